package pagecache

import (
	"fmt"
	"time"

	"github.com/gaiafs/gaiafs/pagecache/kernel"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// FileID identifies a file of the backing filesystem as long as a Home of it is open.
type FileID struct {
	Dev, Ino uint64
}

func (id FileID) String() string { return fmt.Sprintf("%x:%d", id.Dev, id.Ino) }

// Signature has the attributes of the backing file that show a change, from stat.
type Signature struct {
	Size         int64
	Mtime, Ctime time.Time
}

// Home is the backing file of a File, as buffered I/O sees it. Its methods may be called from any goroutine. Errors
// are syscall.Errno, wrapped or not.
type Home interface {
	// ReadAt reads up to len(p) bytes at off. It returns fewer only at end of file, with a nil error.
	ReadAt(p []byte, off int64) (int, error)
	// WriteAt writes all of p at off, or fails. After an error any part of p may have been written. It is called
	// between BeginWrites and end.
	WriteAt(p []byte, off int64) (int, error)
	// Writable reports whether WriteAt can succeed.
	Writable() bool
	// Signature stats the file.
	Signature() (Signature, error)
	// Look finds out whether the file's bytes were changed directly in SOURCE, and returns the number of such changes
	// noticed so far. One change may be counted twice, and several as one. Changes by requests of the mount and by
	// WriteAt do not count. Look is called with File.mu held.
	Look() (changes uint64, err error)
	// BeginWrites looks as Look does, right before calls of WriteAt. end is called right after them, unless BeginWrites
	// failed. Direct changes before end may remain unnoticed.
	BeginWrites() (changes uint64, end func(), err error)
	// ChangedBeside tells Home that the caller detected a direct change from the bytes. The next Look counts it.
	ChangedBeside()
	// Noticed returns what the last Look returned, or more, without looking.
	Noticed() uint64
	// Sync waits until written bytes are on stable storage.
	Sync() error
	// Close closes the file.
	Close() error
}

// HostCached is a Home that knows which of its pages are in the host's page cache.
type HostCached interface {
	Home
	mover.HostCached
}

// DirectReader is a HostCached that can be read past the host's page cache.
type DirectReader interface {
	Home
	mover.DirectReader
}

// NoDirect is the error of a DirectReader that will never be able to read directly.
type NoDirect = mover.NoDirect

// Rights say who may do what with a file.
type Rights struct {
	UID, GID uint32
	// Mode has the permission bits. ACL has the file's further rights as the filesystem encodes them, "" for none.
	Mode uint32
	ACL  string
}

// Guarded is a Home that knows the file's rights. Its methods may be called from any goroutine.
type Guarded interface {
	Home
	Rights() (Rights, error)
}

// ParallelWriter is a Home to which several cores can write at once.
type ParallelWriter interface {
	Home
	// WriteParallel writes runs, one after the other from off on, and reports whether it did. They are whole pages
	// inside the file. If it reports false, any part of them may be written, and WriteAt writes them or says why not.
	// Like WriteAt, it is called between BeginWrites and end.
	WriteParallel(runs [][]byte, off int64) bool
}

// WriteBacker is a Home that can start to make written bytes durable before Sync. Its methods may be called from any
// goroutine.
type WriteBacker interface {
	Home
	// StartWriteBack makes the host start to write n bytes at off to stable storage. It is a hint. It does not wait for
	// the bytes, but may block while the disk is busy.
	StartWriteBack(off, n int64)
}

// UserHome is a Home that needs to know for whom bytes are stored.
type UserHome interface {
	Home
	// WrittenFor announces that WriteAt may be called from now on for programs with the open file src.
	WrittenFor(src Source)
}

// RemovableHome is a Home that knows when its file is no longer in use. Its methods may be called from any goroutine.
type RemovableHome interface {
	Home
	// Removed reports whether the file has neither a name nor an open descriptor.
	Removed() bool
}

// KernelPages is the kernel's page cache of a file's inode. TimedPages keep times, and GrowingPages may know a file to
// be longer than home.
type (
	KernelPages  = kernel.Pages
	TimedPages   = kernel.TimedPages
	GrowingPages = kernel.GrowingPages
)
