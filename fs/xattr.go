package fs

import (
	"bytes"
	"strings"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// onPath runs call with a path to n for the extended attribute calls, which take no O_PATH descriptor. follow says
// whether call must follow symbolic links. For most nodes the path is in /proc/self/fd, and must be followed. A
// symbolic link would be followed too, so its path leads through its directory instead. A link without a name has no
// path.
func (fs *fileSystem) onPath(id uint64, call func(n *node, fd int, path string, follow bool) error) fuse.Status {
	n := fs.node(id)
	if n == nil {
		return fuse.Status(syscall.ESTALE)
	}
	fd, errno := fs.hold(n)
	if errno != 0 {
		return fuse.Status(errno)
	}
	defer fs.unhold(n)
	if n.kind != unix.S_IFLNK {
		return toStatus(call(n, fd, procPath(fd), true))
	}
	n.mu.Lock()
	where := n.where
	n.mu.Unlock()
	if where.parent == nil {
		return fuse.Status(syscall.EOPNOTSUPP)
	}
	parent, errno := fs.hold(where.parent)
	if errno != 0 {
		return fuse.Status(errno)
	}
	defer fs.unhold(where.parent)
	where.parent.names.RLock()
	defer where.parent.names.RUnlock()
	var st unix.Statx_t
	if err := peek(parent, where.name, &st); err != nil || !n.is(identify(&st)) {
		return fuse.Status(syscall.ESTALE)
	}
	return toStatus(call(n, fd, procPath(parent)+"/"+where.name, false))
}

// GetXAttr implements fuse.RawFileSystem.
func (fs *fileSystem) GetXAttr(
	_ <-chan struct{}, header *fuse.InHeader, attr string, dest []byte,
) (uint32, fuse.Status) {
	size := 0
	if isCacheAttribute(attr) && attr != AttributePin {
		return 0, fuse.EINVAL
	}
	// The kernel asks for security.capability before the first write to a file.
	if n := fs.node(header.NodeId); n != nil {
		if n.concealsAttribute(attr) {
			return 0, fuse.ENODATA
		}
		if size, err, ok := n.getOpenXattr(attr, dest); ok {
			return uint32(max(size, 0)), toStatus(err)
		}
	}
	status := fs.onPath(header.NodeId, func(_ *node, _ int, path string, follow bool) (err error) {
		if follow {
			size, err = unix.Getxattr(path, attr, dest)
		} else {
			size, err = unix.Lgetxattr(path, attr, dest)
		}
		return err
	})
	return uint32(max(size, 0)), status
}

// getOpenXattr reads the attribute through an open of n, if there is one. This saves opening the file. ok is false if
// there is no open.
func (n *node) getOpenXattr(attr string, dest []byte) (size int, err error, ok bool) {
	c := n.data.Load()
	if c == nil {
		return 0, nil, false
	}
	of := c.opened.Load()
	if of == nil || !of.use() {
		return 0, nil, false
	}
	defer of.mu.RUnlock()
	size, err = unix.Fgetxattr(of.fd, attr, dest)
	return size, err, true
}

// accessACL is the attribute that contains the ACL of a file.
const accessACL = "system.posix_acl_access"

// SetXAttr implements fuse.RawFileSystem.
func (fs *fileSystem) SetXAttr(cancel <-chan struct{}, in *fuse.SetXAttrIn, attr string, data []byte) fuse.Status {
	if isCacheAttribute(attr) {
		if status := fs.beforeCacheAttribute(in, attr, data); !status.Ok() {
			return status
		}
		defer fs.repin(fs.node(in.NodeId))
	}
	ctx := newRequest(cancel, &in.Caller)
	defer ctx.end()
	return fs.onPath(in.NodeId, func(n *node, fd int, path string, follow bool) error {
		touch := beginTouch(n, fd)
		defer touch.endWith(fd)
		if attr == accessACL {
			defer n.rightsTouched(ctx)
		}
		data := data[:min(len(data), int(in.Size))]
		if err := fs.spend(in.Caller.Uid, func() error {
			if !follow {
				return unix.Lsetxattr(path, attr, data, int(in.Flags))
			}
			return unix.Setxattr(path, attr, data, int(in.Flags))
		}); err != nil || !follow {
			return err
		}
		if in.SetXAttrFlags&fuse.SETXATTR_ACL_KILL_SGID == 0 {
			return nil
		}
		// The backing filesystem would have cleared the bit if the caller had set the ACL itself.
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return err
		}
		if st.Mode&unix.S_ISGID == 0 {
			return nil
		}
		if errno := fs.chmod(n, fd, st.Mode&^unix.S_ISGID); errno != 0 {
			return errno
		}
		return nil
	})
}

// RemoveXAttr implements fuse.RawFileSystem.
func (fs *fileSystem) RemoveXAttr(cancel <-chan struct{}, header *fuse.InHeader, attr string) fuse.Status {
	if isCacheAttribute(attr) {
		if attr != AttributePin {
			return fuse.EINVAL
		}
		defer fs.repin(fs.node(header.NodeId))
	}
	ctx := newRequest(cancel, &header.Caller)
	defer ctx.end()
	return fs.onPath(header.NodeId, func(n *node, fd int, path string, follow bool) error {
		touch := beginTouch(n, fd)
		defer touch.endWith(fd)
		if attr == accessACL {
			defer n.rightsTouched(ctx)
		}
		if follow {
			return unix.Removexattr(path, attr)
		}
		return unix.Lremovexattr(path, attr)
	})
}

// ListXAttr implements fuse.RawFileSystem.
func (fs *fileSystem) ListXAttr(_ <-chan struct{}, header *fuse.InHeader, dest []byte) (uint32, fuse.Status) {
	var names []byte
	status := fs.onPath(header.NodeId, func(_ *node, _ int, path string, follow bool) (err error) {
		list := unix.Llistxattr
		if follow {
			list = unix.Listxattr
		}
		names, err = readNames(func(p []byte) (int, error) { return list(path, p) })
		return err
	})
	if !status.Ok() {
		return 0, status
	}
	names = without(names, func(name string) bool {
		return header.Uid != 0 && strings.HasPrefix(name, "trusted.") || isCacheAttribute(name) && name != AttributePin
	})
	if len(dest) == 0 {
		return uint32(len(names)), fuse.OK
	}
	if len(names) > len(dest) {
		return uint32(len(names)), fuse.ERANGE
	}
	return uint32(copy(dest, names)), fuse.OK
}

// readNames calls list with a buffer that is large enough for the answer.
func readNames(list func([]byte) (int, error)) ([]byte, error) {
	for size := 1 << 10; ; size = 1 << 16 { // XATTR_LIST_MAX
		names := make([]byte, size)
		n, err := list(names)
		if err == syscall.ERANGE && size < 1<<16 {
			continue
		}
		if err != nil {
			return nil, err
		}
		return names[:n], nil
	}
}

// without removes the names that hidden accepts from a list.
func without(names []byte, hidden func(name string) bool) []byte {
	kept := make([]byte, 0, len(names))
	for name := range bytes.SplitAfterSeq(names, []byte{0}) {
		if !hidden(strings.TrimSuffix(string(name), "\x00")) {
			kept = append(kept, name...)
		}
	}
	return kept
}
