package lrc

import (
	"sort"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// DrainID names the pages that one release published and the kernel may still hold.
type DrainID uint64

type drain struct {
	id     DrainID
	ranges []page.Range
}

// Release publishes the pages that owner o modified, ascending ranges that do not overlap. drops are the runs that the kernel may hold; the caller has it
// drop them, then calls Drained with id. Pages that o does not hold tracked are left alone.
func (f *File) Release(ranges []page.Range, o versions.Owner) (drops []page.Range, id DrainID) {
	f.checkDropped(ranges)
	ranges = f.within(ranges)
	f.runs.scanAll(ranges, nil, func(run page.Range, s *state) {
		if r := s.find(o); r != nil && r.tracked && (s.cpu || f.HeldUnasked) {
			drops = page.AppendRange(drops, run)
		}
	})
	f.changeAll(ranges, func(s *state) {
		r := s.find(o)
		if r == nil || !r.tracked {
			return
		}
		r.v = r.v.Next(o)
		s.released = s.released.With(o, r.v.Get(o))
		s.cpu = false
	})
	f.last++
	if len(drops) > 0 {
		f.drain = append(f.drain, drain{f.last, drops})
	}
	f.checkInvariants(page.Range{End: f.runs.end()})
	return drops, f.last
}

// Drained says that the kernel dropped the pages that the release id returned, and that every write of theirs arrived.
func (f *File) Drained(id DrainID) {
	for i := range f.drain {
		if f.drain[i].id == id {
			f.drain = append(f.drain[:i], f.drain[i+1:]...)
			return
		}
	}
}

// Redrop returns the runs of rg that the kernel may hold without what a device released of them: while they drained, a
// program wrote them whole. Like what Release returned, the caller has the kernel drop them, then calls Drained with id;
// the release whose pages they are returns only when there are none left.
func (f *File) Redrop(rg page.Range) (drops []page.Range, id DrainID) {
	rg = rg.Intersect(page.Range{End: f.runs.end()})
	f.runs.scan(rg, func(run page.Range, s *state) {
		if !s.cpu || s.firstPending() == nil {
			return
		}
		for _, part := range f.subtractDraining(run) {
			drops = page.AppendRange(drops, part)
		}
	})
	if len(drops) == 0 {
		return nil, 0
	}
	f.runs.updateAll(drops, nil, nil, func(s *state) { s.cpu = false })
	f.last++
	f.drain = append(f.drain, drain{f.last, drops})
	f.checkInvariants(rg)
	return drops, f.last
}

// Draining returns the ids of the releases that still drain a page of rg.
func (f *File) Draining(rg page.Range) (ids []DrainID) {
	for _, d := range f.drain {
		if len(d.overlapping(rg)) > 0 {
			ids = append(ids, d.id)
		}
	}
	return ids
}

// overlapping returns the drain's ranges that share a page with rg. A release of scattered pages has thousands of others.
func (d *drain) overlapping(rg page.Range) []page.Range {
	first := sort.Search(len(d.ranges), func(i int) bool { return d.ranges[i].End > rg.Start })
	n := first
	for n < len(d.ranges) && d.ranges[n].Start < rg.End {
		n++
	}
	return d.ranges[first:n]
}

// subtractDraining returns the parts of run that are not draining.
func (f *File) subtractDraining(run page.Range) []page.Range {
	parts := []page.Range{run}
	for _, d := range f.drain {
		for _, dr := range d.overlapping(run) {
			parts = page.Subtract(parts, dr)
		}
	}
	return parts
}
