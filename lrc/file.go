package lrc

import (
	"fmt"
	"iter"
	"strings"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// maxPage is past every page that a file can have.
const maxPage = page.Index(1) << (63 - page.Shift)

var wholeFile = page.Range{End: maxPage}

// File is the coherence state of one file. In the zero File, no device holds a page.
type File struct {
	// HeldUnasked is set in write-back mode: the kernel may hold pages that it never read, because it does not read a
	// page before a write of the whole page. Every release then drops its pages, and collects what is pending of them
	// first: the writer of such a page may have seen an earlier release, and the page comes home while it drains, when
	// nothing is collected. Set it before the first call.
	HeldUnasked bool

	// Changed, unless it is nil, is called with every range of pages whose state changes: the bytes of home or of a
	// device, or what is known about them. A change of only what the kernel may hold does not count. The call is made
	// within the method that reports the change. Facts about pages stay valid until Changed is called for them. Set it
	// before the first call.
	Changed func(rg page.Range)

	plans plans // open ones
	pages storage
	drain []drain
	last  DrainID
}

// PageBase is the base of a run of pages.
type PageBase struct {
	Range page.Range
	Base  Base
}

// scan calls fn for those pages of rg that some device may hold, as states.scan does.
func (f *File) scan(rg page.Range, want func(s *state) bool, fn func(run page.Range, s *state)) {
	f.pages.scan([]page.Range{f.clip(rg)}, want, fn)
}

// change updates the states of one range and calls Changed.
func (f *File) change(rg page.Range, fn func(s *state)) {
	if rg.Empty() {
		return
	}
	f.changeAll([]page.Range{rg}, fn)
}

// changeAll is change for several ranges.
func (f *File) changeAll(ranges []page.Range, fn func(s *state)) {
	f.changeNoting(ranges, nil, unremembered, fn)
}

// changeNoting is changeAll with all options of states.update.
func (f *File) changeNoting(
	ranges []page.Range, note func(s *state) Base, kind changeKind, fn func(s *state),
) (noted []PageBase) {
	noted = f.pages.update(ranges, note, kind, fn)
	if f.Changed != nil {
		for _, rg := range ranges {
			f.Changed(rg)
		}
	}
	return noted
}

// clip returns the part of rg that some device may hold.
func (f *File) clip(rg page.Range) page.Range { return rg.Intersect(page.Range{End: f.pages.end()}) }

// within is clip for several ranges.
func (f *File) within(ranges []page.Range) []page.Range {
	n := len(ranges)
	for n > 0 && ranges[n-1].End > f.pages.end() {
		n--
	}
	if n == len(ranges) {
		return ranges
	}
	in := append([]page.Range(nil), ranges[:n]...)
	if last := f.clip(ranges[n]); !last.Empty() {
		in = append(in, last)
	}
	return in
}

// If a method takes several ranges, they are ascending and do not overlap. One call costs less than a call for each
// range.

// Parts yields the parts of rg that the File has states for, in order, in pieces of at most n pages.
func (f *File) Parts(rg page.Range, n page.Index) iter.Seq[page.Range] {
	return func(yield func(page.Range) bool) {
		rg := f.clip(rg)
		for p := rg.Start; p < rg.End; p += n {
			if p = f.pages.next(p); p >= rg.End || !yield(page.Range{Start: p, End: min(p+n, rg.End)}) {
				return
			}
		}
	}
}

// CPURead records that the kernel asks for the pages of rg in order to hold them. It returns what has to come home
// before the kernel is answered. If that does not come home, call CPUReadMerged.
func (f *File) CPURead(rg page.Range) []Pending {
	f.kernelHolds(rg)
	return f.Pending(rg, true)
}

// kernelHolds records that the kernel may hold the pages of rg.
func (f *File) kernelHolds(rg page.Range) {
	absent := false
	if rg = f.clip(rg); rg.Empty() {
		return
	}
	f.scan(rg, nil, func(_ page.Range, s *state) { absent = absent || !s.cpu })
	if absent {
		f.pages.update([]page.Range{rg}, nil, unremembered, func(s *state) { s.cpu = true })
	}
}

// checkAll is checkInvariants of several ranges.
func (f *File) checkAll(ranges []page.Range) {
	for _, rg := range ranges {
		f.checkInvariants(rg)
	}
}

// BaseOf returns the base of o's tracked replica of page p, and whether there is one.
func (f *File) BaseOf(p page.Index, o versions.Owner) (b Base, tracked bool) {
	f.pages.scan([]page.Range{{Start: p, End: p + 1}}, nil, func(_ page.Range, s *state) {
		if r := s.find(o); r != nil && r.tracked {
			b, tracked = r.base, true
		}
	})
	return b, tracked
}

// Held reports whether any device holds a page of rg.
func (f *File) Held(rg page.Range) (held bool) {
	f.scan(rg, nil, func(_ page.Range, s *state) {
		held = held || len(s.replicas) > 0
	})
	return held
}

// Holders returns the owners that hold a page of rg, ascending.
func (f *File) Holders(rg page.Range) []versions.Owner {
	var seen [256]bool
	f.scan(rg, nil, func(_ page.Range, s *state) {
		for i := range s.replicas {
			seen[s.replicas[i].owner] = true
		}
	})
	var out []versions.Owner
	for o, is := range seen {
		if is {
			out = append(out, versions.Owner(o))
		}
	}
	return out
}

// Counts has the numbers of pages that an owner holds of a file. Clean pages are neither stale nor pending.
type Counts struct {
	Resident, Clean, Tracked, Stale, Pending int64
}

// Count counts the pages that owner o holds, except hollow ones without a release.
func (f *File) Count(o versions.Owner) Counts {
	c := make([]Counts, 1)
	f.CountParts(o, 1, c)
	return c[0]
}

// CountParts adds the counts of Count to parts, which has at least one element. parts[i] gets the width pages from
// i*width on. The last part also gets all pages after it.
func (f *File) CountParts(o versions.Owner, width page.Index, parts []Counts) {
	last := page.Index(len(parts) - 1)
	f.scan(wholeFile, nil, func(run page.Range, s *state) {
		r := s.find(o)
		if r == nil || r.base == BaseZero && !r.pending(s.home) {
			return
		}
		stale, pending := r.stale(s.home), r.pending(s.home)
		for run.Start < run.End {
			i, end := min(run.Start/width, last), run.End
			if i < last {
				end = min(end, (i+1)*width)
			}
			c, n := &parts[i], int64(end-run.Start)
			run.Start = end
			c.Resident += n
			if !stale && !pending {
				c.Clean += n
			}
			if r.tracked {
				c.Tracked += n
			}
			if stale {
				c.Stale += n
			}
			if pending {
				c.Pending += n
			}
		}
	})
}

// Replica is a run of pages that an owner holds, all in the same state.
type Replica struct {
	Range                   page.Range
	Tracked, Stale, Pending bool
}

// Replicas returns the pages of rg that owner o holds, except hollow ones without a release.
func (f *File) Replicas(rg page.Range, o versions.Owner) (out []Replica) {
	f.scan(rg, nil, func(run page.Range, s *state) {
		r := s.find(o)
		if r == nil || r.base == BaseZero && !r.pending(s.home) {
			return
		}
		out = append(out, Replica{run, r.tracked, r.stale(s.home), r.pending(s.home)})
	})
	return out
}

// End returns a page past every page that a device holds.
func (f *File) End() page.Index { return f.pages.end() }

// Memory returns the bytes that the versions and states of all pages take.
func (f *File) Memory() int64 { return f.pages.memory() }

// Tables is about that, and costs nothing.
func (f *File) Tables() int64 { return f.pages.estimate() }

// Dump describes every page that is not in the initial state, a line per run of equal states, for tests and debugging.
func (f *File) Dump() string {
	var b strings.Builder
	var open page.Range
	var text string
	flush := func() {
		if !open.Empty() {
			fmt.Fprintf(&b, "%v %s\n", open, text)
		}
	}
	f.scan(wholeFile, nil, func(run page.Range, s *state) {
		t := s.String()
		if len(s.replicas) == 0 && s.cpu {
			return
		}
		if t == text && open.End == run.Start {
			open.End = run.End
			return
		}
		flush()
		open, text = run, t
	})
	flush()
	for _, d := range f.drain {
		fmt.Fprintf(&b, "draining %d %v\n", d.id, d.ranges)
	}
	return b.String()
}
