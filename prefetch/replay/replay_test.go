package replay

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/prefetch"
	"github.com/gaiafs/gaiafs/prefetch/trace"
)

// size is the size of the patterns' files in tests. It is large compared with what a thousand blocks read at a time.
const size = 1 << 30

func run(t *testing.T, tr *trace.Trace, name string) Score {
	t.Helper()
	s, err := Run(tr, DefaultModel(), func() prefetch.Predictor {
		p, err := prefetch.New(name)
		require.NoError(t, err)
		return p
	})
	require.NoError(t, err)
	return s
}

func pattern(t *testing.T, name string) *trace.Trace {
	t.Helper()
	tr, err := Make(name, size, 1)
	require.NoError(t, err)
	return tr
}

// TestCoverageReachesItsTargets checks what device predictors are for: parallel streams are as fast as one sequential
// stream, and nothing is read in vain if there is no stream.
func TestCoverageReachesItsTargets(t *testing.T) {
	sequential := pattern(t, "sequential")
	best := 0.0
	for _, name := range []string{"streams", "streams-16m", "coverage"} {
		best = max(best, run(t, sequential, name).Bandwidth())
	}
	require.Greater(t, best, 3.2e9, "the disk gives 3.5 GB/s")
	for _, c := range []struct {
		pattern string
		fast    float64 // share of the best sequential bandwidth
		wasted  float64
	}{
		{"sequential", 0.98, 0.01},
		{"strided", 0.9, 0.01},
		{"out-of-order", 0.9, 0.01},
		{"slices", 0.85, 0.01},
		{"shuffled", 0.8, 0.01},
		{"random", 0, 0.1},
		{"sparse", 0, 0.1},
		{"graph", 0, 0.1},
	} {
		for _, name := range []string{"coverage", "device"} {
			t.Run(c.pattern+" "+name, func(t *testing.T) {
				tr := pattern(t, c.pattern)
				s := run(t, tr, name)
				t.Logf("%.2f GB/s, %.0f %% of sequential, %.1f %% wasted", s.Bandwidth()/1e9, 100*s.Bandwidth()/best,
					100*s.WasteRate())
				require.GreaterOrEqual(t, s.Bandwidth(), c.fast*best)
				require.LessOrEqual(t, s.WasteRate(), c.wasted)
				if c.fast >= 0.9 {
					require.Greater(t, s.Bandwidth(), run(t, tr, "kernel").Bandwidth())
				}
				if c.fast == 0 {
					require.Less(t, s.WasteRate(), run(t, tr, "tree").WasteRate())
					require.Greater(t, s.Bandwidth(), 0.95*run(t, tr, "none").Bandwidth())
				}
			})
		}
	}
}

func TestStreamsSpareProgramsTheirWaiting(t *testing.T) {
	tr := pattern(t, "cpu")
	s, none, kernel := run(t, tr, "streams"), run(t, tr, "none"), run(t, tr, "kernel")
	require.Greater(t, s.HitRate(), 0.85)
	require.LessOrEqual(t, s.WasteRate(), 0.1)
	require.Less(t, s.Waited, none.Waited/2)
	require.Less(t, s.Waited, kernel.Waited/2)
	require.Less(t, s.Time, none.Time)
	one := run(t, pattern(t, "sequential"), "streams")
	require.Greater(t, one.Bandwidth(), 3.2e9)
}

// slow takes a second for a piece of one page, and a millisecond for each further page.
func slow(depth int) Model {
	return Model{Piece: 4 * page.Size,
		Stages: []Stage{{Latency: time.Second, Depth: depth, Bandwidth: 1000 * page.Size}}}
}

func none() prefetch.Predictor { p, _ := prefetch.New("none"); return p }

// reads returns a trace of accesses of n pages, each by its own source.
func reads(n int64, starts ...int64) *trace.Trace {
	t := &trace.Trace{Files: []trace.File{{Name: "f", Size: 1 << 30}}}
	for i, start := range starts {
		t.Sources = append(t.Sources, trace.Source{Thread: uint32(i)})
		t.Events = append(t.Events, trace.Event{Source: uint32(i), Off: start << page.Shift, Len: n << page.Shift})
	}
	return t
}

func TestTheModelAddsUp(t *testing.T) {
	for _, c := range []struct {
		depth int
		tr    *trace.Trace
		time  time.Duration
	}{
		{1, reads(1, 0), 1001 * time.Millisecond},
		{1, reads(4, 0), 1004 * time.Millisecond},
		{1, reads(8, 0), 2008 * time.Millisecond},              // two pieces, one after the other
		{2, reads(8, 0), 1008 * time.Millisecond},              // latencies overlap, the pipe carries one by one
		{8, reads(1, 0, 10, 20), 1003 * time.Millisecond},      // three programs
		{1, reads(1, 0, 10, 20), 3003 * time.Millisecond},      // that wait for each other
		{8, reads(4, 0, 2, 100), 1000*time.Millisecond + 10e6}, // pages that are on their way are not requested again
	} {
		s, err := Run(c.tr, slow(c.depth), none)
		require.NoError(t, err)
		require.Equal(t, c.time, s.Time)
	}
}

func TestWhatIsCounted(t *testing.T) {
	tr := reads(4, 0)
	again := tr.Events[0]
	again.Time = time.Second
	tr.Events = append(tr.Events, again, trace.Event{Time: 2 * time.Second, Off: 2 << page.Shift, Len: 4 << page.Shift})
	ahead := &scripted{rg: page.Range{Start: 4, End: 20}}
	s, err := Run(tr, DefaultModel(), func() prefetch.Predictor { return ahead })
	require.NoError(t, err)
	require.EqualValues(t, 3, s.Accesses)
	require.EqualValues(t, 2, s.Hits)
	require.EqualValues(t, 12*page.Size, s.Read)
	require.EqualValues(t, 6*page.Size, s.Distinct)
	require.EqualValues(t, 20*page.Size, s.Fetched)
	require.EqualValues(t, 16*page.Size, s.Ahead)
	require.EqualValues(t, 14*page.Size, s.Wasted)
	require.EqualValues(t, 1, s.Requests, "a range next to an access goes with it")
	require.InDelta(t, 0.7, s.WasteRate(), 1e-9)
}

// scripted proposes the same at every access.
type scripted struct {
	rg  page.Range
	end page.Index
}

func (s *scripted) Access(_ page.Range, _ prefetch.Pattern, ahead []page.Range) []page.Range {
	return append(ahead, s.rg)
}
func (s *scripted) Unused(page.Range)     {}
func (s *scripted) Resize(end page.Index) { s.end = end }

// TestAFileThatShrinks has a window past the end of the file, and pages that disappear while they are on their way.
func TestAFileThatShrinks(t *testing.T) {
	tr := reads(1, 0)
	tr.Files[0].Size = 100 << page.Shift
	tr.Events = append(tr.Events,
		trace.Event{Time: 1, Resize: true, Len: 5<<page.Shift - 1},
		trace.Event{Time: 10 * time.Second, Off: 4 << page.Shift, Len: 1 << page.Shift},
		trace.Event{Time: 20 * time.Second, Off: 50 << page.Shift, Len: 1 << page.Shift})
	ahead := &scripted{rg: page.Range{Start: 2, End: 1000}}
	s, err := Run(tr, DefaultModel(), func() prefetch.Predictor { return ahead })
	require.NoError(t, err)
	require.EqualValues(t, 5, ahead.end)
	require.EqualValues(t, 99*page.Size, s.Fetched, "nothing past end of file")
	require.EqualValues(t, 97*page.Size, s.Wasted)
	require.EqualValues(t, 2*page.Size, s.Read, "the last access was past the end")
}

func TestReplaysAreRepeatable(t *testing.T) {
	for _, name := range Patterns() {
		require.NotEmpty(t, AboutPattern(name))
		a, err := Make(name, 32<<20, 7)
		require.NoError(t, err)
		b, err := Make(name, 32<<20, 7)
		require.NoError(t, err)
		require.Equal(t, trace.Encode(a), trace.Encode(b), name)
		require.NotZero(t, a.Accesses(), name)
		require.Equal(t, run(t, a, "coverage"), run(t, b, "coverage"), name)
		for i, x := range a.Events {
			require.LessOrEqual(t, x.Off+x.Len, int64(32<<20), "%s: event %d", name, i)
			require.Positive(t, x.Len)
		}
	}
}

func TestWhatCannotBeReplayedIsRefused(t *testing.T) {
	_, err := Make("backwards", 1<<30, 1)
	require.ErrorContains(t, err, "sequential, strided, out-of-order")
	_, err = Make("random", 4096, 1)
	require.ErrorContains(t, err, "64 GiB")
	_, err = Run(reads(1, 0), Model{}, none)
	require.ErrorContains(t, err, "a model needs a stage")
	for _, s := range []Stage{{}, {Depth: 1, Latency: -1}, {Depth: 1, Bandwidth: 0.5}, {Depth: 1 << 30}} {
		_, err = Run(reads(1, 0), Model{Piece: 1 << 20, Stages: []Stage{s}}, none)
		require.ErrorContains(t, err, "stage 0")
	}
	huge := &trace.Trace{Files: []trace.File{{Size: trace.MaxEnd}}, Sources: make([]trace.Source, 1)}
	for i := range int64(20) {
		huge.Events = append(huge.Events, trace.Event{Off: i * trace.MaxLen, Len: trace.MaxLen})
	}
	_, err = Run(huge, DefaultModel(), none)
	require.ErrorContains(t, err, "are spread over more than 1099511627776 bytes")
	for i := range huge.Events {
		huge.Events[i].Off = 0
	}
	_, err = Run(huge, DefaultModel(), none)
	require.ErrorContains(t, err, "come to more than 17592186044416 bytes")
	s, err := Run(&trace.Trace{}, DefaultModel(), none)
	require.NoError(t, err)
	require.Zero(t, s)
	require.Zero(t, s.Bandwidth()+s.HitRate()+s.WasteRate())
}
