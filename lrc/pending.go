package lrc

import (
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// Pending is a run of pages that a device released and that home lacks.
type Pending struct {
	Range page.Range
	Owner versions.Owner
	// Base names the bytes that the owner's bytes are compared with.
	Base Base
}

// Pending returns, for each page of rg with uncollected releases, the release of the lowest owner. Collecting what it
// returns, until it returns nothing, merges the versions in ascending order of owner, so that the highest wins.
// Draining pages are left out, unless the kernel asks for the pages in order to hold them (entering) or got them by
// CPUReadMerged.
func (f *File) Pending(rg page.Range, entering bool) []Pending {
	var out []Pending
	pending := func(s *state) bool { return s.firstPending() != nil }
	f.scan(rg, pending, func(run page.Range, s *state) {
		r := s.firstPending()
		add := func(run page.Range) {
			if n := len(out); n > 0 && out[n-1].Owner == r.owner && out[n-1].Base == r.base &&
				out[n-1].Range.End == run.Start {
				out[n-1].Range.End = run.End
				return
			}
			out = append(out, Pending{run, r.owner, r.base})
		}
		if entering || len(f.drain) == 0 {
			add(run)
			return
		}
		for _, part := range f.subtractDraining(run, false) {
			add(part)
		}
	})
	return out
}

// AllPending returns every uncollected release of page p, in ascending order of owner, by the same rule as Pending.
func (f *File) AllPending(p page.Index, entering bool) (out []Pending) {
	rg := page.Range{Start: p, End: p + 1}
	if !entering && len(f.subtractDraining(rg, false)) == 0 {
		return nil
	}
	f.pages.scan([]page.Range{rg}, nil, func(_ page.Range, s *state) {
		for i := range s.replicas {
			if r := &s.replicas[i]; r.pending(s.home) {
				out = append(out, Pending{rg, r.owner, r.base})
			}
		}
	})
	return out
}

// PendingOf returns the runs of rg that owner o released and that home lacks, including draining ones.
func (f *File) PendingOf(rg page.Range, o versions.Owner) (out []Pending) {
	pending := func(s *state) bool { r := s.find(o); return r != nil && r.pending(s.home) }
	f.scan(rg, pending, func(run page.Range, s *state) {
		out = append(out, Pending{run, o, s.find(o).base})
	})
	return out
}
