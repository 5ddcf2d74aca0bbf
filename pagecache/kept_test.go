package pagecache

import (
	"context"
	"math"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// keeper is a client that ends its kept brackets when it is asked to, and then says how often it used them.
type keeper struct {
	old   bool // it does not count uses
	mu    sync.Mutex
	open  []*Bracket          // protected by mu
	uses  map[*Bracket]uint32 // protected by mu
	asked int                 // protected by mu
}

func (k *keeper) Counts() bool { return !k.old }

// joined notes that a kept bracket was used n more times.
func (k *keeper) joined(b *Bracket, n uint32) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.uses == nil {
		k.uses = make(map[*Bracket]uint32)
	}
	k.uses[b] += n
}

func (k *keeper) Recall() (func(ctx context.Context) error, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.asked++
	ended := make(chan struct{})
	go func(open []*Bracket, uses map[*Bracket]uint32) {
		defer close(ended)
		for _, b := range open {
			b.Used(uses[b])
			b.Done()
		}
	}(k.open, k.uses)
	k.open, k.uses = nil, nil
	return until(ended), nil
}

// until returns a function that waits until c is closed.
func until(c <-chan struct{}) (wait func(ctx context.Context) error) {
	return func(ctx context.Context) error {
		select {
		case <-c:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// end ends all kept brackets.
func (k *keeper) end() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, b := range k.open {
		b.Done()
	}
}

// keep begins a bracket over extents [from, to). by keeps it if it may.
func (c *traveller) keep(by *keeper, from, to int) *Bracket {
	c.t.Helper()
	b, err := c.m.cache.Use(context.Background(), []Use{c.over(from, to)},
		UseOptions{Patience: time.Minute, Keeper: by})
	require.NoError(c.t, err)
	if b.Kept() {
		by.mu.Lock()
		defer by.mu.Unlock()
		by.open = append(by.open, b)
	}
	return b
}

// TestKeptBracketsAreRecalled: kept brackets fill a device. Another client gets the memory at once, because the first
// one is asked to end them: once, and not again while other brackets are idle. A bracket that is used again is kept
// again.
func TestKeptBracketsAreRecalled(t *testing.T) {
	const extents = 4
	m := newMovingMachine(t, 1, extents, 0)
	a, b := m.travel(m.noisyFile(2*extents*brick), 0, true), m.travel(m.noisyFile(extents*brick), 0, false)
	by := &keeper{}
	defer by.end()
	for i := range extents {
		require.True(t, a.keep(by, i, i+1).Kept())
		a.host[i*brick] = 77
	}
	u, err := b.try(0, extents) // waits for no bracket
	require.NoError(t, err)
	require.Equal(t, 1, by.asked)
	require.Zero(t, a.mapped(), "all was taken back")
	u.Done()
	for i := range 2 * extents {
		require.True(t, a.keep(by, i, i+1).Kept(), "even though the device just needed room")
	}
	require.Equal(t, 2, by.asked, "the first four were idle")
	require.Len(t, by.open, extents)
	a.keep(by, 2*extents-1, 2*extents)
	a.keep(by, 0, 1)
	require.Equal(t, 3, by.asked)
	a.keep(by, 1, 2)
	require.Equal(t, 3, by.asked, "three of those that were recalled are idle")
	require.EqualValues(t, 77, a.loads(0))
}

// TestKeptBeforeItsClientKnows: a client is asked while the answer that lets it keep a bracket is still on its way. It
// is asked again once it knows.
func TestKeptBeforeItsClientKnows(t *testing.T) {
	m := newMovingMachine(t, 1, 1, 0)
	a, b := m.travel(m.noisyFile(brick), 0, false), m.travel(m.noisyFile(brick), 0, false)
	by := &keeper{}
	defer by.end()
	x, err := m.cache.Use(context.Background(), []Use{a.over(0, 1)}, UseOptions{Keeper: by})
	require.NoError(t, err)
	require.True(t, x.Kept())
	_, err = b.try(0, 1)
	require.ErrorIs(t, err, syscall.EDEADLK)
	by.mu.Lock()
	require.Equal(t, 1, by.asked)
	by.open = append(by.open, x) // the answer has arrived
	by.mu.Unlock()
	y, err := m.cache.Use(context.Background(), []Use{b.over(0, 1)}, UseOptions{Patience: 10 * time.Second})
	require.NoError(t, err)
	y.Done()
}

// TestUsesOfKeptBracketsCount: under a rule that counts uses, brackets are kept although the device needs room. Their
// uses count before a victim is chosen.
func TestUsesOfKeptBracketsCount(t *testing.T) {
	m := newMovingMachine(t, 1, 3, 0)
	require.NoError(t, m.cache.devices[0].room.SetEviction("lfu"))
	a := m.travel(m.noisyFile(6*brick), 0, true)
	by := &keeper{}
	defer by.end()
	times := func(n, at int) {
		for range n {
			a.use(at, at+1).Done()
		}
	}
	has := func(extents ...int64) {
		t.Helper()
		a.mu.Lock()
		defer a.mu.Unlock()
		require.Len(t, a.has, len(extents))
		for _, x := range extents {
			require.Contains(t, a.has, x*brick)
		}
	}
	x := a.keep(by, 0, 1)
	require.True(t, x.Kept())
	times(2, 1)
	times(4, 2)
	by.joined(x, 4) // 5 in all
	x = a.keep(by, 3, 4)
	require.True(t, x.Kept(), "a device that just needed room")
	require.Equal(t, 1, by.asked)
	has(0, 2, 3)
	by.joined(x, 4)
	x = a.keep(by, 4, 5)
	require.True(t, x.Kept())
	has(0, 3, 4)
	// What a client says fills a counter by half at most, and one that was not kept has no such uses.
	by.joined(x, math.MaxUint32)
	y := a.use(5, 6)
	has(3, 4, 5)
	y.Used(math.MaxUint32)
	y.Done()
	times(1, 0)
	has(0, 3, 4)
}

// TestColdIdleExtentsLeaveFirst: under a rule that counts uses, clients are not asked for kept brackets while an idle
// extent is colder than theirs, as far as is known.
func TestColdIdleExtentsLeaveFirst(t *testing.T) {
	m := newMovingMachine(t, 1, 3, 0)
	require.NoError(t, m.cache.devices[0].room.SetEviction("lfu"))
	a := m.travel(m.noisyFile(5*brick), 0, true)
	by := &keeper{}
	defer by.end()
	a.use(0, 1).Done()
	for range 2 {
		a.use(1, 2).Done()
	}
	require.True(t, a.keep(by, 2, 3).Kept())
	require.True(t, a.keep(by, 3, 4).Kept())
	require.Zero(t, by.asked, "extent 0 was used as often as extent 2, and earlier")
	require.True(t, a.keep(by, 4, 5).Kept())
	require.Equal(t, 1, by.asked, "extent 1 was used more often")
	a.mu.Lock()
	defer a.mu.Unlock()
	require.Len(t, a.has, 3)
	require.Contains(t, a.has, int64(1*brick))
}

// TestColdExtentsThatMustStay: under a rule that counts uses, clients are not asked for kept brackets whose extents
// could not leave anyway: those of a pinned file, and changed ones while the device gives up unchanged ones first.
func TestColdExtentsThatMustStay(t *testing.T) {
	m := newMovingMachine(t, 1, 3, 0)
	require.NoError(t, m.cache.devices[0].room.SetEviction("lfu"))
	src := m.noisyFile(brick)
	pinned, a := m.travel(src, 0, true), m.travel(m.noisyFile(3*brick), 0, true)
	m.pin(src, Pinning{All: true})
	by := &keeper{}
	defer by.end()
	require.True(t, pinned.keep(by, 0, 1).Kept())
	for i := range 3 {
		a.use(i, i+1).Done()
		a.use(i, i+1).Done()
	}
	require.Zero(t, by.asked, "the pinned extent is the coldest, and stays")
	changed := m.travel(m.noisyFile(brick), 0, true)
	x := changed.keep(by, 0, 1)
	require.True(t, x.Kept())
	changed.host[0]++
	require.EqualValues(t, 1, changed.releases())
	for range 3 {
		a.use(2, 3).Done() // hotter
	}
	by.asked = 0
	require.NoError(t, m.cache.SetBudget(t.Context(), 2*brick, ""))
	require.Zero(t, by.asked, "an unchanged extent was idle")
}

// TestColdExtentsOfOthers: tenants' shares come before uses. A client is not asked for a cold kept bracket while
// another user, who owns more, has idle extents.
func TestColdExtentsOfOthers(t *testing.T) {
	m := newMovingMachine(t, 1, 3, 0)
	require.NoError(t, m.cache.devices[0].room.SetEviction("lfu"))
	a := m.travel(m.noisyFile(brick), 0, false)
	b := m.travelAs(m.noisyFile(3*brick), 0, MapRequest{Len: 3 * brick, User: 7})
	by := &keeper{}
	defer by.end()
	x := a.keep(by, 0, 1)
	require.True(t, x.Kept())
	for i := range 3 {
		b.use(i, i+1).Done()
		b.use(i, i+1).Done()
	}
	require.Zero(t, by.asked)
	require.Equal(t, 1, a.mapped())
}

// TestWhoKeepsUnderWhichRule: under a rule that counts uses, only clients that count them keep brackets. Under one that
// looks at open brackets, nobody does.
func TestWhoKeepsUnderWhichRule(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 0)
	a := m.travel(m.noisyFile(2*brick), 0, true)
	for _, c := range []struct {
		rule      string
		old, kept bool
	}{
		{"lru", false, true}, {"lru", true, true}, {"lfu", false, true}, {"lfu", true, false},
		{"flexgpu", false, false}, {"flexgpu", true, false},
	} {
		require.NoError(t, m.cache.devices[0].room.SetEviction(c.rule))
		b := a.keep(&keeper{old: c.old}, 0, 1)
		require.Equal(t, c.kept, b.Kept(), "%+v", c)
		b.Done()
	}
}

// TestBracketsThatAreNotRecalled: a bracket that its client uses stays in place, even if it began as a kept one. A
// limited user keeps no brackets.
func TestBracketsThatAreNotRecalled(t *testing.T) {
	m := newMovingMachine(t, 1, 3, 0)
	a := m.travel(m.noisyFile(2*brick), 0, false)
	b := m.travelAs(m.noisyFile(2*brick), 0, MapRequest{Len: 2 * brick, User: 7, Limited: true})
	by := &keeper{}
	limited := b.keep(by, 0, 1)
	require.False(t, limited.Kept())
	limited.Done()
	used := a.keep(by, 0, 2)
	require.True(t, used.Kept())
	by.open = nil // a kernel uses it
	_, err := b.try(0, 2)
	require.ErrorIs(t, err, syscall.EDEADLK)
	require.Equal(t, 1, by.asked)
	require.Equal(t, 2, a.mapped())
	used.Done()
	b.use(0, 2).Done()
}

// TestBracketsInPinnedMemoryAreNotKept: what did not fit on the device is not kept.
func TestBracketsInPinnedMemoryAreNotKept(t *testing.T) {
	m := newMovingMachine(t, 1, 1, 1)
	c := m.travel(m.noisyFile(2*brick), 0, false)
	by := &keeper{}
	require.True(t, c.keep(by, 0, 1).Kept())
	u := c.keep(&keeper{}, 0, 2)
	require.False(t, u.Kept())
	u.Done()
	by.end()
	require.Empty(t, m.cache.devices[0].kept.by, "whoever keeps nothing is not asked")
}

// deafKeeper is a client that cannot be asked.
type deafKeeper struct{ asked int }

func (k *deafKeeper) Counts() bool { return true }

func (k *deafKeeper) Recall() (func(ctx context.Context) error, error) {
	k.asked++
	return nil, syscall.EPIPE
}

// TestKeeperThatCannotBeAsked is asked again at the next opportunity.
func TestKeeperThatCannotBeAsked(t *testing.T) {
	var all kept
	by := &deafKeeper{}
	all.add(by)
	for range 3 {
		all.recall(t.Context())
	}
	require.Equal(t, 3, by.asked)
}
