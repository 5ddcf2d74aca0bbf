package fs

import (
	"encoding/binary"
	"syscall"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

const (
	// IoctlGrant is GAIAFS_IOC_GRANT, _IOR('G', 0x01, 128 bytes). On a regular file it grants access to its pages on
	// devices; on a directory it gives the socket and a token that is good for asking for the mount's status.
	IoctlGrant = 0x80804701
	// GrantMagic opens the answer: "gaia", little endian.
	GrantMagic = 0x61696167
	// GrantVersion is the version of the answer's layout.
	GrantVersion = 1
	// GrantSize is the bytes of the answer: magic (4), version (2), flags (2), token (16), the socket's path (104,
	// zero-terminated). Integers are little endian.
	GrantSize = 128
	// GrantForStatus in the flags says that the token is good for the status only.
	GrantForStatus = 1
	// MaxSocketPath is the longest path that fits.
	MaxSocketPath = 103
)

// Grant is what the helper library needs to speak with the daemon about an open file.
type Grant struct {
	Token [16]byte
	// Socket is the path of the daemon's socket, at most MaxSocketPath bytes.
	Socket string
}

// Granter gives out Grants. Its methods are called from request handlers: they must not wait for requests of the mount.
type Granter interface {
	// Grant is for the file that a program has open as src. uid is the user who asks.
	Grant(src pagecache.Source, uid uint32) (Grant, error)
	// GrantStatus is for status only.
	GrantStatus(uid uint32) (Grant, error)
}

// ioctlReadXFlags is FS_IOC_FSGETXATTR, _IOR('X', 31, struct fsxattr), ioctlWriteXFlags FS_IOC_FSSETXATTR,
// _IOW('X', 32, struct fsxattr).
const (
	ioctlReadXFlags  = 0x801c581f
	ioctlWriteXFlags = 0x401c5820
	sizeOfXFlags     = 28
)

// Ioctl implements fuse.RawFileSystem. The ioctls of the backing that read and change inode flags are answered, for
// lsattr and chattr and for tools that ask whether a file is shared or immutable. Nothing else reaches the backing:
// there are ioctls that trim, freeze or shut down a whole filesystem, which the caller may not be allowed but the
// daemon is.
func (fs *fileSystem) Ioctl(
	_ <-chan struct{}, in *fuse.IoctlIn, argument []byte, out *fuse.IoctlOut, reply []byte,
) fuse.Status {
	clear(reply)
	var used usedFile
	var n *node
	fd := -1
	if in.Flags&fuse.IOCTL_DIR != 0 {
		dir, errno := fs.useDir(&in.InHeader, in.Fh)
		if errno != 0 {
			return fuse.Status(errno)
		}
		defer dir.done()
		n, fd = dir.node, dir.fd
	} else {
		var errno syscall.Errno
		if used, errno = fs.useFile(&in.InHeader, in.Fh); errno != 0 {
			return fuse.Status(errno)
		}
		defer used.done()
		n, fd = used.node, used.fd
	}
	switch in.Cmd {
	case IoctlGrant:
		return fs.grant(used, in.Caller.Uid, reply)
	case unix.FS_IOC_GETFLAGS:
		if len(reply) < 4 {
			return fuse.EINVAL
		}
		flags, err := unix.IoctlGetUint32(fd, unix.FS_IOC_GETFLAGS)
		if err != nil {
			return toStatus(err)
		}
		binary.NativeEndian.PutUint32(reply, flags)
		return fuse.OK
	case ioctlReadXFlags:
		if len(reply) < sizeOfXFlags {
			return fuse.EINVAL
		}
		// reply belongs to this request until it is answered, and is as long as the kernel writes.
		return fuse.Status(ioctlOn(fd, ioctlReadXFlags, reply))
	case unix.FS_IOC_SETFLAGS:
		return fuse.Status(fs.setFlags(n, fd, &in.Caller, argument, inodeFlags))
	case ioctlWriteXFlags:
		return fuse.Status(fs.setFlags(n, fd, &in.Caller, argument, inodeXFlags))
	}
	return fuse.Status(syscall.ENOTTY)
}

// flagsIoctl is a pair of ioctls whose argument begins with 32 bits of inode flags.
type flagsIoctl struct {
	read, write uint
	size        int
	privileged  uint32 // flags that only the superuser may change
}

var (
	inodeFlags = flagsIoctl{unix.FS_IOC_GETFLAGS, unix.FS_IOC_SETFLAGS, 4,
		0x10 /* FS_IMMUTABLE_FL */ | 0x20 /* FS_APPEND_FL */ | 0x4000 /* FS_JOURNAL_DATA_FL */}
	inodeXFlags = flagsIoctl{ioctlReadXFlags, ioctlWriteXFlags, sizeOfXFlags,
		0x8 /* FS_XFLAG_IMMUTABLE */ | 0x10 /* FS_XFLAG_APPEND */}
)

// setFlags changes the inode flags of n, which fd is open on, for who. The backing sees the daemon ask, who may
// anything, so the rights are checked here; the kernel does too, since Linux 5.13.
func (fs *fileSystem) setFlags(n *node, fd int, who *fuse.Caller, argument []byte, call flagsIoctl) syscall.Errno {
	if len(argument) < call.size {
		return syscall.EINVAL
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return toErrno(err)
	}
	if who.Uid != 0 {
		old := make([]byte, call.size)
		if errno := ioctlOn(fd, call.read, old); errno != 0 {
			return errno
		}
		changed := binary.NativeEndian.Uint32(old) ^ binary.NativeEndian.Uint32(argument)
		if who.Uid != st.Uid || changed&call.privileged != 0 {
			return syscall.EPERM
		}
	}
	touch := beginTouch(n, fd)
	defer touch.endWith(fd)
	err := fs.creator.as(who, func() error {
		if errno := ioctlOn(fd, call.write, argument); errno != 0 {
			return errno
		}
		return nil
	})
	if err == nil {
		// The kernel keeps the old ctime. Without an offset, the notification waits for no page.
		fs.notify.InodeNotify(uint64(n.id), -1, 0)
	}
	return toErrno(err)
}

// ioctlOn calls ioctl with a pointer to argument, which must be as long as the request reads or writes.
func ioctlOn(fd int, request uint, argument []byte) syscall.Errno {
	// The kernel uses argument during the call only.
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request), uintptr(unsafe.Pointer(&argument[0])))
	return errno
}

// grant answers IoctlGrant. used has no file for a directory.
func (fs *fileSystem) grant(used usedFile, uid uint32, reply []byte) fuse.Status {
	if fs.granter == nil {
		return fuse.Status(syscall.ENOTTY)
	}
	if len(reply) != GrantSize {
		return fuse.EINVAL
	}
	var g Grant
	var err error
	var flags uint16
	if of := used.openFile; of != nil {
		if errno := fs.grantKept(used); errno != 0 {
			return fuse.Status(errno)
		}
		if f := of.content.live(); f != nil { // SOURCE may say otherwise by now
			f.SetPinning(fs.pinning(of.node))
		}
		g, err = fs.granter.Grant(of, uid)
		of.deviceOnly.Store(true)
	} else {
		flags = GrantForStatus
		g, err = fs.granter.GrantStatus(uid)
	}
	if err != nil {
		return toStatus(err)
	}
	if len(g.Socket) > MaxSocketPath {
		return fuse.Status(syscall.ENAMETOOLONG)
	}
	binary.LittleEndian.PutUint32(reply, GrantMagic)
	binary.LittleEndian.PutUint16(reply[4:], GrantVersion)
	binary.LittleEndian.PutUint16(reply[6:], flags)
	copy(reply[8:24], g.Token[:])
	copy(reply[24:], g.Socket)
	return fuse.OK
}
