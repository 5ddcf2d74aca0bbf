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

// extent is what is known of device memory that caches pages of a file. Package residency knows who uses it.
type extent struct {
	*residency.Extent
	file *File
	h    *holding
	dev  *device

	// writable says that a client was given the memory for writing: then programs may store into any page of it
	// whenever they like, whatever they mapped and released. doubtful says that digests were taken from the device's
	// bytes after that, which need not be home's. Both last as long as the extent, and are protected by File.mu.
	writable, doubtful bool
	// given has the users who were given the memory and may have it still. Protected by File.mu.
	given map[uint32]given
	// littered says that something may be left in pages that the device does not hold, by a transfer that failed, or by
	// what had the memory before. Otherwise they have zeros, but for what a client stored who was given the memory for
	// writing. Protected by File.mu.
	littered bool
	// agreed has the digest of every tracked page's base; nil while all of these are zeros, as are those it has not.
	// Protected by File.mu, but that the digests do not change while scans counts somebody who reads them without it:
	// then who wants to change one replaces the array.
	agreed *digests
	scans  int
	// leases are what clients of movable mappings may have of it. Protected by File.mu.
	leases []*lease
}

func (x *extent) pages() page.Range { return x.Pages() }

// span returns the bytes of the file that x caches.
func (x *extent) span() page.Bytes { return page.Span(x.pages().Offset(), x.Size()) }

// off returns where page p of the file is in the memory, offset where byte off is.
func (x *extent) off(p page.Index) int64 { return x.offset(p.Offset()) }
func (x *extent) offset(off int64) int64 { return off - x.pages().Offset() }

// holding is what one device holds of a file. Of users who must not share memory it has one for each (sharing.go).
// Protected by File.mu.
type holding struct {
	f     *File // immutable
	dev   *device
	owner versions.Owner // immutable
	// extents are in the order of their pages. Their sizes differ where the file grew.
	extents []*extent
	// reads are those of home that go on without File.mu.
	reads mover.Reads
	// gone has where extents began that were evicted, until others begin there.
	gone map[page.Index]struct{}
	// grouped are the pages of open groups. The groups' releases alone publish them.
	grouped []page.Range
	// pastEnd is TakePastEnd's.
	pastEnd atomic.Int64
}

func (h *holding) empty() bool { return len(h.extents) == 0 }

// has reports whether x is one of h's still.
func (h *holding) has(x *extent) bool {
	i, found := h.find(x.pages().Start)
	return found && h.extents[i] == x
}

// sorted returns the extents in the order of their pages, for who may change them.
func (h *holding) sorted() []*extent { return slices.Clone(h.extents) }

// find returns the place of the first extent that ends behind page p, and whether p is one of its pages.
func (h *holding) find(p page.Index) (i int, found bool) {
	i, _ = slices.BinarySearchFunc(h.extents, p, func(x *extent, p page.Index) int {
		if x.pages().End <= p {
			return -1
		}
		return 1
	})
	return i, i < len(h.extents) && h.extents[i].pages().Contains(p)
}

// each calls fn for the part of rg in each extent that exists, in order.
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

// walk looks for the extents of pages, of which many in a row are in the same one. Nobody adds or frees extents
// meanwhile.
type walk struct {
	h     *holding
	x     *extent    // that of pages, nil if there is none
	pages page.Range // none at first
}

// at returns the extent of page p, nil if there is none, and pages around p that it is the extent of.
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

// each is that of holding.
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

// covers reports whether all of rg has memory.
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

// appendCopies appends them to pieces.
func (h *holding) appendCopies(pieces []gpubackend.Copy, rg page.Range, buf []byte) []gpubackend.Copy {
	of := walk{h: h}
	return of.appendCopies(pieces, rg, buf)
}

// appendCopies is that of holding.
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

// agreedAt returns the agreed digests of the pages of part, which lie in x, for reading.
func (x *extent) agreedAt(part page.Range) []gpubackend.Digest {
	if x.agreed == nil {
		x.agreed = newDigests(&x.file.c.memory, x.Size()>>page.Shift, x.dev.zeros[0])
	}
	first := x.pages().Start
	return x.agreed.take(part.Start-first, part.End-first)
}

// agreeOn is agreedAt for changing them.
func (x *extent) agreeOn(part page.Range) []gpubackend.Digest {
	if x.scans > 0 {
		shared := x.agreed
		x.agreed, x.scans = shared.clone(), 0
		shared.drop()
	}
	return x.agreedAt(part)
}

// agreeOn sees to it that there are digests of all pages of updates, and that nobody reads them without File.mu.
func (h *holding) agreeOn(updates []lrc.Update) {
	of := walk{h: h}
	for _, u := range updates {
		of.each(u.Range, func(x *extent, part page.Range) { x.agreeOn(part) })
	}
}
