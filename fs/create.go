package fs

import (
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// make creates name in the directory parentID on behalf of who, and answers with the new entry. It calls call with the
// directory's descriptor.
func (fs *fileSystem) make(
	parentID uint64, name string, who *fuse.Caller, out *fuse.EntryOut, call func(dir int) error,
) fuse.Status {
	parent, dir, errno := fs.directory(parentID, name)
	if errno != 0 {
		return fuse.Status(errno)
	}
	defer fs.unhold(parent)
	parent.names.RLock()
	defer parent.names.RUnlock()
	if err := fs.creator.as(who, func() error { return call(dir) }); err != nil {
		return toStatus(err)
	}
	var st unix.Statx_t
	if err := statx(dir, name, &st); err != nil {
		return toStatus(err)
	}
	n := fs.register(parent, name, &st)
	fs.noteHandle(n, dir, name, st.Mnt_id)
	fs.fillEntry(out, n, &st)
	return fuse.OK
}

// Mkdir implements fuse.RawFileSystem.
func (fs *fileSystem) Mkdir(_ <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	return fs.make(in.NodeId, name, &in.Caller, out, func(dir int) error {
		return unix.Mkdirat(dir, name, creationMode(dir, in.Mode, in.Umask))
	})
}

// Mknod implements fuse.RawFileSystem.
func (fs *fileSystem) Mknod(_ <-chan struct{}, in *fuse.MknodIn, name string, out *fuse.EntryOut) fuse.Status {
	return fs.make(in.NodeId, name, &in.Caller, out, func(dir int) error {
		mode := in.Mode&unix.S_IFMT | creationMode(dir, in.Mode, in.Umask)
		return unix.Mknodat(dir, name, mode, decodeDevice(in.Rdev))
	})
}

// Symlink implements fuse.RawFileSystem.
func (fs *fileSystem) Symlink(
	_ <-chan struct{}, header *fuse.InHeader, target, name string, out *fuse.EntryOut,
) fuse.Status {
	return fs.make(header.NodeId, name, &header.Caller, out, func(dir int) error {
		return unix.Symlinkat(target, dir, name)
	})
}

// Link implements fuse.RawFileSystem.
func (fs *fileSystem) Link(_ <-chan struct{}, in *fuse.LinkIn, name string, out *fuse.EntryOut) fuse.Status {
	old := fs.node(in.Oldnodeid)
	if old == nil {
		return fuse.Status(syscall.ESTALE)
	}
	fd, errno := fs.hold(old)
	if errno != 0 {
		return fuse.Status(errno)
	}
	defer fs.unhold(old)
	parent, dir, errno := fs.directory(in.NodeId, name)
	if errno != 0 {
		return fuse.Status(errno)
	}
	same := sameMount(fd, dir)
	fs.unhold(parent)
	if !same {
		return fuse.Status(syscall.EXDEV) // the kernel has locked the directory, so nothing else is asked of the file
	}
	touch := beginTouch(old, fd)
	defer touch.endWith(fd)
	// The name may take a block of the directory. The kernel has decided whether the caller may link to the file
	// (protected_hardlinks).
	return fs.make(in.NodeId, name, &in.Caller, out, func(dir int) error {
		return unix.Linkat(unix.AT_FDCWD, procPath(fd), dir, name, unix.AT_SYMLINK_FOLLOW)
	})
}

// Create implements fuse.RawFileSystem. It always makes the file exclusively: opening a file that was just made
// directly in SOURCE would bypass the kernel's permission check. ESTALE makes the kernel look the name up again and
// check that file.
func (fs *fileSystem) Create(_ <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	parent, dir, errno := fs.directory(in.NodeId, name)
	if errno != 0 {
		return fuse.Status(errno)
	}
	defer fs.unhold(parent)
	flags, direct := fs.creationFlags(in.Flags)
	flags |= unix.O_CREAT | unix.O_EXCL | unix.O_NOFOLLOW
	mode := creationMode(dir, in.Mode, in.Umask)

	parent.names.RLock()
	defer parent.names.RUnlock()
	fd := -1
	err := fs.creator.as(&in.Caller, func() (err error) {
		fd, err = fs.openat(dir, name, flags, mode)
		return err
	})
	switch {
	case err == syscall.EEXIST && in.Flags&unix.O_EXCL == 0:
		return fuse.Status(syscall.ESTALE)
	case err != nil:
		return toStatus(err)
	}
	return fs.answerCreate(parent, name, fd, in, direct, out)
}

// Tmpfile implements fuse.RawFileSystem.
func (fs *fileSystem) Tmpfile(_ <-chan struct{}, in *fuse.CreateIn, out *fuse.CreateOut) fuse.Status {
	parent := fs.node(in.NodeId)
	if parent == nil {
		return fuse.Status(syscall.ESTALE)
	}
	dir, errno := fs.hold(parent)
	if errno != 0 {
		return fuse.Status(errno)
	}
	defer fs.unhold(parent)
	flags, direct := fs.creationFlags(in.Flags)
	// O_EXCL would keep the file from ever getting a name. The kernel enforces that itself for the mount's inode.
	flags |= unix.O_TMPFILE
	mode := creationMode(dir, in.Mode, in.Umask)
	fd := -1
	err := fs.creator.as(&in.Caller, func() (err error) {
		fd, err = fs.openat(dir, ".", flags, mode)
		return err
	})
	if err != nil {
		return toStatus(err)
	}
	return fs.answerCreate(nil, "", fd, in, direct, out)
}

// answerCreate takes over fd, which is open on a new file, and answers with that file. A file without a name has no
// parent and keeps a descriptor of its own.
func (fs *fileSystem) answerCreate(
	parent *node, name string, fd int, in *fuse.CreateIn, direct bool, out *fuse.CreateOut,
) fuse.Status {
	var st unix.Statx_t
	if err := statx(fd, "", &st); err != nil {
		unix.Close(fd)
		return toStatus(err)
	}
	n := fs.register(parent, name, &st)
	fs.noteHandle(n, fd, "", st.Mnt_id)
	if parent == nil {
		if errno := fs.pinTo(n, fd); errno != 0 {
			fs.unrefer(n, 1, 0)
			unix.Close(fd)
			return fuse.Status(errno)
		}
	}
	n.content().witness.see(&st)
	if fs.unseenOpens {
		if errno := fs.keepCreated(n, fd); errno != 0 {
			fs.unrefer(n, 1, 0)
			return fuse.Status(errno)
		}
		if parent == nil {
			fs.lastNameGone(n)
		}
		fs.fillEntry(&out.EntryOut, n, &st)
		out.OpenFlags = fuse.FOPEN_KEEP_CACHE
		return fuse.OK
	}
	who := in.Caller
	if fs.idmapped { // the request names the user to which the caller is mapped
		who.Uid = unknownUser
		fillCaller(&who)
	}
	of, errno := fs.newOpenFile(n, fd, &who, in.Flags, direct, false)
	if errno != 0 {
		fs.unrefer(n, 1, 0)
		return fuse.Status(errno)
	}
	fs.fillEntry(&out.EntryOut, n, &st)
	of.fillOpen(&out.OpenOut)
	return fuse.OK
}

// pinTo gives n an O_PATH descriptor of the file that fd is open on, if n has no descriptor.
func (fs *fileSystem) pinTo(n *node, fd int) syscall.Errno {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.fd >= 0 {
		return 0
	}
	path, err := fs.openat(unix.AT_FDCWD, procPath(fd), unix.O_PATH, 0)
	if err != nil {
		return toErrno(err)
	}
	fs.adoptLocked(n, path)
	return 0
}
