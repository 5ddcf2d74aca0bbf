package lrc

import (
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// ExposePlan prepares memory of one owner for a program that stores. The executor
//
//  1. records what the device has of the pages of Untracked, so that stores will be found;
//  2. commits all or some of them, or aborts: pages that are not committed are not tracked.
//
// It has exclusive use of its pages.
type ExposePlan struct {
	f      *File
	ticket ticket
	owner  versions.Owner
	// Untracked has the runs in which the owner agrees with home and no program stores.
	Untracked []page.Range
}

// BeginExpose plans to track the pages of rg that o holds, after an acquire of them.
func (f *File) BeginExpose(rg page.Range, o versions.Owner) ExposePlan {
	ticket := f.plans.begin(exposing, o, []page.Range{rg})
	return ExposePlan{f: f, ticket: ticket, owner: o, Untracked: f.untracked(rg, o)}
}

// Commit records that programs may store into ranges from now on. The ranges are among Untracked. Home is their base.
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

// Hollow records that o has memory of zeros for the pages of rg that it does not hold, and that programs may store
// there. Such a replica is tracked and stale, with BaseZero.
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

// track records that programs may store into the replicas of o in rg from now on. Home is their base. Pages that o does
// not hold, and stale pages, do not change.
func (f *File) track(rg page.Range, o versions.Owner) {
	f.change(f.clip(rg), func(s *state) {
		if r := s.find(o); r != nil && !r.tracked && !r.stale(s.home) {
			r.tracked = true
		}
	})
	f.checkInvariants(rg)
}

// Untrack records that no program stores into the replicas of o in rg any more. Pending pages stay tracked, because
// their bases are still needed. Hollow pages become absent.
func (f *File) Untrack(rg page.Range, o versions.Owner) (drop []PageBase) {
	f.plans.event("the end of stores", []page.Range{rg})
	// Callers do this again and again, and mostly there is nothing to do. Then Changed must not be called.
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
