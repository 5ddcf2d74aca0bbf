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
	// IoctlGrant is GAIAFS_IOC_GRANT, _IOR('G', 0x01, 128 bytes). On a regular file it grants access to the file's
	// pages on devices. On a directory it returns the socket and a token that is good for the mount's status only.
	IoctlGrant = 0x80804701
	// IoctlGrantShown is GAIAFS_IOC_GRANT_SHOWN, _IOWR('G', 0x02, 128 bytes). It is IoctlGrant for a program that shows
	// its descriptor: the first four bytes of the argument are the number, little endian.
	IoctlGrantShown = 0xc0804702
	// GrantMagic is the first word of the answer: "gaia", little endian.
	GrantMagic = 0x61696167
	// GrantVersion is the version of the answer's layout.
	GrantVersion = 1
	// GrantSize is the size of the answer in bytes: magic (4), version (2), flags (2), token (16), the socket's path
	// (104, zero-terminated). Integers are little endian.
	GrantSize = 128
	// GrantForStatus is the flag of a token that is good for the status only.
	GrantForStatus = 1
	// MaxSocketPath is the longest path that fits, in bytes.
	MaxSocketPath = 103
)

// Grant is what the helper library needs to talk to the daemon about an open file.
type Grant struct {
	Token [16]byte
	// Socket is the path of the daemon's socket, at most MaxSocketPath bytes.
	Socket string
}

// Granter makes Grants. Its methods are called from request handlers: they must not wait for requests of the mount.
type Granter interface {
	// Grant grants the user uid access to the file that a program has open as src.
	Grant(src pagecache.Source, uid uint32) (Grant, error)
	// GrantStatus grants the user uid access to the mount's status only.
	GrantStatus(uid uint32) (Grant, error)
}

// ioctlReadXFlags is FS_IOC_FSGETXATTR, _IOR('X', 31, struct fsxattr). ioctlWriteXFlags is FS_IOC_FSSETXATTR, _IOW('X',
// 32, struct fsxattr).
const (
	ioctlReadXFlags  = 0x801c581f
	ioctlWriteXFlags = 0x401c5820
	sizeOfXFlags     = 28
)

// Ioctl implements fuse.RawFileSystem. It passes the ioctls that read and change inode flags on to the backing file,
// for lsattr and chattr, and for tools that ask whether a file is shared or immutable. No other ioctl reaches the
// backing file: some trim, freeze or shut down a whole filesystem, which the daemon may do but the caller may not.
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
		return fs.grant(used, &in.Caller, noneShown, reply)
	case IoctlGrantShown:
		if len(argument) != GrantSize {
			return fuse.EINVAL
		}
		return fs.grant(used, &in.Caller, int32(binary.LittleEndian.Uint32(argument)), reply)
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
		// reply belongs to this request until it is answered, and is as long as what the kernel writes.
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

// setFlags changes the inode flags of n, which fd is open on, for who. The backing filesystem sees the daemon as the
// caller, which may do anything, so the rights are checked here. The kernel checks them too, since Linux 5.13.
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
		foreign := who.Uid != st.Uid && !fs.idmapped // otherwise the kernel is newer, and knows the mapping
		if foreign || changed&call.privileged != 0 {
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
		fs.kept.drop(keptKey{n, true}) // what may be written was decided when it was opened
		// The kernel has cached the old ctime. Without an offset, the notification waits for no page.
		fs.notify.InodeNotify(uint64(n.id), -1, 0)
	}
	return toErrno(err)
}

// ioctlOn calls ioctl with a pointer to argument, which must be as long as what the request reads or writes.
func ioctlOn(fd int, request uint, argument []byte) syscall.Errno {
	// The kernel uses argument only during the call.
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request), uintptr(unsafe.Pointer(&argument[0])))
	return errno
}

// grant answers IoctlGrant and IoctlGrantShown. For a directory, used has no file. descriptor is the number of the
// caller's descriptor, or noneShown.
func (fs *fileSystem) grant(used usedFile, who *fuse.Caller, descriptor int32, reply []byte) fuse.Status {
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
		src, errno := fs.sourceFor(used, who, descriptor)
		if errno != 0 {
			return fuse.Status(errno)
		}
		if errno := fs.grantKept(used); errno != 0 {
			return fuse.Status(errno)
		}
		if f := of.content.live(); f != nil { // the pin in SOURCE may have changed
			f.SetPinning(fs.pinning(of.node))
		}
		g, err = fs.granter.Grant(src, who.Uid)
		of.deviceOnly.Store(true)
	} else {
		flags = GrantForStatus
		g, err = fs.granter.GrantStatus(who.Uid)
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
