package page

import (
	"fmt"
	"math"
)

const (
	// Shift is the base-2 logarithm of Size.
	Shift = 12
	// Size is the number of bytes in a page.
	Size = 1 << Shift
)

// Index numbers the pages of a file from 0. The last page that a file can have is 2^51-1. It is one byte short.
type Index int64

// Offset returns the file offset of the page's first byte, or math.MaxInt64 for pages that no file can have.
func (i Index) Offset() int64 {
	if i > math.MaxInt64>>Shift {
		return math.MaxInt64
	}
	return int64(i) << Shift
}

// Range is the pages [Start, End) of a file. The zero Range is empty.
type Range struct {
	Start, End Index
}

// Covering returns the pages that hold at least one of the n bytes at byte offset off: the pages of Span(off, n).
func Covering(off, n int64) Range { return Span(off, n).Pages() }

// Count returns the number of pages of n bytes from offset 0, including a partial last page. n is not negative.
func Count(n int64) Index {
	pages := Index(n >> Shift)
	if n&(Size-1) != 0 {
		pages++
	}
	return pages
}

// Len returns the number of pages in r, 0 if r is empty or inverted.
func (r Range) Len() int64 {
	if r.End <= r.Start {
		return 0
	}
	return int64(r.End - r.Start)
}

// Empty reports whether r holds no page.
func (r Range) Empty() bool { return r.End <= r.Start }

// Offset returns the file offset of r's first byte.
func (r Range) Offset() int64 { return r.Start.Offset() }

// Bytes returns the number of bytes of r's pages, at most math.MaxInt64.
func (r Range) Bytes() int64 { return Index(r.Len()).Offset() }

// Span returns the bytes of r's pages, as far as a file can have them.
func (r Range) Span() Bytes { return Bytes{r.Offset(), r.End.Offset()} }

// Contains reports whether page i is in r.
func (r Range) Contains(i Index) bool { return r.Start <= i && i < r.End }

// Intersect returns the pages that are in both r and o.
func (r Range) Intersect(o Range) Range {
	x := Range{max(r.Start, o.Start), min(r.End, o.End)}
	if x.Empty() {
		return Range{}
	}
	return x
}

// Overlaps reports whether r and o share a page.
func (r Range) Overlaps(o Range) bool { return !r.Intersect(o).Empty() }

func (r Range) String() string { return fmt.Sprintf("[%d,%d)", r.Start, r.End) }

// AppendRange appends r to rs. It joins r with the last range if they touch. r must not start before the last range
// does.
func AppendRange(rs []Range, r Range) []Range {
	if r.Empty() {
		return rs
	}
	if n := len(rs); n > 0 && rs[n-1].End >= r.Start {
		rs[n-1].End = max(rs[n-1].End, r.End)
		return rs
	}
	return append(rs, r)
}

// Subtract returns the parts of rs that are not in rg.
func Subtract(rs []Range, rg Range) (out []Range) {
	for _, r := range rs {
		x := r.Intersect(rg)
		if x.Empty() {
			out = append(out, r)
			continue
		}
		if r.Start < x.Start {
			out = append(out, Range{r.Start, x.Start})
		}
		if x.End < r.End {
			out = append(out, Range{x.End, r.End})
		}
	}
	return out
}
