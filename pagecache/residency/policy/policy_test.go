package policy

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// victims returns what a rule names, as a line of a transcript.
func victims(r Rule) string {
	line := "victims:"
	for id := range r.Victims() {
		line += fmt.Sprint(" ", id)
	}
	return line
}

// TestTranscripts replays testdata/RULE_WHAT.txt: events, and the victims after them.
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	require.NoError(t, err)
	ruled := make(map[string]bool)
	for _, path := range files {
		t.Run(filepath.Base(path), func(t *testing.T) {
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			name, _, _ := strings.Cut(filepath.Base(path), "_")
			require.Contains(t, Rules, name)
			ruled[name] = true
			rule := Rules[name]()
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
	for name := range Rules {
		require.True(t, ruled[name], "the rule %q has no transcript", name)
	}
}

func parse(t *testing.T, line string) (e Event) {
	var word string
	_, err := fmt.Sscan(line, &word, &e.ID)
	require.NoError(t, err, line)
	k := slices.Index(kindWords[:], word)
	require.GreaterOrEqual(t, k, 0, line)
	e.Kind = Kind(k)
	require.Equal(t, line, e.String())
	return e
}

// twins are slow and obvious: each looks at the whole trace whenever it is asked.
var twins = map[string]func(trace []Event) []ID{
	"allocated": func(trace []Event) (ids []ID) {
		for _, e := range trace {
			if e.Kind != Placed {
				continue
			}
			last := e
			for _, later := range trace {
				if later.ID == e.ID {
					last = later
				}
			}
			if last.Kind == Placed || last.Kind == Unmapped {
				ids = append(ids, e.ID)
			}
		}
		return ids
	},
}

// random returns an event that may follow those of a trace. on has the extents on the device, and whether they are
// mapped.
func random(rnd *rand.Rand, on map[ID]bool, next ID) Event {
	ids := make([]ID, 0, len(on))
	for id := range on {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	if len(ids) == 0 || rnd.IntN(4) == 0 {
		return Event{Kind: Placed, ID: next, Bytes: 2 << 20 << rnd.IntN(4)}
	}
	id := ids[rnd.IntN(len(ids))]
	switch mapped := on[id]; {
	case rnd.IntN(3) == 0:
		return Event{Kind: Left, ID: id}
	case mapped:
		return Event{Kind: Unmapped, ID: id}
	}
	return Event{Kind: Mapped, ID: id}
}

// TestTwins runs random traces.
func TestTwins(t *testing.T) {
	for name, rule := range Rules {
		require.Contains(t, twins, name)
		for seed := range uint64(50) {
			rnd := rand.New(rand.NewPCG(seed, 1))
			r, on, trace := rule(), make(map[ID]bool), []Event(nil)
			for range 200 {
				e := random(rnd, on, ID(len(trace)+1))
				if on[e.ID] = e.Kind == Mapped; e.Kind == Left {
					delete(on, e.ID)
				}
				trace = append(trace, e)
				r.Note(e)
				got := slices.Collect(r.Victims())
				require.Equal(t, twins[name](trace), got, "%s: go test -run TestTwins; seed %d, after %v", name, seed, trace)
			}
		}
	}
}
