//go:build invariants

package lrc

import (
	"fmt"

	"github.com/gaiafs/gaiafs/internal/page"
)

// checkInvariants panics if a page of rg breaks an invariant of state, if the tables of its segments are not
// consistent, or if a drain is not sane.
func (f *File) checkInvariants(rg page.Range) {
	f.pages.check(rg)
	f.scan(rg, nil, func(run page.Range, s *state) {
		if fault := s.fault(); fault != "" {
			panic(fmt.Sprintf("lrc: pages %v: %s: %v", run, fault, s))
		}
	})
	seen := make(map[DrainID]bool)
	for _, d := range f.drain {
		if seen[d.id] || d.id > f.last {
			panic(fmt.Sprintf("lrc: drain %d was never begun, or twice", d.id))
		}
		seen[d.id] = true
		if len(d.ranges) == 0 {
			panic(fmt.Sprintf("lrc: drain %d has no pages", d.id))
		}
		for i, r := range d.ranges {
			if r.Empty() || i > 0 && d.ranges[i-1].End >= r.Start {
				panic(fmt.Sprintf("lrc: drain %d has the ranges %v", d.id, d.ranges))
			}
		}
	}
}

// checkDropped panics if the kernel may hold a page of ranges that lacks bytes whose release has drained: such a page
// must be dropped again before that release returns.
func (f *File) checkDropped(ranges []page.Range) {
	for _, rg := range ranges {
		f.scan(rg, nil, func(run page.Range, s *state) {
			if !s.cpu || s.firstPending() == nil {
				return
			}
			if left := f.subtractDraining(run, true); len(left) > 0 {
				panic(fmt.Sprintf("lrc: the kernel may hold pages %v without what was released: %v", left, s))
			}
		})
	}
}

// fault names the invariant that state s breaks, "" for none.
func (s *state) fault() string {
	if !s.released.Dominates(s.home) {
		return "home is ahead of what was released"
	}
	if len(s.replicas) == 0 && (s.released.Len() > 0 || s.home.Len() > 0) {
		return "nobody holds the page, and it has versions"
	}
	for i := range s.replicas {
		r := &s.replicas[i]
		switch {
		case r.owner == 0:
			return "the CPU has a replica"
		case i > 0 && s.replicas[i-1].owner >= r.owner:
			return "the replicas are out of order"
		case !s.released.Dominates(r.v):
			return "a replica is ahead of what was released"
		case r.v.Get(r.owner) != s.released.Get(r.owner):
			return "a replica lacks a release of its own"
		case !s.home.Dominates(r.v.With(r.owner, 0)):
			return "a replica has a release of another that home does not have"
		case r.tracked && r.base == BaseHome && r.stale(s.home):
			return "a tracked replica is stale, and has no base but home"
		case r.tracked && r.base == BaseZero && !r.stale(s.home):
			return "a hollow replica is not stale"
		case !r.tracked && r.pending(s.home):
			return "a pending replica is not tracked"
		case !r.tracked && r.base != BaseHome:
			return "a replica that is not tracked has a base"
		}
	}
	return ""
}

// check panics if a segment of rg breaks the rules of type segment, or could be smaller.
func (rs *runs) check(rg page.Range) {
	tables := int64(0)
	for i := range rs.segments {
		tables += rs.segments[i].memory()
	}
	if tables != rs.tables {
		panic(fmt.Sprintf("lrc: the tables take %d bytes, not %d", tables, rs.tables))
	}
	first, _ := rs.find(int64(max(rg.Start, 0)) / segmentPages)
	for i := first; i < len(rs.segments) && firstPage(rs.segments[i].number) < rg.End; i++ {
		g := &rs.segments[i]
		if i > 0 && rs.segments[i-1].number >= g.number {
			panic(fmt.Sprintf("lrc: segment %d comes after segment %d", g.number, rs.segments[i-1].number))
		}
		if fault := g.fault(); fault != "" {
			panic(fmt.Sprintf("lrc: segment %d: %s", g.number, fault))
		}
	}
}

func (g *segment) fault() string {
	if g.index == nil {
		if g.uniform == string(initial) || len(g.blob) > 0 || len(g.ends) > 0 || len(g.pages) > 0 {
			return "agrees, and has a table"
		}
		return ""
	}
	if g.uniform != "" || len(g.index) != segmentPages || len(g.ends) < 2 || len(g.pages) != len(g.ends) {
		return "has a table, and agrees"
	}
	at := uint32(0)
	seen := make(map[string]bool)
	for k, end := range g.ends {
		if end <= at || int(end) > len(g.blob) {
			return "the table is torn"
		}
		at = end
		enc := string(g.encoding(uint16(k)))
		if seen[enc] {
			return "a state is there twice"
		}
		seen[enc] = true
	}
	if int(at) != len(g.blob) {
		return "the table has a tail"
	}
	pages := make([]uint16, len(g.ends))
	for _, k := range g.index {
		if int(k) >= len(g.ends) {
			return "a page has no state"
		}
		pages[k]++
	}
	used := 0
	for k, n := range pages {
		if n != g.pages[k] {
			return "the pages of a state are miscounted"
		}
		if n > 0 {
			used++
		}
	}
	if used < 2 || len(pages)-used > garbage(used) {
		return "too many states have no page"
	}
	return ""
}
