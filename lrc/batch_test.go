package lrc

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// scatteredRanges draws ascending ranges of up to longest pages that do not overlap, below end.
func scatteredRanges(t *rapid.T, end, longest int) (ranges []page.Range) {
	apart := rapid.SampledFrom([]int{1, 20, 200}).Draw(t, "apart")
	for p := rapid.IntRange(0, apart).Draw(t, "first"); p < end; {
		n := rapid.IntRange(1, longest).Draw(t, "pages")
		ranges = append(ranges, page.Range{Start: page.Index(p), End: page.Index(min(p+n, end))})
		p += n + rapid.IntRange(0, apart).Draw(t, "gap")
	}
	return ranges
}

// TestUpdateAllAgainstPages updates the states of many ranges at once, and those of a twin page by page. Segments get
// more states than a byte has values, and states that no page has any more.
func TestUpdateAllAgainstPages(t *testing.T) {
	o := versions.GPU(0)
	rapid.Check(t, func(t *rapid.T) {
		var rs, twin runs
		note := func(s *state) Base {
			if r := s.find(o); r != nil {
				return r.base
			}
			return BaseHome
		}
		each := func(ranges []page.Range, fn func(s *state)) (noted []PageBase) {
			for _, rg := range ranges {
				for p := rg.Start; p < rg.End; p++ {
					noted = append(noted, twin.update([]page.Range{{Start: p, End: p + 1}}, note, unremembered, fn)...)
				}
			}
			return noted
		}
		for range rapid.IntRange(1, 12).Draw(t, "updates") {
			ranges := scatteredRanges(t, twinPages, rapid.SampledFrom([]int{1, 3, 700}).Draw(t, "longest"))
			var fn func(s *state)
			switch rapid.IntRange(0, 4).Draw(t, "update") {
			case 0:
				fn = func(s *state) { s.add(o) }
			case 1:
				fn = func(s *state) {
					r := s.add(o)
					r.base, r.tracked = s.freeBase(), true
				}
			case 2:
				fn = func(s *state) { s.remove(o) }
			case 3: // all pages differ
				fn = func(s *state) { s.add(o) }
				for i := range page.Index(3 * segmentPages / 2) {
					one := []page.Range{{Start: i, End: i + 1}}
					n := versions.Version(i + 1)
					diverge := func(s *state) {
						r := s.add(o)
						r.tracked = true
						r.v = r.v.With(o, n)
						s.released = s.released.With(o, n)
					}
					rs.update(one, nil, unremembered, diverge)
					twin.update(one, nil, unremembered, diverge)
				}
			default:
				fn = func(s *state) {
					s.add(versions.GPU(1))
					s.released = s.released.Next(versions.CPU)
					s.home = s.home.With(versions.CPU, s.released.Get(versions.CPU))
				}
			}
			got, want := make(answers), make(answers)
			got.bases("noted", rs.update(ranges, note, unremembered, fn))
			want.bases("noted", each(ranges, fn))
			require.Equal(t, want, got)
			rs.check(page.Range{End: twinPages})
		}
		text := func(rs *runs, want func(s *state) bool) (pages [twinPages]string) {
			rs.scan([]page.Range{{End: twinPages}}, want, func(run page.Range, s *state) {
				for p := run.Start; p < run.End; p++ {
					require.Empty(t, pages[p], "page %d is in two runs", p)
					pages[p] = s.String()
				}
			})
			return pages
		}
		all := text(&twin, nil)
		require.Equal(t, all, text(&rs, nil))
		for name, want := range map[string]func(s *state) bool{
			"held":  func(s *state) bool { return s.find(o) != nil },
			"stale": func(s *state) bool { r := s.find(o); return r != nil && r.stale(s.home) },
			"noted": func(s *state) bool { return note(s) != BaseHome },
			"other": func(s *state) bool { return s.find(o) == nil },
		} {
			found := text(&rs, want)
			twin.scan([]page.Range{{End: twinPages}}, nil, func(run page.Range, s *state) {
				for p := run.Start; p < run.End; p++ {
					require.Equal(t, want(s), found[p] != "", "page %d, %s", p, name)
				}
			})
		}
	})
}

// TestAppendStale: appendStale appends the result of Stale, and keeps the existing elements.
func TestAppendStale(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var f File
		o := versions.GPU(0)
		f.updated(scatteredRanges(t, twinPages, 500), o, false)
		f.updated(scatteredRanges(t, twinPages, 500), o, true)
		changed := scatteredRanges(t, int(f.End()), 3)
		f.keepBases(changed, versions.CPU)
		for _, rg := range changed {
			f.cpuChanged(rg, rg)
		}
		before := Update{Range: page.Range{Start: -2, End: -1}, Mode: ModePatch, Base: 7}
		whole := page.Range{End: twinPages}
		got := f.appendStale([]Update{before}, whole, o)
		require.Equal(t, before, got[0])
		require.Equal(t, f.Stale(whole, o), got[1:])
		for _, u := range got[1:] {
			for p := u.Range.Start; p < u.Range.End; p++ {
				one := page.Range{Start: p, End: p + 1}
				require.Equal(t, []Update{{one, u.Mode, u.Base}}, f.Stale(one, o))
			}
		}
	})
}
