package lrc

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// twinPages is a few segments and a part of one.
const twinPages = 3*segmentPages + 40

// TestRunsAgainstPages applies events to the ranges of one storage, and page by page to one state per page.
func TestRunsAgainstPages(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var rs runs
		pages := make([]*state, twinPages)
		for i := range pages {
			pages[i] = &state{cpu: true}
		}
		edge := rapid.OneOf(rapid.IntRange(0, twinPages), rapid.SampledFrom([]int{
			0, 1, segmentPages - 1, segmentPages, segmentPages + 1, 2 * segmentPages, 3 * segmentPages, twinPages,
		}))
		for range rapid.IntRange(1, 40).Draw(t, "events") {
			a, b := edge.Draw(t, "from"), edge.Draw(t, "to")
			rg := page.Range{Start: page.Index(min(a, b)), End: page.Index(max(a, b))}
			o := versions.GPU(rapid.IntRange(0, 3).Draw(t, "device"))
			var event func(s *state)
			switch rapid.IntRange(0, 6).Draw(t, "event") {
			case 0, 1:
				event = func(s *state) { s.add(o) }
			case 2:
				event = func(s *state) {
					if r := s.find(o); r != nil {
						r.tracked = true
						r.v = r.v.Next(o)
						s.released = s.released.With(o, r.v.Get(o))
					}
				}
			case 3:
				event = func(s *state) { s.remove(o) }
			case 4:
				event = func(s *state) { s.cpu = !s.cpu }
			case 5:
				event = func(s *state) {
					if r := s.find(o); r != nil && r.tracked {
						r.base = s.freeBase()
					}
				}
			default:
				event = func(s *state) { *s = state{cpu: true} }
			}
			rs.update([]page.Range{rg}, nil, unremembered, event)
			for p := rg.Start; p < rg.End; p++ {
				event(pages[p])
			}
			rs.trim()
		}
		at := page.Index(0)
		rs.scan([]page.Range{{End: twinPages}}, nil, func(run page.Range, s *state) {
			require.Equal(t, at, run.Start, "the runs leave a hole, or overlap")
			require.False(t, run.Empty())
			for p := run.Start; p < run.End; p++ {
				if want := pages[p].String(); s.String() != want {
					t.Fatalf("page %d: %v, want %s", p, s, want)
				}
			}
			at = run.End
		})
		require.Equal(t, page.Index(twinPages), at)
		// Wanted states are found, however many other pages are skipped.
		o := versions.GPU(rapid.IntRange(0, 3).Draw(t, "looked for"))
		a, b := edge.Draw(t, "from"), edge.Draw(t, "to")
		rg := page.Range{Start: page.Index(min(a, b)), End: page.Index(max(a, b))}
		want := func(s *state) bool { return s.cpu && s.find(o) != nil }
		var found, all []page.Index
		rs.scan([]page.Range{rg}, want, func(run page.Range, s *state) {
			for p := run.Start; p < run.End; p++ {
				require.Equal(t, pages[p].String(), s.String())
				found = append(found, p)
			}
		})
		for p := rg.Start; p < rg.End; p++ {
			if want(pages[p]) {
				all = append(all, p)
			}
		}
		require.Equal(t, all, found)
		rs.check(page.Range{End: twinPages})
	})
}

// answers expands a File's answers into an answer for each page, so that different cuts of runs make no difference.
type answers map[page.Index]string

func (a answers) add(rg page.Range, format string, args ...any) {
	for p := rg.Start; p < rg.End; p++ {
		a[p] += fmt.Sprintf(format+"; ", args...)
	}
}

func (a answers) bases(what string, list []PageBase) {
	for _, b := range list {
		a.add(b.Range, "%s base %d", what, b.Base)
	}
}

// twinEvent is an event for a range of pages. Its answers depend only on these pages.
type twinEvent struct {
	kind   int
	owner  versions.Owner
	agrees bool
}

func (e twinEvent) apply(f *File, ranges []page.Range, a answers) {
	each := func(fn func(rg page.Range)) {
		for _, rg := range ranges {
			fn(rg)
		}
	}
	switch e.kind {
	case 0:
		a.bases("drop", f.updated(ranges, e.owner, e.agrees))
	case 1:
		each(func(rg page.Range) { f.track(rg, e.owner) })
	case 2:
		drops, id := f.release(ranges, e.owner)
		for _, d := range drops {
			a.add(d, "kernel drops")
		}
		f.drained(id)
	case 3:
		e.collect(f, ranges, a)
	case 4:
		a.bases("keep", f.keepBases(ranges, versions.CPU))
		each(func(rg page.Range) { f.cpuChanged(rg, rg) })
	case 5:
		each(func(rg page.Range) {
			for _, c := range f.Current(rg, e.owner) {
				a.add(c.Range, "current, tracked %v", c.Tracked)
			}
			for _, u := range f.Stale(rg, e.owner) {
				a.add(u.Range, "%v base %d", u.Mode, u.Base)
			}
		})
		a.bases("drop", f.updated(ranges, e.owner, e.agrees))
	case 6:
		each(func(rg page.Range) { a.bases("drop", f.Untrack(rg, e.owner)) })
	case 7:
		each(func(rg page.Range) { a.bases("drop", f.evicted(rg, e.owner)) })
	case 8:
		each(func(rg page.Range) {
			for _, run := range f.TrackedBy(rg, e.owner, func(b Base) bool { return b == BaseHome }) {
				a.add(run, "based on home")
			}
		})
	case 9:
		each(f.kernelHolds)
	case 10:
		each(func(rg page.Range) { f.Hollow(rg, e.owner) })
	}
}

// collect collects everything pending in the ranges: all runs of one owner with one kind of base at once.
func (e twinEvent) collect(f *File, ranges []page.Range, a answers) {
	for {
		type group struct {
			owner versions.Owner
			home  bool
		}
		groups := make(map[group][]page.Range)
		for _, rg := range ranges {
			for _, c := range f.Pending(rg, e.agrees) {
				a.add(c.Range, "pending %v base %d", c.Owner, c.Base)
				g := group{c.Owner, c.Base == BaseHome}
				groups[g] = append(groups[g], c.Range)
			}
		}
		if len(groups) == 0 {
			return
		}
		for g, runs := range groups {
			a.bases("keep", f.keepBases(runs, g.owner))
			keep, drop := f.collected(runs, g.owner, g.home || e.agrees)
			a.bases("keep own", keep)
			a.bases("drop", drop)
		}
	}
}

// collectFirst reports whether pending pages have to come home before the event.
func (e twinEvent) collectFirst() bool {
	switch e.kind {
	case 0, 4, 5, 7, 9:
		return true
	}
	return false
}

// TestFileAgainstPages drives one File with ranges of pages, and a separate File for each page. They must agree on
// every page.
func TestFileAgainstPages(t *testing.T) {
	const spread = 173 // the pages of the test are spread over a few segments
	const count = 8
	rapid.Check(t, func(t *rapid.T) {
		var whole File
		var single [count]File
		for range rapid.IntRange(1, 50).Draw(t, "events") {
			e := twinEvent{
				kind:   rapid.IntRange(0, 10).Draw(t, "event"),
				owner:  versions.GPU(rapid.IntRange(0, 3).Draw(t, "device")),
				agrees: rapid.Bool().Draw(t, "flag"),
			}
			from := rapid.IntRange(0, count-1).Draw(t, "from")
			to := rapid.IntRange(from+1, count).Draw(t, "to")
			ranges := []page.Range{{Start: page.Index(from * spread), End: page.Index(to * spread)}}
			if rapid.Bool().Draw(t, "scattered") { // only the pages that are looked at
				ranges = nil
				for i := from; i < to; i++ {
					p := page.Index(i * spread)
					ranges = append(ranges, page.Range{Start: p, End: p + 1},
						page.Range{Start: p + spread - 1, End: p + spread})
				}
			}
			events := []twinEvent{e}
			if e.collectFirst() {
				events = []twinEvent{{kind: 3, agrees: e.agrees}, e}
			}
			for _, e := range events {
				got, want := make(answers), make(answers)
				e.apply(&whole, ranges, got)
				for i := from; i < to; i++ {
					p := page.Index(i * spread)
					e.apply(&single[i], []page.Range{{Start: p, End: p + 1}}, want)
				}
				for p := range want {
					require.Equal(t, want[p], got[p], "page %d, event %+v", p, e)
				}
				for i := from; i < to; i++ {
					p := page.Index(i * spread)
					require.Equal(t, want[p], got[p+spread-1], "the last page of run %d, event %+v", i, e)
				}
			}
			for i := range single {
				p := page.Index(i * spread)
				require.Equal(t, at(&single[i], p), at(&whole, p), "page %d after %+v", p, e)
				require.Equal(t, at(&single[i], p), at(&whole, p+spread-1), "page %d after %+v", p+spread-1, e)
			}
		}
	})
}

// at describes page p.
func at(f *File, p page.Index) (text string) {
	f.pages.scan([]page.Range{{Start: p, End: p + 1}}, nil, func(_ page.Range, s *state) { text = s.String() })
	return text
}
