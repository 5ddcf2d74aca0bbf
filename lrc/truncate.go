package lrc

import (
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// TruncatePlan makes home shorter. The executor
//
//  1. cuts home;
//  2. commits, or aborts if home was not cut;
//  3. zeroes the pages in every replica, and what lies behind the new end in the page that it is in.
//
// It has all pages from the first one on for itself.
type TruncatePlan struct {
	f      *File
	ticket ticket
	n      page.Index
}

// BeginTruncate plans that home has no bytes in the pages from n on.
func (f *File) BeginTruncate(n page.Index) TruncatePlan {
	ticket := f.plans.begin(truncating, versions.CPU, []page.Range{{Start: n, End: maxPage}})
	return TruncatePlan{f: f, n: n, ticket: ticket}
}

// Commit says that home was cut. Whatever was pending of the pages is void, and all replicas agree. drop are the bases
// that nobody has any more.
func (p TruncatePlan) Commit() (drop []PageBase) {
	p.f.plans.advance(p.ticket, nil)
	p.f.plans.end(p.ticket)
	return p.f.truncated(p.n)
}

// Abort leaves everything as it was.
func (p TruncatePlan) Abort() { p.f.plans.end(p.ticket) }

// truncated says that home has no bytes in the pages from n on, and that replicas have zeros there: they
// all agree, and whatever was pending of them is void. drop are the bases that nobody has any more.
func (f *File) truncated(n page.Index) (drop []PageBase) {
	rg := page.Range{Start: n, End: f.pages.end()}
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

// keptBases returns every base of rg that is a copy, each once.
func (f *File) keptBases(rg page.Range) (kept []PageBase) {
	f.scan(rg, nil, func(run page.Range, s *state) {
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
