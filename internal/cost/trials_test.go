package cost

import (
	"container/heap"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// server simulates a place. It serves atOnce reads at a time, each with its own time, and then their bytes pass one
// after the other. It serves a queue in order, or all of it at once as a device does.
type server struct {
	request   time.Duration
	bandwidth float64
	noise     float64 // 0: none, 1: reads take anything from nothing to twice as long
	// together makes all reads that wait for one to end begin as one.
	together bool
	atOnce   []time.Duration
	next     []time.Duration // when the reads that begin together then end; 0: there are none
	pipe     time.Duration   // when it is idle
}

func (s *server) reset(atOnce int) {
	s.atOnce, s.next, s.pipe = make([]time.Duration, atOnce), make([]time.Duration, atOnce), 0
}

// ends returns when a read that arrives now ends. Reads arrive in the order of time.
func (s *server) ends(rnd *rand.Rand, now time.Duration, n int64) time.Duration {
	first := 0
	for i := range s.atOnce {
		if s.next[i] > 0 && s.atOnce[i] <= now {
			s.atOnce[i], s.next[i] = s.next[i], 0
		}
	}
	for i := range s.atOnce {
		if s.atOnce[i] < s.atOnce[first] {
			first = i
		}
	}
	request := time.Duration(float64(s.request) * (1 + s.noise*(2*rnd.Float64()-1)))
	ready := max(now, s.atOnce[first]) + request
	switch {
	case !s.together || s.atOnce[first] <= now:
		s.atOnce[first] = ready
	case s.next[first] == 0:
		s.next[first] = ready
	default:
		ready = s.next[first]
	}
	s.pipe = max(s.pipe, ready) + time.Duration(float64(n)/s.bandwidth*1e9)
	return s.pipe
}

// event is the end of a read.
type event struct {
	at, began time.Duration
	n         int64
	from      int
	ahead     Ahead
}

type events []event

func (e events) Len() int           { return len(e) }
func (e events) Less(i, k int) bool { return e[i].at < e[k].at }
func (e events) Swap(i, k int)      { e[i], e[k] = e[k], e[i] }
func (e *events) Push(x any)        { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// scene is two places and their readers.
type scene struct {
	places [2]server
	atOnce [2]int
	sizes  []int64
	jobs   int
}

func (s *scene) String() string {
	text := fmt.Sprintf("%d jobs, %d bytes", s.jobs, s.sizes)
	for i := range s.places {
		p := &s.places[i]
		text += fmt.Sprintf("; %v, %.0f MB/s, %d at once, together %v, noise %.2f", p.request, p.bandwidth/1e6,
			s.atOnce[i], p.together, p.noise)
	}
	return text
}

// randomScene makes a plausible disk and a plausible device.
func randomScene(rnd *rand.Rand, jobs int) *scene {
	s := &scene{jobs: jobs}
	between := func(least, most float64) float64 { return least * math.Exp(rnd.Float64()*math.Log(most/least)) }
	for i := range s.places {
		s.places[i] = server{
			request: time.Duration(between(5e3, 2e6)), bandwidth: between(2e8, 2e10), noise: rnd.Float64(),
		}
		s.atOnce[i] = []int{1, 4, 32}[rnd.IntN(3)]
		s.places[i].together = i == 0 && rnd.IntN(2) == 0
	}
	s.sizes = [][]int64{{4096}, {16 << 10}, {128 << 10}, {1 << 20}, {4096, 128 << 10}}[rnd.IntN(5)]
	return s
}

// run simulates the given number of reads, after some to learn from. It returns how long the counted reads took in all,
// and which part of them came from the first place. choose decides where a read comes from.
func (s *scene) run(seed uint64, reads int, choose func(sources *[2]*Source, n int64) int,
	ended func(n int64, took time.Duration)) (
	took time.Duration, first float64,
) {
	rnd := rand.New(rand.NewPCG(seed, 1))
	sources := [2]*Source{NewSource(20*time.Microsecond, 10e9), NewSource(100*time.Microsecond, 2e9)}
	for i := range s.places {
		s.places[i].reset(s.atOnce[i])
	}
	learn := reads / 4
	var under events
	begin := func(now time.Duration) {
		n := s.sizes[rnd.IntN(len(s.sizes))]
		i := choose(&sources, n)
		ahead := sources[i].Begin(n)
		heap.Push(&under, event{at: s.places[i].ends(rnd, now, n), began: now, n: n, from: i, ahead: ahead})
	}
	for range s.jobs {
		begin(0)
	}
	var learned, now time.Duration
	from := [2]int{}
	for k := range reads + learn {
		e := heap.Pop(&under).(event)
		now = e.at
		sources[e.from].End(e.n, e.ahead, e.at-e.began, false, began.Add(now))
		ended(e.n, e.at-e.began)
		if k == learn {
			learned = now
		}
		if k >= learn {
			from[e.from]++
		}
		begin(now)
	}
	return now - learned, float64(from[0]) / float64(from[0]+from[1])
}

// alone is run with one place.
func (s *scene) alone(seed uint64, reads, place int) time.Duration {
	took, _ := s.run(seed, reads, func(*[2]*Source, int64) int { return place }, func(int64, time.Duration) {})
	return took
}

// chosen is run with a choice by cost.
func (s *scene) chosen(seed uint64, reads int) (took time.Duration, first float64) {
	var trials Trials
	probes := 0
	return s.run(seed, reads, func(sources *[2]*Source, n int64) int {
		if probes++; probes <= 8 { // places that are due are probed in this way
			return probes % 2
		}
		return trials.Pick(n, []time.Duration{sources[0].Time(n), sources[1].Time(n)})
	}, trials.Spent)
}

// TestChoiceNeverLoses: whatever two places are like, choosing by current measurements is at most 1 % slower than the
// better one of them alone, for one job and for many. Many jobs use both places if that helps.
func TestChoiceNeverLoses(t *testing.T) {
	const reads = 10_000
	worst, gain := math.Inf(1), 0.
	for k := range uint64(100) {
		rnd := rand.New(rand.NewPCG(k, 7))
		for _, jobs := range []int{1, 16} {
			s := randomScene(rnd, jobs)
			better := min(s.alone(k, reads, 0), s.alone(k, reads, 1))
			took, first := s.chosen(k, reads)
			ratio := float64(better) / float64(took)
			if ratio < worst {
				worst = ratio
			}
			gain = max(gain, ratio)
			if ratio < 0.99 {
				t.Errorf("%.3f of the better one, %.2f of it from the first: case %d, %v", ratio, first, k, s)
			}
		}
	}
	t.Logf("worst %.3f, best %.2f of the better one", worst, gain)
	require.Greater(t, gain, 1.5)
}
