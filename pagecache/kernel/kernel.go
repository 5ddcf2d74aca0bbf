package kernel

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
)

// Lock is the lock of the file.
type Lock interface {
	sync.Locker
	// LockIn locks like Lock. If ctx ends first, it returns the error of ctx, and the lock is not held.
	LockIn(ctx context.Context) error
}

// Executor is the file that a Kernel belongs to. The first four methods are called with the file's lock held, the last
// two without.
type Executor interface {
	// Draining returns the releases that still drain a page of rg.
	Draining(rg page.Range) []lrc.DrainID
	// CPUReadMerged reports that the kernel gets pages of rg with pending bytes merged in. It returns those that the
	// kernel has to drop afterwards.
	CPUReadMerged(rg page.Range) lrc.Drain
	// Size returns the size of home.
	Size() int64
	// Outrun is called when a release gives up, because programs keep writing the pages that it makes the kernel drop.
	Outrun()
	// Dropped is called when the kernel has dropped pages, with the number of calls and the time that they took.
	Dropped(calls int, took time.Duration)
	// NotDropped is called if the kernel did not drop pages.
	NotDropped(pages page.Range, err error)
}

// Kernel keeps track of the kernel's pages of a file. The file's lock guards its fields.
type Kernel struct {
	mu   Lock     // the file's; immutable
	file Executor // immutable
	// cachesWrites says that the kernel may cache pages that it never read, and extend the file. Immutable.
	cachesWrites bool

	pages  Pages
	drains map[lrc.DrainID]chan struct{} // each is closed when the draining ends
	merged map[page.Index]*mergedPage
	// asked counts the times that the kernel may have begun to extend the file. sentAll is the value of asked when the
	// kernel had last sent everything.
	asked   atomic.Uint64
	sentAll uint64
}

// New returns the Kernel of a file that was not in use before.
func New(mu Lock, file Executor, pages Pages, cachesWrites bool) *Kernel {
	k := &Kernel{
		mu: mu, file: file, pages: pages, cachesWrites: cachesWrites,
		drains: make(map[lrc.DrainID]chan struct{}),
	}
	k.asked.Store(1) // programs may be writing already
	return k
}

// Meet replaces the way to the kernel's pages: a program uses the file through another open.
func (k *Kernel) Meet(pages Pages) { k.pages = pages }

// Pages returns the way to the kernel's pages. It is used without the file's lock.
func (k *Kernel) Pages() Pages { return k.pages }

// CachesWrites reports whether the kernel may cache pages that it never read, and extend the file. It needs no lock.
func (k *Kernel) CachesWrites() bool { return k.cachesWrites }
