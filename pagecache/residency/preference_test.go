package residency

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestPriorities: of a tenant's extents, those of the lowest priority leave first, whatever the rule, and come back
// last.
func TestPriorities(t *testing.T) {
	d, _ := newPinnedDevice(t, 16, 8)
	ctx := context.Background()
	high, low, other := newKey(t, d), newKey(t, d), newKey(t, d)
	high.preference.Store(&Preference{Priority: 1})
	low.preference.Store(&Preference{Priority: -1})
	d.SetLowest(-1)
	high.idle(t, 0, 4) // the oldest
	other.idle(t, 0, 4)
	low.idle(t, 0, 8)
	all, others := len(low.tiers()), len(high.tiers())+len(other.tiers())
	shrink := func(k *key) {
		for budget := d.Budget(); len(k.tiers()) > 0; {
			budget -= granule
			require.NoError(t, d.SetBudget(ctx, budget, "a test"))
		}
	}
	require.Positive(t, all)
	shrink(low)
	require.Len(t, append(high.tiers(), other.tiers()...), others)
	others = len(high.tiers())
	shrink(other)
	require.Len(t, high.tiers(), others)
}

// TestOnHost: grants of a Key that should be on the host get pinned memory, although the device has room. Its extents
// do not move back.
func TestOnHost(t *testing.T) {
	d, _ := newPinnedDevice(t, 8, 4)
	ctx, now := context.Background(), time.Now()
	k := newKey(t, d)
	k.preference.Store(&Preference{OnHost: true})
	for range 2 {
		g, err := k.grant(false, 0, 2)
		require.NoError(t, err)
		require.Equal(t, []Tier{TierHost, TierHost}, k.tiers())
		g.Free()
		require.NoError(t, d.Back(ctx, now))
		require.NoError(t, d.Back(ctx, now.Add(backAfter)))
	}
	k.preference.Store(nil)
	require.NoError(t, d.Back(ctx, now.Add(2*backAfter)))
	require.NoError(t, d.Back(ctx, now.Add(3*backAfter)))
	require.Equal(t, []Tier{TierVRAM, TierVRAM}, k.tiers())
}

// TestOnHostOfMoreThanThereIs: if there is no pinned memory for extents that should be on the host, they are on the
// device.
func TestOnHostOfMoreThanThereIs(t *testing.T) {
	d, _ := newPinnedDevice(t, 8, 4)
	k := newKey(t, d)
	k.preference.Store(&Preference{OnHost: true})
	g, err := d.Grant(context.Background(), []Want{k.want(0, 6)}, Asking{Patience: time.Millisecond})
	require.NoError(t, err)
	require.Contains(t, k.tiers(), TierHost)
	require.Contains(t, k.tiers(), TierVRAM)
	g.Free()
}
