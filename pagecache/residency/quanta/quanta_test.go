package quanta

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	longest = 100 * time.Millisecond
	unit    = 1 << 20
)

// clock runs clients of a Quanta.
type clock struct {
	*Quanta
	now time.Time
}

func newClock() *clock {
	return &clock{&Quanta{Longest: longest}, time.Unix(1000, 0)}
}

func (c *clock) wait(d time.Duration) { c.now = c.now.Add(d) }

// bracket has a client use a bracket that lacks memory, and bring it. It reports whether the client has a quantum.
func (c *clock) bracket(by Client, takes time.Duration, spare bool) bool {
	c.Ask(by, c.now, unit, 0)
	has := false
	if c.Hungry(by) {
		has, _ = c.May(by, c.now, func() bool { return spare })
	}
	c.Open(by, c.now)
	c.Granted(by, c.now)
	c.wait(takes)
	c.Ready(by, c.now, unit, takes)
	return has
}

func (c *clock) close(by Client) { c.Closed(by, c.now, false) }

// hungry returns a clock with a client that has a quantum, an open bracket, and all of its memory.
func hungry(t *testing.T) *clock {
	c := newClock()
	require.False(t, c.bracket(1, time.Millisecond, true), "it has not shown yet that it is hungry")
	c.close(1)
	require.True(t, c.bracket(1, 2*time.Millisecond, true))
	require.True(t, c.Protected(1, c.now))
	return c
}

// TestQuantumEnds: a client keeps its memory for a multiple of the time that bringing took.
func TestQuantumEnds(t *testing.T) {
	c := hungry(t)
	c.wait(keeps * 2 * time.Millisecond * 9 / 10)
	require.True(t, c.Protected(1, c.now))
	c.wait(keeps * 2 * time.Millisecond)
	require.False(t, c.Protected(1, c.now))
	require.True(t, c.bracket(1, time.Millisecond, true), "if nobody waits, it may have another one")
}

// TestQuantumIsBounded: no quantum is longer than Longest, even if its client asks on and on.
func TestQuantumIsBounded(t *testing.T) {
	c := hungry(t)
	end := c.now.Add(longest)
	for c.now.Before(end) {
		c.Ask(1, c.now, unit, 0)
		c.wait(100 * time.Microsecond)
		c.Ready(1, c.now, unit, 100*time.Microsecond)
		c.wait(500 * time.Microsecond)
	}
	require.False(t, c.Protected(1, c.now))
}

// TestVain: a client that brings memory for more than half of a quantum loses it early, and gets none for a while.
func TestVain(t *testing.T) {
	c, begin := hungry(t), time.Time{}
	for begin = c.now; c.Protected(1, c.now); {
		c.bracket(1, time.Millisecond, true)
	}
	require.Less(t, c.now.Sub(begin), longest*6/10)
	for range leastSkips - 1 {
		require.False(t, c.bracket(1, time.Millisecond, true))
	}
	c.wait(longest)
	require.True(t, c.bracket(1, time.Millisecond, true))
}

// TestOneBringsAtATime: while one client brings its memory, no other begins a quantum. Those that wait are served in
// order of arrival.
func TestOneBringsAtATime(t *testing.T) {
	c := newClock()
	for by := range Client(3) {
		c.bracket(by+1, time.Millisecond, false)
		c.bracket(by+1, time.Millisecond, false)
	}
	require.True(t, c.bracket(1, time.Millisecond, true))
	may := func(by Client) bool {
		may, again := c.May(by, c.now, func() bool { return true })
		require.True(t, may || again.After(c.now))
		return may
	}
	c.Queue(3)
	c.Queue(2)
	require.False(t, may(3), "1 brings")
	c.wait(Grace)
	require.False(t, may(2), "3 came first")
	require.True(t, may(3))
	c.Leave(3)
	require.True(t, c.First(2))
	require.True(t, c.Protected(1, c.now))
}

// TestIdleClientsGiveUp: a client without a bracket loses its quantum soon, and one that pauses gets none.
func TestIdleClientsGiveUp(t *testing.T) {
	c := hungry(t)
	c.close(1)
	c.wait(Grace / 2)
	require.True(t, c.Protected(1, c.now))
	c.wait(Grace / 2)
	require.False(t, c.Protected(1, c.now))
	for range 10 {
		c.wait(3 * time.Millisecond)
		require.False(t, c.bracket(1, 20*time.Millisecond, true), "it pauses")
		c.close(1)
	}
}

// TestKeptBracketsHidePauses: a client that may have ended its brackets long ago is not taken for hungry.
func TestKeptBracketsHidePauses(t *testing.T) {
	c := newClock()
	c.bracket(1, time.Millisecond, true)
	c.Keep(1)
	require.False(t, c.bracket(1, time.Millisecond, true))
	c.close(1)
	c.Closed(1, c.now, true)
	require.False(t, c.bracket(1, time.Millisecond, true))
	require.True(t, c.MayKeep(1, c.now))
	c.Press(c.now)
	require.False(t, c.MayKeep(1, c.now), "while clients compete, pauses must be seen")
	c.wait(forgets)
	require.True(t, c.MayKeep(1, c.now))
}

// TestTooMuchToBring: a client that has too much in pinned memory to bring it within half of a quantum gets none.
func TestTooMuchToBring(t *testing.T) {
	c := newClock()
	c.bracket(1, time.Millisecond, true)
	c.close(1)
	c.Ask(1, c.now, unit, 40*unit)
	require.True(t, c.Hungry(1))
	c.Failed(1, c.now)
	c.Ask(1, c.now, unit, 60*unit)
	require.False(t, c.Hungry(1))
}

// TestNoQuanta: without Longest, nobody gets one, and clients are forgotten some time after their last bracket.
func TestNoQuanta(t *testing.T) {
	c := newClock()
	c.Longest = 0
	for by := range Client(9) {
		for range 3 {
			require.False(t, c.bracket(by+1, time.Millisecond, true))
			c.close(by + 1)
		}
	}
	c.wait(forgets)
	c.Open(9, c.now)
	require.Len(t, c.clients, 1)
	require.False(t, c.Any(c.now))
	c.Ask(0, c.now, unit, 0)
	require.False(t, c.Hungry(0))
}
