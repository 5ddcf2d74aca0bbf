package grants

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var start = time.Unix(1000, 0)

// room is memory in which an ask takes what need says.
type room struct {
	free int
	need map[ID]int
}

func (r *room) fits(a Ask) bool { return r.need[a.ID] <= r.free }

// decide takes what Next grants, and returns the decisions as words.
func decide(q *Queue, r *room, now time.Time) (said []string) {
	for {
		d, ok := q.Next(now, r.fits)
		if !ok {
			return said
		}
		if d.Refused != nil {
			said = append(said, fmt.Sprintf("no %d", d.Ask.ID))
			continue
		}
		r.free -= r.need[d.Ask.ID]
		said = append(said, fmt.Sprintf("yes %d", d.Ask.ID))
	}
}

func (r *room) done(t *testing.T, q *Queue, c Client, id ID) {
	require.True(t, q.Done(c, id))
	require.False(t, q.Done(c, id))
	r.free += r.need[id]
}

// TestChensDeadlock is Figure 3.2: on 12 GB four programs have 3.61, 1.36, 1.88 and 3.88 GB, and their next launches need
// 3.36, 3.09, 3.51 and 2.51 GB besides. Where what they have stays, none of them fits into the 1.27 GB that are free. Here
// each asks for the sum.
func TestChensDeadlock(t *testing.T) {
	has := []int{361, 136, 188, 388}
	wants := []int{336, 309, 351, 251}
	r := &room{free: 1200, need: make(map[ID]int)}
	for i := range has {
		require.Less(t, 1200-(361+136+188+388), wants[i])
		r.need[ID(i+1)] = has[i] + wants[i]
	}
	var q Queue
	for i := range has {
		q.Ask(Ask{ID: ID(i + 1), Client: Client(i + 1), Since: start})
	}
	require.Equal(t, []string{"yes 1", "yes 2"}, decide(&q, r, start))
	r.done(t, &q, 2, 2)
	require.Empty(t, decide(&q, r, start))
	r.done(t, &q, 1, 1)
	require.Equal(t, []string{"yes 3", "yes 4"}, decide(&q, r, start))
	r.done(t, &q, 3, 3)
	r.done(t, &q, 4, 4)
	require.Equal(t, 1200, r.free)
	require.Zero(t, q.Waiting()+q.Held())
}

// TestNobodyOvertakesTheFirst: one that needs little does not pass one that needs much, but for a higher priority; and
// nobody passes an earlier ask of the same client.
func TestNobodyOvertakesTheFirst(t *testing.T) {
	var q Queue
	r := &room{free: 10, need: map[ID]int{1: 6, 2: 10, 3: 1, 4: 1, 5: 1}}
	q.Ask(Ask{ID: 1, Client: 1})
	require.Equal(t, []string{"yes 1"}, decide(&q, r, start))
	q.Ask(Ask{ID: 2, Client: 2})
	q.Ask(Ask{ID: 3, Client: 3})
	q.Ask(Ask{ID: 4, Client: 3, Priority: 5})
	require.Empty(t, decide(&q, r, start))
	q.Ask(Ask{ID: 5, Client: 4, Priority: 1})
	require.Equal(t, []string{"yes 5"}, decide(&q, r, start))
	r.done(t, &q, 4, 5)
	r.done(t, &q, 1, 1)
	require.Equal(t, []string{"yes 2"}, decide(&q, r, start))
	r.done(t, &q, 2, 2)
	require.Equal(t, []string{"yes 3", "yes 4"}, decide(&q, r, start))
}

// TestNested: who holds does not wait.
func TestNested(t *testing.T) {
	var q Queue
	r := &room{free: 10, need: map[ID]int{1: 6, 2: 10, 3: 4, 4: 1}}
	q.Ask(Ask{ID: 1, Client: 1})
	q.Ask(Ask{ID: 2, Client: 2})
	require.Equal(t, []string{"yes 1"}, decide(&q, r, start))
	q.Ask(Ask{ID: 3, Client: 1, Inside: 1})
	q.Ask(Ask{ID: 4, Client: 1, Inside: 3})
	require.Equal(t, []string{"yes 3", "no 4"}, decide(&q, r, start))
	q.Ask(Ask{ID: 4, Client: 2, Inside: 3})
	d, ok := q.Next(start, r.fits)
	require.True(t, ok)
	require.Equal(t, NotHeld, d.Refused.Reason)
	require.ErrorContains(t, d.Refused, "nested in 3, which is no open bracket")
	r.done(t, &q, 1, 3)
	r.done(t, &q, 1, 1)
	require.Equal(t, []string{"yes 2"}, decide(&q, r, start))
	q.Ask(Ask{ID: 4, Client: 2, Inside: 2})
	d, ok = q.Next(start, r.fits)
	require.True(t, ok)
	require.Equal(t, Holds, d.Refused.Reason)
	require.ErrorContains(t, d.Refused, "end the outer bracket")
}

// TestTimeout: who waited too long learns why, and what fits at that very moment is granted.
func TestTimeout(t *testing.T) {
	var q Queue
	r := &room{free: 10, need: map[ID]int{1: 6, 2: 10, 3: 1, 4: 11}}
	q.Ask(Ask{ID: 1, Client: 7})
	require.Equal(t, []string{"yes 1"}, decide(&q, r, start))
	late := start.Add(time.Second)
	q.Ask(Ask{ID: 2, Client: 2, Since: start, Until: late})
	q.Ask(Ask{ID: 3, Client: 3, Since: start, Until: late})
	at, ok := q.Wake()
	require.True(t, ok)
	require.Equal(t, late, at)
	require.Empty(t, decide(&q, r, late.Add(-1)))
	d, _ := q.Next(late, r.fits)
	require.EqualError(t, d.Refused, "a bracket waited 1s for memory (open brackets: client 7)")
	require.Equal(t, []string{"yes 3"}, decide(&q, r, late), "it is the first by now, and fits")
	_, ok = q.Wake()
	require.False(t, ok)

	q.Ask(Ask{ID: 2, Client: 2, Since: start})
	q.Ask(Ask{ID: 4, Client: 3, Since: start, Until: late})
	d, _ = q.Next(late, r.fits)
	require.EqualError(t, d.Refused, "a bracket waited 1s for memory behind 1 others (open brackets: client 3, 7)")
	require.Equal(t, []ID{1}, q.Leave(7))
	require.Equal(t, []ID{3}, q.Leave(3))
	require.Empty(t, q.Leave(2))
	q.Ask(Ask{ID: 4, Client: 3, Since: start, Until: late})
	d, _ = q.Next(late, r.fits)
	require.ErrorContains(t, d.Refused, "taken by mappings that never move")
	require.False(t, q.Withdraw(4))
}

// twin says what Queue says, slowly: it sorts all that waits whenever it is asked, by who must be before whom.
type twin struct {
	asks []Ask // that wait, in the order in which they came
	held []Ask
}

// rank returns those that are not nested in the order in which they are granted.
func (w *twin) rank() (order []Ask) {
	for _, a := range w.asks {
		if a.Inside != 0 {
			continue
		}
		order = append(order, a)
	}
	slices.SortStableFunc(order, func(a, b Ask) int { return b.Priority - a.Priority })
	return order
}

func (w *twin) drop(id ID) {
	w.asks = slices.DeleteFunc(w.asks, func(a Ask) bool { return a.ID == id })
}

func (w *twin) next(now time.Time, fits func(Ask) bool) (said string) {
	for _, a := range w.asks {
		if a.Inside == 0 {
			continue
		}
		w.drop(a.ID)
		ok := slices.ContainsFunc(w.held, func(h Ask) bool { return h.ID == a.Inside && h.Client == a.Client })
		if !ok || !fits(a) {
			return fmt.Sprintf("no %d", a.ID)
		}
		w.held = append(w.held, a)
		return fmt.Sprintf("yes %d", a.ID)
	}
	order := w.rank()
	for i, a := range order {
		if expired := !a.Until.IsZero() && !a.Until.After(now); expired && (i > 0 || !fits(a)) {
			w.drop(a.ID)
			return fmt.Sprintf("no %d", a.ID)
		}
	}
	if len(order) > 0 && fits(order[0]) {
		w.drop(order[0].ID)
		w.held = append(w.held, order[0])
		return fmt.Sprintf("yes %d", order[0].ID)
	}
	return ""
}

// TestTwin runs random programs on a Queue and its twin: nobody gets more than there is, and all end.
func TestTwin(t *testing.T) {
	for seed := range uint64(100) {
		rnd := rand.New(rand.NewPCG(seed, 0))
		const memory = 20
		var q Queue
		w, r, now := &twin{}, &room{free: memory, need: make(map[ID]int)}, start
		again := fmt.Sprintf("go test ./pagecache/residency/grants -run TestTwin; seed %d", seed)
		settle := func() {
			for {
				want := w.next(now, r.fits)
				d, ok := q.Next(now, r.fits)
				require.Equal(t, want != "", ok, again)
				if !ok {
					return
				}
				if d.Refused != nil {
					require.Equal(t, want, fmt.Sprintf("no %d", d.Ask.ID), again)
					require.NotEmpty(t, d.Refused.Error())
					continue
				}
				require.Equal(t, want, fmt.Sprintf("yes %d", d.Ask.ID), again)
				r.free -= r.need[d.Ask.ID]
				require.GreaterOrEqual(t, r.free, 0, again)
			}
		}
		end := func(i int) {
			a := w.held[i]
			w.held = slices.Delete(w.held, i, i+1)
			r.done(t, &q, a.Client, a.ID)
		}
		for id := ID(1); id < 120; id++ {
			switch k := rnd.IntN(10); {
			case k < 5:
				a := Ask{ID: id, Client: Client(rnd.IntN(5) + 1), Priority: rnd.IntN(3), Since: now}
				if rnd.IntN(3) == 0 {
					a.Until = now.Add(time.Duration(rnd.IntN(9)))
				}
				if len(w.held) > 0 && rnd.IntN(4) == 0 {
					a.Inside = w.held[rnd.IntN(len(w.held))].ID
				}
				r.need[id] = 1 + rnd.IntN(memory)
				q.Ask(a)
				for _, b := range w.rank() {
					if b.Client == a.Client && b.Priority < a.Priority {
						a.Priority = b.Priority
					}
				}
				w.asks = append(w.asks, a)
			case k < 8 && len(w.held) > 0:
				end(rnd.IntN(len(w.held)))
			case k == 8 && len(w.asks) > 0:
				gone := w.asks[rnd.IntN(len(w.asks))].ID
				require.True(t, q.Withdraw(gone))
				w.drop(gone)
			case k == 9 && rnd.IntN(4) == 0:
				c := Client(rnd.IntN(5) + 1)
				held := q.Leave(c)
				w.asks = slices.DeleteFunc(w.asks, func(a Ask) bool { return a.Client == c })
				for _, id := range held {
					r.free += r.need[id]
				}
				w.held = slices.DeleteFunc(w.held, func(a Ask) bool {
					require.Equal(t, a.Client == c, slices.Contains(held, a.ID), again)
					return a.Client == c
				})
			}
			now = now.Add(time.Duration(rnd.IntN(3)))
			settle()
			require.Equal(t, len(w.asks), q.Waiting(), again)
			require.Equal(t, len(w.held), q.Held(), again)
		}
		// When all that is granted ends, all that waits is granted: there is no deadlock.
		for len(w.held) > 0 {
			end(0)
			settle()
		}
		require.Zero(t, q.Waiting(), again)
		require.Equal(t, memory, r.free, again)
	}
}
