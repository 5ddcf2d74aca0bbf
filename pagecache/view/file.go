package view

import (
	"iter"
	"math/bits"
	"slices"
	"sort"

	"github.com/gaiafs/gaiafs/internal/page"
)

// Run is a range of bytes that are contiguous both in a file and in the view.
type Run struct {
	// Off is the offset in the file, View the offset in the view.
	Off, View, Len int64
}

// Rows is Count runs of equal length, each Stride bytes after the start of the one before. In the view they follow each
// other. Run is the first of them.
type Rows struct {
	Run
	Stride, Count int64
}

// Span returns the file's bytes from the start of the first run to the end of the last.
func (r *Rows) Span() page.Bytes { return page.Span(r.Off, (r.Count-1)*r.Stride+r.Len) }

// File describes the part of a view that comes from one file. It is immutable.
type File struct {
	l      *Layout
	number int
	// order lists the file's segments by their offsets.
	order []int32
	// ends is a heap over order: a segment tree whose leaves begin at len(ends)/2. Each element is the largest end of
	// the segments below it. It finds the segments that overlap a range even if many segments begin before it.
	ends []int64
}

// index builds what the searches need.
func (f *File) index(l *Layout, number int) {
	f.l, f.number = l, number
	slices.SortStableFunc(f.order, func(a, b int32) int {
		switch x, y := l.segments[a].Offset, l.segments[b].Offset; {
		case x < y:
			return -1
		case x > y:
			return 1
		}
		return 0
	})
	if len(f.order) == 0 {
		return
	}
	leaves := 1 << bits.Len(uint(len(f.order)-1))
	f.ends = make([]int64, 2*leaves)
	for i, s := range f.order {
		f.ends[leaves+i] = l.segments[s].span().End
	}
	for i := leaves - 1; i > 0; i-- {
		f.ends[i] = max(f.ends[2*i], f.ends[2*i+1])
	}
}

// Number returns the file's number.
func (f *File) Number() int { return f.number }

// Span returns the range from the first to the last byte of the file that the view has. It is empty if the view has
// none.
func (f *File) Span() page.Bytes {
	if len(f.order) == 0 {
		return page.Bytes{}
	}
	return page.Bytes{Off: f.l.segments[f.order[0]].Offset, End: f.ends[1]}
}

// overlapping yields the segments whose spans overlap b, in the order of their offsets.
func (f *File) overlapping(b page.Bytes) iter.Seq[int32] {
	return func(yield func(int32) bool) {
		if b.Empty() {
			return
		}
		end := sort.Search(len(f.order), func(i int) bool { return f.l.segments[f.order[i]].Offset >= b.End })
		leaves := len(f.ends) / 2
		var below func(node, first, n int) bool
		below = func(node, first, n int) bool {
			if first >= end || f.ends[node] <= b.Off {
				return true
			}
			if n == 1 {
				return yield(f.order[first])
			}
			return below(2*node, first, n/2) && below(2*node+1, first+n/2, n/2)
		}
		if leaves > 0 {
			below(1, 0, leaves)
		}
	}
}

// Runs yields the runs of the file's bytes b that the view has, segment by segment. The runs of one segment are
// ascending, in the file and in the view. Runs of different segments may overlap in the file.
func (f *File) Runs(b page.Bytes) iter.Seq[Run] {
	return func(yield func(Run) bool) {
		for r := range f.Rows(b) {
			for k := range r.Count {
				if !yield(Run{r.Off + k*r.Stride, r.View + k*r.Len, r.Len}) {
					return
				}
			}
		}
	}
}

// Rows is Runs, but yields whole rows of a segment together: at most three Rows for each segment. Rows that follow each
// other without gaps are a single run.
func (f *File) Rows(b page.Bytes) iter.Seq[Rows] {
	return func(yield func(Rows) bool) {
		for i := range f.overlapping(b) {
			s, start := &f.l.segments[i], f.l.starts[i]
			part := func(k, length int64) bool {
				row := page.Span(s.Offset+k*s.stride(), length)
				in := row.Intersect(b)
				return yield(Rows{Run{in.Off, start + k*s.Length + in.Off - row.Off, in.Len()}, in.Len(), 1})
			}
			first, end := s.rows(b)
			switch {
			case first >= end:
				continue
			case s.stride() == s.Length:
				if !part(0, s.bytes()) {
					return
				}
				continue
			}
			if s.Offset+first*s.stride() < b.Off {
				if !part(first, s.Length) {
					return
				}
				first++
			}
			whole := end
			if s.Offset+(end-1)*s.stride()+s.Length > b.End {
				whole--
			}
			if n := whole - first; n > 0 && !yield(Rows{Run{s.Offset + first*s.stride(), start + first*s.Length,
				s.Length}, s.stride(), n}) {
				return
			}
			if first <= whole && whole < end && !part(whole, s.Length) {
				return
			}
		}
	}
}

// Has reports whether the view has any of the file's bytes in b.
func (f *File) Has(b page.Bytes) bool {
	for i := range f.overlapping(b) {
		if first, end := f.l.segments[i].rows(b); first < end {
			return true
		}
	}
	return false
}

// A section is 128 MiB of a file: the unit of State's bookkeeping.
const (
	sectionShift = 15
	sectionPages = 1 << sectionShift
)

// section returns the pages of section i.
func section(i int64) page.Range {
	return page.Range{Start: page.Index(i) << sectionShift, End: page.Index(i+1) << sectionShift}
}

// sections returns the numbers of the sections that have bytes of the view, ascending.
func (f *File) sections() (list []int64) {
	compact := func() {
		slices.Sort(list)
		list = slices.Compact(list)
	}
	known := 1 << 10
	add := func(b page.Bytes) {
		pages := b.Pages()
		for i := int64(pages.Start >> sectionShift); i <= int64((pages.End-1)>>sectionShift); i++ {
			if n := len(list); n == 0 || list[n-1] != i {
				list = append(list, i)
			}
		}
	}
	for _, i := range f.order {
		if len(list) > 2*known { // many segments of the same sections
			compact()
			known = max(known, len(list))
		}
		s := &f.l.segments[i]
		if s.stride()-s.Length < sectionPages<<page.Shift {
			add(s.span()) // no gap is as large as a section
			continue
		}
		for k := range s.Count {
			add(page.Span(s.Offset+k*s.stride(), s.Length))
		}
	}
	compact()
	return list
}

// mostSections returns an upper bound on the number of sections.
func (f *File) mostSections() (n int64) {
	for _, i := range f.order {
		s := &f.l.segments[i]
		n += min(s.Count*(s.Length/(sectionPages<<page.Shift)+2), s.span().Len()/(sectionPages<<page.Shift)+2)
	}
	return min(n, f.Span().Len()/(sectionPages<<page.Shift)+2)
}

// has returns the pages of rg that hold bytes of the view. rg is in the section that begins at first.
func (f *File) has(rg page.Range, first page.Index) (set pageSet) {
	f.addTo(set[:], rg, first)
	return set
}

// addTo adds the pages of rg that hold bytes of the view to the bitmap that begins at first.
func (f *File) addTo(set bitmap, rg page.Range, first page.Index) {
	b := rg.Span()
	for i := range f.overlapping(b) {
		s := &f.l.segments[i]
		pages := s.span().Intersect(b).Pages()
		if s.stride()-s.Length < page.Size { // no page is in a gap
			set.add(pages, first)
		} else {
			s.addRows(set, pages, first)
		}
	}
}

// addRows adds the pages of rg that hold bytes of the segment to the bitmap that begins at first. rg is in the span of
// the segment. The gap between two rows is at least a page.
func (s *Segment) addRows(set bitmap, rg page.Range, first page.Index) {
	// The pattern of pages repeats after this many words, the least common multiple of a word's pages and the stride.
	start, stride := (rg.Start-first)>>6, s.stride()
	period := page.Index(min(stride/min(stride&-stride, 64*page.Size), int64(len(set))))
	head := rg.Intersect(page.Range{Start: rg.Start, End: first + (start+period+1)<<6}) // rg may begin inside a word
	var room pageSet
	rows := bitmap(room[:len(set)])
	from, end := s.rows(head.Span())
	for k := from; k < end; k++ {
		at := s.Offset + k*stride
		row := page.Range{Start: page.Index(at >> page.Shift), End: page.Index((at+s.Length-1)>>page.Shift) + 1}
		rows.add(row.Intersect(head), first)
	}
	words(rg, first, func(i page.Index, bits uint64) {
		if i > start+period {
			rows[i] = rows[i-period]
		}
		set[i] |= rows[i] & bits
	})
}
