package policy

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func newRule(t *testing.T, name string, o Options) Rule {
	r, err := New(name, o)
	require.NoError(t, err)
	return r
}

// victims returns the victims that a rule names, as a line of a transcript.
func victims(r Rule) string {
	line := "victims:"
	for id := range r.Victims() {
		line += fmt.Sprint(" ", id)
	}
	return line
}

// TestTranscripts replays testdata/RULE_WHAT.txt: events, and the victims after them. RULE may end in +readonly.
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	require.NoError(t, err)
	ruled := make(map[string]bool)
	for _, path := range files {
		t.Run(filepath.Base(path), func(t *testing.T) {
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			name, _, _ := strings.Cut(filepath.Base(path), "_")
			name, readOnly := strings.CutSuffix(name, "+readonly")
			ruled[name] = true
			rule := newRule(t, name, Options{ReadOnlyFirst: readOnly})
			for i, line := range strings.Split(strings.TrimSpace(string(text)), "\n") {
				switch {
				case strings.HasPrefix(line, "#"):
				case strings.HasPrefix(line, "victims:"):
					require.Equal(t, line, victims(rule), "%s:%d", path, i+1)
				default:
					rule.Note(parse(t, line))
				}
			}
		})
	}
	for _, name := range Names() {
		require.True(t, ruled[name], "the rule %q has no transcript", name)
	}
}

// parse is the inverse of Event.String.
func parse(t *testing.T, line string) (e Event) {
	words := strings.Fields(line)
	k := slices.Index(kindWords[:], words[0])
	require.GreaterOrEqual(t, k, 0, line)
	e.Kind = Kind(k)
	n, err := strconv.ParseUint(words[1], 10, 64)
	require.NoError(t, err, line)
	if e.Kind == Began || e.Kind == Ended {
		e.Program = Program(n)
		e.At, err = time.ParseDuration(words[2])
		require.NoError(t, err, line)
	} else {
		e.ID = ID(n)
		for _, w := range words[2:] {
			name, number, _ := strings.Cut(w, "=")
			n, _ := strconv.ParseInt(number, 10, 64)
			switch name {
			case "bytes":
				e.Bytes = n
			case "priority":
				e.Priority = int(n)
			case "write":
				e.Write = true
			case "claimed":
				e.Claimed = uint32(n)
			}
		}
	}
	require.Equal(t, line, e.String())
	return e
}

// seen is what a twin learns from a whole trace.
type seen struct {
	trace    []Event
	id       ID
	bytes    int64
	priority int
	placed   int // the index of its last Placed event
	used     int
	accesses float64 // per block
}

// candidates returns the extents that may leave after a trace, and those that may once clients were asked. It searches
// the whole trace for each.
func candidates(trace []Event) (list, kept []seen) {
	for i, e := range trace {
		if e.Kind != Placed || slices.ContainsFunc(trace[i+1:], func(l Event) bool {
			return l.ID == e.ID &&
				l.Kind == Left
		}) {
			continue
		}
		x, last := seen{trace: trace, id: e.ID, bytes: e.Bytes, priority: e.Priority, placed: i}, Placed
		history := 0.0
		for k, l := range trace {
			if l.ID != e.ID || l.Kind == Began || l.Kind == Ended {
				continue
			}
			switch l.Kind {
			case Mapped, Unmapped, Kept, Placed:
				last = l.Kind
			case Accessed:
				history += max(float64((l.Bytes+2<<20-1)/(2<<20)), 1) * max(float64(l.Claimed), 1)
			case Forgotten:
				history = 0
			}
			if l.Kind != Left && l.Kind != Kept {
				x.used = k
			}
		}
		x.accesses = history / float64(e.Bytes/(2<<20))
		switch last {
		case Mapped:
		case Kept:
			kept = append(kept, x)
		default:
			list = append(list, x)
		}
	}
	return list, kept
}

// slow reports whether FlexGPU's rule ranks x last.
func (x seen) slow() bool {
	open, since, usual := map[Program]int{}, map[Program]time.Duration{}, map[Program]float64{}
	for _, e := range x.trace {
		switch e.Kind {
		case Began:
			if open[e.Program] == 0 {
				since[e.Program] = e.At
			}
			open[e.Program]++
		case Ended:
			if open[e.Program]--; open[e.Program] > 0 {
				continue
			}
			took := float64(e.At - since[e.Program])
			if u, ok := usual[e.Program]; ok {
				took = u + (took-u)/4
			}
			usual[e.Program] = took
		}
	}
	shortest := -1.0
	for p, n := range open {
		if u, ok := usual[p]; ok && n > 0 && (shortest < 0 || u < shortest) {
			shortest = u
		}
	}
	return shortest >= 0 && float64(x.bytes)/linkBandwidth*1e9 >= shortest
}

// twins are slow and obvious: each compares two extents by the whole trace. Random rules have none.
var twins = map[string]func(x, y seen) int{
	"allocated": func(x, y seen) int { return x.placed - y.placed },
	"lru":       func(x, y seen) int { return x.used - y.used },
	"lfu":       func(x, y seen) int { return cmp.Or(cmp.Compare(x.accesses, y.accesses), x.used-y.used) },
	"flexgpu": func(x, y seen) int {
		number := map[bool]int{true: 1}
		return cmp.Or(number[x.slow()]-number[y.slow()], cmp.Compare(x.accesses, y.accesses), x.used-y.used)
	},
}

// random returns an event that may follow a trace. on has the extents on the device, and whether they are mapped; off
// has those that left.
func random(rnd *rand.Rand, on map[ID]bool, off map[ID]bool, open map[Program]int, at time.Duration, next ID) Event {
	pick := func(m map[ID]bool) ID {
		ids := make([]ID, 0, len(m))
		for id := range m {
			ids = append(ids, id)
		}
		slices.Sort(ids)
		return ids[rnd.IntN(len(ids))]
	}
	if rnd.IntN(8) == 0 {
		p := Program(1 + rnd.IntN(3))
		if open[p] > 0 && rnd.IntN(2) == 0 {
			return Event{Kind: Ended, Program: p, At: at}
		}
		return Event{Kind: Began, Program: p, At: at}
	}
	if len(on) == 0 || rnd.IntN(5) == 0 {
		e := Event{Kind: Placed, ID: next, Bytes: 2 << 20 << rnd.IntN(4), Priority: rnd.IntN(3)}
		if len(off) > 0 && rnd.IntN(2) == 0 {
			if e.ID = pick(off); rnd.IntN(3) == 0 {
				return Event{Kind: Forgotten, ID: e.ID}
			}
		}
		return e
	}
	id := pick(on)
	switch mapped := on[id]; {
	case rnd.IntN(4) == 0:
		return Event{Kind: Left, ID: id}
	case rnd.IntN(2) == 0:
		e := Event{Kind: Accessed, ID: id, Bytes: rnd.Int64N(8 << 20), Write: rnd.IntN(2) == 0}
		if rnd.IntN(3) == 0 {
			e.Write, e.Claimed = false, 1+rnd.Uint32N(5)
		}
		return e
	case mapped && rnd.IntN(2) == 0:
		return Event{Kind: Kept, ID: id}
	case mapped && rnd.IntN(2) == 0:
		return Event{Kind: Unmapped, ID: id}
	}
	return Event{Kind: Mapped, ID: id}
}

// TestTwins compares the rules with their twins on random traces. Random rules must name the same extents, in any
// order.
func TestTwins(t *testing.T) {
	for _, name := range Names() {
		for seed := range uint64(20) {
			rnd := rand.New(rand.NewPCG(seed, 1))
			r, on, off, open := newRule(t, name, Options{Seed: seed}), map[ID]bool{}, map[ID]bool{}, map[Program]int{}
			var trace []Event
			for i := range 150 {
				e := random(rnd, on, off, open, time.Duration(i)*10*time.Microsecond, ID(len(trace)+1))
				switch e.Kind {
				case Left:
					delete(on, e.ID)
					off[e.ID] = true
				case Forgotten:
					delete(off, e.ID)
				case Placed, Mapped, Unmapped:
					on[e.ID] = e.Kind == Mapped
					delete(off, e.ID)
				case Began:
					open[e.Program]++
				case Ended:
					open[e.Program]--
				}
				trace = append(trace, e)
				r.Note(e)
				want, got := []ID(nil), slices.Collect(r.Victims())
				list, kept := candidates(trace)
				order, ok := twins[name]
				if ok {
					slices.SortFunc(list, order)
				} else {
					slices.SortFunc(list, func(x, y seen) int { return cmp.Compare(x.id, y.id) })
					slices.Sort(got)
				}
				for _, x := range list {
					want = append(want, x.id)
				}
				require.Equal(t, want, got, "%s: go test -run TestTwins; seed %d, after %v", name, seed, trace)
				if c, ok := r.(Counter); ok {
					for _, y := range append(list, kept...) {
						var want []ID
						for _, x := range kept {
							if order(x, y) < 0 {
								want = append(want, x.id)
							}
						}
						require.ElementsMatch(t, want, slices.Collect(c.Colder(y.id)), "%s: seed %d, after %v", name,
							seed, trace)
					}
				}
			}
		}
	}
}

// TestRandomIsEven: each extent is equally likely to be the first victim, whatever happened before.
func TestRandomIsEven(t *testing.T) {
	for name, r := range map[string]Rule{"random": Random(1), "gpuswap": newRule(t, "gpuswap", Options{Seed: 1})} {
		const extents, draws = 8, 8000
		for id := range ID(extents) {
			r.Note(Event{Kind: Placed, ID: id, Bytes: block})
		}
		var first [extents]int
		for range draws {
			id := slices.Collect(r.Victims())[0]
			first[id]++
			r.Note(Event{Kind: Left, ID: id})
			r.Note(Event{Kind: Placed, ID: id, Bytes: block})
		}
		for id, n := range first {
			require.InDelta(t, draws/extents, n, draws/extents/4, "%s: extent %d", name, id)
		}
	}
}

// TestFullCounters: halving the counters keeps their order.
func TestFullCounters(t *testing.T) {
	r := newRule(t, "lfu", Options{}).(counter)
	for id := range ID(3) {
		r.Note(Event{Kind: Placed, ID: id, Bytes: block})
	}
	r.extents[0].count, r.extents[1].count, r.extents[2].count = mostCount, 4, 6
	require.Equal(t, "victims: 1 2 0", victims(r))
	r.Note(Event{Kind: Accessed, ID: 0, Bytes: 1})
	require.EqualValues(t, (mostCount+1)/2, r.extents[0].count)
	require.EqualValues(t, 2, r.extents[1].count)
	require.Equal(t, "victims: 1 2 0", victims(r))
}

// TestClaims: claims fill counters by half at most, whatever they say, and halve none.
func TestClaims(t *testing.T) {
	r := newRule(t, "lfu", Options{}).(counter)
	for id := range ID(3) {
		r.Note(Event{Kind: Placed, ID: id, Bytes: 4 * block})
	}
	count := func(id ID) uint64 { return r.extents[id].count / r.extents[id].blocks() }
	r.extents[1].count, r.extents[2].count = 4*mostCount, 4*7
	for range 3 {
		for id := range ID(3) {
			r.Note(Event{Kind: Accessed, ID: id, Bytes: 4 * block, Claimed: math.MaxUint32})
		}
	}
	require.EqualValues(t, mostClaimed, count(0))
	require.EqualValues(t, mostCount, count(1), "it was seen more often already")
	require.EqualValues(t, mostClaimed, count(2))
	require.Equal(t, "victims: 0 2 1", victims(r))
	r.extents[0].count = 0
	r.Note(Event{Kind: Accessed, ID: 0, Bytes: 2 * block, Claimed: 6})
	require.EqualValues(t, 3, count(0), "half of its blocks")
	r.Note(Event{Kind: Accessed, ID: 0, Bytes: math.MaxInt64, Claimed: math.MaxUint32})
	require.EqualValues(t, mostClaimed, count(0))

	var th Threshold
	th.visits(2).accesses = mostCount
	th.Claim(1, 5)
	require.True(t, th.Reached(1, 500, 1000, true))
	require.False(t, th.Reached(1, 1000, 1000, true))
	for range 3 {
		th.Claim(1, math.MaxUint32)
		th.Claim(2, math.MaxUint32)
	}
	require.EqualValues(t, mostClaimed, th.visits(1).accesses)
	require.EqualValues(t, mostCount, th.visits(2).accesses)
}

// TestThreshold uses the numbers of Ganguly, section IV. With t_s = 8, one access is enough while less than an eighth
// is allocated, and 9 are needed when memory is full. With p = 2, 16 are needed if something has to leave, and 48 after
// two round trips.
func TestThreshold(t *testing.T) {
	needs := func(th Threshold, trips int, allocated int64, fits bool) (n int) {
		for range trips {
			th.Left(1)
		}
		for n = 1; !th.Access(1, false, allocated, 1000, fits); n++ {
		}
		return n
	}
	require.Equal(t, 1, needs(Threshold{}, 0, 124, true))
	require.Equal(t, 2, needs(Threshold{}, 0, 125, true))
	require.Equal(t, 8, needs(Threshold{}, 0, 999, true))
	require.Equal(t, 9, needs(Threshold{}, 0, 1000, true))
	require.Equal(t, 16, needs(Threshold{Penalty: 2}, 0, 1000, false))
	require.Equal(t, 48, needs(Threshold{Penalty: 2}, 2, 1000, false))
	require.Equal(t, 64, needs(Threshold{}, 0, 1000, false))
	var th Threshold
	require.True(t, th.Access(1, true, 1000, 1000, false), "a write moves at once")
	require.True(t, th.Reached(1, 0, 1000, true))
	require.False(t, th.Reached(1, 999, 1000, true), "one access is not enough")
	require.False(t, th.Reached(2, 0, 1000, true), "never accessed")

	// When counters are full, all are halved.
	th.visits(1).accesses, th.visits(2).accesses = mostCount, 100
	th.Access(1, false, 0, 1, false)
	require.EqualValues(t, (mostCount+1)/2, th.visits(1).accesses)
	require.EqualValues(t, 50, th.visits(2).accesses)
	th.visits(1).trips, th.visits(2).trips = mostTrips, 4
	th.Left(1)
	require.EqualValues(t, (mostTrips+1)/2, th.visits(1).trips)
	require.EqualValues(t, 2, th.visits(2).trips)
	th.Forget(1)
	require.Zero(t, th.visits(1).accesses)
}

func TestNamesOfRules(t *testing.T) {
	for _, name := range Names() {
		require.NotEmpty(t, About(name))
		newRule(t, name, Options{})
	}
	require.Contains(t, Names(), Default)
	_, err := New("no such rule", Options{})
	require.ErrorContains(t, err, "there are allocated, lru")
	require.Empty(t, About("no such rule"))
}
