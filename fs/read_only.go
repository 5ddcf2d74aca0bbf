package fs

import (
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// readOnly refuses every change on a read-only mount. The kernel refuses changes too, until the mount is made writable
// (mount(8) with -o remount,rw). So every request that changes something is refused here, and handlers need not check.
type readOnly struct{ *fileSystem }

var _ fuse.RawFileSystem = readOnly{}

// Open implements fuse.RawFileSystem.
func (r readOnly) Open(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if in.Flags&(unix.O_ACCMODE|unix.O_TRUNC) != unix.O_RDONLY {
		return fuse.EROFS
	}
	return r.fileSystem.Open(cancel, in, out)
}

// Ioctl implements fuse.RawFileSystem.
func (r readOnly) Ioctl(
	cancel <-chan struct{}, in *fuse.IoctlIn, argument []byte, out *fuse.IoctlOut, reply []byte,
) fuse.Status {
	if in.Cmd == unix.FS_IOC_SETFLAGS || in.Cmd == ioctlWriteXFlags {
		return fuse.EROFS
	}
	return r.fileSystem.Ioctl(cancel, in, argument, out, reply)
}

// Create implements fuse.RawFileSystem.
func (readOnly) Create(<-chan struct{}, *fuse.CreateIn, string, *fuse.CreateOut) fuse.Status {
	return fuse.EROFS
}

// Tmpfile implements fuse.RawFileSystem.
func (readOnly) Tmpfile(<-chan struct{}, *fuse.CreateIn, *fuse.CreateOut) fuse.Status {
	return fuse.EROFS
}

// Mknod implements fuse.RawFileSystem.
func (readOnly) Mknod(<-chan struct{}, *fuse.MknodIn, string, *fuse.EntryOut) fuse.Status {
	return fuse.EROFS
}

// Mkdir implements fuse.RawFileSystem.
func (readOnly) Mkdir(<-chan struct{}, *fuse.MkdirIn, string, *fuse.EntryOut) fuse.Status {
	return fuse.EROFS
}

// Symlink implements fuse.RawFileSystem.
func (readOnly) Symlink(<-chan struct{}, *fuse.InHeader, string, string, *fuse.EntryOut) fuse.Status {
	return fuse.EROFS
}

// Link implements fuse.RawFileSystem.
func (readOnly) Link(<-chan struct{}, *fuse.LinkIn, string, *fuse.EntryOut) fuse.Status {
	return fuse.EROFS
}

// Unlink implements fuse.RawFileSystem.
func (readOnly) Unlink(<-chan struct{}, *fuse.InHeader, string) fuse.Status { return fuse.EROFS }

// Rmdir implements fuse.RawFileSystem.
func (readOnly) Rmdir(<-chan struct{}, *fuse.InHeader, string) fuse.Status { return fuse.EROFS }

// Rename implements fuse.RawFileSystem.
func (readOnly) Rename(<-chan struct{}, *fuse.RenameIn, string, string) fuse.Status {
	return fuse.EROFS
}

// SetAttr implements fuse.RawFileSystem.
func (readOnly) SetAttr(<-chan struct{}, *fuse.SetAttrIn, *fuse.AttrOut) fuse.Status {
	return fuse.EROFS
}

// SetXAttr implements fuse.RawFileSystem.
func (readOnly) SetXAttr(<-chan struct{}, *fuse.SetXAttrIn, string, []byte) fuse.Status {
	return fuse.EROFS
}

// RemoveXAttr implements fuse.RawFileSystem.
func (readOnly) RemoveXAttr(<-chan struct{}, *fuse.InHeader, string) fuse.Status { return fuse.EROFS }

// Write implements fuse.RawFileSystem.
func (readOnly) Write(<-chan struct{}, *fuse.WriteIn, []byte) (uint32, fuse.Status) {
	return 0, fuse.EROFS
}

// Fallocate implements fuse.RawFileSystem.
func (readOnly) Fallocate(<-chan struct{}, *fuse.FallocateIn) fuse.Status { return fuse.EROFS }

// CopyFileRange implements fuse.RawFileSystem.
func (readOnly) CopyFileRange(<-chan struct{}, *fuse.CopyFileRangeIn) (uint32, fuse.Status) {
	return 0, fuse.EROFS
}
