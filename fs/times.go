package fs

import (
	"encoding/binary"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// modified are the arguments of utimensat that set mtime to now by the filesystem's clock, which lags behind time.Now.
var modified = []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Nsec: unix.UTIME_NOW}}

// Modified implements pagecache.TimedHome.
func (h *home) Modified() error { return h.setTimes(modified) }

// SetModified implements pagecache.TimedHome.
func (h *home) SetModified(mtime time.Time) error {
	t, err := unix.TimeToTimespec(mtime)
	if err != nil {
		return err
	}
	return h.setTimes([]unix.Timespec{{Nsec: unix.UTIME_OMIT}, t})
}

func (h *home) setTimes(times []unix.Timespec) error {
	defer h.beginChange()()
	return h.witness.setModified(h.fd, times[1], func() error { return setTimesOf(h.fs, h.fd, times) })
}

// Modified implements pagecache.TimedPages.
func (k kernelPages) Modified() {
	node := k.fs.table.byInode(k.key)
	if node == nil {
		return // the kernel asks when it looks the file up
	}
	if !k.fs.writeBack {
		// Without an offset, the notification drops attributes only.
		_ = k.fs.dropPages(node, -1, 0)
		return
	}
	if err := k.fs.touch(node); err != nil {
		k.fs.log.Debug("the kernel keeps an older time of modification", "node", node.path(), "error", err)
	}
}

// touch sets the mtime of n to now, through the mount. A kernel that caches writes keeps the times of files itself, and
// takes them neither from an answer nor from a notification. So the daemon sets them as a program does. The caller
// holds no lock: the request comes back to this process.
func (fs *fileSystem) touch(n *node) error {
	n.touching.Add(1)
	defer n.touching.Add(-1)
	return fs.through(n, func(fd int) error { return unix.UtimesNanoAt(fd, "", modified, unix.AT_EMPTY_PATH) })
}

// knownSize returns the size of n that the kernel knows, for a request that changes bytes before end, see
// pagecache.Change. size is the size of SOURCE. The kernel knows a longer file if it has cached writes that made the
// file longer. knownSize returns 0 if that cannot matter, and a negative number if it cannot find out. The caller holds
// no lock.
func (fs *fileSystem) knownSize(n *node, size, end int64) int64 {
	if !fs.writeBack || end <= size {
		return 0
	}
	if n.content().live() == nil {
		return -1 // not asked; devices may hold part of the file by the time of the change
	}
	return kernelSize(fs, n)
}

// kernelSize returns the size of n that a kernel that caches writes knows. It is negative if kernelSize cannot find
// out. The caller holds no lock.
func kernelSize(fs *fileSystem, n *node) int64 {
	var st unix.Statx_t
	err := fs.through(n, func(fd int) error {
		return unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_SIZE, &st)
	})
	if err != nil {
		fs.log.Debug("the kernel's size of a file is not known", "node", n.path(), "error", err)
		return -1
	}
	return int64(st.Size)
}

// through calls do with an O_PATH descriptor of n on the mount.
func (fs *fileSystem) through(n *node, do func(fd int) error) error {
	fs.touching.RLock()
	defer fs.touching.RUnlock()
	root, err := unix.Open(fs.mountpoint, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(root)
	if device, err := deviceOf(root); err != nil || device != fs.device {
		return unix.ENODEV // unmounted
	}
	fd, err := fs.openThrough(root, n)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return do(fd)
}

// openThrough opens n with O_PATH below the root of the mount. It does not enter what is mounted inside the mount: that
// may have another file with the number of n, such as n itself in a bind mount of SOURCE, or may not answer.
func (fs *fileSystem) openThrough(root int, n *node) (int, error) {
	how := &unix.OpenHow{Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_XDEV}
	fd, err := unix.Openat2(root, n.path(), how)
	if err == nil {
		var st unix.Statx_t
		err = unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_INO, &st)
		if err == nil && st.Ino == fs.inodeNumber(n.key) {
			return fd, nil
		}
		unix.Close(fd)
	}
	// It has no name, or another one by now, or a mount covers it. FUSE's handles for NFS need no name, but privileges.
	const fileID64Generation = 0x81 // FILEID_INO64_GEN of Linux: node number and generation
	handle := binary.NativeEndian.AppendUint32(nil, uint32(n.id>>32))
	handle = binary.NativeEndian.AppendUint32(handle, uint32(n.id))
	handle = binary.NativeEndian.AppendUint32(handle, 0)
	at, err := unix.Openat(root, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(at)
	return unix.OpenByHandleAt(at, unix.NewFileHandle(fileID64Generation, handle), unix.O_PATH|unix.O_CLOEXEC)
}

// deviceOf returns the device number of the filesystem of fd, major:minor, without a request.
func deviceOf(fd int) (string, error) {
	var st unix.Statx_t
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, 0, &st)
	return fmt.Sprintf("%d:%d", st.Dev_major, st.Dev_minor), err
}
