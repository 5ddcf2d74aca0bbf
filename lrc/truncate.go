package lrc

import (
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// TruncatePlan makes home shorter. The executor
//
//  1. truncates home;
//  2. commits, or aborts if home was not truncated;
//  3. zeroes the pages in every replica, and the bytes past the new end in the last page.
//
// It has exclusive use of all pages from the first one on.
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

// Commit records that home was truncated. Pending releases of the pages are void, and all replicas agree. No replica
// uses the bases in drop any more.
func (p TruncatePlan) Commit() (drop []PageBase) {
	p.f.plans.advance(p.ticket, nil)
	p.f.plans.end(p.ticket)
	return p.f.truncated(p.n)
}

// Abort leaves everything as it was.
func (p TruncatePlan) Abort() { p.f.plans.end(p.ticket) }

// truncated records that home has no bytes in the pages from n on, and that replicas have zeros there. They all agree,
// and pending releases are void. No replica uses the bases in drop any more.
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

// keptBases returns every base copy of rg once.
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
