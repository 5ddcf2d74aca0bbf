package fs

import (
	"strings"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

// Attributes with this prefix say what the page cache is to do. SOURCE keeps the pin, so that it outlives the mount,
// and has no other that the mount shows.
const (
	cacheAttributes = "user.gaiafs."
	// AttributePin, of a file or directory, has a text that pagecache.ParsePinning reads. A directory's is that of all
	// files below that have none of their own, nor a nearer directory that has one.
	AttributePin = cacheAttributes + "pin"
	// attributeEvict, when it is set, gives up what devices hold of a file: "all", or a device's number. It is kept
	// nowhere.
	attributeEvict = cacheAttributes + "evict"
)

func isCacheAttribute(name string) bool { return strings.HasPrefix(name, cacheAttributes) }

// beforeCacheAttribute checks a value that somebody sets, and evicts where that is what was asked for. The kernel has
// checked that he may write the file.
func (fs *fileSystem) beforeCacheAttribute(cancel <-chan struct{}, in *fuse.SetXAttrIn, attr string,
	data []byte) fuse.Status {
	value := string(data[:min(len(data), int(in.Size))])
	n := fs.node(in.NodeId)
	p, err := pagecache.ParsePinning(value)
	switch {
	case n == nil:
		return fuse.Status(syscall.ESTALE)
	case fs.cache == nil:
		return fuse.Status(syscall.EOPNOTSUPP)
	case err != nil || attr != AttributePin && attr != attributeEvict:
		return fuse.EINVAL
	case attr == attributeEvict:
		return fs.evictNode(cancel, in, n, p)
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

// evictNode is pagecache.Evict for a request.
func (fs *fileSystem) evictNode(cancel <-chan struct{}, in *fuse.SetXAttrIn, n *node, p pagecache.Pinning) fuse.Status {
	switch {
	case in.Caller.Uid != 0 && in.Caller.Uid != fs.creator.uid:
		return fuse.EPERM
	case !n.isRegular():
		return fuse.Status(syscall.EISDIR)
	case !p.Any():
		return fuse.EINVAL
	}
	devices := p.Devices
	if p.All {
		devices = []int{-1}
	}
	ctx := newRequest(cancel, &in.Caller)
	defer ctx.end()
	for _, d := range devices {
		e, err := fs.cache.Evict(ctx, n.key.fileID(), d)
		if err != nil {
			return toStatus(err)
		}
		if e.Kept+e.Pinned > 0 {
			return fuse.EBUSY
		}
	}
	return fuse.OK
}

// pinning returns how a file is pinned: by its own attribute, or that of the nearest directory above that has one. What
// cannot be read pins nothing.
func (fs *fileSystem) pinning(n *node) pagecache.Pinning {
	var st unix.Statx_t
	if fs.stat(n, &st) != 0 {
		return pagecache.Pinning{}
	}
	for at := n; at != nil; {
		if p, has := fs.ownPinning(at); has {
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

// ownPinning returns what a node's own attribute says, if there is one that says something.
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

// repin looks at a file's pin again, or for a directory at those of all files.
func (fs *fileSystem) repin(id uint64) {
	n := fs.node(id)
	if n == nil || fs.cache == nil {
		return
	}
	if !n.isRegular() {
		fs.repinAll()
	} else if f := fs.cache.Lookup(n.key.fileID()); f != nil {
		f.SetPinning(fs.pinning(n))
	}
}

// repinAll looks at the pins of all files that devices hold something of again. Of files that the kernel has forgotten
// it does not know where they are, and filesystems below SOURCE may not answer: these files are looked at when somebody
// opens them for a device.
func (fs *fileSystem) repinAll() {
	if fs.cache == nil {
		return
	}
	fs.cache.Repin(func(id pagecache.FileID) (p pagecache.Pinning, known bool) {
		n := fs.table.byInode(inodeKey{id.Dev, id.Ino})
		if n == nil || fs.mayHang(n) {
			return p, false
		}
		return fs.pinning(n), true
	})
}
