package fs

import (
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

// Fallocate implements fuse.RawFileSystem. The kernel passes on allocating, punching holes and zeroing. It refuses the
// other modes itself.
func (fs *fileSystem) Fallocate(cancel <-chan struct{}, in *fuse.FallocateIn) fuse.Status {
	used, errno := fs.useFileToWrite(&in.InHeader, in.Fh)
	if errno != 0 {
		return fuse.Status(errno)
	}
	defer used.done()
	of := used.openFile
	if errno := fs.killSetIDFor(&in.Caller, of); errno != 0 {
		return fuse.Status(errno)
	}
	change := pagecache.Change{Kind: pagecache.ChangeAllocate, Off: page.Clamp(in.Offset), Len: page.Clamp(in.Length)}
	switch {
	case in.Mode&(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_ZERO_RANGE) != 0:
		change.Kind = pagecache.ChangeZero
	case in.Mode&(unix.FALLOC_FL_COLLAPSE_RANGE|unix.FALLOC_FL_INSERT_RANGE) != 0:
		change.Kind = pagecache.ChangeShift
	}
	allocate := func(off, n int64) error {
		return fs.spend(in.Caller.Uid, func() error {
			return retry(func() error { return unix.Fallocate(of.fd, in.Mode, off, n) })
		})
	}
	c, changed := of.content, page.Span(change.Off, change.Len)
	end, reached := int64(0), int64(0)
	if in.Mode&unix.FALLOC_FL_KEEP_SIZE == 0 {
		end, reached = changed.End, changed.End
	}
	if change.Kind == pagecache.ChangeShift {
		reached = anySize
	}
	ctx := newRequest(cancel, &in.Caller)
	defer ctx.end()
	size := c.witness.begin(of.fd)
	defer c.witness.end(of.fd, reached)
	change.Known = fs.knownSize(of.node, size, changed.End)
	return toStatus(fs.lengthen(of.node, of.fd, size, end, func() error {
		return c.changeHome(ctx, fs, of.fd, change, allocate)
	}))
}

// killSetIDFor is killSetID for requests that change bytes and do not say whether the caller may keep set-id bits. The
// superuser may.
func (fs *fileSystem) killSetIDFor(who *fuse.Caller, of *openFile) syscall.Errno {
	if who.Uid == 0 {
		return 0
	}
	return fs.killSetID(of.node, of.fd, who)
}

// Lseek implements fuse.RawFileSystem, for SEEK_DATA and SEEK_HOLE.
func (fs *fileSystem) Lseek(cancel <-chan struct{}, in *fuse.LseekIn, out *fuse.LseekOut) fuse.Status {
	if d := fs.dirs.get(in.Fh); d != nil {
		return fuse.EINVAL
	}
	used, errno := fs.useFile(&in.InHeader, in.Fh)
	if errno != 0 {
		return fuse.Status(errno)
	}
	defer used.done()
	of := used.openFile
	if fs.writeBack && fs.mayBeWritten(of.content) {
		// The kernel asks without sending the writes that it has cached, and home would report a hole. No write is in
		// flight: the program that asks holds the inode's lock.
		var err error
		fs.aside(func() { err = fs.dropPages(of.node, page.From(int64(in.Offset)).Pages().Offset(), -1) })
		if err != nil {
			return toStatus(err)
		}
	}
	if f := of.content.live(); f != nil {
		ctx := newRequest(cancel, &in.Caller)
		defer ctx.end()
		if err := f.ReadRange(ctx, page.From(int64(in.Offset))); err != nil {
			return toStatus(err)
		}
	}
	// Nothing else uses the descriptor's position.
	off, err := unix.Seek(of.fd, int64(in.Offset), int(in.Whence))
	if err != nil {
		return toStatus(err)
	}
	out.Offset = uint64(off)
	return fuse.OK
}

// maxCopy limits one copy_file_range request, in bytes. The answer has 32 bits.
const maxCopy = 1 << 30

// maxCopyHeld is the limit if devices hold part of the destination: all replaced bytes may have to be kept at once.
const maxCopyHeld = 8 << 20

// CopyFileRange implements fuse.RawFileSystem.
func (fs *fileSystem) CopyFileRange(cancel <-chan struct{}, in *fuse.CopyFileRangeIn) (uint32, fuse.Status) {
	src, errno := fs.useFile(&in.InHeader, in.FhIn)
	if errno != 0 {
		return 0, fuse.Status(errno)
	}
	defer src.done()
	used, errno := fs.useFileOf(&in.InHeader, in.NodeIdOut, in.FhOut, true)
	if errno != 0 {
		return 0, fuse.Status(errno)
	}
	defer used.done()
	dst := used.openFile
	if errno := fs.killSetIDFor(&in.Caller, dst); errno != 0 {
		return 0, fuse.Status(errno)
	}
	from, to, size := page.Clamp(in.OffIn), page.Clamp(in.OffOut), int(min(in.Len, maxCopy))
	if dst.content.live() != nil {
		size = min(size, maxCopyHeld)
	}
	ctx := newRequest(cancel, &in.Caller)
	defer ctx.end()
	if f := src.content.live(); f != nil {
		if err := f.ReadRange(ctx, page.Span(from, int64(size))); err != nil {
			return 0, toStatus(err)
		}
	}
	copied := 0
	transfer := func(off, _ int64) error {
		from := from
		return fs.spend(in.Caller.Uid, func() error {
			return retry(func() (err error) {
				copied, err = unix.CopyFileRange(src.fd, &from, dst.fd, &off, size, int(in.Flags))
				return err
			})
		})
	}
	c, end := dst.content, page.Span(to, int64(size)).End
	before := c.witness.begin(dst.fd)
	defer c.witness.end(dst.fd, end)
	change := pagecache.Change{Kind: pagecache.ChangeWrite, Off: to, Len: int64(size),
		Known: fs.knownSize(dst.node, before, end)}
	err := fs.lengthen(dst.node, dst.fd, before, end, func() error {
		return c.changeHome(ctx, fs, dst.fd, change, transfer)
	})
	if err != nil {
		return 0, fuse.Status(copyErrno(err))
	}
	return uint32(copied), fuse.OK
}

// copyErrno returns the errno for the kernel. It makes the kernel copy by reading and writing if the backing filesystem
// cannot copy by itself.
func copyErrno(err error) syscall.Errno {
	switch errno := toErrno(err); errno {
	case syscall.EXDEV, syscall.ENOSYS:
		return syscall.EOPNOTSUPP
	default:
		return errno
	}
}
