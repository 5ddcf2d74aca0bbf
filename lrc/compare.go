package lrc

import (
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// ComparePlan makes up for changes of home that nobody announced. The executor
//
//  1. finds out in which pages of Compare home has other bytes than the replicas agreed on, and what these were;
//  2. commits, and keeps the former bytes; or aborts, and the pages are as much in doubt as before.
//
// It has its pages for itself.
type ComparePlan struct {
	f      *File
	ticket ticket
	rg     page.Range
	// Compare are the runs that home is the base of, for some replica. Of the others home may as well have changed:
	// nobody compares them with it.
	Compare []page.Range
}

// BeginCompare plans to find out what became of rg.
func (f *File) BeginCompare(rg page.Range) ComparePlan {
	ranges := []page.Range{rg}
	ticket := f.plans.begin(comparing, versions.CPU, ranges)
	return ComparePlan{f: f, rg: rg, ticket: ticket, Compare: f.Keeps(ranges, versions.CPU)}
}

// Commit says that of Compare, home changed in the pages of changed, and no others. keep are those of which the former
// bytes have to be kept, and under which base.
func (p ComparePlan) Commit(changed []page.Range) (keep []PageBase) {
	p.f.plans.advance(p.ticket, changed)
	p.f.plans.end(p.ticket)
	keep = p.f.keepBases(changed, versions.CPU)
	moved := []page.Range{p.rg}
	for _, rg := range p.Compare {
		moved = page.Subtract(moved, rg)
	}
	for _, rg := range append(moved, changed...) {
		p.f.cpuChanged(rg, page.Range{})
	}
	return keep
}

// Abort leaves everything as it was.
func (p ComparePlan) Abort() { p.f.plans.end(p.ticket) }
