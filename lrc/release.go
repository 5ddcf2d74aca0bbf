package lrc

import (
	"slices"
	"sort"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// ReleasePlan publishes what programs stored on one owner. The executor
//
//  1. collects the runs of Collect: a program may have written a whole page there after it saw an earlier release, and
//     the kernel may hold that page. The released bytes have to come home before the page does. If home does not take
//     them, the release goes on;
//  2. commits; or aborts, and nothing is published;
//  3. makes the kernel drop the pages of the drain that Commit returned, and of each drain that follows it.
//
// It holds no pages until it is committed. Releases drain while other plans go on.
type ReleasePlan struct {
	f      *File
	ticket ticket
	ranges []page.Range
	rg     page.Range
	owner  versions.Owner
	// Collect is empty unless the File has HeldUnasked.
	Collect []page.Range
}

// BeginRelease plans to publish the pages of rg that o modified, as ascending ranges. The plan keeps the slice. Pages
// that o does not track do not change.
func (f *File) BeginRelease(modified []page.Range, rg page.Range, o versions.Owner) ReleasePlan {
	p := ReleasePlan{f: f, ranges: modified, rg: rg, owner: o, ticket: f.plans.begin(releasing, o, []page.Range{rg})}
	if f.HeldUnasked {
		p.Collect = modified
	}
	return p
}

// Commit publishes the pages: home and every other replica are behind from now on.
func (p ReleasePlan) Commit() Drain {
	p.f.plans.advance(p.ticket, p.ranges)
	p.f.plans.end(p.ticket)
	drops, id := p.f.release(p.ranges, p.owner)
	return p.f.newDrain(drops, id, p.rg)
}

// Abort leaves everything as it was.
func (p ReleasePlan) Abort() { p.f.plans.end(p.ticket) }

// Drain has the pages that the kernel has to forget before their release returns. If it has no Pages, there is nothing
// to do. Otherwise the executor
//
//  1. makes the kernel write its dirty pages among them home and forget all of them;
//  2. reports that by Dropped, and goes on with the drain that Dropped returns; or gives up.
type Drain struct {
	f      *File
	ticket ticket
	rg     page.Range
	// Pages are runs that the kernel may hold.
	Pages []page.Range
	ID    DrainID
}

func (f *File) newDrain(drops []page.Range, id DrainID, rg page.Range) Drain {
	if len(drops) == 0 {
		return Drain{}
	}
	return Drain{f: f, rg: rg, Pages: drops, ID: id, ticket: f.plans.begin(draining, versions.CPU, drops)}
}

// Dropped records that the kernel dropped the pages, and that every write of them arrived. If a program wrote a whole
// page of the release in between, the kernel holds that page again without the released bytes. Then the returned drain
// has it.
func (d Drain) Dropped() Drain {
	d.GiveUp()
	return d.f.Redrop(d.rg)
}

// GiveUp is Dropped without a further drain. It is for a kernel that does not keep up with programs that write.
func (d Drain) GiveUp() {
	d.f.plans.end(d.ticket)
	d.f.drained(d.ID)
}

// Redrop returns the pages of rg that the kernel may hold without a device's released bytes, and that no release
// drains.
func (f *File) Redrop(rg page.Range) Drain {
	drops, id := f.redrop(rg, false)
	return f.newDrain(drops, id, rg)
}

// CPUReadMerged reports that what CPURead returned for rg did not come home, and that the kernel gets pages with these
// bytes merged in. The drain has those pages: the kernel must drop them after it got its answer. The kernel asked for
// them, so it holds no older copies, and releases that drain them no longer wait for them.
func (f *File) CPUReadMerged(rg page.Range) Drain {
	drops, id := f.redrop(rg, true)
	return f.newDrain(drops, id, rg)
}

// DrainID names the pages that one release published and the kernel may still hold.
type DrainID uint64

type drain struct {
	id     DrainID
	ranges []page.Range
	// shown are those of ranges that Pending does not leave out. Something of them had been released, and had drained,
	// before this drain began, and home did not take it: the kernel's copies are no older than that.
	shown []page.Range
}

// release publishes the pages that owner o modified, as ascending ranges that do not overlap. drops are the runs that
// the kernel may hold. Pages that o does not track do not change.
func (f *File) release(ranges []page.Range, o versions.Owner) (drops []page.Range, id DrainID) {
	f.checkDropped(ranges)
	ranges = f.within(ranges)
	var shown []page.Range
	f.pages.scan(ranges, nil, func(run page.Range, s *state) {
		if r := s.find(o); r != nil && r.tracked && (s.cpu || f.HeldUnasked) {
			drops = page.AppendRange(drops, run)
			if s.firstPending() != nil {
				for _, part := range f.subtractDraining(run, false) {
					shown = page.AppendRange(shown, part)
				}
			}
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
		f.drain = append(f.drain, drain{f.last, drops, shown})
	}
	f.checkInvariants(wholeFile)
	return drops, f.last
}

// drained ends a drain.
func (f *File) drained(id DrainID) {
	for i := range f.drain {
		if f.drain[i].id == id {
			f.drain = append(f.drain[:i], f.drain[i+1:]...)
			return
		}
	}
}

// redrop makes a drain of the runs of rg that the kernel may hold although something of them is pending. Either a
// program wrote them whole while they drained, or a read gave them to the kernel merged.
func (f *File) redrop(rg page.Range, merged bool) (drops []page.Range, id DrainID) {
	f.scan(rg, nil, func(run page.Range, s *state) {
		if !s.cpu || s.firstPending() == nil {
			return
		}
		parts := []page.Range{run}
		if !merged {
			parts = f.subtractDraining(run, true)
		}
		for _, part := range parts {
			drops = page.AppendRange(drops, part)
		}
	})
	if len(drops) == 0 {
		return nil, 0
	}
	if merged {
		f.takeOver(drops)
	}
	f.pages.update(drops, nil, unremembered, func(s *state) { s.cpu = false })
	f.last++
	d := drain{id: f.last, ranges: drops}
	if merged {
		d.shown = drops
	}
	f.drain = append(f.drain, d)
	f.checkInvariants(rg)
	return drops, f.last
}

// takeOver removes pages from all drains.
func (f *File) takeOver(pages []page.Range) {
	for i := range f.drain {
		for _, rg := range pages {
			if d := &f.drain[i]; len(overlapping(d.ranges, rg)) > 0 {
				d.ranges, d.shown = page.Subtract(d.ranges, rg), page.Subtract(d.shown, rg)
			}
		}
	}
	f.drain = slices.DeleteFunc(f.drain, func(d drain) bool { return len(d.ranges) == 0 })
}

// Draining returns the ids of the releases that still drain a page of rg.
func (f *File) Draining(rg page.Range) (ids []DrainID) {
	for _, d := range f.drain {
		if len(overlapping(d.ranges, rg)) > 0 {
			ids = append(ids, d.id)
		}
	}
	return ids
}

// overlapping returns those of a drain's ranges that share a page with rg. It searches, because a release of scattered
// pages has thousands of ranges.
func overlapping(ranges []page.Range, rg page.Range) []page.Range {
	first := sort.Search(len(ranges), func(i int) bool { return ranges[i].End > rg.Start })
	n := first
	for n < len(ranges) && ranges[n].Start < rg.End {
		n++
	}
	return ranges[first:n]
}

// subtractDraining returns the parts of run that are not draining. Pages that a drain shows count as draining only if
// shown is set.
func (f *File) subtractDraining(run page.Range, shown bool) []page.Range {
	parts := []page.Range{run}
	for _, d := range f.drain {
		hidden := overlapping(d.ranges, run)
		if !shown {
			for _, rg := range overlapping(d.shown, run) {
				hidden = page.Subtract(hidden, rg)
			}
		}
		for _, dr := range hidden {
			parts = page.Subtract(parts, dr)
		}
	}
	return parts
}
