package view

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gaiafs/gaiafs/internal/page"
)

// drawSegment returns a segment near the page base. Its stride is a multiple of a page, of a part of one, or neither.
func drawSegment(t *rapid.T, base page.Index) Segment {
	one := func(name string, of ...int64) int64 { return rapid.SampledFrom(of).Draw(t, name) }
	pages := one("pages", 0, 0, 1, 63, 64, 300)
	stride := one("stride", 1, 2, 3, 4, 7, 16, 40, 64, 65, 96, 128, 130) * page.Size
	stride += one("more", 0, 0, 2048, 1024, 24, 1)
	gap := one("gap", 0, 4095, 4096, 5000, 12288, stride/2, stride*3/4, stride-1)
	return Segment{
		Offset: base.Offset() + pages*page.Size + one("offset", 0, 8, 2048, 4095),
		Length: stride - min(gap, stride-1),
		Stride: stride,
		Count:  one("count", 1, 2, 20, 500, 1<<14),
	}
}

// TestPagesOfRows: the pages of rows that repeat are the same as those of each row.
func TestPagesOfRows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		first := section(rapid.SampledFrom([]int64{0, 3, 1 << 35}).Draw(t, "section")).Start
		var segments []Segment
		for range rapid.IntRange(1, 4).Draw(t, "segments") {
			segments = append(segments, drawSegment(t, first))
		}
		l, err := New(1, segments, 1)
		require.NoError(t, err)
		words := rapid.SampledFrom([]int{1, 2, 9, 100, sectionPages / 64}).Draw(t, "words")
		rg := page.Range{Start: first, End: first + page.Index(64*words)}
		rg.Start += page.Index(rapid.IntRange(0, int(rg.Len())-1).Draw(t, "before"))
		rg.End -= page.Index(rapid.IntRange(0, int(rg.Len())-1).Draw(t, "after"))

		got, want := make(bitmap, words), make(bitmap, words)
		there := page.Range{Start: first + 7, End: first + 13}
		got.add(there, first)
		l.File(0).addTo(got, rg, first)
		want.add(there, first)
		for _, s := range segments {
			for k := range s.Count {
				pages := page.Span(s.Offset+k*s.Stride, s.Length).Pages()
				for p := max(pages.Start, rg.Start); p < min(pages.End, rg.End); p++ {
					want[(p-first)/64] |= 1 << ((p - first) % 64)
				}
			}
		}
		require.Equal(t, want, got)
	})
}

// drawBitmap returns words with runs of pages and gaps, up to most long.
func drawBitmap(t *rapid.T, words, most int, name string) bitmap {
	s := make(bitmap, words)
	lengths := rapid.SliceOfN(rapid.IntRange(0, most), 8*words, 64*words).Draw(t, name)
	at := 0
	for i, n := range lengths {
		for range n {
			if i%2 == 1 && at < 64*words {
				s[at/64] |= 1 << (at % 64)
			}
			at++
		}
	}
	return s
}

// TestBridges: ranges are joined as if they were looked at page by page.
func TestBridges(t *testing.T) {
	const first = page.Index(640)
	rapid.Check(t, func(t *rapid.T) {
		words := rapid.IntRange(1, 12).Draw(t, "words")
		set := drawBitmap(t, words, rapid.SampledFrom([]int{2, 5, 70}).Draw(t, "most"), "set")
		other := make(bitmap, words)
		if rapid.Bool().Draw(t, "with others") {
			other = drawBitmap(t, words, rapid.SampledFrom([]int{2, 70, 500}).Draw(t, "most others"), "others")
			other.minus(set)
		}
		gap := rapid.OneOf(rapid.Int64Range(0, 5), rapid.Int64Range(0, 64)).Draw(t, "gap")
		var before []page.Range
		if n := page.Index(rapid.IntRange(-1, 3).Draw(t, "distance")); n >= 0 { // to a range of an earlier section
			before = []page.Range{{Start: 600, End: first - n}}
		}

		want := slices.Clone(before)
		crossed := false // a page of other, since the last page of set
		for p := first; p < first+page.Index(64*words); p++ {
			in := func(s bitmap) bool { return s[(p-first)/64]>>((p-first)%64)&1 != 0 }
			crossed = crossed || in(other)
			if !in(set) {
				continue
			}
			last := len(want) - 1
			if last >= 0 && (want[last].End == p ||
				int64(p-want[last].End) <= gap && want[last].End >= first && !crossed) {
				want[last].End = p + 1
			} else {
				want = append(want, page.Range{Start: p, End: p + 1})
			}
			crossed = false
		}
		require.Equal(t, want, set.appendBridged(before, other, gap, first))
	})
}
