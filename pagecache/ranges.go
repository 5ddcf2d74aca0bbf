package pagecache

import (
	"iter"

	"github.com/gaiafs/gaiafs/internal/page"
)

// cut yields consecutive parts of rg of at most n pages.
func cut(rg page.Range, n page.Index) iter.Seq[page.Range] {
	return func(yield func(page.Range) bool) {
		for p := rg.Start; p < rg.End; p += n {
			if !yield(page.Range{Start: p, End: min(p+n, rg.End)}) {
				return
			}
		}
	}
}

// joined returns ascending ranges with adjacent ones joined.
func joined(ranges []page.Range) (out []page.Range) {
	for _, rg := range ranges {
		out = page.AppendRange(out, rg)
	}
	return out
}

// intersect returns the pages that are in both a and b. These are ascending and do not overlap.
func intersect(a, b []page.Range) (out []page.Range) {
	for i, k := 0, 0; i < len(a) && k < len(b); {
		if x := a[i].Intersect(b[k]); !x.Empty() {
			out = append(out, x)
		}
		if a[i].End < b[k].End {
			i++
		} else {
			k++
		}
	}
	return out
}

// subtract returns the pages of a that are not in b. Both are ascending and do not overlap.
func subtract(a, b []page.Range) (out []page.Range) {
	k := 0
	for _, r := range a {
		for k < len(b) && b[k].End <= r.Start {
			k++
		}
		for i := k; i < len(b) && b[i].Start < r.End; i++ {
			if r.Start < b[i].Start {
				out = append(out, page.Range{Start: r.Start, End: b[i].Start})
			}
			r.Start = max(r.Start, b[i].End)
		}
		if !r.Empty() {
			out = append(out, r)
		}
	}
	return out
}

// pagesOf returns the number of pages of ranges.
func pagesOf(ranges []page.Range) (n int64) {
	for _, rg := range ranges {
		n += rg.Len()
	}
	return n
}

// sizeOf returns how many bytes ranges have.
func sizeOf(ranges []page.Range) int64 { return pagesOf(ranges) * page.Size }
