package gpubackend

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestCopyOfRows compares copies of rows, whole and in parts, with a byte-by-byte model.
func TestCopyOfRows(t *testing.T) {
	for seed := range uint64(300) {
		rnd := rand.New(rand.NewPCG(seed, 0))
		row := 1 + rnd.Int64N(20)
		stride := row + rnd.Int64N(3)*rnd.Int64N(30)
		host := make([]byte, rnd.Int64N(12)*stride+1+rnd.Int64N(row))
		var want []byte
		for i := range host {
			if host[i] = byte(rnd.Uint32()); int64(i)%stride < row {
				want = append(want, host[i])
			}
		}
		c := Copy{Off: 1000, Host: host, Row: row, Stride: stride}
		require.NoError(t, c.Check(), "seed %d", seed)
		require.EqualValues(t, len(want), c.Bytes(), "seed %d", seed)
		check := func(list []Copy, off int64, want []byte) {
			t.Helper()
			var got []byte
			for _, c := range list {
				require.NoError(t, c.Check(), "seed %d", seed)
				for at, b := range c.Rows() {
					require.NotEmpty(t, b)
					require.EqualValues(t, off+int64(len(got)), at, "seed %d", seed)
					got = append(got, b...)
				}
			}
			require.Equal(t, want, got, "seed %d", seed)
		}
		check([]Copy{c}, 1000, want)
		for range 10 {
			from := rnd.IntN(len(want))
			n := 1 + rnd.IntN(len(want)-from)
			parts := c.AppendPart(nil, int64(from), int64(n))
			require.LessOrEqual(t, len(parts), 2)
			check(parts, 1000+int64(from), want[from:from+n])
		}
	}
	plain := Copy{Off: 5, Host: []byte("plain")}
	require.Equal(t, []Copy{{Off: 6, Host: []byte("lai")}}, plain.AppendPart(nil, 1, 3))
	huge := Copy{Host: make([]byte, 5), Row: 5, Stride: math.MaxInt64}
	require.NoError(t, huge.Check())
	require.EqualValues(t, 5, huge.Bytes())
	for range huge.Rows() {
	}
	for _, bad := range []Copy{{Row: -1}, {Row: 2, Stride: 1}, {Row: 1}, {Stride: 1}, {Row: 1, Stride: -1},
		{Host: make([]byte, 3), Row: 2, Stride: 3}, {Host: make([]byte, 4), Row: 3, Stride: math.MinInt64}} {
		require.ErrorIs(t, bad.Check(), ErrRange, "%v", bad)
	}
}
