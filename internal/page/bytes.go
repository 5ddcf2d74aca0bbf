package page

import "math"

// Bytes is the bytes [Off, End) of a file. Off and End are never negative: the constructors clamp them, and the methods
// keep them so. No file has a byte at math.MaxInt64, so a range that ends there reaches the end of any file. The zero
// Bytes is empty.
//
// Offsets and lengths come from programs, and may be anything up to 2^63-1. Their sum may overflow, so only Span adds
// them.
type Bytes struct {
	Off, End int64
}

// Span returns the n bytes at off, cut to the offsets that a file can have. It is empty if n is negative.
func Span(off, n int64) Bytes {
	end := off
	if n > 0 {
		if end = off + n; off > 0 && end < off {
			end = math.MaxInt64
		}
	}
	return Bytes{max(off, 0), max(end, 0)}
}

// From returns the bytes from off to the end of any file.
func From(off int64) Bytes { return Bytes{max(off, 0), math.MaxInt64} }

// Clamp converts an unsigned offset or length. Values that do not fit become math.MaxInt64: no file is that large.
func Clamp(n uint64) int64 { return int64(min(n, math.MaxInt64)) }

// Len returns the number of bytes in b, 0 if b is empty or inverted.
func (b Bytes) Len() int64 { return max(0, b.End-b.Off) }

// Empty reports whether b holds no byte.
func (b Bytes) Empty() bool { return b.End <= b.Off }

// Intersect returns the bytes that are in both b and o.
func (b Bytes) Intersect(o Bytes) Bytes {
	x := Bytes{max(b.Off, o.Off), min(b.End, o.End)}
	if x.Empty() {
		return Bytes{}
	}
	return x
}

// Pages returns the pages that hold at least one byte of b.
func (b Bytes) Pages() Range {
	start := Index(b.Off >> Shift)
	if b.Empty() {
		return Range{start, start}
	}
	return Range{start, Count(b.End)}
}

// Whole returns the pages that lie completely in b.
func (b Bytes) Whole() Range {
	r := Range{Count(b.Off), Index(b.End >> Shift)}
	if r.Empty() {
		return Range{r.Start, r.Start}
	}
	return r
}
