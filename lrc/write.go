package lrc

import (
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// WritePlan is a change of home by the CPU: a write by a program, a write of the kernel's dirty pages, or a hole. The
// executor
//
//  1. collects Collect and begins again, unless it is empty: the writer may have seen what was released;
//  2. reads the pages of Keep from home and keeps them as these bases;
//  3. changes home;
//  4. commits, even if the change failed half way; or aborts if home has not changed.
//
// It has exclusive use of its pages: until it ends, no other plan may hold one of them.
type WritePlan struct {
	f       *File
	ticket  ticket
	rg      page.Range
	Collect []Pending
	Keep    []PageBase
}

// BeginWrite plans a change of home in rg. If the plan has something to Collect, it has not begun and must not be
// ended.
func (f *File) BeginWrite(rg page.Range) (p WritePlan) {
	if collect := f.Pending(rg, false); len(collect) > 0 {
		return WritePlan{Collect: collect}
	}
	ranges := []page.Range{rg}
	p = WritePlan{f: f, rg: rg, ticket: f.plans.begin(writing, versions.CPU, ranges)}
	p.Keep = f.keepBases(ranges, versions.CPU)
	return p
}

// Commit records that home changed. Every replica is behind from now on. Of the plan's pages, the kernel may hold those
// of held and those that it held before. A write of a part of a page does not change whether the kernel holds it, nor
// does the write-back of a page that it read before, nor a hole.
func (p WritePlan) Commit(held page.Range) {
	p.f.plans.advance(p.ticket, nil)
	p.f.cpuChanged(p.rg, held)
	p.f.plans.end(p.ticket)
}

// Abort records that home has not changed. Home is the base of all pages of Keep again, and no replica uses their
// copies.
func (p WritePlan) Abort() {
	p.f.plans.end(p.ticket)
	p.f.notKept(p.Keep)
}

// Keeps returns the runs of ranges that a plan to change home would have in Keep.
func (f *File) Keeps(ranges []page.Range, except versions.Owner) (out []page.Range) {
	keeps := func(s *state) bool { return s.keeps(except) }
	f.pages.scan(f.within(ranges), keeps, func(run page.Range, _ *state) { out = page.AppendRange(out, run) })
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

// keepBases is called before home changes. It returns the runs of ranges whose bytes in home have to be kept, and under
// which Base: home is the only base of a tracked replica there. except is the device whose own bytes are being
// collected, because collected changes its base; CPU means none.
func (f *File) keepBases(ranges []page.Range, except versions.Owner) []PageBase {
	var out []PageBase
	needs := func(s *state) bool { return s.keeps(except) }
	ranges = f.within(ranges)
	f.pages.scan(ranges, needs, func(run page.Range, s *state) { out = append(out, PageBase{run, s.freeBase()}) })
	if len(out) == 0 {
		return nil
	}
	kind := unremembered
	if except == versions.CPU {
		kind = keptForCPU
	}
	f.changeNoting(ranges, nil, kind, func(s *state) {
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

// notKept undoes keepBases. Home has not changed.
func (f *File) notKept(bases []PageBase) {
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

// cpuChanged records that home has bytes of rg that no replica has.
func (f *File) cpuChanged(rg, held page.Range) {
	f.kernelHolds(rg.Intersect(held))
	rg = f.clip(rg)
	if rg.Empty() {
		return
	}
	f.changeNoting([]page.Range{rg}, nil, writtenByCPU, func(s *state) {
		if len(s.replicas) == 0 {
			return
		}
		s.released = s.released.Next(versions.CPU)
		s.home = s.home.With(versions.CPU, s.released.Get(versions.CPU))
	})
	f.checkInvariants(rg)
}
