package residency

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// newDelayingDevice is newPinnedDevice with a threshold.
func newDelayingDevice(t *testing.T, granules, pinned int64, static, penalty uint64) (*Device, *faulty.Device) {
	t.Helper()
	d, f := newPinnedDevice(t, granules, pinned)
	d.SetDelay(Delay{Threshold: true, Static: static, Penalty: penalty})
	return d, f
}

// use opens and closes a bracket, and returns the tiers of its extents while it was open.
func (k *key) use(t *testing.T, from, to page.Index) (tiers []Tier) {
	t.Helper()
	g, err := k.grant(false, from, to)
	require.NoError(t, err)
	for _, x := range g.Pins()[0].Extents() {
		tiers = append(tiers, x.Placement().Tier)
	}
	g.Free()
	return tiers
}

// usesUntilMove returns how many brackets use a granule until it is in the device's own memory.
func (k *key) usesUntilMove(t *testing.T, at page.Index) int {
	t.Helper()
	for n := 1; n < 1000; n++ {
		if k.use(t, at, at+1)[0] == TierVRAM {
			return n
		}
	}
	t.Fatal("the extent never moved")
	return 0
}

// evictAll evicts all idle extents from the device's own memory.
func (d *Device) evictAll(t *testing.T) {
	t.Helper()
	ctx := context.Background()
	for evicted := true; evicted; {
		mine, _, err := d.turn(ctx)
		require.NoError(t, err)
		evicted, err = d.evict(ctx, TierVRAM, tenants.Nobody, ForSomebody, sparing{copied: true}, 0)
		require.NoError(t, err)
		d.yield(mine)
	}
}

// TestThresholdWhileMemoryIsFree: the fuller the device is, the more brackets an extent is used by before it moves in.
// While an eighth is in use, the first one is enough.
func TestThresholdWhileMemoryIsFree(t *testing.T) {
	d, _ := newDelayingDevice(t, 16, 8, 8, 8)
	k := newKey(t, d)
	for i, want := range []int{1, 1, 2, 2, 3, 3, 4, 4, 5} { // 8·i/16 + 1
		require.Equal(t, want, k.usesUntilMove(t, page.Index(i)), "with %d granules in use", i)
	}
	require.Zero(t, d.Status().Pinned, "what moved left pinned memory")
	// Acquires are accesses, too.
	other := newKey(t, d)
	require.Equal(t, []Tier{TierHost}, other.use(t, 0, 1)) // 5.5 are needed
	pin := d.Keep(other, granules(0, 1))
	for range 4 {
		pin.Accessed(granules(0, 1))
	}
	pin.Free()
	require.Equal(t, []Tier{TierVRAM}, other.use(t, 0, 1))
	require.Equal(t, Delayed{Brackets: 17, Extents: 17, Bytes: 17 * granule}, d.Status().Delayed)
}

// TestThresholdOfOneBracket: what a bracket brings in counts for the extents after it.
func TestThresholdOfOneBracket(t *testing.T) {
	d, _ := newDelayingDevice(t, 16, 16, 8, 8)
	k := newKey(t, d)
	require.Equal(t, []Tier{TierVRAM, TierVRAM, TierHost, TierHost}, k.use(t, 0, 4))
	require.Equal(t, []Tier{TierVRAM, TierVRAM, TierVRAM, TierVRAM}, k.use(t, 0, 4))
}

// TestThresholdWhenFull: if another extent has to leave, t_s·(r+1)·p accesses are needed. Round trips raise it.
func TestThresholdWhenFull(t *testing.T) {
	d, _ := newPinnedDevice(t, 2, 8)
	full, k := newKey(t, d), newKey(t, d)
	full.idle(t, 0, 2)
	d.SetDelay(Delay{Threshold: true, Static: 2, Penalty: 3})
	require.Equal(t, 6, k.usesUntilMove(t, 0))
	require.Empty(t, full.tiers(), "it made room")
	for trips := 1; trips < 3; trips++ {
		before := d.delays.at(spot{k, 0}).id
		d.evictAll(t)
		require.Empty(t, k.tiers())
		full.idle(t, 0, 2)
		require.Equal(t, before, d.delays.at(spot{k, 0}).id, "the history outlives the extent")
		// The 6·trips accesses so far count.
		require.Equal(t, 6, k.usesUntilMove(t, 0), "after %d round trips", trips)
	}
}

// TestThresholdOfKeptBrackets: uses that a client says it made of a bracket count as brackets.
func TestThresholdOfKeptBrackets(t *testing.T) {
	d, _ := newPinnedDevice(t, 2, 8)
	full, k := newKey(t, d), newKey(t, d)
	d.SetDelay(Delay{Threshold: true, Static: 2, Penalty: 3})
	g, err := k.grant(false, 0, 1)
	require.NoError(t, err)
	require.Equal(t, []Tier{TierVRAM}, k.tiers())
	g.Pins()[0].Claimed(granules(0, 1), 7)
	g.Free()
	d.evictAll(t)
	full.idle(t, 0, 2)
	require.Equal(t, 12-8, k.usesUntilMove(t, 0), "12 are needed after a round trip, and there were 1 and 7")
}

// TestThresholdSparesTheBracket: room for an extent that has reached the threshold is made of other brackets' extents,
// not of those that the same bracket uses.
func TestThresholdSparesTheBracket(t *testing.T) {
	d, _ := newDelayingDevice(t, 2, 8, 1, 2)
	k, other := newKey(t, d), newKey(t, d)
	require.Equal(t, []Tier{TierVRAM}, k.use(t, 0, 1))
	require.Equal(t, 1, other.usesUntilMove(t, 0))
	require.Equal(t, []Tier{TierVRAM, TierHost}, k.use(t, 0, 2))
	first := k.Extents(granules(0, 1))[0]
	require.Equal(t, []Tier{TierVRAM, TierVRAM}, k.use(t, 0, 2))
	require.Empty(t, other.tiers())
	require.Same(t, first, k.Extents(granules(0, 1))[0], "it did not leave, although it is the oldest")
}

// TestWritesMoveInAtOnce: the first bracket after a release that changed an extent moves it in, and only that one.
func TestWritesMoveInAtOnce(t *testing.T) {
	d, _ := newDelayingDevice(t, 4, 4, 1000, 8)
	a, k := newKey(t, d), newKey(t, d)
	require.Equal(t, []Tier{TierVRAM}, a.use(t, 0, 1))
	require.Equal(t, []Tier{TierHost}, k.use(t, 0, 1))
	require.Equal(t, []Tier{TierHost}, k.use(t, 0, 1))
	pin := d.Keep(k, granules(0, 1))
	pin.Changed([]page.Range{granules(0, 1)})
	pin.Free()
	require.Equal(t, []Tier{TierVRAM}, k.use(t, 0, 1))
	a.use(t, 0, 1)
	d.evictAll(t)
	require.Equal(t, []Tier{TierVRAM}, a.use(t, 0, 1))
	require.Equal(t, []Tier{TierHost}, k.use(t, 0, 1))
}

// TestSwitchThreshold: with the threshold off, extents move with the first bracket. With it on again, nothing is known
// of them.
func TestSwitchThreshold(t *testing.T) {
	d, _ := newDelayingDevice(t, 2, 4, 8, 8)
	k := newKey(t, d)
	require.Equal(t, []Tier{TierVRAM, TierHost}, k.use(t, 0, 2))
	require.True(t, d.Status().Threshold)
	d.SetDelay(Delay{})
	require.Equal(t, []Tier{TierVRAM, TierVRAM}, k.use(t, 0, 2))
	require.False(t, d.Status().Threshold)
	d.SetDelay(Delay{Threshold: true})
	require.Zero(t, d.delays.spots)
	require.Equal(t, []Tier{TierVRAM, TierVRAM}, k.use(t, 0, 2), "what is there stays there")
	d.SetDelay(Delay{Threshold: true, Static: 4})
	require.Equal(t, 2, d.delays.spots, "another number forgets nothing")
}

// TestThresholdAndBack: extents that brackets use in pinned memory do not move back in the background before they reach
// the threshold.
func TestThresholdAndBack(t *testing.T) {
	d, _ := newDelayingDevice(t, 4, 4, 8, 8)
	k := newKey(t, d)
	ctx, now := context.Background(), time.Now()
	back := func() {
		for range 2 {
			require.NoError(t, d.Back(ctx, now))
			now = now.Add(backAfter)
		}
	}
	require.Equal(t, []Tier{TierVRAM, TierHost}, k.use(t, 0, 2))
	back()
	require.Equal(t, []Tier{TierVRAM, TierHost}, k.tiers())
	pin := d.Keep(k, granules(1, 2))
	pin.Accessed(granules(1, 2))
	pin.Accessed(granules(1, 2))
	pin.Free()
	back()
	require.Equal(t, []Tier{TierVRAM, TierVRAM}, k.tiers())

	// Nothing is known of what was in pinned memory before there was a threshold.
	d.SetDelay(Delay{})
	full := newKey(t, d)
	g, err := full.grant(false, 0, 4)
	require.NoError(t, err)
	require.Equal(t, []Tier{TierHost}, k.use(t, 2, 3))
	g.Free()
	full.letGo(t)
	d.SetDelay(Delay{Threshold: true})
	back()
	require.Equal(t, []Tier{TierHost}, k.tiers())
}

// TestThresholdWithoutPinnedMemory: if there is no pinned memory, or the host refuses it, extents move with the first
// bracket.
func TestThresholdWithoutPinnedMemory(t *testing.T) {
	for name, err := range map[string]error{"memory": gpubackend.ErrNoMemory, "another error": errors.New("refused")} {
		t.Run(name, func(t *testing.T) {
			d, f := newDelayingDevice(t, 4, 4, 8, 8)
			for n := range 10 {
				f.Fail(faulty.AllocHost, n+1, err)
			}
			require.Equal(t, []Tier{TierVRAM, TierVRAM, TierVRAM}, newKey(t, d).use(t, 0, 3))
			require.Zero(t, d.Status().Delayed)
		})
	}
	t.Run("exhausted", func(t *testing.T) {
		d, _ := newDelayingDevice(t, 4, 1, 8, 8)
		a, b := newKey(t, d), newKey(t, d)
		g, err := a.grant(false, 0, 2)
		require.NoError(t, err)
		require.Equal(t, []Tier{TierVRAM, TierHost}, a.tiers())
		require.Equal(t, []Tier{TierVRAM, TierVRAM}, b.use(t, 0, 2))
		g.Free()
		require.Equal(t, []Tier{TierHost}, b.use(t, 2, 3), "idle extents make room")
	})
	t.Run("none", func(t *testing.T) {
		d, _ := newDelayingDevice(t, 2, 0, 8, 8)
		k := newKey(t, d)
		require.Equal(t, []Tier{TierVRAM, TierVRAM}, k.use(t, 0, 2))
		require.Equal(t, []Tier{TierVRAM}, k.use(t, 2, 3))
	})
}

// TestThresholdAndMaxima: a tenant gets no more pinned memory than its maximum. If it may own no more of the device,
// its extents need as many accesses as on a full device.
func TestThresholdAndMaxima(t *testing.T) {
	d, _ := newDelayingDevice(t, 16, 16, 1, 4)
	d.setTenants(t, []tenants.Tenant{{ID: tenants.User(1), Weight: 1, Most: 2 * granule, MostPinned: 2 * granule}})
	k := newKey(t, d)
	grant := func(from, to page.Index) (list []Tier) {
		g, err := d.Grant(context.Background(), []Want{k.want(from, to)},
			Asking{By: Tenant{User: 1}, Patience: patient})
		require.NoError(t, err)
		for _, x := range g.Pins()[0].Extents() {
			list = append(list, x.Placement().Tier)
		}
		g.Free()
		require.LessOrEqual(t, d.pinned.Tenants()[0].Owned, int64(2*granule))
		return list
	}
	require.Equal(t, []Tier{TierVRAM, TierVRAM, TierHost, TierHost}, grant(0, 4))
	for range 2 {
		require.Equal(t, []Tier{TierHost}, grant(2, 3))
	}
	require.Equal(t, []Tier{TierVRAM}, grant(2, 3), "the fourth access")
	d.mu.Lock()
	defer d.mu.Unlock()
	require.EqualValues(t, 2*granule, d.ledger.Owned(tenants.User(1)), "another extent of the tenant left")
}

// TestThresholdOnTheHost: extents of a file that should be on the host stay there, however often they are accessed.
func TestThresholdOnTheHost(t *testing.T) {
	d, _ := newDelayingDevice(t, 4, 4, 8, 8)
	k := newKey(t, d)
	require.Equal(t, []Tier{TierVRAM, TierHost}, k.use(t, 0, 2))
	k.preference.Store(&Preference{OnHost: true})
	for range 5 {
		require.Equal(t, []Tier{TierHost}, k.use(t, 1, 2))
	}
	k.preference.Store(&Preference{})
	require.Equal(t, []Tier{TierVRAM}, k.use(t, 1, 2))
}

// TestForgetAccesses: a Key that is gone leaves nothing behind, and neither do more spots than are remembered.
func TestForgetAccesses(t *testing.T) {
	d, _ := newDelayingDevice(t, 4, 4, 8, 8)
	k, gone := newKey(t, d), newKey(t, d)
	k.use(t, 0, 1)
	gone.use(t, 0, 2)
	require.Equal(t, 3, d.delays.spots)
	gone.letGo(t)
	d.Forget(gone)
	require.Len(t, d.delays.of, 1)
	require.Equal(t, 1, d.delays.spots)
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range page.Index(leastSpots) {
		d.historyLocked(spot{gone, i})
	}
	require.LessOrEqual(t, d.delays.spots, leastSpots)
	require.NotNil(t, d.delays.at(spot{k, 0}), "its extent has memory")
}
