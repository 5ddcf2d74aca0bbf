package lrc

import (
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// CollectPlan brings home what one owner released. The executor
//
//  1. reads the pages of Keep from home and keeps them as these bases;
//  2. reads the owner's bytes, once, and merges them with home if their base is not home;
//  3. writes home;
//  4. commits what came home, or aborts if home has not changed.
//
// It has exclusive use of its pages. Plans for other pages may be open at the same time, and end in any order.
type CollectPlan struct {
	f      *File
	ticket ticket
	// Runs are what to collect, ascending.
	Runs []Pending
	Keep []PageBase
}

// BeginCollect plans to bring home runs that Pending returned, of one owner. The plan keeps runs.
func (f *File) BeginCollect(runs []Pending) CollectPlan {
	f.mustBePending(runs)
	ranges := make([]page.Range, len(runs))
	for i, p := range runs {
		ranges[i] = p.Range
	}
	p := CollectPlan{f: f, Runs: runs, ticket: f.plans.begin(collecting, runs[0].Owner, ranges)}
	p.Keep = f.keepBases(ranges, runs[0].Owner)
	return p
}

// Commit records which pages came home. For pages in agree, home has exactly the collected bytes, and is the owner's
// base from now on. For pages in differ, home has other owners' bytes too. The caller must keep the collected bytes as
// the owner's base, under the names in keep. No replica uses the bases in drop any more. The plan's other pages stay
// pending, and their copies stay kept, because home may have changed in part.
func (p CollectPlan) Commit(agree, differ []page.Range) (keep, drop []PageBase) {
	o := p.Runs[0].Owner
	p.f.plans.advance(p.ticket, agree)
	p.f.plans.advance(p.ticket, differ)
	_, drop = p.f.collected(agree, o, true)
	keep, more := p.f.collected(differ, o, false)
	p.f.plans.end(p.ticket)
	return keep, append(drop, more...)
}

// Abort records that home has not changed. All pages stay pending. Home is the base of all pages of Keep again, and no
// replica uses their copies.
func (p CollectPlan) Abort() {
	p.f.plans.end(p.ticket)
	p.f.notKept(p.Keep)
}

// collected records that home now contains what the owner released of the ranges. With agrees, home has exactly the
// collected bytes, and is the owner's base from now on. Otherwise home has other owners' bytes too. The caller must
// keep the collected bytes as the owner's base, under the names in keep. No replica uses the bases in drop any more.
func (f *File) collected(ranges []page.Range, o versions.Owner, agrees bool) (keep, drop []PageBase) {
	f.pages.scan(ranges, nil, func(run page.Range, s *state) {
		r := s.find(o)
		if r == nil {
			return
		}
		old := r.base
		if !agrees {
			// The name of the old base is free only if no other owner uses it.
			keep = append(keep, PageBase{run, s.freeBase()})
		}
		if old.kept() && s.soleUser(old, o) {
			drop = append(drop, PageBase{run, old})
		}
	})
	f.changeAll(ranges, func(s *state) {
		r := s.find(o)
		if r == nil {
			return
		}
		s.home = s.home.With(o, r.v.Get(o))
		if agrees {
			// The device has the same bytes as home, with everything that others released.
			r.base, r.v = BaseHome, r.v.Join(s.home)
		} else {
			r.base = s.freeBase()
		}
	})
	f.checkAll(ranges)
	return keep, drop
}

// soleUser reports whether o is the only one whose base is b.
func (s *state) soleUser(b Base, o versions.Owner) bool {
	for i := range s.replicas {
		r := &s.replicas[i]
		if r.owner != o && r.tracked && r.base == b {
			return false
		}
	}
	return true
}
