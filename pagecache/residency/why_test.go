package residency

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// TestWhyEvicted: evictions are counted by reason and rule; so is what brackets had in pinned memory.
func TestWhyEvicted(t *testing.T) {
	d, _ := newPinnedDevice(t, 4, 2)
	ctx := context.Background()
	idle, k := newKey(t, d), newKey(t, d)
	idle.idle(t, 0, 1)
	idle.idle(t, 1, 2)
	mapped, err := newKey(t, d).take(0, 0, 4) // in one extent
	require.NoError(t, err)
	require.Equal(t, []Departure{{Why: ForMapping, Rule: "allocated", Extents: 2, Bytes: 2 * granule}},
		d.Status().Departures)
	require.Equal(t, OverBus{}, d.Status().OverBus)

	g, err := k.grant(false, 0, 2)
	require.NoError(t, err)
	g.Free()
	over := d.Status().OverBus
	require.EqualValues(t, 1, over.Brackets)
	require.EqualValues(t, 2*granule, over.Bytes)
	require.Positive(t, over.Seconds)
	other, err := newKey(t, d).grant(false, 0, 1)
	require.NoError(t, err)
	require.Contains(t, d.Status().Departures,
		Departure{Why: ForPinned, Rule: "allocated", Pinned: true, Extents: 1, Bytes: granule})
	other.Free()
	mapped.Free()
	require.NoError(t, d.SetBudget(ctx, granule, "a test"))
	require.Contains(t, d.Status().Departures,
		Departure{Why: ForBudget, Rule: "allocated", Extents: 1, Bytes: 4 * granule})
	require.Zero(t, over.Brackets-1)
}

// TestOthersExtentsAndMostPinned: an extent that another tenant left in pinned memory counts toward the maximum of the
// tenant that uses it next, whose own extents make room.
func TestOthersExtentsAndMostPinned(t *testing.T) {
	d, _ := newPinnedDevice(t, 2, 8)
	ctx := context.Background()
	d.setTenants(t, []tenants.Tenant{{ID: tenants.User(1), Weight: 1, MostPinned: 2 * granule}})
	mapped, err := newKey(t, d).take(0, 0, 2)
	require.NoError(t, err)
	grant := func(k *key, user uint32, from, to int) (*Grant, error) {
		return d.Grant(ctx, []Want{k.want(pageOf(from), pageOf(to))},
			Asking{By: Tenant{User: user}, Patience: time.Millisecond})
	}
	own, shared := newKey(t, d), newKey(t, d)
	g, err := grant(shared, 2, 0, 4)
	require.NoError(t, err)
	g.Free()
	g, err = grant(own, 1, 0, 2)
	require.NoError(t, err)
	g.Free()
	pinned := func() (n int64) {
		for _, a := range d.pinned.Tenants() {
			if a.Tenant == tenants.User(1) {
				n = a.Owned
			}
		}
		return n
	}
	require.EqualValues(t, 2*granule, pinned())
	g, err = grant(shared, 1, 0, 1)
	require.NoError(t, err)
	require.EqualValues(t, 2*granule, pinned())
	require.Len(t, own.tiers(), 1, "its own extents left")
	_, err = grant(shared, 1, 1, 4)
	require.Error(t, err, "three are more than its maximum")
	require.LessOrEqual(t, pinned(), int64(2*granule))
	g.Free()
	mapped.Free()
}

// TestLargeExtentsGoBack: an extent that is larger than a batch leaves free moves back, too.
func TestLargeExtentsGoBack(t *testing.T) {
	d, _ := newPinnedDevice(t, 16, 16)
	ctx, now := context.Background(), time.Now()
	var mapped []*Pin
	full, k := newKey(t, d), newKey(t, d)
	for i := range 16 {
		p, err := full.take(0, pageOf(i), pageOf(i+1))
		require.NoError(t, err)
		mapped = append(mapped, p)
	}
	g, err := d.Grant(ctx, []Want{{Key: k, Pages: granules(0, 2), Size: 2 * granule}},
		Asking{By: Tenant{User: 1}, Patience: patient})
	require.NoError(t, err)
	g.Free()
	require.Equal(t, []Tier{TierHost}, k.tiers())
	for _, x := range full.Extents(granules(0, 16))[:2] {
		mapped[0].Free()
		mapped = mapped[1:]
		require.True(t, full.Clean(ctx, x, true))
	}
	require.NoError(t, d.Back(ctx, now))
	require.NoError(t, d.Back(ctx, now.Add(backAfter)))
	require.Equal(t, []Tier{TierVRAM}, k.tiers())
	for _, p := range mapped {
		p.Free()
	}
}

// TestClaimsAreCountedAtOnce: two concurrent moves of a tenant's extents do not both get the last memory that the
// tenant may own.
func TestClaimsAreCountedAtOnce(t *testing.T) {
	d, _ := newPinnedDevice(t, 4, 4)
	id := tenants.User(1)
	d.setTenants(t, []tenants.Tenant{{ID: id, Weight: 1, Most: 2 * granule}})
	require.True(t, d.claim(id, 2*granule))
	require.False(t, d.claim(id, granule))
	d.unclaim(id, 2*granule)
	require.True(t, d.claim(id, granule))
	d.unclaim(id, granule)
}

// TestRecallsInVainBecomeRare: if others keep wanting memory, clients are not recalled at every observation.
func TestRecallsInVainBecomeRare(t *testing.T) {
	d, f := newDevice(t, 16, 1)
	mapped, err := newKey(t, d).take(0, 0, 16)
	require.NoError(t, err)
	d.SetLive()
	f.SetFree(1)
	recalls := 0
	d.options.Recall = func(context.Context) { recalls++ }
	now := time.Now()
	for range 60 * 4 { // a minute
		require.NoError(t, d.Follow(context.Background(), now))
		now = now.Add(250 * time.Millisecond)
	}
	require.Less(t, recalls, 10)
	f.SetFree(20 * granule)
	require.NoError(t, d.Follow(context.Background(), now))
	was := recalls
	f.SetFree(1)
	require.NoError(t, d.Follow(context.Background(), now))
	require.Equal(t, was+1, recalls, "it recalls at once again")
	mapped.Free()
}
