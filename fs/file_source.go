package fs

import (
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

var (
	_ pagecache.Source        = (*openFile)(nil)
	_ pagecache.Source        = shownFile{}
	_ pagecache.HomeReader    = (*openFile)(nil)
	_ pagecache.DirectReader  = (*home)(nil)
	_ pagecache.MappedHome    = (*home)(nil)
	_ pagecache.TimedHome     = (*home)(nil)
	_ pagecache.TimedPages    = kernelPages{}
	_ pagecache.Guarded       = (*home)(nil)
	_ pagecache.UserHome      = (*home)(nil)
	_ pagecache.RemovableHome = (*home)(nil)
)

// ID implements pagecache.Source.
func (of *openFile) ID() pagecache.FileID { return of.node.key.fileID() }

// Name implements pagecache.Source.
func (of *openFile) Name() string { return of.node.path() }

// Readable implements pagecache.Source.
func (of *openFile) Readable() bool { return of.flags&unix.O_ACCMODE != unix.O_WRONLY }

// Writable implements pagecache.Source.
func (of *openFile) Writable() bool { return of.flags&unix.O_ACCMODE != unix.O_RDONLY }

// Open implements pagecache.Source.
func (of *openFile) Open() bool { return !of.released.Load() }

// Kernel implements pagecache.Source.
func (of *openFile) Kernel() pagecache.KernelPages { return kernelPages{of.fs, of.node.key} }

// Attach implements pagecache.Source. The caller must hold no lock that a change of home takes.
func (of *openFile) Attach(f *pagecache.File) {
	if of.content.live() != f { // otherwise the grant has looked for a pin
		f.SetPinning(of.fs.pinning(of.node))
		of.content.attach(f)
	}
	// Changes that took the gate before and saw no File are over once the gate is ours.
	of.content.gate.Lock()
	//lint:ignore SA2001 nothing is guarded; the point is to have waited
	of.content.gate.Unlock()
}

// OpenHome implements pagecache.Source.
func (of *openFile) OpenHome(writable bool) (pagecache.Home, error) {
	if !of.use() {
		return nil, syscall.EBADF
	}
	defer of.mu.RUnlock()
	flags := unix.O_RDONLY
	if writable {
		flags = unix.O_RDWR
	}
	fd, err := of.fs.openat(unix.AT_FDCWD, procPath(of.fd), flags|unix.O_LARGEFILE, 0)
	if err != nil {
		return nil, err
	}
	of.fs.witnesses.hold(of.node.key, of.content.witness)
	h := &home{fs: of.fs, key: of.node.key, witness: of.content.witness, fd: fd, writable: writable}
	h.mark = of.fs.events.watch(fd, h.key, h.witness)
	return h, nil
}

// home implements pagecache.Home. It has a descriptor of its own, which stays valid after the node and all opens are
// gone.
type home struct {
	fs       *fileSystem
	key      inodeKey
	witness  *witness
	mark     *mark // nil without events
	fd       int
	writable bool
	direct   direct
	// ordinary is 1 more than the id of a user on whose behalf devices store, other than the daemon's user. It is 0 if
	// there was none.
	ordinary atomic.Uint64
}

// WrittenFor implements pagecache.UserHome.
func (h *home) WrittenFor(src pagecache.Source) {
	var uid uint32
	switch of := src.(type) {
	case *openFile:
		uid = of.uid
	case shownFile:
		uid = of.uid
	default:
		return
	}
	if uid != h.fs.creator.uid {
		h.ordinary.Store(uint64(uid) + 1)
	}
}

// storer returns the user whose right to space counts for bytes that devices stored, see content.storer.
func (h *home) storer() uint32 {
	if u := h.ordinary.Load(); u != 0 {
		return uint32(u - 1)
	}
	return h.fs.creator.uid
}

// ReadAt implements pagecache.Home.
func (h *home) ReadAt(p []byte, off int64) (int, error) { return readAt(h.fd, p, off) }

// ReadCached implements pagecache.HostCached. On filesystems that cannot say what is cached, nothing is.
func (h *home) ReadCached(p []byte, off int64) (int, error) {
	done := 0
	for done < len(p) {
		n, err := unix.Preadv2(h.fd, [][]byte{p[done:]}, off+int64(done), unix.RWF_NOWAIT)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EAGAIN, err == syscall.EOPNOTSUPP, err == syscall.ENOSYS, err == nil && n == 0:
			return done, nil
		case err != nil:
			return done, err
		default:
			done += n
		}
	}
	return done, nil
}

// adviceSize is the length of one fadvise call, in bytes. The kernel uses no more of a longer range than the device's
// read-ahead, which is this by default.
const adviceSize = 128 << 10

// WillNeed implements pagecache.HostCached.
func (h *home) WillNeed(off, n int64) {
	for end := off + n; off < end; off += adviceSize {
		if unix.Fadvise(h.fd, off, min(adviceSize, end-off), unix.FADV_WILLNEED) != nil {
			return // the filesystem has no read-ahead
		}
	}
}

// StartWriteBack implements pagecache.WriteBacker. It does not wait, and so does not consume a write error that an
// fsync should report.
func (h *home) StartWriteBack(off, n int64) {
	_ = unix.SyncFileRange(h.fd, off, n, unix.SYNC_FILE_RANGE_WRITE)
}

// beginChange announces a change through the mount, so that it is not taken for a foreign one. The change does not make
// the file longer. The caller calls end right after it.
func (h *home) beginChange() (end func()) {
	h.witness.begin(h.fd)
	return func() { h.witness.end(h.fd, 0) }
}

// WriteAt implements pagecache.Home.
func (h *home) WriteAt(p []byte, off int64) (int, error) {
	done := 0
	for done < len(p) {
		n, err := 0, error(nil)
		err = h.fs.spend(h.storer(), func() (err error) {
			n, err = unix.Pwrite(h.fd, p[done:], off+int64(done))
			return err
		})
		switch {
		case err == syscall.EINTR:
		case err != nil:
			return done, err
		case n == 0:
			return done, syscall.EIO
		default:
			done += n
		}
	}
	return done, nil
}

// Writable implements pagecache.Home.
func (h *home) Writable() bool { return h.writable }

// Map implements pagecache.MappedHome. On an overlay it opens the file again: mappings of a descriptor that was opened
// before the first write show the layer below for ever.
func (h *home) Map(n int64) (mem []byte, unmap func() error, err error) {
	var in unix.Statfs_t
	if err := unix.Fstatfs(h.fd, &in); err != nil {
		return nil, nil, err
	}
	fd := h.fd
	if in.Type == unix.OVERLAYFS_SUPER_MAGIC {
		if fd, err = h.fs.openat(unix.AT_FDCWD, procPath(h.fd), unix.O_RDONLY|unix.O_LARGEFILE, 0); err != nil {
			return nil, nil, err
		}
		defer unix.Close(fd)
	}
	mem, err = unix.Mmap(fd, 0, int(n), unix.PROT_READ, unix.MAP_SHARED)
	return mem, func() error { return unix.Munmap(mem) }, err
}

// Signature implements pagecache.Home.
func (h *home) Signature() (pagecache.Signature, error) {
	var st unix.Stat_t
	if err := unix.Fstat(h.fd, &st); err != nil {
		return pagecache.Signature{}, err
	}
	return pagecache.Signature{
		Size:  st.Size,
		Mtime: time.Unix(st.Mtim.Unix()),
		Ctime: time.Unix(st.Ctim.Unix()),
	}, nil
}

// Look implements pagecache.Home.
func (h *home) Look() (uint64, error) { return h.witness.look(h.fd) }

// BeginWrites implements pagecache.Home.
func (h *home) BeginWrites() (changes uint64, end func(), err error) {
	changes, err = h.witness.lookAndBegin(h.fd)
	return changes, func() { h.witness.end(h.fd, 0) }, err
}

// ChangedBeside implements pagecache.Home.
func (h *home) ChangedBeside() { h.witness.told.Store(true) }

// Noticed implements pagecache.Home.
func (h *home) Noticed() uint64 { return h.witness.changes.Load() }

// Rights implements pagecache.Guarded. On filesystems without ACLs, the ACL is empty.
func (h *home) Rights() (pagecache.Rights, error) {
	var st unix.Stat_t
	if err := unix.Fstat(h.fd, &st); err != nil {
		return pagecache.Rights{}, err
	}
	r := pagecache.Rights{UID: st.Uid, GID: st.Gid, Mode: st.Mode}
	n, err := unix.Fgetxattr(h.fd, accessACL, nil)
	if n == 0 || err == unix.ENODATA || err == unix.EOPNOTSUPP {
		return r, nil
	}
	for err == nil {
		buf := make([]byte, n)
		if n, err = unix.Fgetxattr(h.fd, accessACL, buf); err == nil {
			r.ACL = string(buf[:n])
			return r, nil
		}
		if err == unix.ERANGE { // the ACL grew
			n, err = unix.Fgetxattr(h.fd, accessACL, nil)
		}
	}
	return r, err
}

// Sync implements pagecache.Home.
func (h *home) Sync() error { return syncDescriptor(h.fd, 0) }

// Close implements pagecache.Home.
func (h *home) Close() error {
	h.direct.close()
	h.fs.witnesses.unhold(h.key, h.witness)
	h.fs.events.unwatch(h.mark, h.fd)
	return unix.Close(h.fd)
}
