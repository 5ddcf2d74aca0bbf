package fs

import (
	"encoding/binary"
	"syscall"

	"golang.org/x/sys/unix"
)

// If the kernel opens files itself on a writable mount, programs may write files that the daemon has not opened. If
// such a file is renamed in SOURCE, its node's locator leads nowhere. So there the daemon remembers a file handle of
// each regular file (name_to_handle_at(2)), and opens files by it. That also needs no lock of a directory's names.
//
// A handle leads to the file as long as the file has a name or an open. Files on mounts below SOURCE have no handles
// here, also if the mount shows SOURCE's own filesystem: it may be read-only. They are opened by name.

// noHandle is the handle of a file that was found on a mount below SOURCE.
var noHandle = new(string)

// noteHandle remembers the handle of n, which is name in the directory dir, or dir itself if name is empty. It was
// found on the mount with the given number. If SOURCE has another file there by now, openHandle finds that out.
func (fs *fileSystem) noteHandle(n *node, dir int, name string, mount uint64) {
	if !fs.unseenOpens || !n.isRegular() || fs.mayHang(n) {
		return
	}
	if mount != fs.mount && n.handle.Swap(noHandle) != noHandle {
		fs.kept.drop(keptKey{n, true}) // perhaps not allowed where the file was found now
	}
	if n.handle.Load() != nil {
		return
	}
	flags := 0
	if name == "" {
		flags = unix.AT_EMPTY_PATH
	}
	h, _, err := unix.NameToHandleAt(dir, name, flags)
	if err != nil {
		return
	}
	handle := string(binary.NativeEndian.AppendUint32(nil, uint32(h.Type()))) + string(h.Bytes())
	n.handle.CompareAndSwap(nil, &handle)
}

// openHandle opens n by its handle. It returns ESTALE if n has none, or if it leads to no file or to another one.
func (fs *fileSystem) openHandle(n *node, flags int) (int, syscall.Errno) {
	handle := n.handle.Load()
	if handle == nil || handle == noHandle || fs.tree == nil {
		return -1, syscall.ESTALE
	}
	kind, data := int32(binary.NativeEndian.Uint32([]byte(*handle))), []byte((*handle)[4:])
	fd, err := fs.opened(func() (int, error) {
		return unix.OpenByHandleAt(fs.tree.root, unix.NewFileHandle(kind, data), flags|unix.O_CLOEXEC)
	})
	if err != nil {
		return -1, toErrno(err)
	}
	var st unix.Statx_t
	if err := peek(fd, "", &st); err != nil || !n.is(identify(&st)) {
		unix.Close(fd)
		n.handle.CompareAndSwap(handle, nil) // of another file that had the name
		return -1, syscall.ESTALE
	}
	return fd, 0
}

// followHandle gives n a descriptor by its handle, after its name went away directly in SOURCE, and reports whether
// that worked.
func (fs *fileSystem) followHandle(n *node) bool {
	fd, errno := fs.openHandle(n, unix.O_PATH)
	if errno != 0 {
		return false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.fd >= 0 || n.dropped {
		unix.Close(fd)
	} else {
		fs.adoptLocked(n, fd)
	}
	return true
}
