package prefetch

import (
	"math/bits"

	"github.com/gaiafs/gaiafs/internal/page"
)

// kernelWindow is Linux's default for the largest window of a disk (read_ahead_kb): 128 KiB.
const kernelWindow = 128 << 10 >> page.Shift

// Kernel predicts as Linux's read-ahead does (mm/readahead.c, since 2.6.23), with one window per file: all programs
// read through one descriptor, as they do if a daemon reads for them. It serves as a comparison.
type Kernel struct {
	most  int64 // pages of the largest window
	there set   // pages that are present or on their way
	end   page.Index

	// The window is size pages from start on. The first of its last async pages is marked: an access to it fetches the
	// next window.
	start       page.Index
	size, async int64
	marks       set
	previous    page.Index // end of the last access
}

// NewKernel makes a Kernel with windows of at most most pages.
func NewKernel(most int64) *Kernel {
	return &Kernel{most: most, there: make(set), marks: make(set), end: endless, previous: -1}
}

// Access implements Predictor.
func (k *Kernel) Access(rg page.Range, p Pattern, ahead []page.Range) []page.Range {
	if p == Random {
		k.there.add(rg)
		return ahead
	}
	for i := rg.Start; i < rg.End; i++ {
		switch {
		case !k.there.has(i):
			ahead = k.missed(i, int64(rg.End-i), ahead)
		case k.marks.has(i):
			k.marks.drop(page.Range{Start: i, End: i + 1})
			ahead = k.marked(i, int64(rg.End-i), ahead)
		}
	}
	k.previous = rg.End
	return ahead
}

// missed handles an access of n pages from i on, whose first page is not present.
func (k *Kernel) missed(i page.Index, n int64, ahead []page.Range) []page.Range {
	switch {
	case i > 0 && (i == k.start+page.Index(k.size-k.async) || i == k.start+page.Index(k.size)):
		return k.next(i, ahead)
	case i == 0, n > k.most, i == k.previous, i == k.previous-1:
		k.start, k.size = i, k.first(n)
		k.async = k.size
		if k.size > n {
			k.async = k.size - n
		}
		return k.submit(i, ahead)
	}
	// Present pages right before it are the trace of a stream other than the last one.
	before := int64(0)
	for before < k.most && i-page.Index(before) > 0 && k.there.has(i-page.Index(before)-1) {
		before++
	}
	if before <= n {
		k.there.add(page.Range{Start: i, End: i + page.Index(n)}) // random: only what was asked for
		return ahead
	}
	if page.Index(before) >= i {
		before *= 2
	}
	k.start, k.size, k.async = i, min(before+n, k.most), 1
	return k.submit(i, ahead)
}

// marked fetches the next window for an access that reached a mark.
func (k *Kernel) marked(i page.Index, n int64, ahead []page.Range) []page.Range {
	if i == k.start+page.Index(k.size-k.async) {
		return k.next(i, ahead)
	}
	// The mark is of another stream. Its window is found again by the pages that are present.
	start := i + 1
	for k.there.has(start) {
		if int64(start-i) >= k.most {
			return ahead
		}
		start++
	}
	k.start = start
	k.size = k.grow(int64(start-i) + n)
	k.async = k.size
	return k.submit(i, ahead)
}

func (k *Kernel) next(i page.Index, ahead []page.Range) []page.Range {
	k.start += page.Index(k.size)
	k.size = k.grow(k.size)
	k.async = k.size
	return k.submit(i, ahead)
}

// first returns the size of the first window for an access of n pages.
func (k *Kernel) first(n int64) int64 {
	size := int64(1) << bits.Len64(uint64(max(n, 1)-1))
	switch {
	case size <= k.most/32:
		return 4 * size
	case size <= k.most/4:
		return 2 * size
	}
	return k.most
}

// grow returns the size of the next window after one of the given size.
func (k *Kernel) grow(size int64) int64 {
	switch {
	case size < k.most/16:
		return 4 * size
	case size <= k.most/2:
		return 2 * size
	}
	return k.most
}

// submit fetches the window for an access of page i.
func (k *Kernel) submit(i page.Index, ahead []page.Range) []page.Range {
	if i == k.start && k.size == k.async {
		if more := k.grow(k.size); k.size+more <= k.most {
			k.async, k.size = more, k.size+more
		} else {
			k.size, k.async = k.most, k.most/2
		}
	}
	rg := page.Range{Start: k.start, End: k.start + page.Index(k.size)}.Intersect(page.Range{End: k.end})
	for p := rg.Start; p < rg.End; p++ {
		if !k.there.has(p) {
			ahead = add(ahead, page.Range{Start: p, End: p + 1}, k.end)
		}
	}
	k.there.add(rg)
	if mark := k.start + page.Index(k.size-k.async); mark < k.end {
		k.marks.add(page.Range{Start: mark, End: mark + 1})
	}
	return ahead
}

// Unused implements Predictor.
func (k *Kernel) Unused(rg page.Range) {
	k.there.drop(rg)
	k.marks.drop(rg)
}

// Resize implements Predictor.
func (k *Kernel) Resize(end page.Index) {
	k.end = end
	k.there.resize(end)
	k.marks.resize(end)
}
