package fs

import (
	"path"
	"strings"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// node returns the node with the kernel's number id, or nil.
func (fs *fileSystem) node(id uint64) *node {
	if id == uint64(rootID) {
		return fs.root
	}
	return fs.table.byID.get(id)
}

// entryName reports whether name can be an entry of a directory. The kernel sends no other names. Other names could
// lead out of SOURCE.
func entryName(name string) bool {
	return name != "" && name != "." && name != ".." && !strings.Contains(name, "/")
}

// directory returns the node id with its descriptor held, for a request about name in that directory.
func (fs *fileSystem) directory(id uint64, name string) (*node, int, syscall.Errno) {
	n := fs.node(id)
	if n == nil {
		return nil, -1, syscall.ESTALE
	}
	if !entryName(name) {
		return nil, -1, syscall.EINVAL
	}
	fd, errno := fs.hold(n)
	return n, fd, errno
}

// Lookup implements fuse.RawFileSystem.
func (fs *fileSystem) Lookup(
	cancel <-chan struct{}, header *fuse.InHeader, name string, out *fuse.EntryOut,
) fuse.Status {
	parent, dir, errno := fs.directory(header.NodeId, name)
	if errno != 0 {
		return fs.unknown(parent, name, errno)
	}
	defer fs.unhold(parent)
	parent.names.RLock()
	defer parent.names.RUnlock()
	var st unix.Statx_t
	foreign, err := fs.statxIn(parent, dir, name, &st)
	if err == syscall.ENOENT {
		// With node 0, the kernel remembers that the name does not exist.
		out.SetEntryTimeout(fs.keeps(parent, fs.entryTimeout))
		return fuse.OK
	}
	if err != nil {
		return fs.unknown(parent, name, toErrno(err))
	}
	n := fs.register(parent, name, &st)
	fs.noteHandle(n, dir, name, st.Mnt_id)
	fs.freshen(cancel, &header.Caller, n, &st)
	fs.fillEntry(out, n, &st)
	if foreign {
		out.SetAttrTimeout(0)
	}
	return fuse.OK
}

// unknown returns the answer to a LOOKUP that failed for the reason why. parent may be nil. If the kernel knows the
// name, it takes every answer except ENOMEM and EINTR as if the name were gone, and detaches what is mounted there
// (expiry.go).
func (fs *fileSystem) unknown(parent *node, name string, why syscall.Errno) fuse.Status {
	switch why {
	case syscall.EMFILE, syscall.ENFILE:
		return fuse.Status(syscall.ENOMEM)
	case syscall.ENOENT, syscall.ENOTDIR, syscall.ESTALE, syscall.EINVAL, syscall.ENAMETOOLONG, syscall.EINTR:
		return fuse.Status(why)
	}
	mounts, err := readMounts()
	if parent == nil || err != nil || !usedByMounts(mounts, fs.device, path.Join("/", parent.path(), name)) {
		return fuse.Status(why)
	}
	return fuse.Status(syscall.ENOMEM)
}

// Forget implements fuse.RawFileSystem.
func (fs *fileSystem) Forget(id, lookups uint64) {
	if n := fs.node(id); n != nil && n.id != rootID {
		fs.unrefer(n, lookups, 0)
	}
}

// Readlink implements fuse.RawFileSystem.
func (fs *fileSystem) Readlink(_ <-chan struct{}, header *fuse.InHeader) ([]byte, fuse.Status) {
	n := fs.node(header.NodeId)
	if n == nil {
		return nil, fuse.Status(syscall.ESTALE)
	}
	fd, errno := fs.hold(n)
	if errno != 0 {
		return nil, fuse.Status(errno)
	}
	defer fs.unhold(n)
	target := make([]byte, unix.PathMax)
	size, err := unix.Readlinkat(fd, "", target)
	if err != nil {
		return nil, toStatus(err)
	}
	return target[:size], fuse.OK
}

// Access implements fuse.RawFileSystem. ENOSYS makes the kernel check permissions itself and not ask again.
func (fs *fileSystem) Access(<-chan struct{}, *fuse.AccessIn) fuse.Status { return fuse.ENOSYS }

// StatFs implements fuse.RawFileSystem. A filesystem mounted below SOURCE, a subvolume or a directory with a quota may
// have other space than SOURCE.
func (fs *fileSystem) StatFs(_ <-chan struct{}, header *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	n := fs.node(header.NodeId)
	if n == nil {
		return fuse.Status(syscall.ESTALE)
	}
	fd, errno := fs.hold(n)
	if errno == syscall.ESTALE && n.key.dev == fs.root.key.dev {
		n = fs.root // the file was removed in SOURCE
		fd, errno = fs.hold(n)
	}
	if errno != 0 {
		return fuse.Status(errno)
	}
	defer fs.unhold(n)
	var st syscall.Statfs_t
	if err := retry(func() error { return syscall.Fstatfs(fd, &st) }); err != nil {
		return toStatus(err)
	}
	out.FromStatfsT(&st)
	return fuse.OK
}
