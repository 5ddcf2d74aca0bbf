package view

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// ofRanks calls run with the states of four ranks' views of a file of 4 GiB, each of which has every fourth row, and
// with a function that returns them to the start. Rows begin at pages, 8 bytes after them, or anywhere; the stride is a
// multiple of a page, of half a page or of 8 bytes.
func ofRanks(b *testing.B, run func(b *testing.B, states []*State, all page.Range, restart func())) {
	const size = 4 << 30
	for _, x := range []struct{ row, off, more int64 }{
		{4 << 10, 0, 0}, {4 << 10, 8, 0}, {2560, 8, 0}, {4 << 10, 8, 24}, {16 << 10, 140, 0},
	} {
		b.Run(fmt.Sprintf("rows=%d/stride=%d/off=%d", x.row, 4*x.row+x.more, x.off), func(b *testing.B) {
			var files []*File
			for r := range int64(4) {
				l, err := New(1, []Segment{{Offset: x.off + r*x.row, Length: x.row, Stride: 4*x.row + x.more,
					Count: size/(4*x.row+x.more) - 1}}, 256)
				require.NoError(b, err)
				files = append(files, l.File(0))
			}
			states := make([]*State, len(files))
			restart := func() {
				for i, f := range files {
					states[i] = NewState(f)
				}
			}
			restart()
			b.ReportAllocs()
			run(b, states, page.Range{End: page.Count(size)}, restart)
		})
	}
}

// BenchmarkTake takes all pages of one view.
func BenchmarkTake(b *testing.B) {
	ofRanks(b, func(b *testing.B, states []*State, all page.Range, _ func()) {
		for i := 0; b.Loop(); i++ {
			s := states[i%len(states)]
			s.Take(all, 1<<20, 1<<19, 4, 1)
			s.Arrived(all)
			s.Mark(all)
		}
	})
}

// BenchmarkClaim claims the pages of one view in 2 MiB of the file.
func BenchmarkClaim(b *testing.B) {
	ofRanks(b, func(b *testing.B, states []*State, all page.Range, restart func()) {
		const piece = 512
		at, i := all.End, len(states)
		for b.Loop() {
			if i++; i >= len(states) {
				i, at = 0, at+piece
			}
			if at >= all.End {
				b.StopTimer()
				restart()
				for _, s := range states {
					s.Take(all, 1<<20, 1<<19, 4, 1)
				}
				at = 0
				b.StartTimer()
			}
			states[i].Claim(page.Range{Start: at, End: at + piece}, 4)
		}
	})
}
