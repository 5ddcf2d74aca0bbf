package cost

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// place simulates a place with a latency, and a bandwidth for everything that is under way.
type place struct {
	*Source
	latency   time.Duration
	bandwidth float64
	noise     float64
}

func newPlace(latency time.Duration, bandwidth float64) *place {
	return &place{Source: NewSource(time.Millisecond, 1e9), latency: latency, bandwidth: bandwidth}
}

var began = time.Unix(1e9, 0)

// read is a single read with no others under way.
func (p *place) read(rnd *rand.Rand, n int64) {
	ahead := p.Begin(n)
	p.End(n, ahead, p.takes(rnd, n+ahead.Bytes), false, began)
}

func (p *place) takes(rnd *rand.Rand, n int64) time.Duration {
	t := float64(p.latency) + float64(n)/p.bandwidth*1e9
	return time.Duration(t * (1 + p.noise*(2*rnd.Float64()-1)))
}

func sizes(rnd *rand.Rand) int64 { return 4096 << rnd.IntN(9) }

// TestConverges: latency and bandwidth are found from reads of different sizes, with or without noise, whatever the
// first estimate.
func TestConverges(t *testing.T) {
	for _, want := range []place{
		{latency: 10 * time.Microsecond, bandwidth: 20e9},
		{latency: 100 * time.Microsecond, bandwidth: 3e9, noise: 0.2},
		{latency: 8 * time.Millisecond, bandwidth: 150e6, noise: 0.2},
	} {
		rnd := rand.New(rand.NewPCG(1, 2))
		want.Source = NewSource(time.Millisecond, 1e9)
		for range 2000 {
			want.read(rnd, sizes(rnd))
		}
		e := want.Estimate()
		require.InEpsilon(t, float64(want.latency), float64(e.Latency), 0.35, "%v", e)
		require.InEpsilon(t, want.bandwidth, e.Bandwidth, 0.5, "%v", e)
		require.EqualValues(t, 2000, e.Reads)
		require.Zero(t, e.Queued)
	}
}

// TestOneSize: the time of reads of one size is known after a few of them.
func TestOneSize(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	p := newPlace(90*time.Microsecond, 2e9)
	for range 20 {
		p.read(rnd, 128<<10)
	}
	require.InEpsilon(t, float64(p.takes(rnd, 128<<10)), float64(p.Time(128<<10)), 0.05)
}

// TestFollows: within a few reads, the estimate follows a disk that becomes busy, and one that becomes idle again.
func TestFollows(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 6))
	p := newPlace(100*time.Microsecond, 2e9)
	other := NewSource(time.Millisecond, 2e9)
	reads := func(faster bool) (n int) {
		for n = 0; (p.Time(4096) < other.Time(4096)) != faster; n++ {
			require.Less(t, n, 20)
			p.read(rnd, 4096)
		}
		return n
	}
	reads(true)
	p.latency = 20 * time.Millisecond
	require.Less(t, reads(false), 5)
	for range 20 {
		p.read(rnd, 4096)
	}
	p.latency = 100 * time.Microsecond
	require.Less(t, reads(true), 10)
}

// TestHiccup: one extremely slow read does not count forever.
func TestHiccup(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 8))
	p := newPlace(100*time.Microsecond, 2e9)
	for range 50 {
		p.read(rnd, 4096)
	}
	p.End(4096, p.Begin(4096), time.Hour, false, began)
	require.Less(t, p.Time(4096), time.Millisecond)
	for range 5 {
		p.read(rnd, 4096)
	}
	require.Less(t, p.Time(4096), 150*time.Microsecond)
}

// TestIdleSide: of two equal places, the one with less under way is chosen, and reads spread over both.
func TestIdleSide(t *testing.T) {
	a, b := NewSource(50*time.Microsecond, 1e9), NewSource(50*time.Microsecond, 1e9)
	var of [2]int
	for range 64 {
		from, _ := Split(a, b, 4096, 4096, 4096)
		s, i := b, 1
		if from > 0 {
			s, i = a, 0
		}
		s.Begin(4096)
		of[i]++
	}
	require.Equal(t, [2]int{32, 32}, of)
}

// TestSplit: a large read is divided so that both places end at once. A small read is not divided, and if the places
// are very different, the faster one gets it.
func TestSplit(t *testing.T) {
	a, b := NewSource(20*time.Microsecond, 3e9), NewSource(100*time.Microsecond, 1.5e9)
	from, took := Split(a, b, 1<<20, 1<<20, 4096)
	require.Zero(t, from%4096)
	require.Greater(t, from, int64(600<<10))
	require.Less(t, from, int64(900<<10))
	require.InDelta(t, float64(a.Time(from)), float64(b.Time(1<<20-from)), float64(10*time.Microsecond))
	require.Less(t, took, a.Time(1<<20))

	from, _ = Split(a, b, 4096, 4096, 4096)
	require.EqualValues(t, 4096, from)
	slow := NewSource(100*time.Millisecond, 1e9)
	from, _ = Split(a, slow, 1<<20, 1<<20, 4096)
	require.EqualValues(t, 1<<20, from, "nothing waits for the slow one")
	from, _ = Split(slow, b, 1<<20, 1<<20, 4096)
	require.Zero(t, from)

	// What only b has comes from b, and the rest from the place that has all of it sooner.
	from, took = Split(a, b, 1<<20, 256<<10, 4096)
	require.EqualValues(t, 256<<10, from)
	require.Equal(t, b.Time(1<<20-256<<10), took)
	from, _ = Split(a, b, 1<<20, 4095, 4096)
	require.Zero(t, from)
	// The end of a file can be anywhere.
	from, _ = Split(a, b, 5000, 5000, 4096)
	require.EqualValues(t, 5000, from)
}

// TestStuck: a place that does not answer is not asked, unless no other place answers.
func TestStuck(t *testing.T) {
	a, b := NewSource(20*time.Microsecond, 3e9), NewSource(time.Second, 1e9)
	a.Abandon()
	from, _ := Split(a, b, 4096, 4096, 4096)
	require.Zero(t, from)
	require.False(t, a.Due(began))
	require.True(t, a.Estimate().Stuck)
	a.Answer()
	from, _ = Split(a, b, 4096, 4096, 4096)
	require.EqualValues(t, 4096, from)
	b.Abandon()
	slow := NewSource(time.Hour, 1)
	from, _ = Split(slow, b, 1<<20, 1<<20, 4096)
	require.EqualValues(t, 1<<20, from)
}

// TestDue: a place from which nobody reads is measured again from time to time, a slower place less often, and by one
// reader at a time.
func TestDue(t *testing.T) {
	s := NewSource(100*time.Microsecond, 1e9)
	now := began
	require.True(t, s.Due(now), "never measured")
	require.False(t, s.Due(now.Add(time.Hour)), "a reader is measuring it")
	s.Measured(now)
	require.False(t, s.Due(now.Add(time.Millisecond)))
	require.True(t, s.Due(now.Add(time.Second)))
	s.Measured(now)

	slow := NewSource(100*time.Millisecond, 1e9)
	slow.Measured(now)
	require.False(t, slow.Due(now.Add(time.Second)))
	require.True(t, slow.Due(now.Add(3*time.Second)))
	slow.Measured(now)
	slow.End(4096, slow.Begin(4096), time.Millisecond, false, now.Add(3*time.Second))
	require.False(t, slow.Due(now.Add(4*time.Second)), "a read has just measured it")
}

// TestCancelled: a failed read changes no estimate.
func TestCancelled(t *testing.T) {
	s := NewSource(time.Millisecond, 1e9)
	before := s.Estimate()
	s.Begin(1 << 20)
	require.Greater(t, s.Time(4096), 2*time.Millisecond)
	s.Cancel(1 << 20)
	require.Equal(t, before, s.Estimate())
	require.Zero(t, s.Time(0))
}
