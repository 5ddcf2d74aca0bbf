package fs

import (
	"context"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

// SetAttr implements fuse.RawFileSystem. Owner goes before mode, since changing the owner clears set-id bits, and times
// go last, since everything else changes them.
func (fs *fileSystem) SetAttr(cancel <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	n := fs.node(in.NodeId)
	if n == nil {
		return fuse.Status(syscall.ESTALE)
	}
	var of *openFile
	if handle, ok := in.GetFh(); ok {
		of = fs.files.get(handle)
	}
	fd, errno := fs.hold(n)
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
			sizer.named = true
		}
	}
	touch := beginTouch(n, fd)
	if in.Valid&fuse.FATTR_SIZE != 0 {
		touch.reached = anySize
	}
	var st unix.Statx_t
	errno = fs.setAttr(ctx, n, fd, sizer, touch.size, in)
	err := statx(fd, "", &st)
	touch.endWith(fd) // not with st: a write that began meanwhile may have ended since
	if err != nil {
		if errno == 0 {
			errno = toErrno(err)
		}
		return fuse.Status(errno)
	}
	if in.Valid&(fuse.FATTR_MODE|fuse.FATTR_UID|fuse.FATTR_GID) != 0 {
		n.rightsTouched(ctx)
	}
	if errno != 0 {
		return fuse.Status(errno)
	}
	fs.fillAttrOut(out, n, &st)
	return fuse.OK
}

// setAttr sets what in asks for, the size with sizer. before is the size that n has.
func (fs *fileSystem) setAttr(
	ctx context.Context, n *node, fd int, sizer sizer, before int64, in *fuse.SetAttrIn,
) syscall.Errno {
	if in.Valid&^fuse.FATTR_FH == 0 && n.isRegular() {
		// Nothing to set: the kernel is about to write the backing file itself for somebody who may not keep
		// set-id bits, and leaves it to the daemon to clear them.
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
			// Who asks does not see these bits, so they stay.
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
			if errno := fs.setTimes(n, fd, atime, mtime); errno != 0 {
				return errno
			}
			return nil
		}
		if c := n.data.Load(); c != nil {
			// Not while released bytes are written, after which home gets back the time that it had.
			return toErrno(c.changeHome(ctx, pagecache.Change{Kind: pagecache.ChangeTimes},
				func(int64, int64) error { return set() }))
		}
		return toErrno(set())
	}
	return 0
}

// setsTime reports whether a program sets mtime. With --write-back the kernel also sends mtimes of its own: with a new
// size, or the time of a write. A program that sets a time after the mount was made looks the same, and does not count.
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

// finishReleases brings home what devices released of n. Until that is home, a release finds it modified, and one that
// follows (of a client that ends, say) would move the time that a program is about to set.
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

// rightsTouched tells the devices' side that somebody may have fewer rights to the file than before.
func (n *node) rightsTouched(ctx context.Context) {
	if c := n.data.Load(); c != nil {
		if f := c.live(); f != nil {
			f.RightsTouched(ctx)
		}
	}
}

// sizer sets the size of a regular file with a descriptor that is open for writing. named says that a program named
// the file, as truncate(2) does: where that has the size, some filesystems leave its times. Nobody gets a lease on the
// file meanwhile.
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

// setSize truncates or extends a regular file for a user. before is the size that it has.
func (fs *fileSystem) setSize(
	ctx context.Context, n *node, sizer sizer, uid uint32, before, size int64,
) syscall.Errno {
	if !n.isRegular() || size < 0 {
		return syscall.EINVAL
	}
	c := n.content()
	var known int64
	if fs.writeBack && c.live() != nil {
		known = fs.knownSize(n)
	}
	truncate := func(int64, int64) error {
		return fs.spend(uid, func() error { return retry(func() error { return sizer.set(size) }) })
	}
	change := pagecache.Change{Kind: pagecache.ChangeTruncate, Len: size, Known: known}
	do := func() error { return c.changeHome(ctx, change, truncate) }
	errno := toErrno(fs.lengthen(n, sizer.fd, before, size, do))
	if errno == 0 {
		n.told.Store(size)
	}
	if r := fs.cache.Recording(); r != nil && errno == 0 {
		r.Resize(n.key.fileID(), size)
	}
	return errno
}

// chown sets owner and group of n, whose descriptor is fd, where not -1. The backing clears set-id bits, but not the
// one of a group that may not execute: it sees the daemon ask, not who.
func (fs *fileSystem) chown(n *node, fd int, who *fuse.Caller, owner, group int) syscall.Errno {
	var st unix.Stat_t
	foreign := false
	if who.Uid != 0 && n.isRegular() && unix.Fstat(fd, &st) == nil {
		foreign = st.Mode&(unix.S_ISGID|unix.S_IXGRP) == unix.S_ISGID && !inGroup(who, st.Gid)
	}
	if err := fs.spend(who.Uid, func() error { // of the new owner's quota
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
		// Linux keeps no mode for symbolic links; the backing says so as for any lchmod.
		return syscall.EOPNOTSUPP
	}
	return toErrno(unix.Fchmodat(fs.procDir, strconv.Itoa(fd), mode&07777, 0))
}

// setTimes sets times to the nanosecond. A descriptor opened with O_PATH takes AT_EMPTY_PATH since Linux 5.8; before
// that only what is not a symbolic link can be reached, through /proc.
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

// killSetID clears the set-user-ID bit of n, and the set-group-ID bit where the group may execute or who is not in the
// group, as the kernel does on a filesystem of its own when somebody without CAP_FSETID changes the bytes (inode(7)).
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
	// The kernel asked for this and still keeps the old mode. Without an offset, the notification drops attributes
	// only and waits for no page, so it may be sent from here.
	fs.notify.InodeNotify(uint64(n.id), -1, 0)
	return 0
}

// inGroup reports whether who is in a group. Requests carry only the first of a process's groups. One that cannot be
// asked, because it lives in a namespace of processes that is not ours, counts as being in it.
func inGroup(who *fuse.Caller, group uint32) bool {
	if who.Gid == group {
		return true
	}
	status, err := os.ReadFile("/proc/" + strconv.FormatUint(uint64(who.Pid), 10) + "/status")
	if err != nil {
		return true
	}
	for line := range strings.Lines(string(status)) {
		if groups, is := strings.CutPrefix(line, "Groups:"); is {
			return slices.Contains(strings.Fields(groups), strconv.FormatUint(uint64(group), 10))
		}
	}
	return true
}

// procPath names what fd refers to, for calls that take no descriptor. It reaches through O_PATH descriptors.
func procPath(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }
