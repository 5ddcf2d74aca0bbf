//go:build invariants

package lrc

import (
	"fmt"
	"slices"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// plans has the open plans of a File, which are checked against each other.
type plans struct{ open []*openPlan }

// ticket identifies an open plan.
type ticket struct{ *openPlan }

// openPlan is a plan that was neither committed nor aborted.
type openPlan struct {
	kind   planKind
	owner  versions.Owner
	ranges []page.Range // of a plan that holds its pages
	ended  bool
	lost   bool // the owner lost some of the pages
}

// holds reports whether a plan of this kind has exclusive use of its pages. The others change nothing until they are
// committed, and wait for other plans first.
func (k planKind) holds() bool { return k < releasing }

func (p *openPlan) String() string {
	text := fmt.Sprintf("a plan to %v %v", p.kind, p.ranges)
	if p.owner != versions.CPU {
		text += fmt.Sprintf(" of %v", p.owner)
	}
	return text
}

func (p *openPlan) overlaps(ranges []page.Range) bool {
	return slices.ContainsFunc(p.ranges, func(a page.Range) bool { return slices.ContainsFunc(ranges, a.Overlaps) })
}

// covers reports whether all of rg is in the plan.
func (p *openPlan) covers(rg page.Range) bool {
	rest := []page.Range{rg}
	for _, mine := range p.ranges {
		var left []page.Range
		for _, r := range rest {
			left = append(left, page.Subtract([]page.Range{r}, mine)...)
		}
		rest = left
	}
	return len(rest) == 0 || len(rest) == 1 && rest[0].Empty()
}

// free panics if a page of ranges is held by a plan other than except.
func (ps *plans) free(what string, ranges []page.Range, except *openPlan) {
	for _, p := range ps.open {
		if p != except && p.kind.holds() && p.overlaps(ranges) {
			panic(fmt.Sprintf("lrc: %s of %v while %v is open", what, ranges, p))
		}
	}
}

// begin opens a plan.
func (ps *plans) begin(kind planKind, o versions.Owner, ranges []page.Range) ticket {
	if kind.holds() {
		ps.free("a plan to "+kind.String(), ranges, nil)
	}
	p := &openPlan{kind: kind, owner: o, ranges: slices.Clone(ranges)}
	ps.open = append(ps.open, p)
	return ticket{p}
}

// check panics if a plan is not open, or lost pages.
func (ps *plans) check(t ticket) {
	switch {
	case t.openPlan == nil:
		panic("lrc: a plan that never began is carried out")
	case t.ended:
		panic(fmt.Sprintf("lrc: %v has ended", t.openPlan))
	}
}

// widen extends a plan to all of rg.
func (ps *plans) widen(t ticket, rg page.Range) {
	ps.check(t)
	ps.free("a wider plan", []page.Range{rg}, t.openPlan)
	t.ranges = []page.Range{rg}
}

// advance records that ranges of a plan were carried out.
func (ps *plans) advance(t ticket, ranges []page.Range) {
	ps.check(t)
	if t.lost {
		panic(fmt.Sprintf("lrc: %v is carried out after its pages were lost", t.openPlan))
	}
	for i, rg := range ranges {
		if i > 0 && ranges[i-1].End > rg.Start {
			panic(fmt.Sprintf("lrc: the ranges %v are out of order", ranges))
		}
		if !rg.Empty() && !t.covers(rg) {
			panic(fmt.Sprintf("lrc: %v does not cover %v", t.openPlan, rg))
		}
	}
	if !t.kind.holds() {
		ps.free("the commit of a plan to "+t.kind.String(), ranges, nil)
	}
}

// end closes a plan.
func (ps *plans) end(t ticket) {
	ps.check(t)
	t.ended = true
	ps.open = slices.DeleteFunc(ps.open, func(p *openPlan) bool { return p == t.openPlan })
}

// event checks a change that needs no plan.
func (ps *plans) event(what string, ranges []page.Range) { ps.free(what, ranges, nil) }

// lose records that o lost its pages of rg. Plans of other owners there stay valid.
func (ps *plans) lose(rg page.Range, o versions.Owner) {
	for _, p := range ps.open {
		p.lost = p.lost || p.kind.holds() && p.owner == o && p.overlaps([]page.Range{rg})
	}
}

// CheckEnded panics if a plan is open. Releases may be draining.
func (f *File) CheckEnded() {
	for _, p := range f.plans.open {
		if p.kind != draining {
			panic(fmt.Sprintf("lrc: %v was neither committed nor aborted", p))
		}
	}
}

// mustBePending panics if runs are not what Pending returned: pages that one owner released, ascending, with their
// bases.
func (f *File) mustBePending(runs []Pending) {
	for i, p := range runs {
		if p.Owner != runs[0].Owner || i > 0 && runs[i-1].Range.End > p.Range.Start {
			panic(fmt.Sprintf("lrc: the runs %v cannot be collected together", runs))
		}
		f.pages.scan([]page.Range{p.Range}, nil, func(run page.Range, s *state) {
			if r := s.firstPending(); r == nil || r.owner != p.Owner || r.base != p.Base {
				panic(fmt.Sprintf("lrc: %v of %v is not what is to be collected next: %v", run, p.Owner, s))
			}
		})
	}
}

// mustNotPend panics if rg has bytes that have to come home first.
func (f *File) mustNotPend(what string, rg page.Range) {
	if p := f.Pending(rg, false); len(p) > 0 {
		panic(fmt.Sprintf("lrc: %s of %v before %v is collected", what, rg, p))
	}
}

// mustNotPendOf panics if home lacks a release of o in rg.
func (f *File) mustNotPendOf(what string, rg page.Range, o versions.Owner) {
	if p := f.PendingOf(rg, o); len(p) > 0 {
		panic(fmt.Sprintf("lrc: %s of %v before %v is collected", what, rg, p))
	}
}

// mustBeStale panics if a page of ranges is up to date on o.
func (f *File) mustBeStale(ranges []page.Range, o versions.Owner) {
	f.pages.scan(ranges, nil, func(run page.Range, s *state) {
		if r := s.find(o); r != nil && !r.stale(s.home) {
			panic(fmt.Sprintf("lrc: %v of %v was up to date: %v", run, o, s))
		}
	})
}

// mustBeUntracked panics unless o agrees with home in all pages of ranges and no program stores there.
func (f *File) mustBeUntracked(ranges []page.Range, o versions.Owner) {
	f.pages.scan(ranges, nil, func(run page.Range, s *state) {
		if r := s.find(o); r == nil || r.tracked || r.stale(s.home) {
			panic(fmt.Sprintf("lrc: %v of %v cannot be tracked: %v", run, o, s))
		}
	})
}
