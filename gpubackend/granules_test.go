package gpubackend

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// TestDifferingGranules compares them with what a byte by byte comparison says.
func TestDifferingGranules(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 6))
	a, b := make([]byte, page.Size), make([]byte, page.Size)
	for i := range a {
		a[i] = byte(rnd.Uint32())
	}
	for _, n := range []int{0, 1, 2, 17, 300, 800, page.Size} {
		copy(b, a)
		want := map[int]bool{}
		for _, i := range rnd.Perm(page.Size)[:n] {
			b[i] ^= byte(1 + rnd.IntN(255))
			want[i/GranuleSize*GranuleSize] = true
		}
		for _, i := range []int{0, page.Size - 1, 1023, 1024}[:min(n, 4)] {
			b[i] = a[i] + 1
			want[i/GranuleSize*GranuleSize] = true
		}
		g := Differing(a, b)
		require.Equal(t, len(want), g.Count())
		last, found := -1, 0
		g.Each(func(from, to int) {
			require.Greater(t, from, last, "runs have a granule between them")
			for off := from; off < to; off += GranuleSize {
				require.True(t, want[off], "granule at %d", off)
				found++
			}
			last = to
		})
		require.Len(t, want, found)
		p := Patch{Base: a, Next: b}
		require.Equal(t, g, p.Differing())
	}
	named := Patch{Base: a, Next: b, Changed: Granules{1}}
	require.Equal(t, Granules{1}, named.Differing(), "what is named is not looked for")
}
