package lrc

import (
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// EvictPlan takes pages from an owner. The executor
//
//  1. aborts, and tries again later, if pages are Draining: what the kernel writes of them may still have to be merged;
//  2. collects what is pending of the pages;
//  3. commits, and then gives the memory back.
//
// It holds no pages until it is committed.
type EvictPlan struct {
	f      *File
	ticket ticket
	rg     page.Range
	owner  versions.Owner
	// Draining is true if a release of some of the pages has not returned.
	Draining bool
	// Lossy is set by the executor if pending bytes cannot or need not come home: the device is lost, or the file's
	// last name is gone. Then there is nothing to wait for, and nothing to collect.
	Lossy bool
}

// BeginEvict plans to take all pages of rg from o.
func (f *File) BeginEvict(rg page.Range, o versions.Owner) EvictPlan {
	ticket := f.plans.begin(evicting, o, []page.Range{rg})
	return EvictPlan{f: f, ticket: ticket, rg: rg, owner: o, Draining: len(f.Draining(rg)) > 0}
}

// Commit records that the owner holds none of the pages any more. No replica uses the bases in drop any more. A Lossy
// plan may be committed at any time, even while other plans are open. Plans of other owners stay valid. The executor
// must abort plans of the same owner.
func (p EvictPlan) Commit() (drop []PageBase) {
	if p.Lossy {
		p.f.plans.lose(p.rg, p.owner)
	} else {
		p.f.plans.advance(p.ticket, []page.Range{p.rg})
		p.f.mustNotPendOf("an eviction", p.rg, p.owner)
	}
	p.f.plans.end(p.ticket)
	return p.f.evicted(p.rg, p.owner)
}

// Abort leaves everything as it was.
func (p EvictPlan) Abort() { p.f.plans.end(p.ticket) }

// evicted records that o holds no page of rg any more. Pending bytes are lost.
func (f *File) evicted(rg page.Range, o versions.Owner) (drop []PageBase) {
	drop = f.droppedBases([]page.Range{rg}, o)
	f.change(f.clip(rg), func(s *state) { s.remove(o) })
	f.pages.trim()
	f.checkInvariants(rg)
	return drop
}

// droppedBases returns the bases in ranges that only o uses.
func (f *File) droppedBases(ranges []page.Range, o versions.Owner) (drop []PageBase) {
	sole := func(s *state) bool { return s.ownBase(o) != BaseHome }
	f.pages.scan(f.within(ranges), sole, func(run page.Range, s *state) {
		drop = append(drop, PageBase{run, s.ownBase(o)})
	})
	return drop
}
