package gaiafs

import (
	"errors"
	"math"
	"os"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Prot is a set of accesses that a mapping allows.
type Prot uint32

const (
	// ProtRead allows loads. Every mapping allows them.
	ProtRead Prot = 1
	// ProtWrite allows stores, and implies ProtRead.
	ProtWrite Prot = 2
)

// Advice is a hint about future use, with the meaning of the MADV_ constant of the same name.
type Advice uint32

const (
	AdviceNormal     Advice = unix.MADV_NORMAL
	AdviceRandom     Advice = unix.MADV_RANDOM
	AdviceSequential Advice = unix.MADV_SEQUENTIAL
	// AdviceWillNeed starts to fetch the bytes, and returns before they are there.
	AdviceWillNeed Advice = unix.MADV_WILLNEED
	// AdviceDontNeed says that the device may use the memory for something else.
	AdviceDontNeed Advice = unix.MADV_DONTNEED
)

// Kind is a kind of device memory, with the number of the protocol. kinds.go lists them.
type Kind uint32

// Option changes how Map maps.
type Option func(*options)

type options struct {
	flags uint32
	kind  Kind  // 0: any
	align int64 // of a view; 0: not chosen
	stays bool
	note  func(string)
}

// Lazy makes Map return before anything is fetched. Acquire fetches the bytes.
func Lazy() Option { return func(o *options) { o.flags |= mapLazy } }

// Movable makes a mapping that consists of addresses, and has memory only while a bracket uses it: see Use. Such a
// mapping may be larger than the device, and many programs can share a device that has no room for all of them.
//
// A mapping that is larger than its device's budget (--gpu-memory) is movable without this option, because it would
// fail otherwise. No other mapping moves.
func Movable() Option { return func(o *options) { o.flags |= mapMovable; o.stays = false } }

// Stays makes Map fail with ENOMEM, rather than make a movable mapping, if the mapping is larger than its device's
// budget.
func Stays() Option { return func(o *options) { o.flags &^= mapMovable; o.stays = true } }

// OnKind chooses a kind of device on a mount with several kinds. The device's number then counts devices of that kind.
// Without OnKind, the device is a GPU if the mount has any.
func OnKind(k Kind) Option { return func(o *options) { o.kind = k } }

// Notes sets a function that gets the warning of a Release, Sync, Flush or Close that succeeded: programs stored past
// the end of the file, and those stores are lost. The call runs f on its own goroutine before it returns.
func Notes(f func(text string)) Option { return func(o *options) { o.note = f } }

// Mapping is a window on a file in a device's memory. Its methods may be called from any goroutine. They block until
// the daemon answers. Offsets count bytes from the start of the mapping.
type Mapping struct {
	off, length int64        // immutable
	prot        Prot         // immutable
	device      int          // immutable
	kind        Kind         // immutable once Map returned
	note        func(string) // immutable; may be nil

	mu       sync.RWMutex // held for reading while a call runs
	conn     *conn        // nil after Close; guarded by mu
	file     *os.File     // a duplicate of the caller's descriptor; nil for a view. Guarded by mu
	view     *viewSource  // nil for a mapping of a file; guarded by mu
	assembly assembly     // has the memory; guarded by mu
}

// Map maps length bytes at off of an open file of a gaiafs mount into the memory of a device. On a mount with GPUs,
// device is the number that CUDA gives the GPU in this process, whatever the daemon calls it. On a mount with emulated
// devices, device is the mount's number. off is a multiple of 4096, and length is positive. The mapping may reach past
// the end of the file: bytes there read as zero, and stores are lost. The caller may close f afterwards, because the
// mapping keeps a duplicate.
//
// A mapping on a GPU loads libcuda.so.1, and retains the GPU's primary context until 10 seconds after Close. It does
// not change the calling thread's current context.
//
// Errors: EINVAL for a bad off, length, prot or file (also ENOTTY), EACCES if f is not open for prot, ENODEV if there
// is no such device or, for a GPU, no libcuda.so.1, ENOMEM if the device has no room, ECONNREFUSED or ENOTCONN if the
// daemon is gone, ENOTSUP if this library cannot map the device's kind of memory, and any error of reading the file.
func Map(f *os.File, off, length int64, prot Prot, device int, opts ...Option) (*Mapping, error) {
	m, err := newMapping(f, off, length, prot, device, opts)
	return m, during("map", err)
}

func newMapping(f *os.File, off, length int64, prot Prot, device int, opts []Option) (*Mapping, error) {
	var o options
	for _, opt := range opts {
		opt(&o)
	}
	if prot&ProtWrite != 0 {
		prot |= ProtRead
	}
	switch {
	case length <= 0:
		return nil, failed(syscall.EINVAL, "length %d is not positive", length)
	case off < 0 || off%pageSize != 0:
		return nil, failed(syscall.EINVAL, "offset %d is not a multiple of %d", off, pageSize)
	case off > math.MaxInt64-pageSize-length:
		return nil, failed(syscall.EOVERFLOW, "offset and length end past the largest file")
	case prot&ProtRead == 0 || prot&^(ProtRead|ProtWrite) != 0:
		return nil, failed(syscall.EINVAL, "protection %#x is neither read nor write", uint32(prot))
	case device < 0 || device > math.MaxInt32:
		return nil, failed(syscall.ENODEV, "there is no device %d", device)
	case o.align != 0:
		return nil, failed(syscall.EINVAL, "only a view has an alignment")
	}
	file, err := duplicate(f)
	if err != nil {
		return nil, err
	}
	if err := checkFile(file, prot); err != nil {
		file.Close()
		return nil, err
	}
	m := &Mapping{off: off, length: length, prot: prot, device: device, note: o.note, file: file}
	if err := m.openTwice(o); err != nil {
		file.Close()
		return nil, err
	}
	return m, nil
}

// openTwice is open. If a kept connection turns out to be dead, because the daemon was restarted, it tries once more
// with a new connection.
func (m *Mapping) openTwice(o options) error {
	err := m.open(o)
	if errors.Is(err, syscall.ENOTCONN) {
		err = m.open(o)
	}
	return err
}

// duplicate returns a new descriptor of the same open file. The caller owns it.
func duplicate(f *os.File) (*os.File, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, failed(syscall.EBADF, "%v", err)
	}
	var fd int
	var dupErr error
	if err := raw.Control(func(p uintptr) { fd, dupErr = unix.FcntlInt(p, unix.F_DUPFD_CLOEXEC, 0) }); err != nil {
		return nil, failed(syscall.EBADF, "%v", err)
	}
	if dupErr != nil {
		return nil, asError(dupErr, "the descriptor could not be duplicated")
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// checkFile refuses descriptors for which no mount gives a grant.
func checkFile(f *os.File, prot Prot) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return asError(err, "fstat")
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return failed(syscall.EINVAL, "descriptor %d is not of a regular file", f.Fd())
	}
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	if err != nil {
		return asError(err, "fcntl")
	}
	mode := flags & unix.O_ACCMODE
	switch {
	case flags&unix.O_PATH != 0:
		return failed(syscall.EBADF, "descriptor %d was opened with O_PATH", f.Fd())
	case mode == unix.O_WRONLY:
		return failed(syscall.EACCES, "descriptor %d is not open for reading", f.Fd())
	case mode == unix.O_RDONLY && prot&ProtWrite != 0:
		return failed(syscall.EACCES, "descriptor %d is not open for writing", f.Fd())
	}
	return nil
}

// open gets a grant, asks for the mapping, and maps its extents.
func (m *Mapping) open(o options) error {
	flags := o.flags
	if m.view == nil && !o.stays && flags&mapMovable == 0 {
		flags |= mapIfLarger
	}
	if flags&mapLazy == 0 {
		launder, err := m.flushKernel(0, m.length)
		if err != nil {
			return err
		}
		if launder {
			flags |= mapLaunder
		}
	}
	g, tokens, err := m.grants()
	if err != nil {
		return err
	}
	c, err := openConn(g.socket)
	if err != nil {
		return err
	}
	if c.welcome.chosen()&featureMove == 0 {
		if flags&mapMovable != 0 {
			c.release()
			return failed(syscall.ENOTSUP, "the daemon of the mount is older than this library, and moves no memory")
		}
		flags &^= mapIfLarger
	}
	a := assembly{off: m.off, size: wholePages(m.length), align: o.align, prot: m.prot, version: c.welcome.version}
	if o.kind == KindCUDA && c.welcome.among(KindCUDA) == nil && os.Getenv("GAIAFS_EMULATED") == "1" {
		o.kind = 0 // the user wants emulated devices to stand in for GPUs
	}
	var uuid [16]byte
	switch named := c.welcome.among(o.kind); {
	case named == nil && o.kind != 0:
		c.release()
		if o.kind == KindCUDA {
			return failed(syscall.ENODEV, "the mount has no GPUs, only emulated devices: ask for one of these, or set "+
				"GAIAFS_EMULATED=1 to let them stand in for GPUs")
		}
		return failed(syscall.ENODEV, "the mount has no devices of kind %s, only GPUs", o.kind)
	case named != nil && named.open != nil:
		if a.gpu, err = named.open(m.device); err != nil {
			c.release()
			return err
		}
		a.kind, uuid = named, a.gpu.id()
	}
	kind := o.kind
	if c.welcome.version < 2 {
		kind = 0
	}
	if m.view == nil {
		err = c.doMap(typeMap, mapBody(g.token, uint32(m.device), m.prot, flags, kind, m.off, m.length, uuid), a.take)
	} else {
		err = m.askForView(c, uuid, flags, o, tokens, &a)
	}
	if err == nil && o.kind != 0 && Kind(a.reply.kind) != o.kind {
		err = failed(syscall.ENODEV, "device %d has memory of kind %s, not %s", m.device, Kind(a.reply.kind), o.kind)
	}
	if err == nil {
		err = a.finish()
	}
	if err != nil {
		_ = a.drop()
		if a.known {
			_, _ = c.simple(typeUnmap, unmapBody(a.reply.mapping)) // the first failure is the one to report
		}
		c.release()
		return err
	}
	m.conn, m.assembly, m.kind = c, a, Kind(a.reply.kind)
	c.moving.add(&m.assembly)
	c.serve()
	return nil
}

// grants returns the grant of the file. For a view, it returns the grant of the first file and the tokens of all files.
func (m *Mapping) grants() (grant, [][16]byte, error) {
	if m.view != nil {
		return m.view.grants()
	}
	g, err := grantFile(m.file)
	return g, nil, err
}

// grantFile returns the grant of an open file.
func grantFile(f *os.File) (grant, error) {
	g, err := requestGrant(int(f.Fd()))
	if err == nil && g.status {
		err = failed(syscall.EINVAL, "the descriptor is a directory")
	}
	return g, err
}

func wholePages(n int64) int64 { return (n + pageSize - 1) &^ (pageSize - 1) }

// flushKernel writes back what CPU programs stored through their mappings of the file. launder means that this kernel
// does not wait for those writes, so the daemon has to.
func (m *Mapping) flushKernel(off, n int64) (launder bool, err error) {
	if m.view != nil {
		return m.view.flushKernel()
	}
	return flushKernel(m.file, m.off+off, n)
}

func flushKernel(f *os.File, off, n int64) (launder bool, err error) {
	const all = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
	for {
		err := unix.SyncFileRange(int(f.Fd()), off, n, all)
		if err == nil {
			return !kernelWaits(), nil
		}
		if !errors.Is(err, syscall.EINTR) {
			return false, asError(err, "sync_file_range")
		}
	}
}

// startFlush makes the kernel start to write back what CPU programs stored through their mappings, many pages at a
// time. Without it, a release that drops these pages would write them one by one. startFlush does not wait, and does
// not consume a write error that an fsync should report.
func (m *Mapping) startFlush(off, n int64) {
	_ = unix.SyncFileRange(int(m.file.Fd()), m.off+off, n, unix.SYNC_FILE_RANGE_WRITE)
}

// kernelWaits reports whether sync_file_range on a FUSE file waits until the daemon has served the writes. It does
// since Linux 6.16.
var kernelWaits = sync.OnceValue(func() bool {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return false
	}
	return releaseAtLeast(unix.ByteSliceToString(u.Release[:]), 6, 16)
})

// releaseAtLeast reports whether a kernel release such as "6.1.0-13-amd64" is at least major.minor. It does not use
// fmt.Sscanf, whose first call takes 30 µs.
func releaseAtLeast(release string, major, minor int) bool {
	var got [2]int // what is missing stays 0
	for i := range got {
		for release != "" && '0' <= release[0] && release[0] <= '9' && got[i] < 1<<20 {
			got[i], release = 10*got[i]+int(release[0]-'0'), release[1:]
		}
		release = strings.TrimPrefix(release, ".")
	}
	return got[0] > major || got[0] == major && got[1] >= minor
}

// Bytes returns the memory of the mapping, Len bytes, if the CPU can address it. It returns nil for a mapping on a GPU,
// and after Close. The memory is the device's: every process that maps the file there shares it. In a movable mapping,
// touch only what a bracket uses: touching anything else is a fault that Go cannot recover from. A store into a mapping
// without ProtWrite faults, too.
func (m *Mapping) Bytes() []byte {
	m.mu.RLock()
	defer m.mu.RUnlock()
	host, ok := m.assembly.memory.(*hostMemory)
	if !ok {
		return nil
	}
	// The range belongs to the mapping until Close. The doc comment says that the slice ends with it.
	return host.bytes()[:m.length:m.length]
}

// DevicePointer returns the address of the mapping's first byte. In GPU memory it is an address for kernels of any
// context of that GPU in this process; in emulated memory it is an address for the CPU. It is valid until Close, and 0
// afterwards.
func (m *Mapping) DevicePointer() uintptr {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.conn == nil {
		return 0
	}
	return m.assembly.memory.base()
}

// Kind returns the kind of the mapping's memory.
func (m *Mapping) Kind() Kind { return m.kind }

// Len returns the length that was passed to Map.
func (m *Mapping) Len() int64 { return m.length }

// Device returns the number that was passed to Map.
func (m *Mapping) Device() int { return m.device }

// Acquire brings the n bytes at off up to date: they show every Release, and every write of a CPU program, that
// happened before. Bytes that were stored here and not yet released stay. Acquire returns the number of pages that were
// not up to date. Errors: EINVAL outside the mapping, EBADF after Close, ENOTCONN if the daemon is gone.
func (m *Mapping) Acquire(off, n int64) (pages int64, err error) {
	pages, err = m.call(off, n, func(c *conn) (int64, error) {
		launder, err := m.flushKernel(off, n)
		if err != nil {
			return 0, err
		}
		var flags uint32
		if launder {
			flags = acquireLaunder
		}
		return c.simple(typeAcquire, rangeBody(m.assembly.reply.mapping, off, n, flags))
	})
	return pages, during("acquire", err)
}

// Release publishes the stores into the n bytes at off to everyone, and returns the number of pages that had any. It
// moves no bytes. For a mapping without ProtWrite it does nothing. On a GPU it first waits for all work that was
// started in the primary context; while a stream is being captured, that wait fails with a CUDA error and ends the
// capture. Errors are those of Acquire.
func (m *Mapping) Release(off, n int64) (pages int64, err error) {
	pages, err = m.call(off, n, func(c *conn) (int64, error) {
		if m.prot&ProtWrite == 0 {
			return 0, nil
		}
		if err := m.assembly.memory.quiesce(); err != nil {
			return 0, err
		}
		m.startFlush(off, n)
		return c.noted(typeRelease, rangeBody(m.assembly.reply.mapping, off, n, 0), m.note)
	})
	return pages, during("release", err)
}

// Sync is Release, and then waits until the bytes are in the backing file and on stable storage. It also reports
// earlier write-backs that failed. Other errors are those of Acquire.
func (m *Mapping) Sync(off, n int64) error { return during("sync", m.sync(off, n, syncDurable)) }

// Flush is Sync without the wait for stable storage.
func (m *Mapping) Flush(off, n int64) error { return during("flush", m.sync(off, n, 0)) }

func (m *Mapping) sync(off, n int64, flags uint32) error {
	_, err := m.call(off, n, func(c *conn) (int64, error) {
		if m.prot&ProtWrite != 0 {
			if err := m.assembly.memory.quiesce(); err != nil {
				return 0, err
			}
		}
		return c.noted(typeSync, rangeBody(m.assembly.reply.mapping, off, n, flags), m.note)
	})
	return err
}

// Advise gives a hint about the n bytes at off. Errors are those of Acquire.
func (m *Mapping) Advise(off, n int64, advice Advice) error {
	_, err := m.call(off, n, func(c *conn) (int64, error) {
		return c.simple(typeAdvise, rangeBody(m.assembly.reply.mapping, off, n, uint32(advice)))
	})
	return during("advise", err)
}

// call runs a request on the open mapping.
func (m *Mapping) call(off, n int64, request func(*conn) (int64, error)) (int64, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if err := m.checkRange(off, n); err != nil {
		return 0, err
	}
	return request(m.conn)
}

// checkRange checks that the mapping is open and contains the n bytes at off. The caller holds mu, at least for
// reading.
func (m *Mapping) checkRange(off, n int64) error {
	if m.conn == nil {
		return failed(syscall.EBADF, "the mapping is closed")
	}
	if size := wholePages(m.length); off < 0 || n <= 0 || off > size || n > size-off {
		return failed(syscall.EINVAL, "%d bytes at %d are not within the mapping's %d", n, off, m.length)
	}
	return nil
}

// Close releases the whole mapping and unmaps it. It waits for calls in progress, and on a GPU for work that was
// started. Nobody may touch Bytes afterwards. The mapping is gone even if Close returns an error: then the daemon could
// not be reached, or failed to release it. EBADF if the mapping is closed already.
func (m *Mapping) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.conn == nil {
		return during("close", failed(syscall.EBADF, "the mapping is closed"))
	}
	c := m.conn
	m.conn = nil
	dropErr := c.moving.drop(&m.assembly)
	_, err := c.noted(typeUnmap, unmapBody(m.assembly.reply.mapping), m.note)
	c.release()
	if closeErr := m.closeFiles(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = dropErr
	}
	return during("close", err)
}

func (m *Mapping) closeFiles() error {
	if m.view != nil {
		return m.view.close()
	}
	return m.file.Close()
}
