package residency

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// TestBack: idle extents in pinned memory move back when much of the device has been free for a while, until little is
// free, beginning with the tenant that owns least relative to its share. Extents that a bracket uses, that their Key
// wants on the host, or that their owner may not have on the device stay.
func TestBack(t *testing.T) {
	d, _ := newPinnedDevice(t, 16, 12)
	ctx, now := context.Background(), time.Now()
	d.setTenants(t, []tenants.Tenant{{ID: tenants.User(2), Weight: 3}, {ID: tenants.User(3), Weight: 1, Most: granule}})
	full, a, b, c, used := newKey(t, d), newKey(t, d), newKey(t, d), newKey(t, d), newKey(t, d)
	mapped, err := full.take(0, 0, 16)
	require.NoError(t, err)
	host := func(k *key, user uint32, granules int) {
		for i := range granules {
			g, err := d.Grant(ctx, []Want{k.want(pageOf(i), pageOf(i+1))},
				Asking{By: Tenant{User: user}, Patience: patient})
			require.NoError(t, err)
			g.Free()
		}
	}
	host(a, 1, 4)
	host(b, 2, 4)
	host(c, 3, 2)
	busy, err := used.grant(false, 0, 1)
	require.NoError(t, err)
	count := func(k *key, tier Tier) (n int) {
		for _, is := range k.tiers() {
			if is == tier {
				n++
			}
		}
		return n
	}
	later := func() {
		require.NoError(t, d.Back(ctx, now))
		now = now.Add(backAfter)
		require.NoError(t, d.Back(ctx, now))
	}
	later()
	require.EqualValues(t, 11*granule, d.Status().Pinned, "the device is still full")
	mapped.Free()
	full.letGo(t)
	small := newKey(t, d)
	mapped, err = small.take(0, 0, 15)
	if err != nil { // in one extent of 16 granules
		t.Fatal(err)
	}
	later()
	require.EqualValues(t, 11*granule, d.Status().Pinned, "one extent has all of the device")
	mapped.Free()
	small.letGo(t)

	require.NoError(t, d.Back(ctx, now))
	require.EqualValues(t, 11*granule, d.Status().Pinned, "it waits for a while")
	a.refuses.Store(true)
	later()
	require.Equal(t, []int{0, 4, 1}, []int{count(a, TierVRAM), count(b, TierVRAM), count(c, TierVRAM)},
		"a refuses, and c may have one")
	require.Equal(t, []Tier{TierHost}, used.tiers(), "a bracket uses it")
	a.refuses.Store(false)
	later()
	require.Equal(t, 4, count(a, TierVRAM))
	require.EqualValues(t, 9*granule, d.Status().MovedIn)
	busy.Free()
}

// TestBackByShare: the tenant that owns least relative to its share gets room first, and a batch ends before the device
// is full.
func TestBackByShare(t *testing.T) {
	d, _ := newPinnedDevice(t, 16, 8)
	ctx, now := context.Background(), time.Now()
	d.setTenants(t, []tenants.Tenant{{ID: tenants.User(2), Weight: 3}})
	full, a, b := newKey(t, d), newKey(t, d), newKey(t, d)
	var mapped []*Pin
	for i := range 16 {
		p, err := full.take(0, pageOf(i), pageOf(i+1))
		require.NoError(t, err)
		mapped = append(mapped, p)
	}
	for i := range 4 {
		for user, k := range map[uint32]*key{1: a, 2: b} {
			g, err := d.Grant(ctx, []Want{k.want(pageOf(i), pageOf(i+1))},
				Asking{By: Tenant{User: user}, Patience: patient})
			require.NoError(t, err)
			g.Free()
		}
	}
	free := func(n int) {
		for _, x := range full.Extents(granules(0, 16))[:n] {
			mapped[0].Free()
			mapped = mapped[1:]
			require.True(t, full.Clean(ctx, x, true))
		}
	}
	free(1)
	for range 3 {
		require.NoError(t, d.Back(ctx, now))
		now = now.Add(backAfter)
	}
	require.Zero(t, d.Status().MovedIn, "a sixteenth is free, and a batch begins with an eighth")
	free(3)
	require.NoError(t, d.Back(ctx, now))
	require.NoError(t, d.Back(ctx, now.Add(backAfter)))
	require.EqualValues(t, 3*granule, d.Status().MovedIn, "a sixteenth is left")
	require.EqualValues(t, 3*granule, d.owned(2), "furthest below the share")
	for _, p := range mapped {
		p.Free()
	}
}

// TestBackDoesNotWait: Back returns at once while others wait for memory, so that its caller can follow the budget.
func TestBackDoesNotWait(t *testing.T) {
	d, _ := newPinnedDevice(t, 8, 2)
	ctx, now := context.Background(), time.Now()
	full, k := newKey(t, d), newKey(t, d)
	mapped, err := full.take(0, 0, 8)
	require.NoError(t, err)
	g, err := k.grant(false, 0, 1)
	require.NoError(t, err)
	g.Free()
	mapped.Free()
	full.letGo(t)
	require.NoError(t, d.Back(ctx, now))
	mine, _, err := d.turn(ctx)
	require.NoError(t, err)
	short, cancel := context.WithTimeout(ctx, patient/10)
	defer cancel()
	require.NoError(t, d.Back(short, now.Add(backAfter)))
	require.Equal(t, []Tier{TierHost}, k.tiers())
	d.yield(mine)
	require.NoError(t, d.Back(ctx, now.Add(backAfter)))
	require.Equal(t, []Tier{TierVRAM}, k.tiers())
}
