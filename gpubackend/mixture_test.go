package gpubackend

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// TestMixture swaps bytes at random. The digest is always that of the bytes, and each byte comes from one of the pages.
func TestMixture(t *testing.T) {
	k, rnd := testKey(t, 1), rand.New(rand.NewPCG(1, 2))
	a, b := bytes.Repeat([]byte{0xff}, page.Size), make([]byte, page.Size)
	_, _ = (&splitMix{2}).Read(b)
	m, want, other := k.Mix(a, b), bytes.Clone(a), bytes.Clone(b)
	require.Equal(t, k.Sum(a), m.Sum())
	for range 2000 {
		from := rnd.IntN(page.Size + 1)
		to := min(from+rnd.IntN(100), page.Size)
		m.Swap(from, to)
		for i := from; i < to; i++ {
			want[i], other[i] = other[i], want[i]
		}
		require.Equal(t, k.Sum(want), m.Sum())
	}
	require.Equal(t, want, m.Bytes())
	m.Swap(0, page.Size)
	require.Equal(t, other, m.Bytes())
	require.Equal(t, k.Sum(other), m.Sum())
	require.Panics(t, func() { k.Mix(a[1:], b) })
	require.Panics(t, func() { k.Mix(a, b[1:]) })
}

// BenchmarkMixture is the cost of one swap of a few bytes with the digest.
func BenchmarkMixture(b *testing.B) {
	p := make([]byte, page.Size)
	m := testKey(b, 1).Mix(p, bytes.Repeat([]byte{1}, page.Size))
	for i := 0; b.Loop(); i++ {
		at := i * 40 % (page.Size - 4)
		m.Swap(at, at+4)
		m.Sum()
	}
}
