package home

import (
	"time"

	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// Signature has the attributes of the backing file that show a change, from stat.
type Signature struct {
	Size         int64
	Mtime, Ctime time.Time
}

// Backing is the backing file, as buffered I/O sees it. Its methods may be called from any goroutine. Errors are
// syscall.Errno, wrapped or not.
type Backing interface {
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
	// WriteAt do not count. Look is called with the file's lock held.
	Look() (changes uint64, err error)
	// BeginWrites looks as Look does, right before calls of WriteAt. end is called right after them, unless BeginWrites
	// failed. Direct changes before end may remain unnoticed.
	BeginWrites() (changes uint64, end func(), err error)
	// ChangedBeside says that the caller detected a direct change from the bytes. The next Look counts it.
	ChangedBeside()
	// Noticed returns what the last Look returned, or more, without looking.
	Noticed() uint64
	// Sync waits until written bytes are on stable storage.
	Sync() error
	// Close closes the file.
	Close() error
}

// HostCached is a Backing that knows which of its pages are in the host's page cache.
type HostCached interface {
	Backing
	mover.HostCached
}

// DirectReader is a HostCached that can be read past the host's page cache.
type DirectReader interface {
	Backing
	mover.DirectReader
}

// Rights say who may do what with a file.
type Rights struct {
	UID, GID uint32
	// Mode has the permission bits. ACL has the file's further rights as the filesystem encodes them, "" for none.
	Mode uint32
	ACL  string
}

// MayStore reports whether a user certainly may change the file, or may take the right to.
func (r *Rights) MayStore(user uint32) bool {
	return user == r.UID || r.Mode&0o002 != 0 && r.ACL == ""
}

// Takes reports whether anybody may have fewer rights by now than by r.
func (r *Rights) Takes(now Rights) bool {
	return r.UID != now.UID || r.GID != now.GID || r.ACL != now.ACL || r.Mode&^now.Mode&0o777 != 0
}

// Guarded is a Backing that knows the file's rights. Its methods may be called from any goroutine.
type Guarded interface {
	Backing
	Rights() (Rights, error)
}

// ParallelWriter is a Backing to which several cores can write at once.
type ParallelWriter interface {
	Backing
	// WriteParallel writes runs, one after the other from off on, and reports whether it did. They are whole pages
	// inside the file. If it reports false, any part of them may be written, and WriteAt writes them or says why not.
	// Like WriteAt, it is called between BeginWrites and end.
	WriteParallel(runs [][]byte, off int64) bool
}

// WriteBacker is a Backing that can start to make written bytes durable before Sync. Its methods may be called from any
// goroutine.
type WriteBacker interface {
	Backing
	// StartWriteBack makes the host start to write n bytes at off to stable storage. It is a hint. It does not wait for
	// the bytes, but may block while the disk is busy.
	StartWriteBack(off, n int64)
}

// Removable is a Backing that knows when its file is no longer in use. Its methods may be called from any goroutine.
type Removable interface {
	Backing
	// Removed reports whether the file has neither a name nor an open descriptor.
	Removed() bool
}

// Timed is a Backing whose mtime can be set. Its methods may be called from any goroutine.
type Timed interface {
	Backing
	// Modified sets mtime to now, by the filesystem's clock for writes.
	Modified() error
	// SetModified sets mtime.
	SetModified(mtime time.Time) error
}

// Mapped is a Backing whose pages in the host's page cache can be mapped.
type Mapped interface {
	Backing
	// Map maps the first n bytes for reading; n is a multiple of page.Size. Reading beyond the end of the file faults.
	Map(n int64) (mem []byte, unmap func() error, err error)
}
