package fs

import (
	"strings"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

// Attributes with this prefix tell the page cache what to do. SOURCE stores the pin, so that it outlives the mount. The
// mount shows no other attribute with this prefix.
const (
	cacheAttributes = "user.gaiafs."
	// AttributePin is the pin of a file or directory, as text for pagecache.ParsePinning. A directory's pin applies to
	// all files below it without a pin of their own, unless a nearer directory has one.
	AttributePin = cacheAttributes + "pin"
)

func isCacheAttribute(name string) bool { return strings.HasPrefix(name, cacheAttributes) }

// beforeCacheAttribute checks the value of a cache attribute that a program sets. The kernel has checked that the
// program may write the file.
func (fs *fileSystem) beforeCacheAttribute(in *fuse.SetXAttrIn, attr string, data []byte) fuse.Status {
	value := string(data[:min(len(data), int(in.Size))])
	n := fs.node(in.NodeId)
	p, err := pagecache.ParsePinning(value)
	switch {
	case n == nil:
		return fuse.Status(syscall.ESTALE)
	case fs.cache == nil:
		return fuse.Status(syscall.EOPNOTSUPP)
	case err != nil || attr != AttributePin:
		return fuse.EINVAL
	}
	var st unix.Statx_t
	if errno := fs.stat(n, &st); errno != 0 {
		return fuse.Status(errno)
	}
	p.User = st.Uid
	size := int64(0)
	if n.isRegular() {
		size = int64(st.Size)
	}
	return toStatus(fs.cache.CheckPinning(n.key.fileID(), size, p))
}

// pinning returns a file's pin: its own attribute, or that of the nearest directory above that has one. An unreadable
// attribute counts as none.
func (fs *fileSystem) pinning(n *node) pagecache.Pinning {
	for at := n; at != nil; {
		if p, has := fs.ownPinning(at); has {
			var st unix.Statx_t
			if fs.stat(n, &st) != 0 {
				return pagecache.Pinning{}
			}
			p.User = st.Uid
			return p
		}
		at.mu.Lock()
		parent := at.where.parent
		at.mu.Unlock()
		at = parent
	}
	return pagecache.Pinning{}
}

// ownPinning returns the pin in a node's own attribute. has is false if there is no valid one.
func (fs *fileSystem) ownPinning(n *node) (p pagecache.Pinning, has bool) {
	fd, errno := fs.hold(n)
	if errno != 0 {
		return p, false
	}
	defer fs.unhold(n)
	value := make([]byte, 1<<10)
	size, err := unix.Getxattr(procPath(fd), AttributePin, value)
	if err != nil {
		return p, false
	}
	p, err = pagecache.ParsePinning(string(value[:size]))
	return p, err == nil
}

// repin reads the pin of n again. For a directory it reads the pins of the files below it that devices hold something
// of. It skips files that the kernel has forgotten, because their place is unknown, and files on filesystems below
// SOURCE, which may not answer. The pins of these are read when a program opens them for a device.
func (fs *fileSystem) repin(n *node) {
	switch {
	case n == nil || fs.cache == nil:
	case n.isRegular():
		if f := fs.cache.Lookup(n.key.fileID()); f != nil {
			f.SetPinning(fs.pinning(n))
		}
	case n.kind == unix.S_IFDIR:
		fs.cache.Repin(func(id pagecache.FileID) (p pagecache.Pinning, known bool) {
			file := fs.table.byInode(inodeKey{id.Dev, id.Ino})
			if file == nil || fs.mayHang(file) || !file.isIn(n) {
				return p, false
			}
			return fs.pinning(file), true
		})
	}
}

// isIn reports whether n is dir or below it.
func (n *node) isIn(dir *node) bool {
	for n != nil && n != dir {
		n.mu.Lock()
		parent := n.where.parent
		n.mu.Unlock()
		n = parent
	}
	return n != nil
}
