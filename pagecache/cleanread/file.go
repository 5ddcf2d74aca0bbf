package cleanread

import (
	"context"
	"slices"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// Executor carries out coherence for one file.
type Executor interface {
	// Facts returns what devices have of pages, made by File.Facts; nil if none may serve them. It takes the executor's
	// lock; ctx bounds the wait for it.
	Facts(ctx context.Context, rg page.Range) *Facts
	// NothingPending reports whether nothing of pages is pending. Publish calls it with the executor's lock held.
	// entering says that the kernel may hold all the pages from now on.
	NothingPending(pages page.Range, entering bool) bool
	// Haves returns what devices have of pages, without the digests. Publish calls it with the executor's lock held.
	Haves(pages page.Range) []Have
	// BorrowHome returns a function that reads home outside of all requests, to measure reads. Home stays open until
	// giveBack is called, whatever happens to the file. BorrowHome takes the executor's lock. It returns nil, nil if
	// the file is given up.
	BorrowHome() (readAt func(p []byte, off int64) (int, error), giveBack func())
	// Push gives the kernel's page cache p, whole pages at off of which the executor knows that the kernel may hold
	// them. It calls current when no later change of them can be missed, and returns false if current does or if the
	// kernel does not take them. It takes the executor's lock, but does not hold it while it blocks on the kernel.
	Push(off int64, p []byte, current func() bool) bool
	// Count calls fn to count something.
	Count(fn func(c *Counters))
}

// Home is home as one request reads it: through the descriptor of its own open, so that the host reads ahead for each
// open separately. Its methods may be called from any goroutine.
type Home interface {
	// ReadAt reads up to len(p) bytes at off. It returns fewer only at end of file, with a nil error.
	ReadAt(p []byte, off int64) (int, error)
	// ReadCached is ReadAt if the host's page cache has all the bytes; otherwise it returns fewer bytes. Neither
	// ReadCached nor Cached should make the host read.
	ReadCached(p []byte, off int64) (int, error)
	// Cached reports whether the host's page cache has all of the n bytes at off, which are inside the file. It returns
	// false if it cannot tell.
	Cached(off, n int64) bool
	// Look returns the number of changes of home that did not come through the mount.
	Look() (changes uint64, err error)
}

// Extent is memory that caches pages of a file.
type Extent interface {
	Pages() page.Range
	Memory() gpubackend.Memory
	// TryHold keeps the memory until LetGo, unless it has no user any more. It needs no lock.
	TryHold() bool
	LetGo()
}

// Have lists the pages of a range for which a device has home's bytes.
type Have struct {
	Device *Device
	// Pages lists all of them, Tracked those that programs may be storing into.
	Pages, Tracked []page.Range
	// Agreed has the digests of home's bytes of the tracked pages, one after another.
	Agreed []gpubackend.Digest
	// Extents has the extents with the pages, in order.
	Extents []Extent
}

// Facts say what devices have of pages at one moment. They are immutable, and stay valid while the epoch of the pages
// stays the same.
type Facts struct {
	pages page.Range
	epoch uint64
	size  int64 // of the file
	haves []Have
}

// Facts makes Facts. The caller holds the executor's lock.
func (f *File) Facts(pages page.Range, size int64, haves []Have) *Facts {
	return &Facts{pages: pages, epoch: f.epoch(pages), size: size, haves: haves}
}

// File is what is known about reads of one file.
type File struct {
	c       *Cache
	ex      Executor
	serial  uint64 // immutable; distinguishes the File's chunks from those of others
	regions regions
	table   chunkTable
}

// NewFile makes a File. No two Files of a Cache have the same serial number.
func (c *Cache) NewFile(serial uint64, ex Executor) *File {
	return &File{c: c, ex: ex, serial: serial}
}

// Close invalidates everything that is known of the file. The caller holds the executor's lock.
func (f *File) Close() {
	f.regions.all.Add(1)
	f.dropChunks()
}

// facts returns the Facts of rg, from a snapshot or from the executor; nil if there are none.
func (f *File) facts(ctx context.Context, rg page.Range) *Facts {
	if known := f.known(rg); known != nil {
		return known
	}
	return f.ex.Facts(ctx, rg)
}

// known returns the Facts of rg from the snapshot of its region. It returns nil if there is none, or if digests are
// needed.
func (f *File) known(rg page.Range) *Facts {
	r, last := regionsOf(rg)
	s := f.valid(r)
	if r != last || s == nil || !s.serves || !s.complete {
		return nil
	}
	x := &knownFacts{Facts: Facts{pages: rg, epoch: s.epoch, size: s.size}}
	x.Facts.haves = x.haves[:0]
	for i := range s.haves {
		h := &s.haves[i]
		if slices.ContainsFunc(h.Tracked, rg.Overlaps) {
			return nil
		}
		var room []page.Range
		if n := len(x.Facts.haves); n < len(x.runs) {
			room = x.runs[n : n : n+1]
		}
		pages := intersect(room, h.Pages, rg)
		if len(pages) > 0 && !h.Device.Lost() {
			x.Facts.haves = append(x.Facts.haves, Have{Device: h.Device, Pages: pages, Extents: h.Extents})
		}
	}
	return &x.Facts
}

// knownFacts are Facts with memory for what a read of one run usually needs.
type knownFacts struct {
	Facts
	haves [2]Have
	runs  [2]page.Range
}

// intersect appends the parts of list that are in rg.
func intersect(in, list []page.Range, rg page.Range) []page.Range {
	for _, x := range list {
		if both := x.Intersect(rg); !both.Empty() {
			in = append(in, both)
		}
	}
	return in
}
