package page

import (
	"math"
	"math/big"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
)

// wide is a range in arithmetic that cannot overflow.
type wide struct{ start, end *big.Int }

func number(n int64) *big.Int { return big.NewInt(n) }

func (w wide) len() *big.Int {
	if n := new(big.Int).Sub(w.end, w.start); n.Sign() > 0 {
		return n
	}
	return number(0)
}

// clampWide returns the valid file offset closest to n.
func clampWide(n *big.Int) int64 {
	switch {
	case n.Sign() < 0:
		return 0
	case !n.IsInt64():
		return math.MaxInt64
	}
	return n.Int64()
}

// checkSpan compares all results for n bytes at off with those of wide arithmetic.
func checkSpan(t *testing.T, off, n int64) {
	t.Helper()
	sum := number(off)
	if n > 0 {
		sum = new(big.Int).Add(sum, number(n))
	}
	want := Bytes{clampWide(number(off)), clampWide(sum)}
	b := Span(off, n)
	assert.Equal(t, want, b, "Span(%d, %d)", off, n)
	assert.Equal(t, b.Len(), clampWide(wide{number(b.Off), number(b.End)}.len()))
	assert.Equal(t, b.Len() == 0, b.Empty())

	up := func(n int64) *big.Int { return new(big.Int).Rsh(new(big.Int).Add(number(n), number(Size-1)), Shift) }
	down := func(n int64) *big.Int { return new(big.Int).Rsh(number(n), Shift) }
	pages := wide{down(b.Off), down(b.Off)}
	if !b.Empty() {
		pages.end = up(b.End)
	}
	r := b.Pages()
	assert.Equal(t, Range{Index(pages.start.Int64()), Index(pages.end.Int64())}, r, "pages of %v", b)
	assert.Equal(t, r, Covering(off, n))
	whole := wide{up(b.Off), down(b.End)}
	assert.Equal(t, whole.len().Int64(), b.Whole().Len(), "whole pages of %v", b)
	if !b.Whole().Empty() {
		assert.Equal(t, whole.start.Int64(), int64(b.Whole().Start))
	}
	for _, r := range []Range{r, b.Whole(), {b.Pages().Start, math.MaxInt64}} {
		checkRange(t, r)
	}
	assert.Equal(t, b, b.Intersect(r.Span()).orAt(b), "a range lies in its pages: %v", b)
}

// orAt returns b, or at if both are empty: empty ranges may differ.
func (b Bytes) orAt(at Bytes) Bytes {
	if b.Empty() && at.Empty() {
		return at
	}
	return b
}

func checkRange(t *testing.T, r Range) {
	t.Helper()
	at := func(i Index) int64 { return clampWide(new(big.Int).Lsh(number(int64(i)), Shift)) }
	pages := wide{number(int64(r.Start)), number(int64(r.End))}
	assert.Equal(t, clampWide(new(big.Int).Lsh(pages.len(), Shift)), r.Bytes(), "bytes of %v", r)
	assert.Equal(t, Bytes{at(r.Start), at(r.End)}, r.Span(), "bytes of %v", r)
	assert.Equal(t, at(r.Start), r.Offset())
}

// edges are the numbers at which arithmetic may go wrong.
func edges() (n []int64) {
	for _, at := range []int64{0, Size, 1 << 31, 1 << 32, 1 << 44, 1 << 51, 1 << 62, math.MaxInt64 - Size,
		math.MaxInt64} {
		for d := int64(-2); d <= 2; d++ {
			if sum := at + d; at < math.MaxInt64 || d <= 0 {
				n = append(n, sum)
			}
		}
	}
	return append(n, math.MinInt64, math.MinInt64+1, -Size)
}

func TestRangesOfBytesDoNotOverflow(t *testing.T) {
	for _, off := range edges() {
		for _, n := range edges() {
			checkSpan(t, off, n)
		}
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	any := func() int64 { return int64(rng.Uint64() >> rng.IntN(64)) }
	for range 20_000 {
		checkSpan(t, any(), any())
	}
}

func TestRangesOfBytes(t *testing.T) {
	assert.Equal(t, Bytes{5, 8}, Span(5, 3))
	assert.Equal(t, Bytes{math.MaxInt64 - 1, math.MaxInt64}, Span(math.MaxInt64-1, 7))
	assert.Equal(t, Bytes{0, 2}, Span(-3, 5))
	assert.Equal(t, Range{0, 1 << 51}, From(0).Pages())
	assert.Equal(t, Range{1<<51 - 1, 1 << 51}, From(math.MaxInt64-1).Pages())
	assert.Equal(t, Bytes{4, 6}, Bytes{0, 6}.Intersect(Bytes{4, 9}))
	assert.Equal(t, Bytes{}, Bytes{0, 4}.Intersect(Bytes{4, 9}))
	assert.Equal(t, Range{1, 2}, Span(1, 2*Size).Whole())
	assert.EqualValues(t, math.MaxInt64, Clamp(math.MaxUint64))
	assert.EqualValues(t, 7, Clamp(7))
}

func FuzzSpan(f *testing.F) {
	for _, off := range edges() {
		f.Add(off, int64(math.MaxInt64)-off)
		f.Add(off, int64(Size))
	}
	f.Fuzz(checkSpan)
}
