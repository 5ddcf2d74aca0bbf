package residency

import (
	"bytes"
	"context"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// TestLiveBudget: the budget shrinks if less than the floor is left for others, grows after a while if enough is left,
// and does not change in between.
func TestLiveBudget(t *testing.T) {
	l := newLive(1600, 10) // the floor is 100
	begin := time.Now()
	for _, step := range []struct {
		says         string
		after        time.Duration
		budget       int64
		used, free   int64
		least, wants int64
	}{
		{"others have nothing", 0, 1600, 0, 2000, 10, 1600},
		{"they leave the floor", 0, 1600, 1000, 700, 10, 1600},
		{"they leave less: two floors are left", 0, 1600, 1000, 699, 10, 1499},
		{"and the same is seen again", 0, 1499, 1000, 699, 10, 1499},
		{"they take more than there is beside", 0, 1499, 1000, 0, 10, 800},
		{"programs map more", 0, 1499, 1000, 0, 900, 900},
		{"as much as the budget", 0, 1499, 1499, 0, 1499, 1499},
		{"more was set than it may become", 0, 1700, 1000, 2000, 10, 1600},
		{"and is mapped", 0, 1700, 1000, 2000, 1650, 1650},
		{"they give a little back", 0, 800, 800, 299, 10, 800},
		{"they give more back: not at once", 0, 800, 800, 301, 10, 800},
		{"still so", time.Second, 800, 800, 301, 10, 800},
		{"for long enough", 2 * time.Second, 800, 800, 301, 10, 901},
		{"all is free", 3 * time.Second, 901, 901, 1099, 10, 901},
		{"and taken meanwhile", 4 * time.Second, 901, 901, 250, 10, 901},
		{"and free", 5 * time.Second, 901, 901, 1099, 10, 901},
		{"for long enough", 8 * time.Second, 901, 901, 1099, 10, 1600},
	} {
		require.Equal(t, step.wants, l.next(begin.Add(step.after), step.budget, step.used, step.free, step.least),
			step.says)
	}
}

// TestLiveBudgetOfADevice: when others take memory, a device gives up idle extents, and keeps what programs map, what
// is pinned and what is guaranteed. It says why. When the others leave, it gets the memory back.
func TestLiveBudgetOfADevice(t *testing.T) {
	d, f := newDevice(t, 16, 1)
	ctx, now := context.Background(), time.Now()
	f.SetFree(20 * granule)
	idle, mapped, pinned := newKey(t, d), newKey(t, d), newKey(t, d)
	for i := range 8 {
		idle.idle(t, pageOf(i), pageOf(i+1))
	}
	pinned.pinned.Store(&Tenant{})
	pinned.idle(t, 0, 1)
	pin, err := mapped.take(0, 0, 2)
	require.NoError(t, err)
	require.NoError(t, d.Follow(ctx, now))
	require.EqualValues(t, 16*granule, d.Budget(), "it does not follow before SetLive")
	d.SetLive()
	require.NoError(t, d.Follow(ctx, now))
	require.EqualValues(t, 16*granule, d.Budget())
	require.Empty(t, d.Status().Why)

	f.SetFree(11 * granule) // all that is in use
	require.NoError(t, d.Follow(ctx, now))
	require.EqualValues(t, 9*granule, d.Budget())
	require.EqualValues(t, 9*granule, f.Used())
	require.Contains(t, d.Status().Why, "auto, of 1.0 MiB: others use the device too")
	require.NotContains(t, d.Status().Why, "programs map the rest")

	f.SetFree(granule)
	for range 10 { // others take what the device gives up
		require.NoError(t, d.Follow(ctx, now))
	}
	require.EqualValues(t, 3*granule, d.Budget(), "mapped and pinned extents stay")
	require.Empty(t, idle.tiers())
	require.Len(t, pinned.tiers(), 1)
	require.Contains(t, d.Status().Why, "programs map the rest, or it is pinned or guaranteed")
	pin.Free()
	d.setTenants(t, []tenants.Tenant{{ID: tenants.User(1), Weight: 1, Guaranteed: granule + 1}})
	require.NoError(t, d.Follow(ctx, now))
	require.EqualValues(t, 2*granule, d.Budget(), "the guarantee, rounded up to whole allocations")
	require.ErrorContains(t, d.CheckBudget(granule+1), "more is guaranteed to tenants than")

	f.SetFree(20 * granule)
	require.NoError(t, d.Follow(ctx, now))
	require.EqualValues(t, 2*granule, d.Budget(), "it waits for a while")
	require.NoError(t, d.Follow(ctx, now.Add(growsAfter)))
	require.EqualValues(t, 16*granule, d.Budget())
	require.Empty(t, d.Status().Why)

	require.NoError(t, d.SetBudget(ctx, 4*granule, "a test"))
	f.SetFree(granule)
	require.NoError(t, d.Follow(ctx, now))
	require.EqualValues(t, 4*granule, d.Budget(), "a fixed size is not live")
	require.Equal(t, "a test", d.Status().Why)
}

// TestGuaranteesOfALiveBudget: if one of two devices has become smaller, neither gets guarantees that it cannot keep.
func TestGuaranteesOfALiveBudget(t *testing.T) {
	other, _ := newDevice(t, 16, 1)
	d, f := newDevice(t, 16, 1)
	d.SetLive()
	list := []tenants.Tenant{{ID: tenants.User(1), Weight: 1, Guaranteed: 8 * granule}}
	require.NoError(t, d.CheckTenants(list))
	f.SetFree(4 * granule)
	require.NoError(t, d.Follow(context.Background(), time.Now()))
	require.EqualValues(t, 2*granule, d.Budget())
	require.ErrorIs(t, SetTenants([]*Device{other, d}, list), syscall.EINVAL)
	for _, of := range []*Device{other, d} {
		require.LessOrEqual(t, of.ledger.Guaranteed(), of.Budget())
		require.Zero(t, of.ledger.Guaranteed(), "all devices or none")
	}
}

// TestGuaranteesWhileABudgetChanges: SetTenants waits for a change of the budget in progress.
func TestGuaranteesWhileABudgetChanges(t *testing.T) {
	d, _ := newDevice(t, 16, 1)
	d.budgeting.Lock()
	done := make(chan error, 1)
	go func() {
		done <- SetTenants([]*Device{d}, []tenants.Tenant{{ID: tenants.User(1), Weight: 1, Guaranteed: 8 * granule}})
	}()
	stacks := make([]byte, 1<<20)
	require.Eventually(t, func() bool {
		return bytes.Contains(stacks[:runtime.Stack(stacks, true)], []byte("[sync.Mutex.Lock"))
	}, time.Minute, time.Millisecond, "it waits")
	d.resize(4 * granule)
	d.budgeting.Unlock()
	require.ErrorIs(t, <-done, syscall.EINVAL)
	require.Zero(t, d.ledger.Guaranteed())
	d.resize(16 * granule)
}

// TestLiveBudgetAfterRecall: after clients gave back what they kept, the free memory is measured again.
func TestLiveBudgetAfterRecall(t *testing.T) {
	d, f := newDevice(t, 16, 1)
	k := newKey(t, d)
	k.idle(t, 0, 8)
	d.SetLive()
	f.SetFree(granule)
	d.options.Recall = func(context.Context) {
		k.letGo(t)
		f.SetFree(20 * granule)
	}
	require.NoError(t, d.Follow(context.Background(), time.Now()))
	require.EqualValues(t, 16*granule, d.Budget())
}

// TestLiveBudgetWhileMemoryIsMade: the budget never falls below memory that is being allocated.
func TestLiveBudgetWhileMemoryIsMade(t *testing.T) {
	d, f := newDevice(t, 16, 1)
	newKey(t, d).idle(t, 0, 4)
	mem, err := d.alloc(8 * granule)
	require.NoError(t, err)
	d.SetLive()
	f.SetFree(granule) // less than is in use
	require.NoError(t, d.Follow(context.Background(), time.Now()))
	require.EqualValues(t, 10*granule, d.Budget(), "two floors are left")
	require.NoError(t, d.Follow(context.Background(), time.Now()))
	require.EqualValues(t, 8*granule, d.Budget(), "the memory being made")
	require.NoError(t, mem.Free())
	d.unmade(TierVRAM, 8*granule)
}
