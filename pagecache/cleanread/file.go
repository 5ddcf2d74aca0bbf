package cleanread

import (
	"context"
	"slices"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// Executor is who carries out coherence for one file.
type Executor interface {
	// Facts returns what devices have of pages, as File.Facts makes it; nil where none may serve them. It takes the
	// executor's lock, which ctx may end.
	Facts(ctx context.Context, rg page.Range) *Facts
	// NothingPending reports whether nothing of pages is pending. It is called with the executor's lock held, from
	// Publish. entering says that the kernel may hold all of them from now on.
	NothingPending(pages page.Range, entering bool) bool
	// Haves returns what devices have of pages. It is called with the executor's lock held, from Publish, and leaves
	// out the digests.
	Haves(pages page.Range) []Have
	// BorrowHome returns what reads home beside all requests, to measure that. Home stays open until giveBack is
	// called, whatever happens to the file. It takes the executor's lock. Both are nil where the file is given up.
	BorrowHome() (readAt func(p []byte, off int64) (int, error), giveBack func())
	// Count has fn count something.
	Count(fn func(c *Counters))
}

// Home is home as a request reads it: through the descriptor of its own open, so that the host reads ahead for each
// open by itself. Its methods may be called from any goroutine.
type Home interface {
	// ReadAt reads up to len(p) bytes at off. It returns fewer only at end of file, with a nil error.
	ReadAt(p []byte, off int64) (int, error)
	// ReadCached is ReadAt if the host's page cache has all of it; otherwise it returns fewer bytes. Neither it nor
	// Cached should make the host read.
	ReadCached(p []byte, off int64) (int, error)
	// Cached reports whether the host's page cache has all of n bytes at off, which are bytes of the file. Where
	// that cannot be known it reports false.
	Cached(off, n int64) bool
	// Look counts the changes of home that did not come through the mount.
	Look() (changes uint64, err error)
}

// Extent is memory that caches pages of a file.
type Extent interface {
	Pages() page.Range
	Memory() gpubackend.Memory
	// TryHold keeps the memory until LetGo, unless nobody uses it any more. It needs no lock.
	TryHold() bool
	LetGo()
}

// Have is the pages of a range that a device has as home has them.
type Have struct {
	Device *Device
	// Pages are all, Tracked those that programs may be storing into.
	Pages, Tracked []page.Range
	// Agreed has the digests of home's bytes of the tracked pages, one after the other.
	Agreed []gpubackend.Digest
	// Extents have the pages, in their order.
	Extents []Extent
}

// Facts are what devices have of pages at one moment. They are immutable, and hold for as long as the epoch of the
// pages is the same.
type Facts struct {
	pages page.Range
	epoch uint64
	size  int64 // of the file
	haves []Have
}

// Facts makes Facts. It is called with the executor's lock held.
func (f *File) Facts(pages page.Range, size int64, haves []Have) *Facts {
	return &Facts{pages: pages, epoch: f.epoch(pages), size: size, haves: haves}
}

// File is what is known of reads of one file.
type File struct {
	c       *Cache
	ex      Executor
	serial  uint64 // immutable; tells the File's chunks from those of others
	regions regions
	table   chunkTable
}

// NewFile makes a File. No two Files of a Cache have the same serial number.
func (c *Cache) NewFile(serial uint64, ex Executor) *File {
	return &File{c: c, ex: ex, serial: serial}
}

// Close has nothing that is known of the file be used any more. It is called with the executor's lock held.
func (f *File) Close() {
	f.regions.all.Add(1)
	f.dropChunks()
}

// facts returns what is known of rg: from a snapshot, or by asking the executor; nil where that is nothing.
func (f *File) facts(ctx context.Context, rg page.Range) *Facts {
	if known := f.known(rg); known != nil {
		return known
	}
	return f.ex.Facts(ctx, rg)
}

// known returns what the snapshot of the region of rg says of it; nil if there is none, or the digests of pages are
// needed.
func (f *File) known(rg page.Range) *Facts {
	r, last := regionsOf(rg)
	s := f.valid(r)
	if r != last || s == nil || !s.serves || !s.complete {
		return nil
	}
	x := &Facts{pages: rg, epoch: s.epoch, size: s.size}
	for i := range s.haves {
		h := &s.haves[i]
		if slices.ContainsFunc(h.Tracked, rg.Overlaps) {
			return nil
		}
		pages := intersect(h.Pages, rg)
		if len(pages) > 0 && !h.Device.Lost() {
			x.haves = append(x.haves, Have{Device: h.Device, Pages: pages, Extents: h.Extents})
		}
	}
	return x
}

// intersect returns what of list is in rg.
func intersect(list []page.Range, rg page.Range) (in []page.Range) {
	for _, x := range list {
		if both := x.Intersect(rg); !both.Empty() {
			in = append(in, both)
		}
	}
	return in
}
