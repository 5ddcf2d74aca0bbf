package schedule

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func discipline(t *testing.T, name string) Discipline {
	d, err := New(name, func(tenant uint32) float64 { return float64(1 + tenant%3) })
	require.NoError(t, err)
	return d
}

// sizeOf returns the bytes of a call.
func sizeOf(call []Request) (n int64) {
	for _, r := range call {
		n += r.Size
	}
	return n
}

// fits is the slow twin of window.fits: it goes through the calls in progress.
func fits(under [][]Request, r Request) bool {
	calls, bytes := 0, int64(0) // as urgent or more
	for _, c := range under {
		if c[0].Class <= r.Class {
			calls, bytes = calls+1, bytes+sizeOf(c)
		}
	}
	return calls < MostCalls && (bytes == 0 || bytes+r.Size <= InFlight)
}

// moreUrgent reports whether a call of a more urgent class is in progress.
func moreUrgent(under [][]Request, c Class) bool {
	return slices.ContainsFunc(under, func(call []Request) bool { return call[0].Class < c })
}

// mayWait reports whether the next request of a discipline may have to wait for calls in progress.
func mayWait(d Discipline, under [][]Request) bool {
	var next []waiting // of which the discipline chooses
	switch d := d.(type) {
	case *Priority:
		next = d.waits[:1]
		if x := d.waits[d.waits.oldest()]; d.starves(x) {
			next = []waiting{x}
		} else if d.Exclusive && moreUrgent(under, next[0].Class) {
			return true
		}
	case *Shares:
		for _, t := range d.tenants {
			if len(t.waits) > 0 {
				next = append(next, t.waits[0], t.waits[t.waits.oldest()])
			}
		}
	}
	return slices.ContainsFunc(next, func(x waiting) bool { return !fits(under, x.Request) })
}

// inProgress returns what a discipline counts.
func inProgress(d Discipline) any {
	switch d := d.(type) {
	case *Priority:
		return d.classes
	case *Shares:
		return d.classes
	}
	return d.(*FCFS).calls
}

// TestEachRequestIsServed runs random programs on all disciplines: each request begins once, and the device is never
// idle while something waits. In all but FCFS, a request begins if and only if the bytes and calls in flight of its
// class and of more urgent ones leave room, no request starves, and requests that nobody waits for go last.
func TestEachRequestIsServed(t *testing.T) {
	for _, name := range Names() {
		for k := range uint64(40) {
			s := *seed
			if s == 0 {
				s = k + 1
			}
			rnd := rand.New(rand.NewPCG(s, 1))
			again := fmt.Sprintf("%s: go test ./pagecache/mover/schedule -run TestEachRequestIsServed -seed=%d", name,
				s)
			d := discipline(t, name)
			waits := make(map[ID]Request)
			since, begun := make(map[ID]int64), int64(0)
			var under [][]Request
			settle := func() {
				for {
					urgent := false
					for _, r := range waits {
						urgent = urgent || r.Class <= Acquire
					}
					call := d.Next()
					if len(call) == 0 {
						break
					}
					for _, r := range call {
						require.Contains(t, waits, r.ID, again)
						delete(waits, r.ID)
						if name != "fcfs" {
							passed := begun - since[r.ID]
							require.LessOrEqual(t, passed, int64(mostPassed+64*CallBytes), again)
							require.True(t, r.Class <= Acquire || !urgent || passed > mostPassed, again)
							require.True(t, name != "preemptive-exclusive" || !moreUrgent(under, r.Class) ||
								passed > mostPassed, again)
						}
					}
					if name != "fcfs" {
						require.True(t, fits(under, call[0]), again)
					}
					begun, under = begun+sizeOf(call), append(under, call)
				}
				require.True(t, len(under) > 0 || len(waits) == 0, again)
				if name != "fcfs" && len(waits) > 0 {
					require.True(t, mayWait(d, under), again)
				}
			}
			end := func(i int) {
				call := under[i]
				under = slices.Delete(under, i, i+1)
				d.End(call)
			}
			last := ID(0)
			for range 400 {
				switch rnd.IntN(8) {
				case 0, 1, 2:
					last++
					r := Request{ID: last, Class: Class(rnd.IntN(len(Classes()))), Size: 4096 << rnd.IntN(10),
						Own: rnd.IntN(2) == 0, Tenant: uint32(rnd.IntN(4))}
					waits[last], since[last] = r, begun
					d.Arrive(r)
				case 3:
					id := ID(rnd.Uint64N(uint64(last) + 2))
					if r, ok := waits[id]; ok && r.Class > CPURead && !r.Own {
						r.Class = CPURead
						waits[id] = r
					}
					d.Promote(id)
				case 4:
					id := ID(rnd.Uint64N(uint64(last) + 2))
					_, ok := waits[id]
					require.Equal(t, ok, d.Withdraw(id), again)
					delete(waits, id)
				case 5:
					// Replace the discipline by a new one.
					d = discipline(t, name)
					for _, call := range under {
						d.Resume(call)
					}
					ids := make([]ID, 0, len(waits))
					for id := range waits {
						ids = append(ids, id)
					}
					slices.Sort(ids)
					for _, id := range ids {
						since[id] = begun
						d.Arrive(waits[id])
					}
				default:
					if len(under) > 0 {
						end(rnd.IntN(len(under)))
					}
				}
				settle()
			}
			for len(under) > 0 {
				end(0)
				settle()
			}
			require.Empty(t, waits, again)
			require.Zero(t, inProgress(d), again)
			if s, ok := d.(*Shares); ok {
				require.Empty(t, s.tenants, again)
			}
		}
	}
}

// TestCallOfSeveralClasses: FCFS makes calls of several classes. A discipline that replaces it counts such a call until
// it ends, and no longer.
func TestCallOfSeveralClasses(t *testing.T) {
	for _, name := range Names() {
		f := new(FCFS)
		f.Arrive(Request{ID: 1, Class: WriteBack, Size: 1 << 20})
		f.Arrive(Request{ID: 2, Class: Prefetch, Size: 1 << 20})
		call := f.Next()
		require.Len(t, call, 2)
		d := discipline(t, name)
		d.Resume(call)
		require.NotZero(t, inProgress(d), name)
		d.End(call)
		require.Zero(t, inProgress(d), name)
	}
}

func TestNamesOfDisciplines(t *testing.T) {
	require.Contains(t, Names(), Default)
	for _, name := range Names() {
		require.NotEmpty(t, About(name))
		if most := discipline(t, name).Piece(); most > 0 && name != "preemptive-exclusive" {
			require.Contains(t, About(name), fmt.Sprintf("pieces of %d MiB", most>>20))
		}
	}
	require.Empty(t, About("random"))
	_, err := New("random", nil)
	require.ErrorContains(t, err, "there are fcfs, priority")
}

// TestATransferKeepsItsPlace: later pieces of a transfer go before equals that arrived after the first piece, but not
// before more urgent ones.
func TestATransferKeepsItsPlace(t *testing.T) {
	for _, name := range []string{"priority", "preemptive", "preemptive-exclusive", "shares"} {
		d := discipline(t, name)
		begins := func(ids ...ID) {
			for _, id := range ids {
				call := d.Next()
				require.Len(t, call, 1, name)
				require.Equal(t, id, call[0].ID, name)
				d.End(call)
			}
			require.Empty(t, d.Next(), name)
		}
		arrives := func(id, after ID, c Class) {
			d.Arrive(Request{ID: id, After: after, Class: c, Size: MostPiece, Own: true})
		}
		arrives(1, 0, Acquire)
		begins(1)
		arrives(2, 0, Acquire)
		arrives(3, 0, CPURead)
		arrives(4, 1, Acquire)
		arrives(5, 1, Acquire)
		begins(3, 4, 5, 2)
	}
}
