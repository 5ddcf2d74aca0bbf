package prefetch

import (
	"maps"
	"math/bits"
	"slices"

	"github.com/gaiafs/gaiafs/internal/page"
)

// set is a set of pages, kept as bits in sections of sectionPages.
type set map[page.Index]*bitmap

const (
	sectionShift = 12
	// sectionPages is the pages of a section: 16 MiB.
	sectionPages = 1 << sectionShift
)

// bitmap has a bit for each page of a section.
type bitmap [sectionPages / 64]uint64

func (b *bitmap) has(i int) bool { return b[i/64]>>(i%64)&1 != 0 }
func (b *bitmap) add(i int)      { b[i/64] |= 1 << (i % 64) }
func (b *bitmap) drop(i int)     { b[i/64] &^= 1 << (i % 64) }

// any reports whether one of the n bits from i on is set. n is a power of two, and i a multiple of n.
func (b *bitmap) any(i, n int) bool {
	if n < 64 {
		return b[i/64]>>(i%64)&(1<<n-1) != 0
	}
	for _, w := range b[i/64 : (i+n)/64] {
		if w != 0 {
			return true
		}
	}
	return false
}

func (b *bitmap) count() (n int) {
	for _, w := range b {
		n += bits.OnesCount64(w)
	}
	return n
}

func place(i page.Index) (section page.Index, bit int) {
	return i >> sectionShift, int(i & (sectionPages - 1))
}

func (s set) has(i page.Index) bool {
	c, bit := place(i)
	b := s[c]
	return b != nil && b.has(bit)
}

func (s set) add(rg page.Range) {
	for i := rg.Start; i < rg.End; i++ {
		c, bit := place(i)
		b := s[c]
		if b == nil {
			b = new(bitmap)
			s[c] = b
		}
		b.add(bit)
	}
}

func (s set) drop(rg page.Range) {
	for i := rg.Start; i < rg.End; {
		c, bit := place(i)
		b := s[c]
		if b == nil {
			i = (c + 1) << sectionShift
			continue
		}
		b.drop(bit)
		i++
	}
}

// in returns the pages of rg that are in the set.
func (s set) in(rg page.Range) (runs []page.Range) {
	var sections []page.Index
	if n := rg.Len() >> sectionShift; n < int64(len(s)) {
		for c := rg.Start >> sectionShift; c<<sectionShift < rg.End; c++ {
			sections = append(sections, c)
		}
	} else {
		sections = slices.Sorted(maps.Keys(s))
	}
	for _, c := range sections {
		b := s[c]
		if b == nil {
			continue
		}
		for i := max(c<<sectionShift, rg.Start); i < min((c+1)<<sectionShift, rg.End); i++ {
			if _, bit := place(i); b.has(bit) {
				runs = page.AppendRange(runs, page.Range{Start: i, End: i + 1})
			}
		}
	}
	return runs
}

// resize drops the pages from end on.
func (s set) resize(end page.Index) {
	last, bit := place(end)
	for c, b := range s {
		switch {
		case c > last, c == last && bit == 0:
			delete(s, c)
		case c == last:
			for i := bit; i < sectionPages; i++ {
				b.drop(i)
			}
		}
	}
}
