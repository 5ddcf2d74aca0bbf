package fs

import (
	"encoding/binary"
	"path"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// A name that the kernel is told to drop leaves its cache at once, and the kernel then detaches everything that is
// mounted on it or below it, with its files, in all mount namespaces. A program whose working directory is there gets
// ENOENT from getcwd. So the daemon only lets names expire (FUSE_EXPIRE_ONLY, Linux 6.2): the kernel looks up the name
// again before it uses it. It drops the name, and detaches mounts, only if the answer is another file or none.
//
// Older kernels cannot do that. There the daemon says nothing about names at or below which it sees a mount. Such a
// change shows when the kernel asks again.
//
// A name that has expired still keeps its file known, and so the daemon may keep the space of a removed file. So the
// kernel is asked to forget a file that has lost its last name (FUSE_NOTIFY_PRUNE, Linux 6.18).

// expiring is a server whose names expire.
type expiring struct {
	sparing
	c *connection
}

// EntryNotify implements notifier. The message is a fuse_out_header, a fuse_notify_inval_entry_out and the name.
func (e expiring) EntryNotify(parent uint64, name string) fuse.Status {
	const headers, notifyInvalEntry = 16 + 16, 3
	size := headers + len(name) + 1
	b := make([]byte, 0, size)
	le := binary.NativeEndian
	b = le.AppendUint32(b, uint32(size))
	b = le.AppendUint32(b, notifyInvalEntry)
	b = le.AppendUint64(b, 0) // this answers no request
	b = le.AppendUint64(b, parent)
	b = le.AppendUint32(b, uint32(len(name)))
	b = le.AppendUint32(b, fuse.EXPIRE_ONLY)
	b = append(append(b, name...), 0)
	err := retry(func() error {
		_, err := unix.Write(e.c.notices, b)
		return err
	})
	return toStatus(err)
}

// letGo implements notifier.
func (e expiring) letGo(n *node) {
	if e.PruneNotify([]uint64{uint64(n.id)}) != fuse.OK { // an older kernel
		e.sparing.letGo(n)
	}
}

// sparing is a server that drops no name at or below which something is mounted.
type sparing struct {
	*fuse.Server
	fs *fileSystem
}

// EntryNotify implements notifier.
func (s sparing) EntryNotify(parent uint64, name string) fuse.Status {
	n := s.fs.node(parent)
	if n == nil {
		return fuse.ENOENT
	}
	mounts, err := readMounts()
	if err != nil || usedByMounts(mounts, s.fs.device, path.Join("/", n.path(), name)) {
		return fuse.EBUSY
	}
	return s.Server.EntryNotify(parent, name)
}

// letGo implements notifier. If SOURCE has another file with the name, the kernel may know that one by now, and letGo
// does nothing.
func (s sparing) letGo(n *node) {
	n.mu.Lock()
	where := n.where
	n.mu.Unlock()
	if where.parent == nil {
		return
	}
	dir, errno := s.fs.hold(where.parent)
	if errno != 0 {
		return
	}
	defer s.fs.unhold(where.parent)
	if peek(dir, where.name, new(unix.Statx_t)) == syscall.ENOENT {
		s.EntryNotify(uint64(where.parent.id), where.name)
	}
}

// usedByMounts reports whether something is mounted at or below a path in the filesystem of a device, or from there.
func usedByMounts(mounts []MountInfo, device, path string) bool {
	for _, at := range mounts {
		if at.Device != device {
			continue
		}
		if at.root != "/" && below(at.root, path) {
			return true
		}
		inner, err := filepath.Rel(at.root, path)
		if err != nil || !filepath.IsLocal(inner) {
			continue
		}
		shown := filepath.Join(at.Mountpoint, inner)
		if slices.ContainsFunc(mounts, func(m MountInfo) bool { return below(m.Mountpoint, shown) }) {
			return true
		}
	}
	return false
}
