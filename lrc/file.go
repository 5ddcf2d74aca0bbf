package lrc

import (
	"fmt"
	"iter"
	"strings"
	"unsafe"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

const segmentSize = unsafe.Sizeof(segment{})

// File is the coherence state of one file. The zero File is one that no device holds anything of.
type File struct {
	// HeldUnasked says that the kernel may hold pages that it never asked for, as it does when it caches writes: a write of
	// a whole page is not preceded by a read. Every release then drops its pages, and the caller collects what is pending
	// of them before it calls Release: such a page may have been written by somebody who saw an earlier release, and is
	// written home while it drains, when nothing is collected. Set it before the first call.
	HeldUnasked bool

	// Changed, unless it is nil, is called with every range of pages of which something changes but what the kernel may hold:
	// what home has, what a device has, or what is known of either. It is called within the call that says so. What a caller
	// found out about pages for which it was not called since is still so. Set it before the first call.
	Changed func(rg page.Range)

	runs  runs
	drain []drain
	last  DrainID
	// kept and wrote are what KeepBases, for nobody but the CPU, and CPUChanged made of states.
	kept, wrote transitions
}

// PageBase is the base of a run of pages.
type PageBase struct {
	Range page.Range
	Base  Base
}

// Pending is a run of pages that a device released and home does not have.
type Pending struct {
	Range page.Range
	Owner versions.Owner
	// Base is where the bytes are that the owner's are compared with.
	Base Base
}

// Pending returns, for each page of rg that has uncollected releases, the one of the lowest owner, so that collecting
// what is returned until nothing is merges the versions in ascending order of owner and the highest wins. Draining pages
// are left out, unless entering says that the kernel asks for the pages in order to hold them.
func (f *File) Pending(rg page.Range, entering bool) []Pending {
	var out []Pending
	pending := func(s *state) bool { return s.firstPending() != nil }
	f.runs.scanWhere(rg.Intersect(page.Range{End: f.runs.end()}), pending, func(run page.Range, s *state) {
		r := s.firstPending()
		add := func(run page.Range) {
			if n := len(out); n > 0 && out[n-1].Owner == r.owner && out[n-1].Base == r.base && out[n-1].Range.End == run.Start {
				out[n-1].Range.End = run.End
				return
			}
			out = append(out, Pending{run, r.owner, r.base})
		}
		if entering || len(f.drain) == 0 {
			add(run)
			return
		}
		for _, part := range f.subtractDraining(run) {
			add(part)
		}
	})
	return out
}

// AllPending returns every uncollected release of page p, in ascending order of owner, by the same rule as Pending.
func (f *File) AllPending(p page.Index, entering bool) (out []Pending) {
	rg := page.Range{Start: p, End: p + 1}
	if !entering && len(f.subtractDraining(rg)) == 0 {
		return nil
	}
	f.runs.scan(rg, func(_ page.Range, s *state) {
		for i := range s.replicas {
			if r := &s.replicas[i]; r.pending(s.home) {
				out = append(out, Pending{rg, r.owner, r.base})
			}
		}
	})
	return out
}

// PendingOf returns the runs of rg that owner o released and home does not have, draining ones included.
func (f *File) PendingOf(rg page.Range, o versions.Owner) (out []Pending) {
	pending := func(s *state) bool { r := s.find(o); return r != nil && r.pending(s.home) }
	f.runs.scanWhere(rg.Intersect(page.Range{End: f.runs.end()}), pending, func(run page.Range, s *state) {
		out = append(out, Pending{run, o, s.find(o).base})
	})
	return out
}

// change is runs.update for what Changed is to be told of.
func (f *File) change(rg page.Range, fn func(s *state)) {
	if rg.Empty() {
		return
	}
	f.changeKnown([]page.Range{rg}, nil, fn)
}

// changeAll is change for several ranges.
func (f *File) changeAll(ranges []page.Range, fn func(s *state)) { f.changeKnown(ranges, nil, fn) }

// changeKnown is changeAll for a kind of event whose transitions are remembered.
func (f *File) changeKnown(ranges []page.Range, known *transitions, fn func(s *state)) {
	f.changeNoting(ranges, nil, known, fn)
}

// changeNoting is changeKnown that notes what runs.updateAll does.
func (f *File) changeNoting(ranges []page.Range, note func(s *state) Base, known *transitions, fn func(s *state)) (noted []PageBase) {
	noted = f.runs.updateAll(ranges, note, known, fn)
	if f.Changed != nil {
		for _, rg := range ranges {
			f.Changed(rg)
		}
	}
	return noted
}

// within returns the parts of ranges that some device may hold.
func (f *File) within(ranges []page.Range) []page.Range {
	n := len(ranges)
	for n > 0 && ranges[n-1].End > f.runs.end() {
		n--
	}
	if n == len(ranges) {
		return ranges
	}
	in := append([]page.Range(nil), ranges[:n]...)
	if last := ranges[n].Intersect(page.Range{End: f.runs.end()}); !last.Empty() {
		in = append(in, last)
	}
	return in
}

// Where a method takes several ranges, they are ascending and do not overlap. It costs less than one call for each.

// Keeps returns the runs of ranges of which KeepBases would return something.
func (f *File) Keeps(ranges []page.Range, except versions.Owner) (out []page.Range) {
	keeps := func(s *state) bool { return s.keeps(except) }
	f.runs.scanAll(f.within(ranges), keeps, func(run page.Range, _ *state) { out = page.AppendRange(out, run) })
	return out
}

// keeps reports whether home is the only base of a tracked replica of an owner other than except.
func (s *state) keeps(except versions.Owner) bool {
	for i := range s.replicas {
		if r := &s.replicas[i]; r.tracked && r.base == BaseHome && r.owner != except {
			return true
		}
	}
	return false
}

// KeepBases must be called before home changes. It returns the runs of ranges whose bytes in home have to be kept, and
// under which Base, because a tracked replica has no other base. except is the device whose own bytes are being collected;
// its base is changed by Collected instead. CPU for none.
func (f *File) KeepBases(ranges []page.Range, except versions.Owner) []PageBase {
	var out []PageBase
	needs := func(s *state) bool { return s.keeps(except) }
	ranges = f.within(ranges)
	f.runs.scanAll(ranges, needs, func(run page.Range, s *state) { out = append(out, PageBase{run, s.freeBase()}) })
	if len(out) == 0 {
		return nil
	}
	var known *transitions
	if except == versions.CPU {
		known = &f.kept
	}
	f.changeKnown(ranges, known, func(s *state) {
		if !needs(s) {
			return
		}
		b := s.freeBase()
		for i := range s.replicas {
			r := &s.replicas[i]
			if r.tracked && r.base == BaseHome && r.owner != except {
				r.base = b
			}
		}
	})
	f.checkAll(ranges)
	return out
}

// NotKept says that what KeepBases asked for was not kept, and that home has not changed: home is the base again.
func (f *File) NotKept(bases []PageBase) {
	for _, k := range bases {
		ranges := []page.Range{k.Range}
		f.changeAll(ranges, func(s *state) {
			for i := range s.replicas {
				if r := &s.replicas[i]; r.tracked && r.base == k.Base {
					r.base = BaseHome
				}
			}
		})
		f.checkAll(ranges)
	}
}

// Collected says that home now contains what the owner released of the ranges. With agrees, home has exactly the bytes that
// were collected, and is the owner's base from now on. Otherwise somebody else's bytes are in home too; the collected
// bytes must be kept as the owner's base, and keep says under which Base. drop are bases that nobody has any more.
func (f *File) Collected(ranges []page.Range, o versions.Owner, agrees bool) (keep, drop []PageBase) {
	f.runs.scanAll(ranges, nil, func(run page.Range, s *state) {
		r := s.find(o)
		if r == nil {
			return
		}
		old := r.base
		if !agrees {
			// The old base is free to be named again only if the owner was alone in using it.
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
			// Whatever others released, the device has the same bytes.
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

// CPURead says that the kernel is about to hold the pages of rg.
func (f *File) CPURead(rg page.Range) {
	absent := false
	if rg = rg.Intersect(page.Range{End: f.runs.end()}); rg.Empty() {
		return
	}
	f.runs.scan(rg, func(_ page.Range, s *state) { absent = absent || !s.cpu })
	if absent {
		f.runs.update(rg, func(s *state) { s.cpu = true })
	}
}

// CPUWrote says that a write by a CPU program, or of the kernel's dirty pages, changed home, and that the kernel may hold
// all of rg. KeepBases came before it.
func (f *File) CPUWrote(rg page.Range) { f.CPUChanged(rg, rg) }

// CPUChanged is CPUWrote where more is known of the kernel: of rg it may hold the pages of held, and those that it held
// before. A write of a part of a page leaves the kernel with the copy it had, or none; so does the write-back of a page
// that it read before, and a hole.
func (f *File) CPUChanged(rg, held page.Range) {
	f.CPURead(rg.Intersect(held))
	rg = rg.Intersect(page.Range{End: f.runs.end()})
	if rg.Empty() {
		return
	}
	f.changeKnown([]page.Range{rg}, &f.wrote, func(s *state) {
		if len(s.replicas) == 0 {
			return
		}
		s.released = s.released.Next(versions.CPU)
		s.home = s.home.With(versions.CPU, s.released.Get(versions.CPU))
	})
	f.checkInvariants(rg)
}

// Mode says how a replica is brought up to date.
type Mode uint8

const (
	// ModeFill copies home into memory that holds nothing of the page yet.
	ModeFill Mode = iota
	// ModeCopy copies home over a replica that no program stores into.
	ModeCopy
	// ModePatch stores what changed between the base and home into a replica that programs may be storing into.
	ModePatch
)

func (m Mode) String() string { return [...]string{"fill", "copy", "patch"}[m] }

// Update is a run of pages to be brought up to date.
type Update struct {
	Range page.Range
	Mode  Mode
	// Base is where the bytes are that home is compared with, for ModePatch.
	Base Base
}

// Stale returns what has to be brought from home to owner o, after everything pending in rg was collected.
func (f *File) Stale(rg page.Range, o versions.Owner) []Update { return f.AppendStale(nil, rg, o) }

// AppendStale is Stale that appends to out, whose updates come before rg.
func (f *File) AppendStale(out []Update, rg page.Range, o versions.Owner) []Update {
	var u Update // of the pages of state last
	var last *state
	behind := func(s *state) bool { r := s.find(o); return r == nil || r.stale(s.home) }
	f.runs.scanWhere(rg, behind, func(run page.Range, s *state) {
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
		if n := len(out); n > 0 && out[n-1].Mode == u.Mode && out[n-1].Base == u.Base && out[n-1].Range.End == run.Start {
			out[n-1].Range.End = run.End
			return
		}
		u.Range = run
		out = append(out, u)
	})
	return out
}

// Behind returns the updates of rg that Stale does, of replicas whose bases are copies: when they are carried out the copies can go.
// It is right also while something is pending: then the replicas are stale again after a collect.
func (f *File) Behind(rg page.Range, o versions.Owner) (out []Update) {
	behind := func(s *state) bool {
		r := s.find(o)
		return r != nil && r.tracked && r.base.kept() && r.stale(s.home)
	}
	f.runs.scanWhere(rg.Intersect(page.Range{End: f.runs.end()}), behind, func(run page.Range, s *state) {
		out = append(out, Update{Range: run, Mode: ModePatch, Base: s.find(o).base})
	})
	return out
}

// Parts yields the parts of rg of which the File knows something, in order, in pieces of at most n pages.
func (f *File) Parts(rg page.Range, n page.Index) iter.Seq[page.Range] {
	return func(yield func(page.Range) bool) {
		rg := rg.Intersect(page.Range{End: f.runs.end()})
		for p := rg.Start; p < rg.End; p += n {
			i, there := f.runs.find(int64(p) / segmentPages)
			if i == len(f.runs.segments) {
				return
			}
			if !there {
				p = firstPage(f.runs.segments[i].number)
			}
			if p >= rg.End || !yield(page.Range{Start: p, End: min(p+n, rg.End)}) {
				return
			}
		}
	}
}

// Updated says that the replicas of o in the ranges contain home, which is their base from now on. With track, programs
// may store into them. drop are bases that nobody has any more.
func (f *File) Updated(ranges []page.Range, o versions.Owner, track bool) (drop []PageBase) {
	if len(ranges) == 0 {
		return nil
	}
	drop = f.changeNoting(ranges, func(s *state) Base { return s.ownBase(o) }, nil, func(s *state) {
		r := s.add(o)
		r.v = r.v.Join(s.home)
		r.base = BaseHome
		r.tracked = r.tracked || track
	})
	f.checkAll(ranges)
	return drop
}

// checkAll is checkInvariants of several ranges.
func (f *File) checkAll(ranges []page.Range) {
	for _, rg := range ranges {
		f.checkInvariants(rg)
	}
}

// droppedBases returns the bases in ranges that only o has.
func (f *File) droppedBases(ranges []page.Range, o versions.Owner) (drop []PageBase) {
	sole := func(s *state) bool { return s.ownBase(o) != BaseHome }
	f.runs.scanAll(f.within(ranges), sole, func(run page.Range, s *state) { drop = append(drop, PageBase{run, s.ownBase(o)}) })
	return drop
}

// ownBase returns the base that o has and nobody else, BaseHome if there is none.
func (s *state) ownBase(o versions.Owner) Base {
	if r := s.find(o); r != nil && r.tracked && r.base.kept() && s.soleUser(r.base, o) {
		return r.base
	}
	return BaseHome
}

// Hollow says that programs may store into the memory of o for those pages of rg that o does not hold, and that it has zeros there.
// Such a replica is tracked and stale, with BaseZero.
func (f *File) Hollow(rg page.Range, o versions.Owner) {
	f.change(rg, func(s *state) {
		if s.find(o) == nil {
			s.addHollow(o)
		}
	})
	f.checkInvariants(rg)
}

// TrackedBy returns the runs of rg that o tracks with a base that wanted reports true of.
func (f *File) TrackedBy(rg page.Range, o versions.Owner, wanted func(b Base) bool) (out []page.Range) {
	has := func(s *state) bool { r := s.find(o); return r != nil && r.tracked && wanted(r.base) }
	f.runs.scanWhere(rg.Intersect(page.Range{End: f.runs.end()}), has, func(run page.Range, _ *state) {
		out = page.AppendRange(out, run)
	})
	return out
}

// Untracked returns the runs of rg that o holds without being tracked, after an acquire of them.
func (f *File) Untracked(rg page.Range, o versions.Owner) (out []page.Range) {
	untracked := func(s *state) bool { r := s.find(o); return r != nil && !r.tracked }
	f.runs.scanWhere(rg.Intersect(page.Range{End: f.runs.end()}), untracked, func(run page.Range, _ *state) {
		out = page.AppendRange(out, run)
	})
	return out
}

// Current is a run of pages that a device holds as home has them, but for what programs there stored since the last
// agreement and nobody released.
type Current struct {
	Range page.Range
	// Tracked says that programs may have stored into the pages. Into others none did.
	Tracked bool
}

// Current returns the runs of rg that o holds with every release that home has, no other, and home as their base: what
// another device may be given instead of home.
func (f *File) Current(rg page.Range, o versions.Owner) (out []Current) {
	f.runs.scan(rg.Intersect(page.Range{End: f.runs.end()}), func(run page.Range, s *state) {
		r := s.find(o)
		if r == nil || r.base != BaseHome || r.stale(s.home) || r.pending(s.home) {
			return
		}
		if n := len(out); n > 0 && out[n-1].Tracked == r.tracked && out[n-1].Range.End == run.Start {
			out[n-1].Range.End = run.End
			return
		}
		out = append(out, Current{run, r.tracked})
	})
	return out
}

// Bases returns the bases of the pages of rg that o holds and tracks, but for hollow ones.
func (f *File) Bases(rg page.Range, o versions.Owner) (out []PageBase) {
	tracked := func(s *state) bool { r := s.find(o); return r != nil && r.tracked && r.base != BaseZero }
	f.runs.scanWhere(rg.Intersect(page.Range{End: f.runs.end()}), tracked, func(run page.Range, s *state) {
		out = append(out, PageBase{run, s.find(o).base})
	})
	return out
}

// Tracked returns the runs of rg that o holds and tracks.
func (f *File) Tracked(rg page.Range, o versions.Owner) (out []page.Range) {
	f.runs.scan(rg.Intersect(page.Range{End: f.runs.end()}), func(run page.Range, s *state) {
		if r := s.find(o); r != nil && r.tracked {
			out = page.AppendRange(out, run)
		}
	})
	return out
}

// Track says that programs may store into the replicas of o in rg from now on. They must not be stale: home is their
// base. Pages that o does not hold, or holds stale, are left alone.
func (f *File) Track(rg page.Range, o versions.Owner) {
	f.change(rg.Intersect(page.Range{End: f.runs.end()}), func(s *state) {
		if r := s.find(o); r != nil && !r.tracked && !r.stale(s.home) {
			r.tracked = true
		}
	})
	f.checkInvariants(rg)
}

// Untrack says that no program stores into the replicas of o in rg any more. Pages that are pending stay tracked: their
// bases are still needed. Of hollow ones o holds nothing then.
func (f *File) Untrack(rg page.Range, o versions.Owner) (drop []PageBase) {
	// Callers do this again and again, and mostly there is nothing to be done: then nothing has changed.
	var ranges []page.Range
	idle := func(s *state) bool { r := s.find(o); return r != nil && r.tracked && !r.pending(s.home) }
	f.runs.scanWhere(rg.Intersect(page.Range{End: f.runs.end()}), idle, func(run page.Range, s *state) {
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

// Evicted says that o holds nothing of rg any more. What was pending is lost, so it is collected before.
func (f *File) Evicted(rg page.Range, o versions.Owner) (drop []PageBase) {
	drop = f.droppedBases([]page.Range{rg}, o)
	f.change(rg.Intersect(page.Range{End: f.runs.end()}), func(s *state) { s.remove(o) })
	if f.runs.trim(); f.End() == 0 {
		f.kept, f.wrote = nil, nil
	}
	f.checkInvariants(rg)
	return drop
}

// keptBases returns every base of rg that is a copy, each once.
func (f *File) keptBases(rg page.Range) (kept []PageBase) {
	f.runs.scan(rg.Intersect(page.Range{End: f.runs.end()}), func(run page.Range, s *state) {
		seen := map[Base]bool{}
		for i := range s.replicas {
			if r := &s.replicas[i]; r.tracked && r.base.kept() && !seen[r.base] {
				seen[r.base] = true
				kept = append(kept, PageBase{run, r.base})
			}
		}
	})
	return kept
}

// Truncated says that home has no bytes in the pages from n on, and that the caller zeroed them in every replica: they
// all agree, and whatever was pending of them is void. drop are the bases that nobody has any more.
func (f *File) Truncated(n page.Index) (drop []PageBase) {
	rg := page.Range{Start: n, End: f.runs.end()}
	if rg.Empty() {
		return nil
	}
	drop = f.keptBases(rg)
	f.change(rg, func(s *state) {
		s.home = s.released
		for i := range s.replicas {
			s.replicas[i].v, s.replicas[i].base = s.released, BaseHome
		}
	})
	f.checkInvariants(rg)
	return drop
}

// BaseOf returns the base of o's tracked replica of page p, and whether there is one.
func (f *File) BaseOf(p page.Index, o versions.Owner) (b Base, tracked bool) {
	f.runs.scan(page.Range{Start: p, End: p + 1}, func(_ page.Range, s *state) {
		if r := s.find(o); r != nil && r.tracked {
			b, tracked = r.base, true
		}
	})
	return b, tracked
}

// Held reports whether any device holds a page of rg.
func (f *File) Held(rg page.Range) (held bool) {
	f.runs.scan(rg.Intersect(page.Range{End: f.runs.end()}), func(_ page.Range, s *state) {
		held = held || len(s.replicas) > 0
	})
	return held
}

// Holders returns the owners that hold a page of rg, ascending.
func (f *File) Holders(rg page.Range) []versions.Owner {
	var seen [256]bool
	f.runs.scan(rg.Intersect(page.Range{End: f.runs.end()}), func(_ page.Range, s *state) {
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

// Counts is what an owner holds of a file, in pages.
type Counts struct {
	Resident, Tracked, Stale, Pending int64
}

// Count counts the pages that owner o holds, but for hollow ones into which nothing was released.
func (f *File) Count(o versions.Owner) (c Counts) {
	f.runs.scan(page.Range{End: f.runs.end()}, func(run page.Range, s *state) {
		r := s.find(o)
		if r == nil || r.base == BaseZero && !r.pending(s.home) {
			return
		}
		c.Resident += run.Len()
		if r.tracked {
			c.Tracked += run.Len()
		}
		if r.stale(s.home) {
			c.Stale += run.Len()
		}
		if r.pending(s.home) {
			c.Pending += run.Len()
		}
	})
	return c
}

// End returns a page past every page that a device holds.
func (f *File) End() page.Index { return f.runs.end() }

// Memory returns the bytes that the versions and states of all pages take.
func (f *File) Memory() int64 { return f.runs.memory() + f.kept.memory() + f.wrote.memory() }

// Tables is about that, and costs nothing.
func (f *File) Tables() int64 { return f.runs.tables + int64(cap(f.runs.segments))*int64(segmentSize) }

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
	f.runs.scan(page.Range{End: f.runs.end()}, func(run page.Range, s *state) {
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
