package pagecache

import (
	"fmt"
	"time"

	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// FileID names a file of the backing filesystem for as long as a Home of it is open.
type FileID struct {
	Dev, Ino uint64
}

func (id FileID) String() string { return fmt.Sprintf("%x:%d", id.Dev, id.Ino) }

// Signature is what a stat of the backing file says.
type Signature struct {
	Size         int64
	Mtime, Ctime time.Time
}

// Home is the backing file of a File, as buffered I/O sees it. Its methods may be called from any goroutine. Errors
// are syscall.Errno, wrapped or not.
type Home interface {
	// ReadAt reads up to len(p) bytes at off. It returns fewer only at end of file, with a nil error.
	ReadAt(p []byte, off int64) (int, error)
	// WriteAt writes all of p at off, or fails. After an error any part of p may have been written.
	WriteAt(p []byte, off int64) (int, error)
	// Writable reports whether WriteAt can succeed.
	Writable() bool
	// Signature stats the file.
	Signature() (Signature, error)
	// Look finds out whether somebody changed the bytes of the file beside the mount, and returns how many such changes
	// were noticed since the file is known. One may be counted twice, and several as one. What requests of the mount
	// and WriteAt do does not count. It is called with File.mu held.
	Look() (changes uint64, err error)
	// ChangedBeside says that somebody did, of which the caller found out from the bytes: the next Look counts it.
	ChangedBeside()
	// Noticed is what Look returned last, or more, without looking.
	Noticed() uint64
	// Sync waits until what was written is on stable storage.
	Sync() error
	// Close gives up the file.
	Close() error
}

// HostCached is a Home that says what the host's page cache has of it.
type HostCached interface {
	Home
	mover.HostCached
}

// DirectReader is a HostCached that can be read past the host's page cache.
type DirectReader interface {
	Home
	mover.DirectReader
}

// NoDirect is the error of a DirectReader that will never do what was asked for.
type NoDirect = mover.NoDirect

// Rights are who may do what with a file.
type Rights struct {
	UID, GID uint32
	// Mode has the permission bits, ACL the file's list of further rights as the filesystem encodes it, "" for none.
	Mode uint32
	ACL  string
}

// Guarded is a Home that knows the file's rights. Its methods may be called from any goroutine.
type Guarded interface {
	Home
	Rights() (Rights, error)
}

// WriteBacker is a Home that can begin to make written bytes durable before Sync asks for all of it. Its methods may be
// called from any goroutine.
type WriteBacker interface {
	Home
	// StartWriteBack has the host begin to write n bytes at off to stable storage. It is a hint. It does not wait for
	// them, but may block while the disk has much to do.
	StartWriteBack(off, n int64)
}

// UserHome is a Home that cares on whose behalf bytes are stored.
type UserHome interface {
	Home
	// WrittenFor says that programs with the open file src may have WriteAt called from now on.
	WrittenFor(src Source)
}

// RemovableHome is a Home that says when nobody needs it any more. Its methods may be called from any goroutine.
type RemovableHome interface {
	Home
	// Removed reports whether the file has neither a name nor an open.
	Removed() bool
}

// KernelPages is the kernel's page cache of the file's inode, the CPU's replica.
type KernelPages interface {
	// Invalidate writes the dirty pages of the n bytes at off home, as ordinary write requests that arrive before
	// it returns, and drops every page of the range, and the inode's cached attributes. A negative n means to the
	// end. It blocks, and must be called without any lock that a FUSE request handler takes.
	Invalidate(off, n int64) error
}
