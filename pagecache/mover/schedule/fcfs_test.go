package schedule

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var (
	update = flag.Bool("update", false, "write what the transcripts come to")
	seed   = flag.Uint64("seed", 0, "the random program to run")
)

var _ Discipline = (*FCFS)(nil)

// simulator runs the lines of a transcript, each of them an event, and reports what begins.
type simulator struct {
	Discipline
	last  ID
	calls map[ID][]Request // in progress, by the first request of each
}

func newSimulator() *simulator {
	return &simulator{Discipline: new(FCFS), calls: make(map[ID][]Request)}
}

// event runs one line: "arrive CLASS SIZE [own]", "promote ID", "withdraw ID" or "end ID", where ID of "end" is the
// first request of the call. It returns the outcome.
func (s *simulator) event(line string) string {
	words := strings.Fields(line)
	number := func(i int) int64 {
		n, err := strconv.ParseInt(words[i], 10, 64)
		if err != nil {
			panic(line)
		}
		return n
	}
	said := ""
	switch words[0] {
	case "arrive":
		s.last++
		class := Class(slices.Index(classNames[:], words[1]))
		s.Arrive(Request{ID: s.last, Class: class, Size: number(2), Own: len(words) > 3})
		said = fmt.Sprintf("%d waits\n", s.last)
	case "promote":
		s.Promote(ID(number(1)))
	case "withdraw":
		said = fmt.Sprintf("%v\n", s.Withdraw(ID(number(1))))
	case "end":
		id := ID(number(1))
		s.End(s.calls[id])
		delete(s.calls, id)
	default:
		panic(line)
	}
	for call := s.Next(); len(call) > 0; call = s.Next() {
		s.calls[call[0].ID] = call
		said += "begins:"
		for _, r := range call {
			said += fmt.Sprintf(" %d", r.ID)
		}
		said += "\n"
	}
	return said
}

// TestTranscripts replays the files below testdata. The outcome of an event is indented below it.
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			require.NoError(t, err)
			var got strings.Builder
			s := newSimulator()
			for line := range strings.Lines(string(want)) {
				if strings.HasPrefix(line, "\t") {
					continue
				}
				got.WriteString(line)
				if event := strings.TrimSpace(line); event != "" && event[0] != '#' {
					for said := range strings.Lines(s.event(event)) {
						got.WriteString("\t" + said)
					}
				}
			}
			if *update {
				require.NoError(t, os.WriteFile(file, []byte(got.String()), 0o666))
			}
			require.Equal(t, string(want), got.String())
		})
	}
}

// twin is a slow FCFS: it keeps all waiting requests in the order in which the device will take them.
type twin struct {
	waits []Request
	calls int
}

func (w *twin) arrive(r Request) { w.waits = append(w.waits, r) }

// promote puts a request behind everything that somebody waits for, all of which came before.
func (w *twin) promote(id ID) {
	for i, r := range w.waits {
		if r.ID == id && !r.Own && r.Class > CPURead {
			r.Class = CPURead
			w.waits = append(slices.Delete(w.waits, i, i+1), r)
			return
		}
	}
}

func (w *twin) withdraw(id ID) bool {
	n := len(w.waits)
	w.waits = slices.DeleteFunc(w.waits, func(r Request) bool { return r.ID == id })
	return len(w.waits) < n
}

func (w *twin) next() []Request {
	for pass := range 3 {
		var call []Request
		size := int64(0)
		for _, r := range w.waits {
			rank := 2
			if r.Own {
				rank = 0
			} else if r.Class <= CPURead {
				rank = 1
			}
			if rank != pass || rank > 0 && w.calls == 4 {
				continue
			}
			if len(call) > 0 && (rank == 0 || size+r.Size > 2<<20) {
				break
			}
			call, size = append(call, r), size+r.Size
		}
		if len(call) > 0 {
			for _, r := range call {
				w.withdraw(r.ID)
			}
			if pass > 0 {
				w.calls++
			}
			return call
		}
	}
	return nil
}

// TestTwin runs random programs on FCFS and on its twin.
func TestTwin(t *testing.T) {
	for k := range uint64(300) {
		s := *seed
		if s == 0 {
			s = k + 1
		}
		rnd := rand.New(rand.NewPCG(s, 0))
		f, w := new(FCFS), new(twin)
		var under [][]Request
		again := fmt.Sprintf("go test ./pagecache/mover/schedule -run TestTwin -seed=%d", s)
		last := ID(0)
		for range 300 {
			id := ID(rnd.Uint64N(uint64(last) + 2))
			switch rnd.IntN(6) {
			case 0, 1, 2:
				last++
				r := Request{ID: last, Class: Class(rnd.IntN(len(Classes()))), Size: 4096 << rnd.IntN(11),
					Own: rnd.IntN(4) == 0}
				f.Arrive(r)
				w.arrive(r)
			case 3:
				f.Promote(id)
				w.promote(id)
			case 4:
				require.Equal(t, w.withdraw(id), f.Withdraw(id), again)
			case 5:
				if len(under) == 0 {
					continue
				}
				i := rnd.IntN(len(under))
				f.End(under[i])
				if !under[i][0].Own {
					w.calls--
				}
				under = slices.Delete(under, i, i+1)
			}
			for {
				call := f.Next()
				require.Equal(t, ids(w.next()), ids(call), again)
				if len(call) == 0 {
					break
				}
				under = append(under, call)
			}
		}
		// In the end, everything begins.
		for len(under) > 0 {
			f.End(under[0])
			under = under[1:]
			for call := f.Next(); len(call) > 0; call = f.Next() {
				under = append(under, call)
			}
		}
		require.Empty(t, slices.Concat(f.own, f.urgent, f.others), again)
	}
}

func ids(call []Request) (all []ID) {
	for _, r := range call {
		all = append(all, r.ID)
	}
	return all
}
