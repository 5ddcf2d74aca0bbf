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
	uid     uint32 // the user of the program that opened the file
	// flags are the program's open flags. The backing file was opened with backingFlags(flags).
	flags uint32
	// direct says that reads and writes through this open are requests, and that the kernel keeps no pages for it.
	direct bool
	// writesHome says that fd can be written.
	writesHome bool
	// mark is set while events report changes of the file, else nil. It is set once, with mu read-locked, and used with
	// mu locked.
	mark *mark
	// number is the kernel's number of the backing file if the kernel maps it directly, else 0. Unless direct is set,
	// the kernel also reads and writes the backing file. Set before the open is answered, then immutable.
	number int32
	// appendOnly says that the file allows only appending (chattr +a): whatever is written to fd goes to the end.
	appendOnly bool

	// mu is locked to close fd. Users of fd other than requests on this open read-lock it (use).
	mu     sync.RWMutex
	closed bool // protected by mu

	released atomic.Bool
	// wrote says that a request without a handle wrote through this open.
	wrote atomic.Bool
	// deviceOnly says that a device was granted access through this open, and that the open was not read or written
	// since.
	deviceOnly atomic.Bool
}

// backingFlags returns the flags for opening the backing file when a program opens with flags.
//
// O_APPEND is left out: mapped pages are written back to their place through the same descriptor, and pwrite(2) on an
// O_APPEND descriptor appends. O_DIRECT is left out because it breaks mapped write-back too. O_SYNC and O_DSYNC are
// left out because the kernel sends FSYNC after such a write. With write-back caching, the kernel reads partly written
// pages through any open at hand, so a file opened for writing is opened for reading too.
func (fs *fileSystem) backingFlags(flags uint32) (backing int, direct bool) {
	access := int(flags & unix.O_ACCMODE)
	if fs.writeBack && access == unix.O_WRONLY {
		access = unix.O_RDWR
	}
	return access | int(flags&(unix.O_NOATIME|unix.O_NONBLOCK)) | unix.O_LARGEFILE, false
}

// creationFlags is backingFlags for a new file. If the daemon does not see opens, all requests use this one.
func (fs *fileSystem) creationFlags(flags uint32) (backing int, direct bool) {
	if fs.unseenOpens {
		flags = flags&^unix.O_ACCMODE | unix.O_RDWR
	}
	return fs.backingFlags(flags)
}

// Open implements fuse.RawFileSystem.
func (fs *fileSystem) Open(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if fs.kernelOpens {
		return fuse.ENOSYS // the kernel does not ask again
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
		// The kernel looked the path up again and came back. So the program did not open a path, but reopened an open
		// file (/proc/self/fd).
		c.refused.Store(0)
		adrift = true
		fd, errno = fs.openContent(ctx, n, flags, adrift)
	}
	forbidden := errno == syscall.EACCES || errno == syscall.EPERM
	if forbidden && flags&unix.O_ACCMODE == unix.O_RDWR && in.Flags&unix.O_ACCMODE == unix.O_WRONLY {
		// The file may be written but not read. Without kernel pages, nothing needs to be read.
		fd, errno = fs.openContent(ctx, n, flags&^unix.O_ACCMODE|unix.O_WRONLY, adrift)
		direct = true
	}
	if errno == syscall.EPERM && flags&unix.O_NOATIME != 0 {
		fd, errno = fs.openContent(ctx, n, flags&^unix.O_NOATIME, adrift)
	}
	appendOnly := false
	if errno == syscall.EPERM && in.Flags&unix.O_APPEND != 0 {
		// The file allows only appending. Kernel pages could not be written back to their place.
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
		c.awaitPushes()
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
		// The kernel's cached times may be wrong, see passthrough. Without an offset, the notification waits for no
		// page.
		fs.notify.InodeNotify(uint64(n.id), -1, 0)
	}
	return fuse.OK
}

// leaseLooks is the interval at which an open checks whether the lease (fcntl(2)) that blocks it is gone.
const leaseLooks = 10 * time.Millisecond

// openContent opens n's bytes by its name, if it has one. ESTALE makes the kernel look the path up again, which may
// lead to another file by now. With adrift, n need not be where its name leads.
//
// It waits while another process has a lease that the open breaks, unless flags have O_NONBLOCK. The kernel revokes the
// lease after fs.lease-break-time. openContent polls instead of waiting in the kernel, because there each open would
// block a thread of the daemon, and threads are limited.
func (fs *fileSystem) openContent(ctx context.Context, n *node, flags int, adrift bool) (int, syscall.Errno) {
	if flags&unix.O_NONBLOCK != 0 {
		return fs.tryOpenContent(n, flags, adrift)
	}
	return awaitLeases(ctx, func() (int, syscall.Errno) { return fs.tryOpenContent(n, flags|unix.O_NONBLOCK, adrift) })
}

// openToCut opens the file that fd refers to for writing, so that its size can be changed without waiting. truncate(2)
// breaks leases that opens for reading do not break, and its wait for them cannot be interrupted. openToCut waits as
// openContent does.
func (fs *fileSystem) openToCut(ctx context.Context, fd int) (int, syscall.Errno) {
	return awaitLeases(ctx, func() (int, syscall.Errno) {
		const flags = unix.O_WRONLY | unix.O_NONBLOCK | unix.O_LARGEFILE
		content, err := fs.openat(fs.procDir, strconv.Itoa(fd), flags, 0)
		return content, toErrno(err)
	})
}

// awaitLeases calls open, which uses O_NONBLOCK, until no lease blocks it.
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

// tryOpenContent is openContent without waiting. flags have O_NONBLOCK, so it waits neither for leases nor, if the name
// now leads to a fifo, for the fifo's other end.
func (fs *fileSystem) tryOpenContent(n *node, flags int, adrift bool) (int, syscall.Errno) {
	if fd, errno := fs.openHandle(n, flags); errno != syscall.ESTALE {
		return fd, errno
	}
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

// openContentAt opens n's bytes at where. again reports that n moved during the call.
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

// truncateOpen carries out O_TRUNC. The kernel drops its pages itself. It may have sent some of them before. Those are
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
	errno := toErrno(c.changeHome(ctx, fs, fd, pagecache.Change{Kind: pagecache.ChangeTruncate}, truncate))
	if errno == 0 {
		n.told.Store(0)
	}
	if f := c.live(); f != nil && fs.writeBack && f.ReachesPast(0) {
		// This answer brings no attributes, so the kernel keeps those that it has. But it has to ask before it makes
		// the file longer, see beforeWrite.
		fs.notify.InodeNotify(uint64(n.id), -1, 0)
	}
	if r := fs.cache.Recording(); r != nil && errno == 0 {
		r.Resize(n.key.fileID(), 0)
	}
	return errno
}

// killSetIDOf is killSetID for callers that hold no descriptor of n.
func (fs *fileSystem) killSetIDOf(n *node, who *fuse.Caller) syscall.Errno {
	fd, errno := fs.hold(n)
	if errno != 0 {
		return errno
	}
	defer fs.unhold(n)
	return fs.killSetID(n, fd, who)
}

// checkSource looks for changes made directly in SOURCE. If there are any, the kernel drops its pages before the open
// is answered, and devices stop serving theirs.
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

// newOpenFile makes an openFile with a handle. It takes over fd, also if it fails.
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
		of.content.awaitPushes()
	}
	of.content.opened.Store(of)
	if of.number == 0 {
		fs.events.opened(of)
	}
	return of, 0
}

// fillOpen answers an open. The kernel keeps its pages from one open to the next. Stale pages are dropped by
// invalidation: a drop at open could meet a write in flight.
func (of *openFile) fillOpen(out *fuse.OpenOut) {
	out.Fh = of.handle
	switch {
	case of.direct:
		out.OpenFlags = fuse.FOPEN_DIRECT_IO
	case of.number == 0:
		out.OpenFlags = fuse.FOPEN_KEEP_CACHE
	}
	if of.number != 0 {
		out.OpenFlags |= fuse.FOPEN_PASSTHROUGH // with FOPEN_DIRECT_IO, for mappings only
		out.BackingID = of.number
	}
}

// usedByCPU notes a read or write through this open.
func (of *openFile) usedByCPU() {
	if of.deviceOnly.Load() {
		of.deviceOnly.Store(false)
	}
}

// DeviceOnly reports whether all open files are open for devices only: client libraries keep the descriptors of mapped
// files. It returns false if no file is open.
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
			of.content.ordinary.Store(0) // no program can store into the kernel's pages now, and all stores are home
		}
		of.fs.events.unwatch(of.mark, of.fd)
		unix.Close(of.fd)
		if of.content.opens.Add(-1) == 0 {
			of.fs.lastOpenGone(of.node)
		}
	}
}

// Flush implements fuse.RawFileSystem. It exists for backing filesystems that report errors at close.
func (fs *fileSystem) Flush(_ <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	if !fs.remote || fs.kernelOpens {
		return fuse.ENOSYS // the kernel remembers this and sends no more FLUSH
	}
	of := fs.files.get(in.Fh)
	if of == nil {
		return fuse.EBADF
	}
	fd, err := unix.FcntlInt(uintptr(of.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fuse.OK // out of descriptors, which must not make a close fail
	}
	return toStatus(unix.Close(fd))
}

// Fsync implements fuse.RawFileSystem.
func (fs *fileSystem) Fsync(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	used, errno := fs.useFileToSync(&in.InHeader, in.Fh)
	if errno != 0 {
		return fuse.Status(errno)
	}
	defer used.done()
	of := used.openFile
	of.content.complained.Store(false)
	sync := func() error { return syncDescriptor(of.fd, in.FsyncFlags) }
	if fs.unseenOpens {
		sync = func() error { return fs.syncKept(of, in.Pid, in.FsyncFlags) }
	}
	if f := of.content.live(); f != nil {
		ctx := newRequest(cancel, &in.Caller)
		defer ctx.end()
		return toStatus(f.Sync(ctx, sync))
	}
	return toStatus(sync())
}

// syncDescriptor calls fdatasync if flags ask for it, else fsync.
func syncDescriptor(fd int, flags uint32) error {
	const dataOnly = 1 // FUSE_FSYNC_FDATASYNC
	return retry(func() error {
		if flags&dataOnly != 0 {
			return unix.Fdatasync(fd)
		}
		return unix.Fsync(fd)
	})
}
