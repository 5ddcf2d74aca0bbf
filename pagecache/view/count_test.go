package view

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gaiafs/gaiafs/internal/page"
)

// TestCount: the pages of each part are counted as if they were looked at one by one, whatever is stale, coming or
// gone.
func TestCount(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		base := section(rapid.SampledFrom([]int64{0, 2}).Draw(t, "section")).Start
		var segments []Segment
		for range rapid.IntRange(1, 3).Draw(t, "segments") {
			s := drawSegment(t, base)
			s.Count = min(s.Count, 700)
			segments = append(segments, s)
		}
		l, err := New(1, segments, 1)
		require.NoError(t, err)
		f := l.File(0)
		s := NewState(f)
		end := f.Span().Pages().End
		some := func(name string) page.Range {
			from := page.Index(rapid.Int64Range(0, int64(end)).Draw(t, name))
			return page.Range{Start: from, End: from + page.Index(rapid.Int64Range(0, int64(end)).Draw(t, name+" length"))}
		}
		all := page.Range{End: end}
		s.Take(all, 1<<40, 1<<40, 0, 1)
		for range rapid.IntRange(0, 2).Draw(t, "arrivals") {
			s.Arrived(some("arrived"))
		}
		s.Mark(some("marked"))
		gone := []page.Range{some("gone"), some("also gone")}
		width := page.Index(rapid.Int64Range(1, int64(end)+1).Draw(t, "width"))
		got := make([]Counts, rapid.IntRange(1, int((end+width-1)/width)+1).Draw(t, "parts"))
		want := make([]Counts, len(got))
		there, _, _, _ := s.Split([]page.Range{all}, 0)
		fresh := make(map[page.Index]bool)
		for _, rg := range there {
			for p := rg.Start; p < rg.End; p++ {
				fresh[p] = true
			}
		}
		for p := range end {
			pages := page.Range{Start: p, End: p + 1}
			if !f.Has(pages.Span()) || pages.Overlaps(gone[0]) || pages.Overlaps(gone[1]) || int(p/width) >= len(got) {
				continue
			}
			want[p/width].Pages++
			if !fresh[p] {
				want[p/width].Stale++
			}
		}
		s.Count(width, gone, got)
		require.Equal(t, want, got)
	})
}
