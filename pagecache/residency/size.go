package residency

import (
	"math/bits"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// extentsPerFile bounds the number of extents of a file that is mapped. Each costs a descriptor and 0.2 ms here, and up
// to 0.6 ms in every client that maps the file. A file that is larger than the device is mapped through small windows.
// Its extents are 1/extentsPerDevice of the device's memory, so that a small window does not take much of the device.
const (
	extentsPerFile   = 32
	extentsPerDevice = 256
)

// filePages is the number of pages of the largest possible file.
const filePages = page.Index(1) << (63 - page.Shift)

// Size chooses the size of new extents for a file of so many bytes. For small files it is the device's granularity, for
// large ones the power-of-two multiple of it that makes at most extentsPerFile extents. If the file fits on the device,
// but not with a last extent of that size, the extents are smaller.
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

// extentsPerView is extentsPerFile for views. A view is filled as a whole and never grows. So a view that is small
// compared with the device's memory (1/viewsPerDevice, up to viewExtent) is one extent.
const (
	extentsPerView = 8
	viewsPerDevice = 64
	viewExtent     = 128 << 20
)

// ViewSize is Size for a view of so many bytes. The last extent of a view ends where the view does (Request.Ends).
func ViewSize(info gpubackend.Info, bytes int64) int64 {
	want := max((bytes+extentsPerView-1)/extentsPerView, min(info.Memory/viewsPerDevice, viewExtent), info.Granularity)
	return 1 << bits.Len64(uint64(want-1))
}

// cut shortens the last piece, if it is new, to its part of rg, and returns by how many bytes.
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

// block returns the pages of a new extent that contains page p, in a gap between other extents. If an aligned extent of
// size fits into the gap, it is that; otherwise it is the largest half, quarter and so on that fits. All sizes are
// multiples of least, the device's granularity.
func block(p page.Index, gap page.Range, size, least int64) page.Range {
	for ; ; size >>= 1 {
		rg := Aligned(page.Range{Start: p, End: p + 1}, size)
		if size <= least || gap.Start <= rg.Start && rg.End <= gap.End {
			return rg
		}
	}
}

// Aligned returns rg extended to whole extents of a size.
func Aligned(rg page.Range, size int64) page.Range {
	n := page.Count(size)
	return page.Range{Start: rg.Start &^ (n - 1), End: (rg.End + n - 1) &^ (n - 1)}
}

// piece is an existing extent, or the place for a new one.
type piece struct {
	x     *Extent // nil for a new one
	pages page.Range
}

// plan cuts rg into extents: existing ones, and new ones for the gaps. there has all extents that overlap the aligned
// range, in order. plan ends early, after the piece that makes the sum exceed most bytes.
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

// bytes returns the size of the memory. For the last pages of the largest possible file, that is more than page.Range
// says.
func (x piece) bytes() int64 { return x.pages.Len() << page.Shift }
