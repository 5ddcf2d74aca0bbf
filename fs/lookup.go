package fs

import (
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
		return fuse.Status(errno)
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
		return toStatus(err)
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

// StatFs implements fuse.RawFileSystem.
func (fs *fileSystem) StatFs(_ <-chan struct{}, _ *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	var st syscall.Statfs_t
	if err := retry(func() error { return syscall.Fstatfs(fs.root.fd, &st) }); err != nil {
		return toStatus(err)
	}
	out.FromStatfsT(&st)
	return fuse.OK
}
