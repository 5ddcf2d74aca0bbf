package residency

import (
	"math/bits"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// extentsPerFile bounds the number of extents that a file is cut into when it is mapped: each costs a descriptor and
// 0.2 ms here, and up to 0.6 ms in every client that maps the file. A file that is larger than the device is mapped in
// parts, a window at a time, and is cut into extentsPerDevice for each time that the device's memory goes into it, so
// that a small window does not take much of the device.
const (
	extentsPerFile   = 32
	extentsPerDevice = 256
)

// filePages is the number of pages that a file can have.
const filePages = page.Index(1) << (63 - page.Shift)

// Size chooses the size of new extents for a file of so many bytes: the device's granularity for small files, and for
// large ones the power-of-two multiple of it that makes at most extentsPerFile of them. Where the file would go into
// the device's memory but for what is left over in the last extent, they are smaller.
func Size(info gpubackend.Info, bytes int64) int64 {
	size, want := info.Granularity, bytes/extentsPerFile
	if bytes > info.Memory {
		want = info.Memory / extentsPerDevice
	}
	if want > size {
		size = 1 << bits.Len64(uint64(want-1))
	}
	fits := func() bool { return (bytes+size-1)&^(size-1) <= info.Memory }
	for size > info.Granularity && (size > info.Memory/8 || bytes <= info.Memory && !fits()) {
		size >>= 1
	}
	return size
}

// extentsPerView is to views as extentsPerFile is to files. A view is filled as a whole, and never grows, so a small
// part of a device's memory (1/viewsPerDevice) is one extent, up to viewExtent.
const (
	extentsPerView = 8
	viewsPerDevice = 64
	viewExtent     = 128 << 20
)

// ViewSize is Size for a view of so many bytes, whose last extent ends where the view does (Request.Ends).
func ViewSize(info gpubackend.Info, bytes int64) int64 {
	want := max((bytes+extentsPerView-1)/extentsPerView, min(info.Memory/viewsPerDevice, viewExtent), info.Granularity)
	return 1 << bits.Len64(uint64(want-1))
}

// cut shortens the last of the pieces, if it is a new one, to what it has of rg, and returns by how many bytes.
func cut(pieces []piece, rg page.Range, least int64) (less int64) {
	last := &pieces[len(pieces)-1]
	end := Aligned(rg, least).End
	if last.x != nil || last.pages.End <= end {
		return 0
	}
	less = last.bytes()
	last.pages.End = end
	return less - last.bytes()
}

// block returns the pages of a new extent for page p, which is in a gap between others: as many as size has, where an
// extent of that size begins and ends in the gap, and otherwise the largest half, quarter and so on that does. least is
// the device's granularity, of which all are multiples.
func block(p page.Index, gap page.Range, size, least int64) page.Range {
	for ; ; size >>= 1 {
		rg := Aligned(page.Range{Start: p, End: p + 1}, size)
		if size <= least || gap.Start <= rg.Start && rg.End <= gap.End {
			return rg
		}
	}
}

// Aligned returns the extents of a size that rg is in.
func Aligned(rg page.Range, size int64) page.Range {
	n := page.Count(size)
	return page.Range{Start: rg.Start &^ (n - 1), End: (rg.End + n - 1) &^ (n - 1)}
}

// piece is an extent, or the place for a new one.
type piece struct {
	x     *Extent // nil for a new one
	pages page.Range
}

// plan cuts rg into extents: those that are there, and new ones for the gaps. there has all that overlap the aligned
// range, in order. It ends early, after the first piece that exceeds most bytes in all.
func plan(there []*Extent, rg page.Range, size, least, most int64) (pieces []piece, bytes int64) {
	from := page.Index(0)
	for p := rg.Start; p < rg.End && bytes <= most; {
		for len(there) > 0 && there[0].pages.End <= p {
			from, there = there[0].pages.End, there[1:]
		}
		next := piece{}
		if len(there) > 0 && there[0].pages.Contains(p) {
			next = piece{there[0], there[0].pages}
		} else {
			gap := page.Range{Start: from, End: filePages}
			if len(there) > 0 {
				gap.End = there[0].pages.Start
			}
			next.pages = block(p, gap, size, least)
		}
		pieces = append(pieces, next)
		bytes += next.bytes()
		p = next.pages.End
	}
	return pieces, bytes
}

// bytes returns the size of the memory. That of the last pages that a file can have is larger than what page.Range
// says.
func (x piece) bytes() int64 { return x.pages.Len() << page.Shift }
