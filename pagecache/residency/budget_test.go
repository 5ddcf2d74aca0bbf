package residency

import (
	"context"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// TestBudgetShrinks: idle extents leave, those first that no program changed. Mapped extents stay, and no memory is
// given out until the rest fits.
func TestBudgetShrinks(t *testing.T) {
	d, _ := newDevice(t, 6, 1)
	written, clean, mapped := newKey(t, d), newKey(t, d), newKey(t, d)
	written.idle(t, 0, 1)
	written.idle(t, 1, 2)
	for _, x := range written.Extents(granules(0, 2)) {
		x.Accessed(4096, true)
	}
	clean.idle(t, 0, 1)
	clean.idle(t, 1, 2)
	pin, err := mapped.take(0, 0, 2)
	require.NoError(t, err)
	ctx := context.Background()
	require.NoError(t, d.SetBudget(ctx, 5*granule+1, "a test"))
	require.EqualValues(t, 5*granule, d.Budget())
	require.Equal(t, "a test", d.Status().Why)
	require.Len(t, clean.tiers(), 1)
	require.NoError(t, d.SetBudget(ctx, 4*granule, ""))
	require.Empty(t, clean.tiers())
	require.Len(t, written.tiers(), 2)
	require.NoError(t, d.SetBudget(ctx, granule, ""))
	require.Empty(t, written.tiers())
	require.EqualValues(t, 2*granule, d.backend.Used(), "mapped extents stay")
	_, err = clean.take(0, 0, 1)
	require.ErrorIs(t, err, syscall.ENOMEM)
	pin.Free()
	one, err := clean.take(0, 0, 1)
	require.NoError(t, err, "the extent leaves once nobody maps it")
	require.Empty(t, mapped.tiers())
	one.Free()
	share := func() int64 {
		d.mu.Lock()
		defer d.mu.Unlock()
		return d.ledger.Share(tenants.User(0))
	}
	require.EqualValues(t, granule, share())
	require.NoError(t, d.SetBudget(ctx, 4*granule, ""))
	require.EqualValues(t, 4*granule, share())
}

// TestBudgetGrows: a budget can exceed the one that the device was made with, but not the device's memory.
func TestBudgetGrows(t *testing.T) {
	d, f := newDevice(t, 2, 0.5)
	f.SetFree(4 * granule)
	require.ErrorIs(t, d.CheckBudget(5*granule), syscall.ENOMEM)
	require.ErrorIs(t, d.CheckBudget(granule-1), syscall.EINVAL)
	require.NoError(t, d.CheckBudget(4*granule))
	require.NoError(t, d.SetBudget(context.Background(), 4*granule, ""))
	k := newKey(t, d)
	_, err := d.Reserve(context.Background(), k, Request{Pages: granules(0, 3), Size: granule,
		By: Tenant{User: 1, Limited: true}})
	require.ErrorContains(t, err, "user 1 may map no more than 128 KiB of its 256 KiB and maps 0 B already")
	d.SetShare(1)
	pin, err := d.Reserve(context.Background(), k, Request{Pages: granules(0, 4), Size: granule,
		By: Tenant{User: 1, Limited: true}})
	require.NoError(t, err)
	pin.Free()
}

// TestPinnedMemoryShrinks: a lower limit frees the pinned memory that no bracket uses.
func TestPinnedMemoryShrinks(t *testing.T) {
	d, _ := newPinnedDevice(t, 1, 4)
	a, b := newKey(t, d), newKey(t, d)
	g, err := a.grant(false, 0, 2)
	require.NoError(t, err)
	more, err := b.grant(false, 0, 2)
	require.NoError(t, err)
	more.Free()
	require.EqualValues(t, 3*granule, d.Status().Pinned)
	d.pinned.SetLimit(0)
	require.NoError(t, d.Trim(context.Background()))
	require.EqualValues(t, granule, d.Status().Pinned, "a bracket has it")
	require.Empty(t, b.tiers())
	g.Free()
	require.NoError(t, d.Trim(context.Background()))
	used, _ := d.pinned.Used()
	require.Zero(t, used)
	require.Zero(t, d.pinned.Limit())
	d.pinned.SetLimit(2 * granule)
	g, err = b.grant(false, 0, 3)
	require.NoError(t, err)
	g.Free()
}
