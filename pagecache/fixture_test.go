package pagecache

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/cost"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/internal/testdevice"
)

// memoryHome is a backing file in memory. Its reads and writes can be made to fail.
type memoryHome struct {
	mu    sync.Mutex
	data  []byte
	clock int64
	// noted is clock after the mount's last change or look. foreign counts the direct changes noticed.
	noted   int64
	foreign uint64
	told    bool // ChangedBeside was called
	rerr    error
	werr    error
	werrAt  int64 // writes below it still succeed
	// werrEnd, if not 0, is where writes succeed again.
	werrEnd int64
	// room, if not 0, is where the file has no room. A write that reaches it takes the bytes before it, and fails.
	room   int64
	writes int
	synced int
	open   int
	rights Rights
	// hung, if not nil, makes writes wait until it is closed. waiting counts them.
	hung    chan struct{}
	waiting atomic.Int64
	// beforeRead, if not nil, is called by each read with its range, with mu held.
	beforeRead func(page.Bytes)
	// beforeWrites, if not nil, is called by each BeginWrites before it looks, with mu held.
	beforeWrites func()
	// maps counts the maps that Map made and nobody unmapped; shown is what the last one shows. afterMap, if not nil,
	// is called by each Map, and afterUnmap by the end of each map, with mu held.
	maps                 int
	shown                *os.File
	afterMap, afterUnmap func()
	// slow is how much longer each write takes.
	slow time.Duration
	// relied is how many bytes were written since the last BeginWrites, and most the largest number so far.
	relied, most int64
}

// lookLocked counts direct changes.
func (h *memoryHome) lookLocked() {
	if h.clock != h.noted || h.told {
		h.foreign++
	}
	h.noted, h.told = h.clock, false
}

// changes brackets a change through the mount.
func (h *memoryHome) changes() (end func()) {
	h.lookLocked()
	return func() { h.noted = h.clock }
}

// edit changes the file directly.
func (h *memoryHome) edit(change func(data []byte) []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.clock++
	h.data = change(h.data)
}

// editAt stores bytes directly.
func (h *memoryHome) editAt(off int, p []byte) {
	h.edit(func(data []byte) []byte {
		copy(data[off:], p)
		return data
	})
}

// resize sets the size directly.
func (h *memoryHome) resize(size int) {
	h.edit(func(data []byte) []byte {
		return append(data[:min(size, len(data)):min(size, len(data))], make([]byte, max(size-len(data), 0))...)
	})
}

func newHome(size int) *memoryHome { return &memoryHome{data: make([]byte, size)} }

func (h *memoryHome) ReadAt(p []byte, off int64) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.beforeRead != nil {
		h.beforeRead(page.Span(off, int64(len(p))))
	}
	switch {
	case h.rerr != nil:
		return 0, h.rerr
	case off >= int64(len(h.data)):
		return 0, nil
	}
	return copy(p, h.data[off:]), nil
}

// failReads makes reads fail with err, or succeed again if err is nil.
func (h *memoryHome) failReads(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.rerr = err
}

func (h *memoryHome) WriteAt(p []byte, off int64) (int, error) {
	if h.hung != nil {
		h.waiting.Add(1)
		<-h.hung
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	time.Sleep(h.slow)
	h.clock++
	h.noted++ // nobody takes it for a direct change
	if h.werr != nil && off >= h.werrAt && (h.werrEnd == 0 || off < h.werrEnd) {
		return copy(h.data[min(off, int64(len(h.data))):], p[:len(p)/2]), h.werr
	}
	if end := off + int64(len(p)); h.room > 0 && end > h.room {
		return copy(h.data[min(off, h.room):h.room], p), syscall.ENOSPC
	}
	if need := off + int64(len(p)); need > int64(len(h.data)) {
		h.data = append(h.data, make([]byte, need-int64(len(h.data)))...)
	}
	h.writes++
	h.relied += int64(len(p))
	h.most = max(h.most, h.relied)
	return copy(h.data[off:], p), nil
}

// WriteParallel writes every other time, and otherwise stops in the middle.
func (h *memoryHome) WriteParallel(runs [][]byte, off int64) bool {
	return h.writeRuns(h.WriteAt, runs, off)
}

func (h *memoryHome) writeRuns(write func(p []byte, off int64) (int, error), runs [][]byte, off int64) bool {
	h.mu.Lock()
	stops, size := h.writes%2 == 1, int64(len(h.data))
	h.mu.Unlock()
	for i, run := range runs {
		if len(run)%page.Size != 0 || off+int64(len(run)) > size {
			panic("not whole pages inside the file")
		}
		if _, err := write(run, off); err != nil || stops && i > 0 {
			return false
		}
		off += int64(len(run))
	}
	return true
}

func (h *memoryHome) truncate(size int64) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	defer h.changes()()
	h.clock++
	if size < int64(len(h.data)) {
		h.data = h.data[:size:size]
		return nil
	}
	h.data = append(h.data, make([]byte, size-int64(len(h.data)))...)
	return nil
}

func (h *memoryHome) Writable() bool { return true }

func (h *memoryHome) Look() (uint64, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lookLocked()
	return h.foreign, nil
}

func (h *memoryHome) BeginWrites() (uint64, func(), error) {
	h.mu.Lock()
	if h.relied = 0; h.beforeWrites != nil {
		h.beforeWrites()
	}
	h.mu.Unlock()
	changes, err := h.Look()
	return changes, func() {}, err
}

func (h *memoryHome) ChangedBeside() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.told = true
}

func (h *memoryHome) Noticed() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.foreign
}

func (h *memoryHome) Rights() (Rights, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.rights, nil
}

// chmod changes the rights of the file, as a request of the mount does.
func (s *source) chmod(change func(r *Rights)) {
	s.home.mu.Lock()
	change(&s.home.rights)
	s.home.mu.Unlock()
	if s.attached != nil {
		s.attached.RightsTouched(context.Background())
	}
}

func (h *memoryHome) Signature() (Signature, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return Signature{Size: int64(len(h.data)), Mtime: time.Unix(h.clock, 0)}, nil
}

func (h *memoryHome) Sync() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.synced++
	return nil
}

// Map implements MappedHome with a copy of the file's bytes. So it is noticed if somebody uses it after a change of
// home.
func (h *memoryHome) Map(n int64) (mem []byte, unmap func() error, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	fd, err := unix.MemfdCreate("home", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, nil, err
	}
	shown := os.NewFile(uintptr(fd), "home")
	pages := make([]byte, n)
	copy(pages, h.data)
	if _, err := shown.Write(pages); err != nil {
		return nil, nil, errors.Join(err, shown.Close())
	}
	if mem, err = unix.Mmap(fd, 0, int(n), unix.PROT_READ, unix.MAP_SHARED); err != nil {
		return nil, nil, errors.Join(err, shown.Close())
	}
	h.maps++
	if h.shown = shown; h.afterMap != nil {
		h.afterMap()
	}
	return mem, func() error {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.maps--
		if h.afterUnmap != nil {
			h.afterUnmap()
		}
		return errors.Join(unix.Munmap(mem), shown.Close())
	}, nil
}

func (h *memoryHome) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.open--
	return nil
}

func (h *memoryHome) fail(err error) { h.failFrom(0, err) }

// failFrom makes writes at off and beyond fail.
func (h *memoryHome) failFrom(off int64, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.werr, h.werrAt, h.werrEnd = err, off, 0
}

func (h *memoryHome) bytes(off, n int) []byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]byte(nil), h.data[off:off+n]...)
}

// testKernel stands in for the kernel's page cache. It records what it was told to drop, and runs a hook meanwhile.
type testKernel struct {
	mu      sync.Mutex
	dropped []page.Range
	hook    func(off, n int64)
}

func (k *testKernel) Invalidate(off, n int64) error {
	k.mu.Lock()
	if n >= 0 {
		k.dropped = append(k.dropped, page.Covering(off, n))
	}
	hook := k.hook
	k.mu.Unlock()
	if hook != nil {
		hook(off, n)
	}
	return nil
}

func (k *testKernel) Push(int64, []byte, func() bool) bool { return false }

func (k *testKernel) take() []page.Range {
	k.mu.Lock()
	defer k.mu.Unlock()
	d := k.dropped
	k.dropped = nil
	return d
}

// source is an open file on the mount.
type source struct {
	id       FileID
	home     *memoryHome
	kernel   *testKernel
	readonly bool
	attached *File
	name     string // "file" if empty
	// disk, if not nil, is what OpenHome returns.
	disk   *disk
	reader HomeReader // how reads reach home; nil: they do not use devices
}

func (s *source) ID() FileID     { return s.id }
func (s *source) Name() string   { return cmp.Or(s.name, "file") }
func (s *source) Readable() bool { return true }
func (s *source) Writable() bool { return !s.readonly }
func (s *source) Open() bool     { return true }
func (s *source) OpenHome(bool) (Home, error) {
	s.home.mu.Lock()
	defer s.home.mu.Unlock()
	s.home.open++
	return s.backing(), nil
}

// backing returns the home that OpenHome returns.
func (s *source) backing() backingFile {
	if s.disk != nil {
		return s.disk
	}
	return s.home
}

type backingFile interface {
	Home
	truncate(size int64) error
}

func (s *source) Kernel() KernelPages { return s.kernel }

// attaching is held while source.attached is set.
var attaching sync.Mutex

// Attach may be called concurrently for the same File.
func (s *source) Attach(f *File) {
	attaching.Lock()
	defer attaching.Unlock()
	if s.attached != f {
		s.attached = f
	}
}

// machine is a Cache over emulated devices, or GPUs.
type machine struct {
	t     *testing.T
	cache *Cache
	// devices can be told to fail, and otherwise work as emulated ones.
	devices []*faulty.Device
	next    uint64
}

type machineOption func(*Options, *int64)

func memory(n int64) machineOption { return func(_ *Options, m *int64) { *m = n } }
func interval(d time.Duration) machineOption {
	return func(o *Options, _ *int64) { o.WriteBackInterval = d }
}
func pinnedMemory(n int64) machineOption { return func(o *Options, _ *int64) { o.PinnedMemory = n } }
func hostMemory(n int64) machineOption   { return func(o *Options, _ *int64) { o.HostMemory = n } }

// newMachine makes a machine. Its devices have one digest key, as those of a mount do.
func newMachine(t *testing.T, devices int, options ...machineOption) *machine {
	t.Helper()
	key, err := gpubackend.NewDigestKey(rand.Reader)
	require.NoError(t, err)
	return newKeyedMachine(t, slices.Repeat([]*gpubackend.DigestKey{key}, devices), options...)
}

func newKeyedMachine(t *testing.T, keys []*gpubackend.DigestKey, options ...machineOption) *machine {
	t.Helper()
	m := &machine{t: t}
	o := Options{WriteBackInterval: time.Hour, pinTick: time.Hour}
	size := int64(64 << 20)
	for _, opt := range options {
		opt(&o, &size)
	}
	testdevice.Require(t)
	if n := testdevice.Count(len(keys)); n < len(keys) {
		t.Skipf("%d devices are needed, and there are %d GPUs", len(keys), n)
	}
	for i, key := range keys {
		d, err := testdevice.Open(emulated.Options{Ordinal: i, Memory: size, Poison: true, CopyEngines: true, Key: key})
		require.NoError(t, err)
		m.devices = append(m.devices, faulty.Wrap(d))
		o.Devices = append(o.Devices, m.devices[i])
	}
	c, err := New(o)
	require.NoError(t, err)
	m.cache = c
	t.Cleanup(func() {
		require.NoError(t, c.Close(context.Background()))
		require.Zero(t, c.pinned.Files(), "everything is unlocked")
	})
	return m
}

func (m *machine) file(size int) *source {
	m.next++
	return &source{id: FileID{1, m.next}, home: newHome(size), kernel: &testKernel{}}
}

// program is a client with a mapping. It loads from the memory and stores into it as a kernel would.
type program struct {
	*Mapping
	t      *testing.T
	host   []byte            // the memory, if the CPU can address it
	gpu    gpubackend.Device // otherwise the device
	pieces []programPart
}

// programPart is the part of an extent that a program maps.
type programPart struct {
	mem        gpubackend.Memory
	start, end int64 // in the mapping
	off        int64 // of start in mem
}

func (m *machine) run(src *source, device int, off, n int64, writable bool) *program {
	m.t.Helper()
	mp, err := m.cache.Map(context.Background(), src, MapRequest{Device: device, Off: off, Len: n, Writable: writable})
	require.NoError(m.t, err)
	return m.attach(mp, off, n, writable)
}

func (m *machine) attach(mp *Mapping, off, n int64, writable bool) *program {
	m.t.Helper()
	length := page.Covering(off, n).Bytes()
	p := &program{Mapping: mp, t: m.t}
	if mp.Device().Kind != gpubackend.KindEmulated {
		mp.f.mu.Lock()
		defer mp.f.mu.Unlock()
		mp.h.each(mp.pages, func(x *extent, _ page.Range) {
			lo, hi := max(off, x.span().Off), min(off+length, x.span().End)
			gpu, mem := m.devices[mp.Device().Ordinal].Inner(x.Memory())
			p.gpu, p.pieces = gpu, append(p.pieces, programPart{mem, lo - off, hi - off, x.offset(lo)})
		})
		return p
	}
	base, err := unix.MmapPtr(-1, 0, nil, uintptr(length), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(m.t, err)
	prot := unix.PROT_READ
	if writable {
		prot |= unix.PROT_WRITE
	}
	for _, x := range mp.Extents() {
		lo, hi := max(off, x.Offset), min(off+length, x.Offset+x.Size)
		_, err := unix.MmapPtr(int(x.Descriptor.Fd()), lo-x.Offset, addPointer(base, lo-off), uintptr(hi-lo), prot,
			unix.MAP_SHARED|unix.MAP_FIXED)
		require.NoError(m.t, err)
	}
	p.host = bytesAt(base, int(length))
	m.t.Cleanup(func() { _ = unix.MunmapPtr(base, uintptr(length)) })
	return p
}

// end returns the size of the memory.
func (p *program) end() int { return int(page.Covering(p.off, p.len).Bytes()) }

func (p *program) all() []byte { return p.load(0, p.end()) }

func (p *program) byteAt(at int) byte { return p.load(at, at+1)[0] }

// load returns the bytes [from, to) of the memory. If the CPU can address them, they are not copied.
func (p *program) load(from, to int) []byte {
	if p.host != nil {
		return p.host[from:to]
	}
	b := make([]byte, to-from)
	assert.NoError(p.t, p.gpu.CopyOut(context.Background(), p.copies(from, b)))
	return b
}

// store stores a byte.
func (p *program) store(at int, c byte) {
	if p.host != nil {
		p.host[at] = c
		return
	}
	assert.NoError(p.t, p.gpu.CopyIn(context.Background(), p.copies(at, []byte{c})))
}

// add increments a byte.
func (p *program) add(at int) { p.store(at, p.byteAt(at)+1) }

// copies returns the pieces of a copy between b and the memory from a byte on.
func (p *program) copies(from int, b []byte) (all []gpubackend.Copy) {
	for _, x := range p.pieces {
		lo, hi := max(int64(from), x.start), min(int64(from+len(b)), x.end)
		if lo < hi {
			all = append(all, gpubackend.Copy{Mem: x.mem, Off: x.off + lo - x.start,
				Host: b[lo-int64(from) : hi-int64(from)]})
		}
	}
	return all
}

func (p *program) acquire() int64 {
	p.t.Helper()
	n, err := p.Acquire(context.Background(), 0, p.len, false)
	require.NoError(p.t, err)
	return n
}

func (p *program) release() int64 {
	p.t.Helper()
	n, err := p.Release(context.Background(), 0, p.len)
	require.NoError(p.t, err)
	return n
}

// unmap gives up the memory as a client does. Tests can still look at a copy of it.
func (p *program) unmap() {
	p.t.Helper()
	p.unmapAndKeep()
	p.giveUp()
}

// unmapAndKeep unmaps as a hostile client does, which keeps the memory.
func (p *program) unmapAndKeep() {
	p.t.Helper()
	require.NoError(p.t, p.Unmap(context.Background()))
}

// giveUp ends the program's access to the device memory.
func (p *program) giveUp() {
	if p.host == nil {
		return
	}
	p.t.Helper()
	was := bytes.Clone(p.host)
	_, err := unix.MmapPtr(-1, 0, unsafe.Pointer(&p.host[0]), uintptr(len(p.host)), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_FIXED)
	require.NoError(p.t, err)
	copy(p.host, was)
}

// read reads as a CPU program does through the mount.
func (s *source) read(t *testing.T, off, n int) []byte {
	t.Helper()
	p := make([]byte, n)
	f := s.attached
	if f == nil {
		_, err := s.home.ReadAt(p, int64(off))
		require.NoError(t, err)
		return p
	}
	got, fromHome, err := f.Read(context.Background(), p, int64(off), false, s.reader)
	require.NoError(t, err)
	if fromHome {
		got, err = s.backing().ReadAt(p, int64(off))
		require.NoError(t, err)
	}
	return p[:got]
}

// write writes as a CPU program does through the mount.
func (s *source) write(t *testing.T, off int, p []byte) {
	t.Helper()
	require.NoError(t, s.tryWrite(Change{Kind: ChangeWrite, Off: int64(off), Len: int64(len(p))}, p))
}

func (s *source) tryWrite(c Change, p []byte) error {
	do := func(off, _ int64) error {
		_, err := s.backing().WriteAt(p, off)
		return err
	}
	c.Bytes = &p
	err := s.attached.ChangeHome(context.Background(), c, do)
	if err == ErrDetached {
		return do(c.Off, c.Len)
	}
	return err
}

func (s *source) truncate(t *testing.T, size int64) {
	t.Helper()
	require.NoError(t, s.attached.ChangeHome(context.Background(), Change{Kind: ChangeTruncate, Len: size},
		func(size, _ int64) error { return s.backing().truncate(size) }))
}

var (
	_ Source      = (*source)(nil)
	_ Home        = (*memoryHome)(nil)
	_ KernelPages = (*testKernel)(nil)
)

// collectDue does the background's work of one tick, and waits for it.
func (c *Cache) collectDue(ctx context.Context) {
	for _, f := range c.snapshotFiles() {
		f.collectDue(ctx)
		f.lockDue(ctx)
	}
}

// reads returns the measured cost of reads from a device.
func (d *device) reads() cost.Estimate {
	return d.moves.Cost.Estimate()
}
