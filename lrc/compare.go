package lrc

import (
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// ComparePlan accounts for changes of home that nobody announced. The executor
//
//  1. finds the pages of Compare in which home differs from the bytes that the replicas agreed on, and these bytes;
//  2. commits, and keeps the former bytes; or aborts, and the pages are as much in doubt as before.
//
// It has exclusive use of its pages.
type ComparePlan struct {
	f      *File
	ticket ticket
	rg     page.Range
	// Compare has the runs in which home is the base of some replica. In all other pages home may have changed too, but
	// no replica is compared with it.
	Compare []page.Range
}

// BeginCompare plans to find out what changed in rg.
func (f *File) BeginCompare(rg page.Range) ComparePlan {
	ranges := []page.Range{rg}
	ticket := f.plans.begin(comparing, versions.CPU, ranges)
	return ComparePlan{f: f, rg: rg, ticket: ticket, Compare: f.Keeps(ranges, versions.CPU)}
}

// Commit records that of the pages of Compare, home changed exactly in those of changed. The caller must keep the
// former bytes of the pages in keep, under the given bases.
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
