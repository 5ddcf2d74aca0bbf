package view

import (
	"iter"
	"math/bits"
	"slices"

	"github.com/gaiafs/gaiafs/internal/page"
)

// pageSet is a set of pages of one section.
type pageSet [sectionPages / 64]uint64

func (s *pageSet) bitmap() bitmap { return s[:] }

// bitmap is a set of consecutive pages, a bit for each. It begins at a page that is a multiple of 64.
type bitmap []uint64

// words calls do for each word of a bitmap that has pages of rg, with the bits of these pages. The bitmap begins at
// first and contains rg.
func words(rg page.Range, first page.Index, do func(i page.Index, bits uint64)) {
	for p, end := rg.Start-first, rg.End-first; p < end; {
		bit := p & 63
		n := min(64-bit, end-p)
		do(p>>6, (^uint64(0)>>(64-n))<<bit)
		p += n
	}
}

// add adds the pages of rg. The bitmap begins at first and contains rg.
func (s bitmap) add(rg page.Range, first page.Index) {
	words(rg, first, func(i page.Index, bits uint64) { s[i] |= bits })
}

// remove removes the pages of rg. The bitmap begins at first and contains rg.
func (s bitmap) remove(rg page.Range, first page.Index) {
	words(rg, first, func(i page.Index, bits uint64) { s[i] &^= bits })
}

// and removes the pages that are not in o, which is no shorter.
func (s bitmap) and(o bitmap) {
	for i := range s {
		s[i] &= o[i]
	}
}

// minus removes the pages that are in o, which may be shorter.
func (s bitmap) minus(o bitmap) {
	for i := range o {
		s[i] &^= o[i]
	}
}

// or adds the pages that are in o, which may be shorter.
func (s bitmap) or(o bitmap) {
	for i := range o {
		s[i] |= o[i]
	}
}

// none reports whether no page of rg is in the bitmap, which begins at first.
func (s bitmap) none(rg page.Range, first page.Index) bool {
	found := uint64(0)
	words(rg, first, func(i page.Index, bits uint64) { found |= s[i] & bits })
	return found == 0
}

// meets reports whether a page is in both s and o, which is no shorter.
func (s bitmap) meets(o bitmap) bool {
	for i := range s {
		if s[i]&o[i] != 0 {
			return true
		}
	}
	return false
}

// len returns the number of pages in the set.
func (s bitmap) len() (n int64) {
	for _, word := range s {
		n += int64(bits.OnesCount64(word))
	}
	return n
}

// lenOf returns the number of pages of rg in the bitmap, which begins at first.
func (s bitmap) lenOf(rg page.Range, first page.Index) (n int64) {
	words(rg, first, func(i page.Index, word uint64) { n += int64(bits.OnesCount64(s[i] & word)) })
	return n
}

// ranges yields the pages of the bitmap, which begins at first. Ranges end at the ends of words.
func (s bitmap) ranges(first page.Index) iter.Seq[page.Range] {
	return func(yield func(page.Range) bool) {
		for i, word := range s {
			at := first + page.Index(i)<<6
			for word != 0 {
				from := bits.TrailingZeros64(word)
				n := bits.TrailingZeros64(^(word >> from))
				if !yield(page.Range{Start: at + page.Index(from), End: at + page.Index(from+n)}) {
					return
				}
				if from+n == 64 {
					break
				}
				word &^= (1<<n - 1) << from
			}
		}
	}
}

// appendRanges appends the pages of the bitmap, which begins at first.
func (s bitmap) appendRanges(list []page.Range, first page.Index) []page.Range {
	runs, before := 0, uint64(0)
	for _, word := range s {
		runs += bits.OnesCount64(word &^ (word<<1 | before>>63))
		before = word
	}
	list = slices.Grow(list, runs)
	for rg := range s.ranges(first) {
		list = page.AppendRange(list, rg)
	}
	return list
}

// appendBridged is appendRanges, but joins ranges across gaps of at most gap pages if none of the gap's pages is in
// other. Both bitmaps begin at first. gap is at most 64.
func (s bitmap) appendBridged(list []page.Range, other bitmap, gap int64, first page.Index) []page.Range {
	var room pageSet
	closed := bitmap(room[:len(s)])
	s.closeTo(closed, gap, len(list) > 0 && list[len(list)-1].End == first)
	if !closed.meets(other) {
		return closed.appendRanges(list, first)
	}
	for rg := range s.ranges(first) {
		if n := len(list); n > 0 {
			between := page.Range{Start: list[n-1].End, End: rg.Start}
			if between.Empty() || between.Len() <= gap && between.Start >= first && other.none(between, first) {
				list[n-1].End = rg.End
				continue
			}
		}
		list = append(list, rg)
	}
	return list
}

// closeTo stores the bitmap into to, with gaps of at most gap pages filled. after says that the page before the bitmap
// is in the set, too, so a gap may begin at the bitmap's start. gap is at most 64.
func (s bitmap) closeTo(to bitmap, gap int64, after bool) {
	var before uint64 // the word before
	if after {
		before = 1 << 63
	}
	// Add the next gap pages after each page. Then keep the pages that are followed by gap such pages.
	widen := func(word uint64) uint64 {
		wide := word
		for range gap {
			wide |= wide<<1 | before>>63
			before |= before << 1
		}
		before = word
		return wide
	}
	for i, word := range s {
		to[i] = widen(word)
	}
	next := widen(0)
	for i := len(to) - 1; i >= 0; i-- {
		wide := to[i]
		for range gap {
			to[i] &= to[i]>>1 | next<<63
			next &= next >> 1
		}
		next = wide
	}
}
