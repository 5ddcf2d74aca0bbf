package pagecache

import (
	"math"
	"slices"
	"sync/atomic"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/pagecache/residency"
	"github.com/gaiafs/gaiafs/versions"
)

// extent is a piece of device memory that caches pages of a file. Package residency knows who uses it.
type extent struct {
	*residency.Extent
	file *File
	h    *holding
	dev  *device

	// writable means that a client was given the memory for writing. Its programs may store into any page of it at any
	// time, whatever they mapped and released. doubtful means that digests were computed from the device's bytes after
	// that, so they need not be home's. Both stay set as long as the extent lives, and are protected by File.mu.
	writable, doubtful bool
	// given has the users who were given the memory and may still have it. Protected by File.mu.
	given map[uint32]given
	// littered means that pages that the device does not hold may contain leftovers of a failed transfer or of the
	// memory's previous use. If it is not set, such pages are zero, except for stores by clients that were given the
	// memory for writing. Protected by File.mu.
	littered bool
	// agreed has the digest of the base of every tracked page. It is nil while all bases are zero pages, and digests
	// that it lacks are those of zero pages. Protected by File.mu, with one exception: scans counts goroutines that
	// read the digests without the lock. While it is not 0, a change of a digest replaces the whole array first.
	agreed *digests
	scans  int
	// leases are the memory that clients of movable mappings may have of the extent. Protected by File.mu.
	leases []*lease
}

func (x *extent) pages() page.Range { return x.Pages() }

// span returns the bytes of the file that x caches.
func (x *extent) span() page.Bytes { return page.Span(x.pages().Offset(), x.Size()) }

// off returns the offset of page p of the file in the memory, offset that of byte off of the file.
func (x *extent) off(p page.Index) int64 { return x.offset(p.Offset()) }
func (x *extent) offset(off int64) int64 { return off - x.pages().Offset() }

// holding is what one device holds of a file. Users who must not share memory have a holding each (sharing.go).
// Protected by File.mu.
type holding struct {
	f     *File // immutable
	dev   *device
	owner versions.Owner // immutable
	// extents are ordered by their pages. Their sizes differ if the file grew.
	extents []*extent
	// reads are the reads of home that run without File.mu.
	reads mover.Reads
	// gone has the first pages of evicted extents, until a new extent begins there.
	gone map[page.Index]struct{}
	// grouped are the pages of open groups. Only the release of the group publishes them.
	grouped []page.Range
	// pastEnd counts pages for TakePastEnd.
	pastEnd atomic.Int64
}

func (h *holding) empty() bool { return len(h.extents) == 0 }

// has reports whether x still belongs to h.
func (h *holding) has(x *extent) bool {
	i, found := h.find(x.pages().Start)
	return found && h.extents[i] == x
}

// sorted returns a copy of the extents in the order of their pages. The caller may change h while it iterates.
func (h *holding) sorted() []*extent { return slices.Clone(h.extents) }

// find returns the index of the first extent that ends after page p, and whether that extent contains p.
func (h *holding) find(p page.Index) (i int, found bool) {
	i, _ = slices.BinarySearchFunc(h.extents, p, func(x *extent, p page.Index) int {
		if x.pages().End <= p {
			return -1
		}
		return 1
	})
	return i, i < len(h.extents) && h.extents[i].pages().Contains(p)
}

// each calls fn for each extent that overlaps rg, in order, with the pages of rg in it.
func (h *holding) each(rg page.Range, fn func(x *extent, part page.Range)) {
	if rg.Empty() {
		return
	}
	i, _ := h.find(rg.Start)
	for _, x := range h.extents[i:] {
		part := rg.Intersect(x.pages())
		if part.Empty() {
			return
		}
		fn(x, part)
	}
}

// walk finds the extents of pages. It is fast if consecutive pages are in the same extent. The extents must not change
// while it is used.
type walk struct {
	h     *holding
	x     *extent    // the extent of pages, nil if there is none
	pages page.Range // empty at first
}

// at returns the extent of page p, or nil, and a range around p for which that holds.
func (w *walk) at(p page.Index) (*extent, page.Range) {
	if w.pages.Contains(p) {
		return w.x, w.pages
	}
	if i, found := w.h.find(p); found {
		w.x = w.h.extents[i]
		w.pages = w.x.pages()
	} else {
		w.x, w.pages = nil, page.Range{Start: p, End: math.MaxInt64>>page.Shift + 1}
		if i < len(w.h.extents) {
			w.pages.End = w.h.extents[i].pages().Start
		}
	}
	return w.x, w.pages
}

// each is holding.each, except that it starts from the extent found last.
func (w *walk) each(rg page.Range, fn func(x *extent, part page.Range)) {
	for p := rg.Start; p < rg.End; {
		x, pages := w.at(p)
		end := min(rg.End, pages.End)
		if x != nil {
			fn(x, page.Range{Start: p, End: end})
		}
		p = end
	}
}

// covers reports whether all pages of rg have memory.
func (h *holding) covers(rg page.Range) bool {
	pages := int64(0)
	h.each(rg, func(_ *extent, part page.Range) { pages += part.Len() })
	return pages == rg.Len()
}

// at returns the extent of page p and the byte offset of p in it.
func (h *holding) at(p page.Index) (*extent, int64) {
	i, found := h.find(p)
	if !found {
		return nil, 0
	}
	return h.extents[i], h.extents[i].off(p)
}

// copies returns the device copies between the pages of rg and buf, which has rg.Bytes() bytes.
func (h *holding) copies(rg page.Range, buf []byte) []gpubackend.Copy {
	return h.appendCopies(nil, rg, buf)
}

// appendCopies appends to pieces what copies returns.
func (h *holding) appendCopies(pieces []gpubackend.Copy, rg page.Range, buf []byte) []gpubackend.Copy {
	of := walk{h: h}
	return of.appendCopies(pieces, rg, buf)
}

// appendCopies is holding.appendCopies.
func (w *walk) appendCopies(pieces []gpubackend.Copy, rg page.Range, buf []byte) []gpubackend.Copy {
	w.each(rg, func(x *extent, part page.Range) {
		from := (part.Start - rg.Start).Offset()
		pieces = append(pieces, gpubackend.Copy{
			Mem:  x.Memory(),
			Off:  x.off(part.Start),
			Host: buf[from : from+part.Bytes()],
		})
	})
	return pieces
}

// agreedAt returns the agreed digests of the pages of part, which lie in x. The caller must not change them.
func (x *extent) agreedAt(part page.Range) []gpubackend.Digest {
	if x.agreed == nil {
		x.agreed = newDigests(&x.file.c.memory, x.Size()>>page.Shift, x.dev.zeros[0])
	}
	first := x.pages().Start
	return x.agreed.take(part.Start-first, part.End-first)
}

// agreeOn is agreedAt for callers that change the digests.
func (x *extent) agreeOn(part page.Range) []gpubackend.Digest {
	if x.scans > 0 {
		shared := x.agreed
		x.agreed, x.scans = shared.clone(), 0
		shared.drop()
	}
	return x.agreedAt(part)
}

// agreeOn creates the digests of all pages of updates, and makes sure that nobody reads them without File.mu.
func (h *holding) agreeOn(updates []lrc.Update) {
	of := walk{h: h}
	for _, u := range updates {
		of.each(u.Range, func(x *extent, part page.Range) { x.agreeOn(part) })
	}
}
