package prefetch

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// reads makes n adjacent accesses of size pages, and returns what else was asked for.
func reads(d *Device, at page.Index, n int, size page.Index, p Pattern) (asked []page.Range, end page.Index) {
	for range n {
		asked = d.Access(page.Range{Start: at, End: at + size}, p, asked)
		at += size
	}
	return asked, at
}

func TestDeviceAsksForNothingTwice(t *testing.T) {
	d := NewDevice()
	d.Resize(1 << 16)
	asked, _ := reads(d, 0, 1<<12, 16, Unknown)
	seen := make(set)
	for _, a := range asked {
		require.Empty(t, seen.in(a))
		require.LessOrEqual(t, a.End, page.Index(1<<16))
		seen.add(a)
	}
	require.Greater(t, len(seen.in(page.Range{End: 1 << 16})), 0)
	require.Empty(t, d.ahead.in(page.Range{End: endless}), "everything was read")
	require.Zero(t, d.owed)
}

// TestDeviceKeepsToAdvice: sequential windows begin with 512 KiB and end with 16 MiB; random has none.
func TestDeviceKeepsToAdvice(t *testing.T) {
	d := NewDevice()
	asked, end := reads(d, 0, 1, 16, Sequential)
	require.Equal(t, []page.Range{{Start: 16, End: 16 + MinWindow}}, asked)
	asked, end = reads(d, end, 4000, 16, Sequential)
	require.LessOrEqual(t, asked[len(asked)-1].End, end+MaxWindow)
	require.Greater(t, asked[len(asked)-1].End, end+MaxWindow/4)
	d = NewDevice()
	asked, _ = reads(d, 0, 1000, 16, Random)
	require.Empty(t, asked)
}

// TestDeviceLearnsFromWhatWasUnused: pages that were fetched and dropped unread make windows smaller; pages that were
// read and dropped do not.
func TestDeviceLearnsFromWhatWasUnused(t *testing.T) {
	window := func(d *Device) int64 { return d.streams.all[0].window }
	d := NewDevice()
	_, end := reads(d, 0, 1000, 16, Sequential)
	before := window(d)
	d.Unused(page.Range{End: end})
	require.Equal(t, before, window(d))
	d.Unused(page.Range{Start: end, End: end + 2*MaxWindow})
	require.Less(t, window(d), before)
	require.Empty(t, d.ahead.in(page.Range{End: endless}))
	asked, _ := reads(d, end, 200, 16, Sequential)
	require.NotEmpty(t, asked, "it goes on")
}

// TestDeviceReadsLittleInVain: for any accesses, the amount that is fetched and never used is bounded.
func TestDeviceReadsLittleInVain(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 1))
	d := NewDevice()
	asked := int64(0)
	for range 3000 {
		at := page.Index(rnd.Int64N(1 << 22))
		for k := range page.Index(3) { // looks like the beginning of a stream
			for _, a := range d.Access(page.Range{Start: at + k, End: at + k + 1}, Unknown, nil) {
				asked += a.Len()
			}
		}
	}
	require.LessOrEqual(t, d.owed, firstTrust+d.used/trustShare)
	require.Less(t, asked, int64(9000+2*firstTrust))
	d.Resize(0)
	require.Zero(t, d.owed)
}

var _ Predictor = (*Device)(nil)
