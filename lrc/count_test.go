package lrc

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

// TestCountPartsAgainstPages counts the parts of files, and each page of a twin.
func TestCountPartsAgainstPages(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var f File
		o := versions.GPU(0)
		for _, rg := range scatteredRanges(t, 400, 40) {
			f.pages.update([]page.Range{rg}, func(*state) Base { return BaseHome }, unremembered,
				func(s *state) { s.add(o) })
		}
		width := page.Index(rapid.IntRange(1, 70).Draw(t, "width"))
		parts := make([]Counts, rapid.IntRange(1, 12).Draw(t, "parts"))
		f.CountParts(o, width, parts)
		for i, got := range parts {
			var want Counts
			first := page.Index(i) * width
			end := first + width
			if i == len(parts)-1 {
				end = max(end, f.End())
			}
			f.pages.scan([]page.Range{{Start: first, End: end}}, nil, func(run page.Range, s *state) {
				if s.find(o) != nil {
					want.Resident += run.Len()
					want.Clean += run.Len()
				}
			})
			require.Equal(t, want, got, "part %d", i)
		}
		require.Equal(t, f.Count(o).Resident, f.Count(o).Clean)
	})
}
