package lrc

import (
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// AcquirePlan brings the replicas of one owner up to date. The executor
//
//  1. carries out updates, in any order and by any number at a time;
//  2. reports them by Updated, as they arrive;
//  3. ends the plan. Pages that were not reported do not change.
//
// Home must not change until the plan ends: the plan has exclusive use of its pages.
type AcquirePlan struct {
	f      *File
	ticket ticket
	owner  versions.Owner
	rg     page.Range
	behind bool
}

// BeginAcquire plans to bring all of rg to owner o, after everything pending there was collected.
func (f *File) BeginAcquire(rg page.Range, o versions.Owner) AcquirePlan {
	f.mustNotPend("an acquire", rg)
	return f.beginAcquire(rg, o, false)
}

// BeginRelieve plans to bring the replicas of o in rg up to date whose bases are copies, so that the copies can be
// freed. Pages may be pending: then the replicas are stale again after a collect.
func (f *File) BeginRelieve(rg page.Range, o versions.Owner) AcquirePlan {
	return f.beginAcquire(rg, o, true)
}

func (f *File) beginAcquire(rg page.Range, o versions.Owner, behind bool) AcquirePlan {
	return AcquirePlan{f: f, owner: o, rg: rg, behind: behind, ticket: f.plans.begin(acquiring, o, []page.Range{rg})}
}

// Widen extends p to rg, which includes all of p's pages. No page that is added may be pending.
func (p *AcquirePlan) Widen(rg page.Range) {
	p.f.mustNotPend("an acquire", rg)
	p.f.plans.widen(p.ticket, rg)
	p.rg = rg
}

// Updates returns the updates from home for all of the plan's pages.
func (p AcquirePlan) Updates() []Update { return p.AppendUpdates(nil, p.rg) }

// AppendUpdates appends the updates of part of the plan to out, whose updates come before part.
func (p AcquirePlan) AppendUpdates(out []Update, part page.Range) []Update {
	if part = part.Intersect(p.rg); p.behind {
		return append(out, p.f.behind(part, p.owner)...)
	}
	return p.f.appendStale(out, part, p.owner)
}

// Updated records that the replicas in ranges contain home, which is their base from now on. With track, programs may
// store into them. No replica uses the bases in drop any more.
func (p AcquirePlan) Updated(ranges []page.Range, track bool) (drop []PageBase) {
	p.f.plans.advance(p.ticket, ranges)
	p.f.mustBeStale(ranges, p.owner)
	return p.f.updated(ranges, p.owner, track)
}

// End ends the plan.
func (p AcquirePlan) End() { p.f.plans.end(p.ticket) }

// Mode is the way in which a replica is brought up to date.
type Mode uint8

const (
	// ModeFill copies home into memory that holds nothing of the page yet.
	ModeFill Mode = iota
	// ModeCopy copies home over a replica that no program stores into.
	ModeCopy
	// ModePatch stores the bytes that differ between the base and home into a replica that programs may be storing
	// into.
	ModePatch
)

func (m Mode) String() string { return [...]string{"fill", "copy", "patch"}[m] }

// Update is a run of pages to be brought up to date.
type Update struct {
	Range page.Range
	Mode  Mode
	// Base names the bytes that home is compared with, for ModePatch.
	Base Base
}

// Stale returns the updates that owner o needs from home, after everything pending in rg was collected.
func (f *File) Stale(rg page.Range, o versions.Owner) []Update { return f.appendStale(nil, rg, o) }

// appendStale is Stale that appends to out, whose updates come before rg.
func (f *File) appendStale(out []Update, rg page.Range, o versions.Owner) []Update {
	var u Update // of the pages of state last
	var last *state
	behind := func(s *state) bool { r := s.find(o); return r == nil || r.stale(s.home) }
	f.pages.scan([]page.Range{rg}, behind, func(run page.Range, s *state) {
		if s != last {
			last = s
			switch r := s.find(o); {
			case r == nil:
				u = Update{Mode: ModeFill}
			case !r.tracked:
				u = Update{Mode: ModeCopy}
			default:
				u = Update{Mode: ModePatch, Base: r.base}
			}
		}
		if n := len(out); n > 0 && out[n-1].Mode == u.Mode && out[n-1].Base == u.Base &&
			out[n-1].Range.End == run.Start {
			out[n-1].Range.End = run.End
			return
		}
		u.Range = run
		out = append(out, u)
	})
	return out
}

// behind returns those updates of Stale whose replicas have copies as bases: once they are carried out, the copies can
// be freed. Pages may be pending: then the replicas are stale again after a collect.
func (f *File) behind(rg page.Range, o versions.Owner) (out []Update) {
	behind := func(s *state) bool {
		r := s.find(o)
		return r != nil && r.tracked && r.base.kept() && r.stale(s.home)
	}
	f.scan(rg, behind, func(run page.Range, s *state) {
		out = append(out, Update{Range: run, Mode: ModePatch, Base: s.find(o).base})
	})
	return out
}

// updated records that the replicas of o in the ranges contain home, which is their base from now on. With track,
// programs may store into them. No replica uses the bases in drop any more.
func (f *File) updated(ranges []page.Range, o versions.Owner, track bool) (drop []PageBase) {
	if len(ranges) == 0 {
		return nil
	}
	drop = f.changeNoting(ranges, func(s *state) Base { return s.ownBase(o) }, unremembered, func(s *state) {
		r := s.add(o)
		r.v = r.v.Join(s.home)
		r.base = BaseHome
		r.tracked = r.tracked || track
	})
	f.checkAll(ranges)
	return drop
}

// ownBase returns the base copy that only o uses, or BaseHome if there is none.
func (s *state) ownBase(o versions.Owner) Base {
	if r := s.find(o); r != nil && r.tracked && r.base.kept() && s.soleUser(r.base, o) {
		return r.base
	}
	return BaseHome
}
