package controltest

import (
	"errors"
	"io"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

// File is an ordinary file that plays an open file of a mount. It implements pagecache.Source.
type File struct {
	f      *os.File
	id     pagecache.FileID
	mode   int
	closed atomic.Bool
}

// NewFile wraps f. Close closes f.
func NewFile(f *os.File) (*File, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, err
	}
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	if err != nil {
		return nil, err
	}
	return &File{f: f, id: pagecache.FileID{Dev: st.Dev, Ino: st.Ino}, mode: flags & unix.O_ACCMODE}, nil
}

// ID, Name, Readable and Writable describe the descriptor; Open is true until Close.
func (f *File) ID() pagecache.FileID { return f.id }
func (f *File) Name() string         { return f.f.Name() }
func (f *File) Readable() bool       { return f.mode != unix.O_WRONLY }
func (f *File) Writable() bool       { return f.mode != unix.O_RDONLY }
func (f *File) Open() bool           { return !f.closed.Load() }

// Close stands for the last close of the client's descriptor.
func (f *File) Close() error {
	f.closed.Store(true)
	return f.f.Close()
}

// OpenHome opens the file again.
func (f *File) OpenHome(writable bool) (pagecache.Home, error) {
	mode := unix.O_RDONLY
	if writable {
		mode = unix.O_RDWR
	}
	h, err := os.OpenFile(procPath(f.f), mode, 0)
	if err != nil {
		return nil, err
	}
	return home{h, writable}, nil
}

// Kernel has nothing to drop, because readers of the file read home.
func (f *File) Kernel() pagecache.KernelPages { return noPages{} }

type noPages struct{}

func (noPages) Invalidate(off, n int64) error { return nil }

func (noPages) Push(int64, []byte, func() bool) bool { return false }

// Attach does nothing, because no request looks at attached files.
func (f *File) Attach(*pagecache.File) {}

type home struct {
	*os.File
	writable bool
}

func (h home) ReadAt(p []byte, off int64) (int, error) {
	n, err := h.File.ReadAt(p, off)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return n, err
}

func (h home) Writable() bool { return h.writable }

func (h home) Look() (uint64, error) { return 0, nil }

func (h home) BeginWrites() (changes uint64, end func(), err error) { return 0, func() {}, nil }

func (h home) ChangedBeside() {}

func (h home) Noticed() uint64 { return 0 }

func (h home) Signature() (pagecache.Signature, error) {
	st, err := h.Stat()
	if err != nil {
		return pagecache.Signature{}, err
	}
	return pagecache.Signature{Size: st.Size(), Mtime: st.ModTime(), Ctime: st.ModTime()}, nil
}
