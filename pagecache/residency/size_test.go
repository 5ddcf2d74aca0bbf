package residency

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

const mib, gib = 1 << 20, 1 << 30

// TestLargeFilesHaveFewExtents: each extent costs a client time.
func TestLargeFilesHaveFewExtents(t *testing.T) {
	for _, x := range []struct{ memory, file, want int64 }{
		{141 * gib, 1, 2 * mib},
		{141 * gib, 64 * mib, 2 * mib},
		{141 * gib, 65 * mib, 4 * mib},
		{141 * gib, 10 * gib, 512 * mib},
		{141 * gib, 100 * gib, 4 * gib},
		{103 * gib, 101 * gib, 2 * gib}, // with extents of 4 GiB it would not fit
		{100 * gib, 1000 * gib, 512 * mib},
		{16 * mib, 16 * mib, 2 * mib},
		{64 * mib, 1 * gib, 2 * mib},
	} {
		info := gpubackend.Info{Memory: x.memory, Granularity: 2 * mib}
		got := Size(info, x.file)
		require.Equal(t, x.want, got, "%+v", x)
		if x.file <= x.memory {
			require.LessOrEqual(t, (x.file+got-1)/got, int64(52))
			require.LessOrEqual(t, (x.file+got-1)/got*got, x.memory)
		}
	}
}

// file has a file's extents, without memory.
type file struct {
	info gpubackend.Info
	has  []*Extent
	size int64
}

// mapTo maps the whole file after it grew to n bytes, and returns how many extents it has.
func (f *file) mapTo(t *testing.T, n int64) int {
	f.size = n
	rg := page.Range{End: page.Count(n)}
	pieces, bytes := plan(f.has, rg, Size(f.info, n), f.info.Granularity, f.info.Memory)
	require.LessOrEqual(t, bytes, f.info.Memory)
	f.has = f.has[:0:0]
	for p := page.Index(0); len(pieces) > 0; pieces = pieces[1:] {
		x := pieces[0]
		require.Equal(t, p, x.pages.Start, "each extent begins where the one before it ends")
		p = x.pages.End
		if x.x == nil {
			require.Zero(t, x.bytes()&(x.bytes()-1))
			require.Zero(t, x.pages.Start.Offset()%x.bytes(), "aligned")
			x.x = &Extent{pages: x.pages}
		}
		f.has = append(f.has, x.x)
	}
	require.GreaterOrEqual(t, page.Index(f.has[len(f.has)-1].pages.End), rg.End)
	return len(f.has)
}

// TestGrownFilesHaveFewExtents: extents from when the file was small stay, and add few to the total.
func TestGrownFilesHaveFewExtents(t *testing.T) {
	h200 := gpubackend.Info{Memory: 141 * gib, Granularity: 2 * mib}
	f := file{info: h200}
	require.Equal(t, 1, f.mapTo(t, 4<<10))
	require.Equal(t, 1+10+31, f.mapTo(t, 64*gib), "the first one, what fills the first 2 GiB up, and the rest")

	f = file{info: h200}
	for n := int64(4 << 10); n <= 128*gib; n *= 2 {
		require.LessOrEqual(t, f.mapTo(t, n), 32+16*12, "grown and mapped again and again")
	}
	f = file{info: h200}
	for n := int64(mib); n <= 16*gib; n += 61 * mib {
		f.mapTo(t, n)
	}
	require.LessOrEqual(t, len(f.has), 32+17*9)
}

// TestPlans checks plans for random ranges, with some extents in place.
func TestPlans(t *testing.T) {
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 7))
		var there []*Extent
		for p := page.Index(rnd.IntN(4)) * 512; p < 1<<18; {
			n := page.Index(512) << rnd.IntN(6)
			if p = (p + n - 1) &^ (n - 1); rnd.IntN(2) == 0 {
				there = append(there, &Extent{pages: page.Range{Start: p, End: p + n}})
			}
			p += n
		}
		size := int64(2*mib) << rnd.IntN(7)
		start := page.Index(rnd.IntN(1 << 18))
		rg := page.Range{Start: start, End: start + 1 + page.Index(rnd.IntN(1<<14))}
		var near []*Extent
		for _, x := range there {
			if x.pages.Overlaps(Aligned(rg, size)) {
				near = append(near, x)
			}
		}
		pieces, bytes := plan(near, rg, size, 2*mib, 1<<62)
		require.True(t, pieces[0].pages.Contains(rg.Start), "seed %d", seed)
		require.True(t, pieces[len(pieces)-1].pages.Contains(rg.End-1), "seed %d", seed)
		for i, x := range pieces {
			bytes -= x.bytes()
			require.True(t, i == 0 || pieces[i-1].pages.End == x.pages.Start, "seed %d", seed)
			require.True(t, x.x != nil || x.bytes() <= size, "seed %d", seed)
			for _, y := range there {
				require.True(t, x.x == y || !x.pages.Overlaps(y.pages), "seed %d: %v is there, and %v is planned", seed,
					y.pages, x.pages)
			}
		}
		require.Zero(t, bytes, "seed %d", seed)
	}
}

// TestViewsHaveFewExtents: and take at most one granule more than their bytes.
func TestViewsHaveFewExtents(t *testing.T) {
	info := gpubackend.Info{Memory: 141 * gib, Granularity: 2 * mib}
	for _, x := range []struct{ view, extents int64 }{
		{1, 1}, {2*mib + 1, 1}, {128 * mib, 1}, {230 * mib, 2}, {gib, 8}, {gib + 1, 5}, {100 * gib, 7},
	} {
		rg := page.Range{End: page.Count(x.view)}
		pieces, bytes := plan(nil, rg, ViewSize(info, x.view), info.Granularity, info.Memory)
		bytes -= cut(pieces, rg, info.Granularity)
		require.Len(t, pieces, int(x.extents), "%d bytes", x.view)
		require.Equal(t, (x.view+2*mib-1)/(2*mib)*2*mib, bytes, "%d bytes", x.view)
		for i := range pieces {
			bytes -= pieces[i].bytes()
		}
		require.Zero(t, bytes, "%d bytes", x.view)
	}
	require.EqualValues(t, 4*mib, ViewSize(gpubackend.Info{Memory: 256 * mib, Granularity: 2 * mib}, 17*mib))
}

// TestCutLeavesExtents: only the place for a new extent is cut.
func TestCutLeavesExtents(t *testing.T) {
	pages, part := page.Range{End: 4 * 512}, page.Range{End: 100}
	there := []piece{{&Extent{pages: pages}, pages}}
	require.Zero(t, cut(there, part, 2*mib))
	require.Equal(t, pages, there[0].pages)
	place := []piece{{nil, pages}}
	require.EqualValues(t, 6*mib, cut(place, part, 2*mib))
	require.EqualValues(t, 512, place[0].pages.End)
}
