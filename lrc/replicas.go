package lrc

import (
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// TrackedBy returns the runs of rg that o tracks with a base for which wanted returns true.
func (f *File) TrackedBy(rg page.Range, o versions.Owner, wanted func(b Base) bool) (out []page.Range) {
	has := func(s *state) bool { r := s.find(o); return r != nil && r.tracked && wanted(r.base) }
	f.scan(rg, has, func(run page.Range, _ *state) {
		out = page.AppendRange(out, run)
	})
	return out
}

// Current is a run of pages in which a device agrees with home, except for stores that were not released.
type Current struct {
	Range page.Range
	// Tracked is true if programs may have stored into the pages.
	Tracked bool
}

// Current returns the runs of rg that o holds with exactly the releases that home has, and with home as their base.
// Another device may be filled from them instead of from home.
func (f *File) Current(rg page.Range, o versions.Owner) (out []Current) {
	f.scan(rg, nil, func(run page.Range, s *state) {
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

// Bases returns the bases of the pages of rg that o tracks, except hollow ones.
func (f *File) Bases(rg page.Range, o versions.Owner) (out []PageBase) {
	tracked := func(s *state) bool { r := s.find(o); return r != nil && r.tracked && r.base != BaseZero }
	f.scan(rg, tracked, func(run page.Range, s *state) {
		out = append(out, PageBase{run, s.find(o).base})
	})
	return out
}

// Tracked returns the runs of rg that o tracks.
func (f *File) Tracked(rg page.Range, o versions.Owner) (out []page.Range) {
	f.scan(rg, nil, func(run page.Range, s *state) {
		if r := s.find(o); r != nil && r.tracked {
			out = page.AppendRange(out, run)
		}
	})
	return out
}
