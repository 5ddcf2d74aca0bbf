package fs

import (
	"context"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

// openFile is an open of a regular file, from OPEN or CREATE until RELEASE. It implements pagecache.Source.
type openFile struct {
	fs      *fileSystem
	node    *node
	content *content
	handle  uint64
	fd      int
	uid     uint32 // of the program that opened
	// flags are those the program opened with. The backing was opened with backingFlags of them.
	flags uint32
	// direct says that reads and writes through this open are requests and that the kernel keeps no pages for it.
	direct bool
	// writesHome says that fd can be written.
	writesHome bool
	// mark is the file's while events report its changes, or nil. Set once with mu read-locked, used with mu locked.
	mark *mark
	// number is what the kernel calls the backing file, where it maps that itself and, unless direct is set, reads and
	// writes it too; else 0. Set before the open is answered, then immutable.
	number int32
	// appendOnly says that whatever is written to fd goes to the end of the file, which may do nothing else (chattr
	// +a).
	appendOnly bool

	// mu is locked to close fd, and read-locked by those who use fd other than in a request on this open (use).
	mu     sync.RWMutex
	closed bool // protected by mu

	released atomic.Bool
	// deviceOnly says that a device was granted access through this open, and that nothing was read or written through
	// it since.
	deviceOnly atomic.Bool
}

// backingFlags returns the flags to open the backing file with for a program's.
//
// O_APPEND is left out, since pages that a program mapped are written back at their place through the same descriptor,
// and pwrite(2) on an O_APPEND descriptor appends. O_DIRECT breaks mapped write-back too. O_SYNC and O_DSYNC: the
// kernel sends FSYNC after such a write. With write-back caching the kernel reads pages that a write covers in part
// through whatever open it has at hand, so a file to be written is opened for reading too.
func (fs *fileSystem) backingFlags(flags uint32) (backing int, direct bool) {
	access := int(flags & unix.O_ACCMODE)
	if fs.writeBack && access == unix.O_WRONLY {
		access = unix.O_RDWR
	}
	return access | int(flags&(unix.O_NOATIME|unix.O_NONBLOCK)) | unix.O_LARGEFILE, false
}

// Open implements fuse.RawFileSystem.
func (fs *fileSystem) Open(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if fs.kernelOpens {
		return fuse.ENOSYS // the kernel asks no more
	}
	n := fs.node(in.NodeId)
	if n == nil || !n.isRegular() {
		return fuse.Status(syscall.ESTALE)
	}
	ctx := newRequest(cancel, &in.Caller)
	defer ctx.end()
	c := n.content()
	flags, direct := fs.backingFlags(in.Flags)
	adrift := false
	fd, errno := fs.openContent(ctx, n, flags, adrift)
	if thread := uint64(in.Pid) + 1; errno == syscall.ESTALE && c.refused.Swap(thread) == thread {
		// The kernel looked the path up again and came back: it is no path but another open of the file
		// (/proc/self/fd).
		c.refused.Store(0)
		adrift = true
		fd, errno = fs.openContent(ctx, n, flags, adrift)
	}
	forbidden := errno == syscall.EACCES || errno == syscall.EPERM
	if forbidden && flags&unix.O_ACCMODE == unix.O_RDWR && in.Flags&unix.O_ACCMODE == unix.O_WRONLY {
		// A file that may be written but not read: without pages of the kernel's there is nothing to read for.
		fd, errno = fs.openContent(ctx, n, flags&^unix.O_ACCMODE|unix.O_WRONLY, adrift)
		direct = true
	}
	if errno == syscall.EPERM && flags&unix.O_NOATIME != 0 {
		fd, errno = fs.openContent(ctx, n, flags&^unix.O_NOATIME, adrift)
	}
	appendOnly := false
	if errno == syscall.EPERM && in.Flags&unix.O_APPEND != 0 {
		// A file that may only be appended to. Pages of the kernel's could not be written back to their place.
		if fd, errno = fs.openContent(ctx, n, flags|unix.O_APPEND, adrift); errno == 0 {
			appendOnly, direct = true, true
		}
	}
	if errno != 0 {
		return fuse.Status(errno)
	}
	of, errno := fs.newOpenFile(n, fd, &in.Caller, in.Flags, direct, appendOnly)
	if errno != 0 {
		return fuse.Status(errno)
	}
	switch {
	case in.Flags&unix.O_TRUNC != 0:
		errno = fs.truncateOpen(ctx, n, fd, in)
	case of.number == 0 || c.live() != nil:
		errno = fs.checkSource(ctx, n, fd)
	}
	if errno != 0 {
		fs.files.take(of.handle)
		of.close()
		return fuse.Status(errno)
	}
	of.fillOpen(out)
	if of.number != 0 && of.storesMapped() {
		// The kernel may not trust the times that it has, see passthrough. Without an offset, the notification waits
		// for no page.
		fs.notify.InodeNotify(uint64(n.id), -1, 0)
	}
	return fuse.OK
}

// leaseLooks is how often an open looks whether a lease (fcntl(2)) that is in its way is gone.
const leaseLooks = 10 * time.Millisecond

// openContent opens n's bytes by its name, where it has one. ESTALE makes the kernel look the path up again, which may
// lead to another file by now. With adrift, n need not be where its name leads.
//
// It waits while somebody has a lease that the open breaks, unless flags have O_NONBLOCK: the kernel takes the lease
// away after fs.lease-break-time. It tries again and again instead of waiting in the kernel, where each open would have
// a thread of the daemon's, of which there are only so many.
func (fs *fileSystem) openContent(ctx context.Context, n *node, flags int, adrift bool) (int, syscall.Errno) {
	if flags&unix.O_NONBLOCK != 0 {
		return fs.tryOpenContent(n, flags, adrift)
	}
	return awaitLeases(ctx, func() (int, syscall.Errno) { return fs.tryOpenContent(n, flags|unix.O_NONBLOCK, adrift) })
}

// openToCut opens the file that fd refers to for writing, so that it can be made shorter or longer without waiting:
// truncate(2) breaks leases that opens for reading do not, and waits for them where nobody can interrupt it. It waits
// as openContent does.
func (fs *fileSystem) openToCut(ctx context.Context, fd int) (int, syscall.Errno) {
	return awaitLeases(ctx, func() (int, syscall.Errno) {
		const flags = unix.O_WRONLY | unix.O_NONBLOCK | unix.O_LARGEFILE
		content, err := fs.openat(fs.procDir, strconv.Itoa(fd), flags, 0)
		return content, toErrno(err)
	})
}

// awaitLeases calls open, with O_NONBLOCK, until no lease is in its way.
func awaitLeases(ctx context.Context, open func() (int, syscall.Errno)) (int, syscall.Errno) {
	for {
		fd, errno := open()
		if errno != syscall.EWOULDBLOCK {
			return fd, errno
		}
		select {
		case <-time.After(leaseLooks):
		case <-ctx.Done():
			return -1, syscall.EINTR
		}
	}
}

// tryOpenContent is openContent that does not wait, neither for leases nor, should the name lead to a fifo by now, for
// its other end: flags have O_NONBLOCK.
func (fs *fileSystem) tryOpenContent(n *node, flags int, adrift bool) (int, syscall.Errno) {
	for {
		n.mu.Lock()
		where := n.where
		n.mu.Unlock()
		if adrift || where.parent == nil {
			fd, errno := fs.hold(n)
			if errno != 0 {
				return -1, errno
			}
			defer fs.unhold(n)
			content, err := fs.openat(fs.procDir, strconv.Itoa(fd), flags, 0)
			return content, toErrno(err)
		}
		fd, again, errno := fs.openContentAt(n, where, flags)
		if !again {
			return fd, errno
		}
	}
}

// openContentAt opens n's bytes at where. again says that n moved meanwhile.
func (fs *fileSystem) openContentAt(n *node, where locator, flags int) (fd int, again bool, errno syscall.Errno) {
	parent, errno := fs.hold(where.parent)
	if errno != 0 {
		return -1, false, errno
	}
	defer fs.unhold(where.parent)
	if !fs.mayHang(n) {
		fd, again, errno = fs.openNamed(n, where, parent, flags)
	} else if fd, again, errno = fs.openNamed(n, where, parent, unix.O_PATH); fd >= 0 {
		path := fd
		defer unix.Close(path)
		var err error
		fd, err = fs.openat(fs.procDir, strconv.Itoa(path), flags, 0)
		errno = toErrno(err)
	}
	if errno == syscall.ENXIO || errno == syscall.ENODEV {
		errno = syscall.ESTALE
	}
	return fd, again, errno
}

// truncateOpen carries out O_TRUNC. The kernel drops the pages itself. It may have sent some of them before: those are
// written before the file is cut, or not at all (leaveOutPast).
func (fs *fileSystem) truncateOpen(ctx context.Context, n *node, fd int, in *fuse.OpenIn) syscall.Errno {
	c := n.content()
	if in.Mode&fuse.OPEN_KILL_SUIDGID != 0 {
		if errno := fs.killSetIDOf(n, &in.Caller); errno != 0 {
			return errno
		}
	}
	if in.Flags&unix.O_ACCMODE == unix.O_RDONLY {
		var errno syscall.Errno
		if fd, errno = fs.openToCut(ctx, fd); errno != 0 {
			return errno
		}
		defer unix.Close(fd)
	}
	c.gate.Lock()
	defer c.gate.Unlock()
	c.witness.begin(fd)
	defer c.witness.end(fd, anySize)
	truncate := func(int64, int64) error { return retry(func() error { return unix.Ftruncate(fd, 0) }) }
	errno := toErrno(c.changeHome(ctx, pagecache.Change{Kind: pagecache.ChangeTruncate}, truncate))
	if errno == 0 {
		n.told.Store(0)
	}
	if r := fs.cache.Recording(); r != nil && errno == 0 {
		r.Resize(n.key.fileID(), 0)
	}
	return errno
}

// killSetIDOf is killSetID for a node whose descriptor is not at hand.
func (fs *fileSystem) killSetIDOf(n *node, who *fuse.Caller) syscall.Errno {
	fd, errno := fs.hold(n)
	if errno != 0 {
		return errno
	}
	defer fs.unhold(n)
	return fs.killSetID(n, fd, who)
}

// checkSource looks whether others changed the file in SOURCE. If so the kernel's pages are dropped before the open is
// answered, and devices stop serving theirs.
func (fs *fileSystem) checkSource(ctx context.Context, n *node, fd int) syscall.Errno {
	c := n.content()
	changes, err := c.witness.look(fd)
	if err != nil {
		return toErrno(err)
	}
	if f := c.live(); f != nil {
		if _, err := f.CheckHome(ctx); err != nil {
			return toErrno(err)
		}
	}
	if c.dropped.Load() == changes {
		return 0
	}
	fs.changed.Add(1)
	fs.aside(func() { err = fs.invalidate(n, 0, -1) })
	if err != nil {
		return toErrno(err)
	}
	c.dropped.Store(changes)
	return 0
}

// newOpenFile takes over fd, also where it fails, and gives it a handle.
func (fs *fileSystem) newOpenFile(
	n *node, fd int, who *fuse.Caller, flags uint32, direct, appendOnly bool,
) (*openFile, syscall.Errno) {
	of := &openFile{
		fs: fs, node: n, content: n.content(), fd: fd, uid: who.Uid, flags: flags, direct: direct,
		appendOnly: appendOnly,
		writesHome: flags&unix.O_ACCMODE != unix.O_RDONLY,
		handle:     fs.lastHandle.Add(1),
	}
	if errno := fs.enter(of); errno != 0 {
		unix.Close(fd)
		return nil, errno
	}
	fs.files.put(of.handle, of)
	if of.content.opens.Add(1) == 1 {
		of.content.complained.Store(false)
	}
	if of.writesHome {
		of.content.writers.Add(1)
		if of.uid != fs.creator.uid {
			of.content.ordinary.Store(uint64(of.uid) + 1)
		}
	}
	of.content.opened.Store(of)
	if of.number == 0 {
		fs.events.opened(of)
	}
	return of, 0
}

// fillOpen answers an open. The kernel keeps its pages from one open to the next: what must be dropped is dropped by
// invalidation, and a drop at open could meet a write in flight.
func (of *openFile) fillOpen(out *fuse.OpenOut) {
	out.Fh = of.handle
	switch {
	case of.direct:
		out.OpenFlags = fuse.FOPEN_DIRECT_IO
	case of.number == 0:
		out.OpenFlags = fuse.FOPEN_KEEP_CACHE
	}
	if of.number != 0 {
		out.OpenFlags |= fuse.FOPEN_PASSTHROUGH // with FOPEN_DIRECT_IO for mappings only
		out.BackingID = of.number
	}
}

// usedByCPU notes that something is read or written through this open.
func (of *openFile) usedByCPU() {
	if of.deviceOnly.Load() {
		of.deviceOnly.Store(false)
	}
}

// DeviceOnly reports whether the files that programs have open are open for devices only: client libraries keep the
// descriptors of what they map. It is false where none is open.
func (s *Server) DeviceOnly() bool {
	files := s.fs.files.all()
	for _, of := range files {
		if !of.deviceOnly.Load() {
			return false
		}
	}
	return len(files) > 0 && len(s.fs.dirs.all()) == 0
}

// Release implements fuse.RawFileSystem.
func (fs *fileSystem) Release(_ <-chan struct{}, in *fuse.ReleaseIn) {
	if of, ok := fs.files.take(in.Fh); ok {
		of.close()
	}
}

// use read-locks mu, unless of is closed or about to be. It never waits, so the caller may hold any lock.
func (of *openFile) use() bool {
	if !of.mu.TryRLock() {
		return false
	}
	if of.closed {
		of.mu.RUnlock()
		return false
	}
	return true
}

func (of *openFile) close() {
	of.released.Store(true)
	of.content.opened.CompareAndSwap(of, nil)
	of.mu.Lock()
	defer of.mu.Unlock()
	if !of.closed {
		of.closed = true
		of.fs.leave(of)
		if of.writesHome && of.content.writers.Add(-1) == 0 {
			of.content.ordinary.Store(0) // nobody stores into the kernel's pages any more, and they are home
		}
		of.fs.events.unwatch(of.mark, of.fd)
		unix.Close(of.fd)
		if of.content.opens.Add(-1) == 0 {
			of.fs.lastOpenGone(of.node)
		}
	}
}

// Flush implements fuse.RawFileSystem. It is there for backing filesystems that report errors at close.
func (fs *fileSystem) Flush(_ <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	if !fs.remote {
		return fuse.ENOSYS // the kernel remembers, and spares one request a close
	}
	of := fs.files.get(in.Fh)
	if of == nil {
		return fuse.EBADF
	}
	fd, err := unix.FcntlInt(uintptr(of.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fuse.OK // out of descriptors; close never fails for that
	}
	return toStatus(unix.Close(fd))
}

// Fsync implements fuse.RawFileSystem.
func (fs *fileSystem) Fsync(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	used, errno := fs.useFile(&in.InHeader, in.Fh)
	if errno != 0 {
		return fuse.Status(errno)
	}
	defer used.done()
	of := used.openFile
	of.content.complained.Store(false)
	sync := func() error { return syncDescriptor(of.fd, in.FsyncFlags) }
	if f := of.content.live(); f != nil {
		ctx := newRequest(cancel, &in.Caller)
		defer ctx.end()
		return toStatus(f.Sync(ctx, sync))
	}
	return toStatus(sync())
}

// syncDescriptor is fsync, or fdatasync if flags say so.
func syncDescriptor(fd int, flags uint32) error {
	const dataOnly = 1 // FUSE_FSYNC_FDATASYNC
	return retry(func() error {
		if flags&dataOnly != 0 {
			return unix.Fdatasync(fd)
		}
		return unix.Fsync(fd)
	})
}
