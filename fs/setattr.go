package fs

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

// ownTimes are the attributes that a kernel that caches writes sends after a change. Programs may set these, too, but
// then the request names no handle.
const ownTimes = fuse.FATTR_MTIME | fuse.FATTR_CTIME

// SetAttr implements fuse.RawFileSystem. It sets the owner before the mode, because changing the owner clears set-id
// bits. It sets the times last, because all other changes change them.
func (fs *fileSystem) SetAttr(cancel <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	n := fs.node(in.NodeId)
	if n == nil {
		return fuse.Status(syscall.ESTALE)
	}
	var of *openFile
	handle, hasHandle := in.GetFh()
	if hasHandle {
		of = fs.files.get(handle)
	}
	fd, errno := fs.hold(n)
	if errno == syscall.ESTALE && in.Valid&^fuse.FATTR_FH == ownTimes && fs.writeBack && n.isRemoved() {
		// The kernel sends the times of a file that it has just removed, and the daemon has let the file go (letGo).
		// syncfs would report an error.
		out.Mode = n.kind
		return fuse.OK
	}
	if errno != 0 {
		return fuse.Status(errno)
	}
	defer fs.unhold(n)
	ctx := newRequest(cancel, &in.Caller)
	defer ctx.end()
	if fs.setsTime(in) && n.touching.Load() == 0 {
		fs.finishReleases(ctx, n)
	}

	sizer := sizer{fd: -1}
	if in.Valid&fuse.FATTR_SIZE != 0 && n.isRegular() {
		if of != nil && of.writesHome {
			sizer.fd = of.fd
		} else {
			if sizer.fd, errno = fs.openToCut(ctx, fd); errno != 0 {
				return fuse.Status(errno)
			}
			defer unix.Close(sizer.fd)
			sizer.named = !fs.unseenOpens || !hasHandle && in.Size != 0 // opens with O_TRUNC come here, too
		}
	}
	if in.Valid&fuse.FATTR_SIZE != 0 && n.isRegular() {
		n.content() // has the witness for beginTouch
	}
	touch := beginTouch(n, fd)
	if in.Valid&fuse.FATTR_SIZE != 0 {
		touch.reached = anySize
	}
	var st unix.Statx_t
	errno = fs.setAttr(ctx, n, fd, sizer, touch.size, in)
	err := statx(fd, "", &st)
	touch.endWith(fd) // not with st: a write that was in flight may have ended since
	if err != nil {
		if errno == 0 {
			errno = toErrno(err)
		}
		return fuse.Status(errno)
	}
	if in.Valid&(fuse.FATTR_MODE|fuse.FATTR_UID|fuse.FATTR_GID) != 0 {
		n.rightsTouched(ctx)
	}
	if in.Valid&fuse.FATTR_UID != 0 && n.isRegular() {
		fs.repin(n) // the new owner is charged
	}
	if errno != 0 {
		return fuse.Status(errno)
	}
	fs.fillAttrOut(out, n, &st)
	return fuse.OK
}

// setAttr sets the attributes in in, the size with sizer. before is the current size of n.
func (fs *fileSystem) setAttr(
	ctx context.Context, n *node, fd int, sizer sizer, before int64, in *fuse.SetAttrIn,
) syscall.Errno {
	if in.Valid&^fuse.FATTR_FH == 0 && n.isRegular() {
		// Nothing to set: the kernel is about to write the backing file itself for a caller who may not keep set-id
		// bits, and leaves clearing them to the daemon.
		return fs.killSetID(n, fd, &in.Caller)
	}
	if size, ok := in.GetSize(); ok {
		if in.Valid&fuse.FATTR_KILL_SUIDGID != 0 && n.isRegular() {
			if errno := fs.killSetID(n, fd, &in.Caller); errno != 0 {
				return errno
			}
		}
		if errno := fs.setSize(ctx, n, sizer, in.Caller.Uid, before, int64(size)); errno != 0 {
			return errno
		}
	}
	uid, setUID := in.GetUID()
	gid, setGID := in.GetGID()
	if setUID || setGID {
		owner, group := -1, -1
		if setUID {
			owner = int(uid)
		}
		if setGID {
			group = int(gid)
		}
		if errno := fs.chown(n, fd, &in.Caller, owner, group); errno != 0 {
			return errno
		}
	}
	if mode, ok := in.GetMode(); ok {
		if hidden := n.concealed(); hidden != 0 {
			// The caller does not see these bits, so they stay.
			var st unix.Stat_t
			if err := unix.Fstat(fd, &st); err != nil {
				return toErrno(err)
			}
			mode = mode&^hidden | st.Mode&hidden
		}
		if errno := fs.chmod(n, fd, mode); errno != 0 {
			return errno
		}
	}
	atime := timespec(in.Valid, fuse.FATTR_ATIME, fuse.FATTR_ATIME_NOW, in.Atime, in.Atimensec)
	mtime := timespec(in.Valid, fuse.FATTR_MTIME, fuse.FATTR_MTIME_NOW, in.Mtime, in.Mtimensec)
	if atime.Nsec != unix.UTIME_OMIT || mtime.Nsec != unix.UTIME_OMIT {
		set := func() error {
			errno := fs.setTimes(n, fd, atime, mtime)
			if errno == syscall.EPERM && in.Valid == ownTimes|fuse.FATTR_FH {
				// The file is another user's, or allows only appending. It keeps the time at which the bytes arrived:
				// fsync must not fail for that.
				errno = 0
			}
			if errno != 0 {
				return errno
			}
			return nil
		}
		if c := n.data.Load(); c != nil {
			// Not while released bytes are written home: after that, home gets its former time back.
			return toErrno(c.changeHome(ctx, fs, fd, pagecache.Change{Kind: pagecache.ChangeTimes},
				func(int64, int64) error { return c.witness.setModified(fd, mtime, set) }))
		}
		return toErrno(set())
	}
	return 0
}

// setsTime reports whether a program sets mtime. With --write-back, the kernel also sends mtimes of its own: with a new
// size, or the time of a write. If a program sets a time between the mount's start and now, it looks the same as these,
// and does not count.
func (fs *fileSystem) setsTime(in *fuse.SetAttrIn) bool {
	switch {
	case in.Valid&fuse.FATTR_MTIME == 0:
		return false
	case !fs.writeBack:
		return true
	}
	at := time.Unix(int64(in.Mtime), int64(in.Mtimensec))
	return in.Valid&fuse.FATTR_SIZE == 0 && (at.Before(fs.made) || at.After(time.Now()))
}

// finishReleases writes home what devices released of n. Until then, the next release (of a client that ends, say)
// would count as a modification, and would change the time that a program is about to set.
func (fs *fileSystem) finishReleases(ctx context.Context, n *node) {
	c := n.data.Load()
	if c == nil {
		return
	}
	f := c.live()
	if f == nil {
		return
	}
	if err := f.BringHome(ctx); err != nil {
		fs.log.Debug("a later release may change the time that is set", "node", n.path(), "error", err)
	}
}

// rightsTouched tells the page cache that users may have lost rights to the file.
func (n *node) rightsTouched(ctx context.Context) {
	if c := n.data.Load(); c != nil {
		if f := c.live(); f != nil {
			f.RightsTouched(ctx)
		}
	}
}

// sizer sets the size of a regular file through a descriptor that is open for writing. named says that the program
// named the file, as truncate(2) does: if the file has that size already, some filesystems then leave its times alone.
// While the descriptor is open, no process can get a lease on the file.
type sizer struct {
	fd    int
	named bool
}

func (s sizer) set(size int64) error {
	if s.named {
		return unix.Truncate(procPath(s.fd), size)
	}
	return unix.Ftruncate(s.fd, size)
}

// setSize truncates or extends a regular file on behalf of a user. before is its current size.
func (fs *fileSystem) setSize(
	ctx context.Context, n *node, sizer sizer, uid uint32, before, size int64,
) syscall.Errno {
	if !n.isRegular() || size < 0 {
		return syscall.EINVAL
	}
	c := n.content()
	truncate := func(int64, int64) error {
		return fs.spend(uid, func() error { return retry(func() error { return sizer.set(size) }) })
	}
	change := pagecache.Change{Kind: pagecache.ChangeTruncate, Len: size, Known: fs.knownSize(n, before, size)}
	do := func() error { return c.changeHome(ctx, fs, sizer.fd, change, truncate) }
	errno := toErrno(fs.lengthen(n, sizer.fd, before, size, do))
	if errno == 0 {
		n.told.Store(size)
	}
	c.awaitPushes()
	if r := fs.cache.Recording(); r != nil && errno == 0 {
		r.Resize(n.key.fileID(), size)
	}
	return errno
}

// chown sets the owner and group of n, whose descriptor is fd; -1 leaves one as it is. The backing filesystem clears
// set-id bits, except a set-group-ID bit without group execute: it sees the daemon as the caller. chown clears that bit
// itself.
func (fs *fileSystem) chown(n *node, fd int, who *fuse.Caller, owner, group int) syscall.Errno {
	var st unix.Stat_t
	foreign := false
	if who.Uid != 0 && n.isRegular() && unix.Fstat(fd, &st) == nil {
		foreign = st.Mode&(unix.S_ISGID|unix.S_IXGRP) == unix.S_ISGID && !inGroup(who, st.Gid)
	}
	if err := fs.spend(who.Uid, func() error { // counts against the new owner's quota
		return unix.Fchownat(fd, "", owner, group, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW)
	}); err != nil {
		return toErrno(err)
	}
	if !foreign {
		return 0
	}
	return fs.chmod(n, fd, st.Mode&^(unix.S_ISUID|unix.S_ISGID))
}

// chmod sets the permission bits of n, whose descriptor is fd.
func (fs *fileSystem) chmod(n *node, fd int, mode uint32) syscall.Errno {
	if n.kind == unix.S_IFLNK {
		// Linux keeps no mode for symbolic links. The backing filesystem gives the same answer to lchmod.
		return syscall.EOPNOTSUPP
	}
	return toErrno(unix.Fchmodat(fs.procDir, strconv.Itoa(fd), mode&07777, 0))
}

// setTimes sets times with nanosecond precision. O_PATH descriptors take AT_EMPTY_PATH since Linux 5.8. Before that,
// /proc must be used, which does not work for symbolic links.
func (fs *fileSystem) setTimes(n *node, fd int, atime, mtime unix.Timespec) syscall.Errno {
	times := []unix.Timespec{atime, mtime}
	err := unix.UtimesNanoAt(fd, "", times, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW)
	if err == syscall.EINVAL || err == syscall.ENOENT {
		if n.kind == unix.S_IFLNK {
			return syscall.EOPNOTSUPP
		}
		err = unix.UtimesNanoAt(fs.procDir, strconv.Itoa(fd), times, 0)
	}
	return toErrno(err)
}

// killSetID clears the set-user-ID bit of n. It also clears the set-group-ID bit if the group may execute the file or
// who is not in the group. The kernel does the same on its own filesystems when a caller without CAP_FSETID changes the
// bytes (inode(7)).
func (fs *fileSystem) killSetID(n *node, fd int, who *fuse.Caller) syscall.Errno {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return toErrno(err)
	}
	mode := st.Mode &^ unix.S_ISUID
	if mode&unix.S_ISGID != 0 && (mode&unix.S_IXGRP != 0 || !inGroup(who, st.Gid)) {
		mode &^= unix.S_ISGID
	}
	if mode == st.Mode {
		return 0
	}
	touch := beginTouch(n, fd)
	defer touch.endWith(fd)
	if errno := fs.chmod(n, fd, mode); errno != 0 {
		return errno
	}
	// The kernel asked for this and still has the old mode. Without an offset, the notification drops attributes only
	// and waits for no page, so it may be sent from here.
	fs.notify.InodeNotify(uint64(n.id), -1, 0)
	return 0
}

// inGroup reports whether who is in a group. Requests carry only the first group of a process. A process in a foreign
// PID namespace cannot be looked up, and counts as a member.
func inGroup(who *fuse.Caller, group uint32) bool {
	if who.Gid == group {
		return true
	}
	groups, seen := procStatus(strconv.FormatUint(uint64(who.Pid), 10), "Groups:")
	return !seen || slices.Contains(strings.Fields(groups), strconv.FormatUint(uint64(group), 10))
}

// procPath returns a path to what fd refers to, for calls that take no descriptor. It works for O_PATH descriptors.
func procPath(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }
