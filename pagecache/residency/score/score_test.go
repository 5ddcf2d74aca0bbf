package score

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
	"github.com/gaiafs/gaiafs/prefetch/replay"
	"github.com/gaiafs/gaiafs/prefetch/trace"
)

const extent = 64 << 10

// accesses makes a trace of accesses to the first page of each of these extents; -n means a write to n.
func accesses(device int, extents ...int64) *trace.Trace {
	t := &trace.Trace{Files: []trace.File{{Size: 1 << 30}}, Sources: []trace.Source{{Device: device},
		{Device: trace.CPU}}}
	for _, n := range extents {
		x := trace.Event{Off: max(n, -n) * extent, Len: 4096, Write: n < 0}
		t.Events = append(t.Events, x)
	}
	return t
}

func steps(t *testing.T, tr *trace.Trace) *Steps {
	s, err := New(tr, extent, 1)
	require.NoError(t, err)
	return s
}

func named(t *testing.T, name string, o policy.Options) func() policy.Rule {
	return func() policy.Rule {
		r, err := NewRule(name, o)
		require.NoError(t, err)
		return r
	}
}

func setup(extents int64, placement string) Setup {
	return Setup{Memory: extents * extent, Placement: placement, Model: DefaultModel()}
}

// TestByHand checks a play whose every step was computed by hand.
func TestByHand(t *testing.T) {
	s := steps(t, accesses(0, 1, 2, 1, -3, 1, 2, 3))
	require.EqualValues(t, 3*extent, s.Distinct())
	got := s.Score(setup(2, "always"), named(t, "lru", policy.Options{}))
	// 1 and 2 move in; 1 is hit; 3 replaces 2, and is changed; 1 is hit; 2 replaces 3, which is copied home; 3 replaces
	// 1.
	require.Equal(t, Score{Accesses: 7, Hits: 2, Moves: 5, Trips: 2, Moved: 5 * extent, Home: extent, Time: got.Time},
		got)
	m := DefaultModel()
	want := 7*4096/m.Local + 6*extent/m.Link + 5*m.Move.Seconds()
	require.InDelta(t, want, got.Time.Seconds(), 1e-9)
	best := s.Belady(setup(2, "always"))
	require.EqualValues(t, 4, best.Moves)
	got = s.Score(setup(2, "never"), named(t, "lru", policy.Options{}))
	require.Equal(t, Score{Accesses: 7, Remote: 7 * 4096, Time: got.Time}, got)
	// An extent that is written to moves at once, the others once they were accessed often enough.
	got = s.Score(setup(2, "threshold"), named(t, "lru", policy.Options{}))
	require.EqualValues(t, 2, got.Moves, "1 while memory is free, then 3, which is written to")
	require.EqualValues(t, 2*4096, got.Remote, "2, twice")
}

// TestWhatIsAccessedOnCPUs: CPU accesses move nothing, but rules hear of them.
func TestWhatIsAccessedOnCPUs(t *testing.T) {
	tr := accesses(3, 1, 2, 1, 3)
	tr.Events[2].Source = 1
	got := steps(t, tr).Score(setup(2, "always"), named(t, "lru", policy.Options{}))
	require.EqualValues(t, 3, got.Accesses)
	require.EqualValues(t, 3, got.Moves)
	tr.Events = append(tr.Events, trace.Event{Off: extent, Len: 1})
	got = steps(t, tr).Score(setup(2, "always"), named(t, "lru", policy.Options{}))
	require.EqualValues(t, 1, got.Hits, "2 left, because a program on the CPU had used 1")
}

// TestDevicesHaveTheirOwnMemory: an access on one device takes no memory of the other.
func TestDevicesHaveTheirOwnMemory(t *testing.T) {
	tr := accesses(0, 1, 2, 1, 2)
	tr.Sources = append(tr.Sources, trace.Source{Device: 7})
	for i := range 2 {
		x := tr.Events[i]
		x.Source = 2
		tr.Events = append(tr.Events, x)
	}
	got := steps(t, tr).Score(setup(2, "always"), named(t, "allocated", policy.Options{}))
	require.EqualValues(t, 4, got.Moves)
	require.EqualValues(t, 2, got.Hits)
}

// TestNoRuleBeatsBelady: on random traces Belady has the fewest moves.
func TestNoRuleBeatsBelady(t *testing.T) {
	for seed := range uint64(30) {
		rnd := rand.New(rand.NewPCG(seed, 0))
		var list []int64
		for range 300 {
			n := 1 + rnd.Int64N(1+rnd.Int64N(20))
			if rnd.IntN(4) == 0 {
				n = -n
			}
			list = append(list, n)
		}
		s := steps(t, accesses(0, list...))
		of := setup(1+rnd.Int64N(10), "always")
		best := s.Belady(of)
		for _, name := range Names() {
			got := s.Score(of, named(t, name, policy.Options{Seed: seed}))
			require.GreaterOrEqual(t, got.Moves, best.Moves, "%s: go test -run TestNoRuleBeatsBelady; seed %d", name,
				seed)
			require.Equal(t, got.Accesses, got.Hits+got.Moves)
		}
		random := s.BestOfChance(of, 20)
		require.GreaterOrEqual(t, random.Moves, best.Moves)
		require.LessOrEqual(t, random.Time, s.Score(of, named(t, "random", policy.Options{Seed: 3})).Time)
	}
}

// TestShapes: rules behave as they are known to. A loop over slightly more than fits is LRU's worst case; LFU keeps hot
// extents; the threshold keeps cold extents from displacing them.
func TestShapes(t *testing.T) {
	play := func(pattern, rule, placement string) Score {
		tr, err := replay.Make(pattern, 64<<20, 1)
		require.NoError(t, err)
		s := steps(t, tr)
		return s.Score(Setup{Memory: s.Distinct() / 2, Placement: placement, Model: DefaultModel()},
			named(t, rule, policy.Options{Seed: 1}))
	}
	lru, random := play("cyclic", "lru", "always"), play("cyclic", "random", "always")
	require.Zero(t, lru.Hits)
	require.Less(t, random.Moves, lru.Moves*9/10)
	lfu, lru := play("skewed", "lfu", "always"), play("skewed", "lru", "always")
	require.Less(t, lfu.Moves, lru.Moves)
	threshold := play("skewed", "lfu", "threshold")
	require.Less(t, threshold.Time, lfu.Time)
}

// TestReadOnlyFirst: it saves copies home if changed extents are used again, and costs moves if extents that are only
// read are used again. So it is neither a rule of its own nor a setting of the daemon.
func TestReadOnlyFirst(t *testing.T) {
	var streams, tables []int64
	for round := range int64(50) {
		streams = append(streams, -1, -2, 10+2*round, 11+2*round) // two results, and input that is read once
		tables = append(tables, 1, 2, -10-2*round, -11-2*round)   // two tables, and results that nobody reads again
	}
	play := func(list []int64, first bool) Score {
		return steps(t, accesses(0, list...)).Score(setup(3, "always"),
			named(t, "lru", policy.Options{ReadOnlyFirst: first}))
	}
	require.Less(t, play(streams, true).Time, play(streams, false).Time)
	require.Greater(t, play(tables, true).Moves, play(tables, false).Moves-1)
	require.Zero(t, play(tables, true).Hits)
}

func TestWhatCannotBeScored(t *testing.T) {
	_, err := New(accesses(trace.CPU, 1), extent, 1)
	require.ErrorContains(t, err, "no program on a device")
	_, err = New(&trace.Trace{}, extent, 1)
	require.ErrorContains(t, err, "no program on a device")
	_, err = New(accesses(0, 1), 3<<20, 1)
	require.ErrorContains(t, err, "a power of two")
	few := &trace.Trace{Sources: []trace.Source{{Device: 0}}, Events: []trace.Event{{Len: 1 << 12 * extent}}}
	_, err = New(few, extent, mostPlayed>>12)
	require.NoError(t, err)
	_, err = New(few, extent, mostPlayed>>11)
	require.ErrorContains(t, err, "too many to play 1048576 times")
	of := setup(1, "sometimes")
	require.ErrorContains(t, of.Check(), "there are always, threshold, never")
	of = setup(1, "never")
	require.NoError(t, of.Check())
	of.Model.Move = -time.Second
	require.Error(t, of.Check())
}
