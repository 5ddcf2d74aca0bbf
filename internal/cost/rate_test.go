package cost

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestRate: the displayed rate is one that was measured, however small the reads are. The bandwidth estimate of a place
// that serves only single pages may be anything.
func TestRate(t *testing.T) {
	require.Zero(t, newPlace(time.Millisecond, 1e9).Estimate().Rate)
	rnd := rand.New(rand.NewPCG(1, 2))
	p := newPlace(10*time.Microsecond, 1e9)
	for range 100 {
		p.read(rnd, 4096)
	}
	require.InEpsilon(t, 4096/14.1e-6, p.Estimate().Rate, 0.05)
	for range 100 {
		p.End(4096, p.Begin(4096), time.Nanosecond, false, began) // a coarse clock
	}
	require.LessOrEqual(t, p.Estimate().Rate, 4096/(least*1e-9))
}
