package pagecache

import (
	"fmt"

	"github.com/gaiafs/gaiafs/pagecache/home"
	"github.com/gaiafs/gaiafs/pagecache/kernel"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// FileID identifies a file of the backing filesystem as long as a Home of it is open.
type FileID struct {
	Dev, Ino uint64
}

func (id FileID) String() string { return fmt.Sprintf("%x:%d", id.Dev, id.Ino) }

// Home is the backing file of a File, and what else it may be able to do. Package home has their documentation.
type (
	Home           = home.Backing
	Signature      = home.Signature
	Rights         = home.Rights
	HostCached     = home.HostCached
	DirectReader   = home.DirectReader
	ParallelWriter = home.ParallelWriter
	WriteBacker    = home.WriteBacker
	Guarded        = home.Guarded
	TimedHome      = home.Timed
	MappedHome     = home.Mapped
	RemovableHome  = home.Removable
)

// NoDirect is the error of a DirectReader that will never be able to read directly.
type NoDirect = mover.NoDirect

// UserHome is a Home that needs to know for whom bytes are stored.
type UserHome interface {
	Home
	// WrittenFor announces that WriteAt may be called from now on for programs with the open file src.
	WrittenFor(src Source)
}

// KernelPages is the kernel's page cache of a file's inode. TimedPages keep times, and GrowingPages may know a file to
// be longer than home.
type (
	KernelPages  = kernel.Pages
	TimedPages   = kernel.TimedPages
	GrowingPages = kernel.GrowingPages
)
