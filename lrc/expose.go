package lrc

import (
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// ExposePlan gives memory of one owner to a program that stores. The executor
//
//  1. notes what the device has of the pages of Untracked, so that stores will be found;
//  2. commits, or aborts: then the pages are not tracked. That goes for some of them, too.
//
// It has its pages for itself.
type ExposePlan struct {
	f      *File
	ticket ticket
	owner  versions.Owner
	// Untracked are the runs that the owner holds as home has them, and nobody stores into.
	Untracked []page.Range
}

// BeginExpose plans to track the pages of rg that o holds, after an acquire of them.
func (f *File) BeginExpose(rg page.Range, o versions.Owner) ExposePlan {
	ticket := f.plans.begin(exposing, o, []page.Range{rg})
	return ExposePlan{f: f, ticket: ticket, owner: o, Untracked: f.untracked(rg, o)}
}

// Commit says that programs may store into ranges from now on, which are among Untracked. Home is their base.
func (p ExposePlan) Commit(ranges []page.Range) {
	p.f.plans.advance(p.ticket, ranges)
	p.f.mustBeUntracked(ranges, p.owner)
	p.f.plans.end(p.ticket)
	for _, rg := range ranges {
		p.f.track(rg, p.owner)
	}
}

// Abort leaves everything as it was.
func (p ExposePlan) Abort() { p.f.plans.end(p.ticket) }

// Hollow says that programs may store into the memory of o for those pages of rg that o does not hold, and that it has
// zeros there. Such a replica is tracked and stale, with BaseZero.
func (f *File) Hollow(rg page.Range, o versions.Owner) {
	f.plans.event("new memory", []page.Range{rg})
	f.change(rg, func(s *state) {
		if s.find(o) == nil {
			s.addHollow(o)
		}
	})
	f.checkInvariants(rg)
}

// untracked returns the runs of rg that o holds without being tracked, after an acquire of them.
func (f *File) untracked(rg page.Range, o versions.Owner) (out []page.Range) {
	untracked := func(s *state) bool { r := s.find(o); return r != nil && !r.tracked }
	f.scan(rg, untracked, func(run page.Range, _ *state) {
		out = page.AppendRange(out, run)
	})
	return out
}

// track says that programs may store into the replicas of o in rg from now on. They must not be stale: home is their
// base. Pages that o does not hold, or holds stale, are left alone.
func (f *File) track(rg page.Range, o versions.Owner) {
	f.change(f.clip(rg), func(s *state) {
		if r := s.find(o); r != nil && !r.tracked && !r.stale(s.home) {
			r.tracked = true
		}
	})
	f.checkInvariants(rg)
}

// Untrack says that no program stores into the replicas of o in rg any more. Pages that are pending stay tracked: their
// bases are still needed. Of hollow ones o holds nothing then.
func (f *File) Untrack(rg page.Range, o versions.Owner) (drop []PageBase) {
	f.plans.event("the end of stores", []page.Range{rg})
	// Callers do this again and again, and mostly there is nothing to be done: then nothing has changed.
	var ranges []page.Range
	idle := func(s *state) bool { r := s.find(o); return r != nil && r.tracked && !r.pending(s.home) }
	f.scan(rg, idle, func(run page.Range, s *state) {
		ranges = page.AppendRange(ranges, run)
		if b := s.ownBase(o); b != BaseHome {
			drop = append(drop, PageBase{run, b})
		}
	})
	f.changeAll(ranges, func(s *state) {
		r := s.find(o)
		if r.base == BaseZero {
			s.remove(o)
			return
		}
		r.tracked, r.base = false, BaseHome
	})
	f.checkInvariants(rg)
	return drop
}
