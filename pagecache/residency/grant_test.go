package residency

import (
	"bytes"
	"context"
	"log/slog"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// newPinnedDevice is newDevice with so many granules of pinned memory.
func newPinnedDevice(t *testing.T, granules, pinned int64) (*Device, *faulty.Device) {
	t.Helper()
	return newDeviceOf(t, granules, NewPinned(pinned*granule))
}

// newDeviceOf is newPinnedDevice with pinned memory that other devices may share.
func newDeviceOf(t *testing.T, granules int64, pinned *Pinned) (*Device, *faulty.Device) {
	t.Helper()
	e, err := emulated.New(emulated.Options{Memory: granules * granule, Granularity: granule})
	require.NoError(t, err)
	f := faulty.Wrap(e)
	d, err := New(f, Options{
		Share: 1, Log: slog.New(slog.DiscardHandler), Patience: func() time.Duration { return patient }, Pinned: pinned,
	})
	require.NoError(t, err)
	t.Cleanup(func() {
		d.pinned.Trim(0)
		used, spare := d.pinned.Used()
		require.Zero(t, used+spare)
		require.Empty(t, d.pinned.Tenants())
		d.mu.Lock()
		defer d.mu.Unlock()
		require.Empty(t, d.line)
		require.Empty(t, d.grants)
		require.Zero(t, d.mapped+d.taken+d.takenHost+d.promised+int64(d.making+d.leaving))
		require.NoError(t, f.Close())
	})
	return d, f
}

// want returns a Want for the granules [from, to), in extents of one granule each.
func (k *key) want(from, to page.Index) Want {
	return Want{Key: k, Pages: granules(from, to), Size: granule}
}

func (k *key) grant(nested bool, from, to page.Index) (*Grant, error) {
	return k.d.Grant(context.Background(), []Want{k.want(from, to)},
		Asking{Nested: nested, Patience: patient, By: Tenant{Process: 7}})
}

func (k *key) tiers() (list []Tier) {
	for _, x := range k.Extents(granules(0, 1000)) {
		list = append(list, x.Placement().Tier)
	}
	return list
}

// TestGrantTakesPinnedMemoryForTheRest: a grant that does not fit on the device, even without idle extents, gets pinned
// memory for the rest.
func TestGrantTakesPinnedMemoryForTheRest(t *testing.T) {
	d, _ := newPinnedDevice(t, 2, 2)
	idle, k := newKey(t, d), newKey(t, d)
	idle.idle(t, 0, 1)
	g, err := k.grant(false, 0, 3)
	require.NoError(t, err)
	require.Equal(t, []Tier{TierVRAM, TierVRAM, TierHost}, k.tiers())
	require.Empty(t, idle.tiers(), "idle extents left first")
	require.EqualValues(t, granule, d.Status().Pinned)
	g.Free()
	again, err := k.grant(false, 0, 3)
	require.NoError(t, err)
	again.Free()
}

// TestGrantIsWhole: a grant that cannot get all of its memory holds none.
func TestGrantIsWhole(t *testing.T) {
	d, _ := newPinnedDevice(t, 3, 0)
	a, b := newKey(t, d), newKey(t, d)
	g, err := a.grant(false, 0, 2)
	require.NoError(t, err)
	_, err = b.grant(true, 0, 2)
	require.ErrorIs(t, err, syscall.EDEADLK)
	require.ErrorContains(t, err, "process 7 holds 128 KiB in a bracket for")
	require.EqualValues(t, 2*granule, d.Status().Mapped)
	more, err := a.grant(true, 2, 3)
	require.NoError(t, err, "the failed grant has given back what it got")
	more.Free()
	g.Free()
	_, err = b.grant(false, 0, 4)
	require.ErrorIs(t, err, syscall.ENOMEM)
}

// TestGrantWaitsWithoutLooking: a failed attempt's own memory, given back, does not trigger the next attempt.
func TestGrantWaitsWithoutLooking(t *testing.T) {
	d, _ := newPinnedDevice(t, 3, 0)
	a, b := newKey(t, d), newKey(t, d)
	g, err := a.grant(false, 0, 2)
	require.NoError(t, err)
	const waits = 4 * 16 * keptTick
	_, err = d.Grant(t.Context(), []Want{b.want(0, 2)}, Asking{Patience: waits, By: Tenant{Process: 7}})
	require.ErrorIs(t, err, syscall.ETIMEDOUT)
	require.Less(t, b.asked.Load(), int64(100))
	g.Free()
}

// TestGrantAfterPinnedMemoryIsRefused: if the host gives no pinned memory, a grant goes on without it.
func TestGrantAfterPinnedMemoryIsRefused(t *testing.T) {
	d, f := newPinnedDevice(t, 1, 1)
	k := newKey(t, d)
	f.Fail(faulty.AllocHost, 1, gpubackend.ErrNoMemory)
	_, err := k.grant(true, 0, 2)
	require.ErrorIs(t, err, syscall.EDEADLK)
	g, err := k.grant(true, 0, 2)
	require.NoError(t, err)
	g.Free()
}

// TestPinnedMemoryIsLittered: an extent in recycled pinned memory knows that it may hold old bytes.
func TestPinnedMemoryIsLittered(t *testing.T) {
	d, f := newPinnedDevice(t, 1, 1)
	f.OldBytes()
	held, err := newKey(t, d).grant(false, 0, 1)
	require.NoError(t, err)
	k := newKey(t, d)
	g, err := k.grant(false, 0, 1)
	require.NoError(t, err)
	mem := k.Extents(granules(0, 1))[0].Memory()
	g.Free()
	k.letGo(t)
	_, spare := d.pinned.Used()
	require.EqualValues(t, granule, spare, "it is kept for the next extent")
	other, zeros := newKey(t, d), f.Calls(faulty.Zero)
	g, err = other.grant(false, 0, 1)
	require.NoError(t, err)
	x := other.Extents(granules(0, 1))[0]
	require.Same(t, mem, x.Memory())
	require.True(t, x.Littered())
	require.Equal(t, zeros, f.Calls(faulty.Zero))
	g.Free()
	held.Free()
}

// TestPinnedMemoryIsGivenBack: spares are freed if nobody uses them, or if another size is needed.
func TestPinnedMemoryIsGivenBack(t *testing.T) {
	d, _ := newPinnedDevice(t, 4, 2)
	a, _, err := d.pinned.take(d, granule, 0)
	require.NoError(t, err)
	d.pinned.put(d, a, nil)
	d.pinned.Trim(time.Hour)
	used, spare := d.pinned.Used()
	require.EqualValues(t, granule, used)
	require.EqualValues(t, granule, spare)
	b, _, err := d.pinned.take(d, 2*granule, 0)
	require.NoError(t, err)
	_, _, err = d.pinned.take(d, granule, 0)
	require.ErrorIs(t, err, gpubackend.ErrNoMemory)
	d.pinned.put(d, b, nil)
	d.pinned.Trim(0)
	used, _ = d.pinned.Used()
	require.Zero(t, used)
}

// TestPinnedMemoryOfAnotherDevice: idle extents of any device make room in pinned memory. A tenant at its maximum
// evicts its own; a full pool evicts those of the tenant that owns most. An extent that a bracket of the other device
// uses stays.
func TestPinnedMemoryOfAnotherDevice(t *testing.T) {
	pool := NewPinned(4 * granule)
	far, _ := newDeviceOf(t, 1, pool)
	near, _ := newDeviceOf(t, 1, pool)
	require.NoError(t, SetTenants([]*Device{far,
		near}, []tenants.Tenant{{ID: tenants.User(1), Weight: 1, MostPinned: 2 * granule}}))
	ask := func(k *key, user uint32, from, to page.Index) (*Grant, error) {
		return k.d.Grant(context.Background(), []Want{k.want(from, to)}, Asking{By: Tenant{User: user}, Nested: true})
	}
	idle := func(k *key, user uint32, from, to page.Index) {
		t.Helper()
		g, err := ask(k, user, from, to)
		require.NoError(t, err)
		g.Free()
	}
	full, a, b, c := newKey(t, far), newKey(t, far), newKey(t, far), newKey(t, near)
	mapped, err := full.take(0, 0, 1)
	require.NoError(t, err)
	idle(a, 1, 0, 2)
	idle(b, 2, 0, 2)
	require.Equal(t, []Tier{TierHost, TierHost}, a.tiers())
	require.Equal(t, []Tier{TierHost, TierHost}, b.tiers())

	idle(c, 1, 0, 2)
	require.Equal(t, []Tier{TierVRAM, TierHost}, c.tiers())
	require.Len(t, a.tiers(), 1, "one's own")
	require.Len(t, b.tiers(), 2)
	idle(c, 3, 2, 7)
	require.Empty(t, a.tiers())
	require.Empty(t, b.tiers())

	c.letGo(t)
	used, err := ask(b, 2, 0, 3)
	require.NoError(t, err)
	_, err = ask(c, 3, 0, 3)
	require.ErrorIs(t, err, syscall.EDEADLK)
	require.Len(t, b.tiers(), 3)
	used.Free()
	idle(c, 3, 0, 3)

	pool.SetLimit(granule)
	require.NoError(t, far.Trim(context.Background()))
	usedNow, _ := pool.Used()
	require.EqualValues(t, granule, usedNow, "including the other device's")
	pool.SetLimit(4 * granule)
	mapped.Free()
}

// TestPinnedMemoryOfOthers: a user does not get pinned memory that another user may still have. Nor does the same user
// get it, if an old export is writable and the new contents may be read-only for the user.
func TestPinnedMemoryOfOthers(t *testing.T) {
	d, _ := newPinnedDevice(t, 1, 3)
	mem, _, err := d.pinned.take(d, granule, 1)
	require.NoError(t, err)
	file, err := mem.Export(true)
	require.NoError(t, err)
	dup, err := syscall.Dup(int(file.Fd()))
	require.NoError(t, err)
	d.pinned.put(d, mem, []uint32{1})
	other, _, err := d.pinned.take(d, granule, 2)
	require.NoError(t, err)
	require.NotSame(t, mem, other)
	own, _, err := d.pinned.take(d, granule, 1)
	require.NoError(t, err)
	require.NotSame(t, mem, own)
	d.pinned.put(d, own, []uint32{1})
	d.info.ReadOnlyExports = false
	require.True(t, d.passesTo(1, mem, []uint32{1}))
	require.False(t, d.passesTo(1, mem, []uint32{1, 2}))
	require.NoError(t, syscall.Close(dup))
	require.True(t, d.passesTo(1, mem, []uint32{1, 2}))
	own, _, err = d.pinned.take(d, granule, 1)
	require.NoError(t, err)
	d.pinned.put(d, own, []uint32{1})
	d.pinned.put(d, other, []uint32{2})
}

// TestPinnedMemoryThatRootHasTakesNobodysExtent: an extent that moves to pinned memory gets none that a program of root
// may still have. Nobody would remember that root has it.
func TestPinnedMemoryThatRootHasTakesNobodysExtent(t *testing.T) {
	d, _ := newPinnedDevice(t, 2, 3)
	d.info.ReadOnlyExports = false
	mem, _, err := d.pinned.take(d, granule, 0)
	require.NoError(t, err)
	file, err := mem.Export(true)
	require.NoError(t, err)
	dup, err := syscall.Dup(int(file.Fd()))
	require.NoError(t, err)
	d.pinned.put(d, mem, []uint32{0})
	k := newKey(t, d)
	k.idle(t, 0, 1)
	x := k.Extents(granules(0, 1))[0]
	require.True(t, x.Demote(context.Background(), func(_, _ gpubackend.Memory) error { return nil }))
	require.NotSame(t, mem, x.Memory())
	require.NoError(t, syscall.Close(dup))
}

// TestKeptExtentsStay: kept extents are not evicted, and nobody is charged for them.
func TestKeptExtentsStay(t *testing.T) {
	d, _ := newPinnedDevice(t, 1, 0)
	k, other := newKey(t, d), newKey(t, d)
	k.idle(t, 0, 1)
	keep := d.Keep(k, granules(0, 5))
	require.Len(t, keep.Extents(), 1)
	_, err := other.grant(true, 0, 1)
	require.ErrorIs(t, err, syscall.EDEADLK)
	require.Empty(t, d.Status().Users)
	keep.Free()
	g, err := other.grant(true, 0, 1)
	require.NoError(t, err)
	g.Free()
}

// TestKeepsWhatMoves: Keep waits for a moving extent and then keeps it, because whoever brings extents up to date must
// not miss one.
func TestKeepsWhatMoves(t *testing.T) {
	d, _ := newPinnedDevice(t, 2, 2)
	k := newKey(t, d)
	k.idle(t, 0, 1)
	x := k.Extents(granules(0, 1))[0]
	kept := make(chan *Pin, 1)
	moved := x.Demote(context.Background(), func(_, _ gpubackend.Memory) error {
		asked := k.asked.Load()
		go func() { kept <- d.Keep(k, granules(0, 2)) }()
		require.Eventually(t, func() bool { return k.asked.Load() > asked+1 || len(kept) > 0 }, patient,
			time.Millisecond)
		return nil
	})
	require.True(t, moved)
	keep := <-kept
	require.Equal(t, []*Extent{x}, keep.Extents())
	keep.Free()
}

// TestLogOfFailedMoves: the log has moves that failed, but not those whose client ended meanwhile.
func TestLogOfFailedMoves(t *testing.T) {
	d, _ := newPinnedDevice(t, 1, 1)
	var log bytes.Buffer
	d.options.Log = slog.New(slog.NewTextHandler(&log, nil))
	k := newKey(t, d)
	k.idle(t, 0, 1)
	x := k.Extents(granules(0, 1))[0]
	ctx, end := context.WithCancel(context.Background())
	require.False(t, x.Demote(ctx, func(_, _ gpubackend.Memory) error {
		end()
		return ctx.Err()
	}))
	require.Empty(t, log.String())
	require.False(t, x.Demote(context.Background(), func(_, _ gpubackend.Memory) error { return syscall.EIO }))
	require.Contains(t, log.String(), syscall.EIO.Error())
}

// TestWhoGivesUpLeavesTheLine: when one Grant gives up, those behind it are served.
func TestWhoGivesUpLeavesTheLine(t *testing.T) {
	d, _ := newPinnedDevice(t, 1, 0)
	a := newKey(t, d)
	g, err := a.grant(false, 0, 1)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ends := make(chan error, 2)
	for i := range 2 {
		k := newKey(t, d)
		go func() {
			g, err := d.Grant(ctx, []Want{k.want(0, 1)}, Asking{Patience: patient})
			if err == nil {
				g.Free()
			}
			ends <- err
		}()
		require.Eventually(t, func() bool { return d.Status().Waiting == i+1 }, patient, time.Millisecond)
	}
	behind := make(chan error, 1)
	go func() {
		k := newKey(t, d)
		g, err := k.grant(false, 0, 1)
		if err == nil {
			g.Free()
		}
		behind <- err
	}()
	require.Eventually(t, func() bool { return d.Status().Waiting == 3 }, patient, time.Millisecond)
	cancel()
	for range 2 {
		require.ErrorIs(t, <-ends, context.Canceled)
	}
	g.Free()
	require.NoError(t, <-behind)
}

// TestPinWaitsForAMove: whoever pins an extent that is moving gets it in its new place.
func TestPinWaitsForAMove(t *testing.T) {
	d, _ := newPinnedDevice(t, 2, 2)
	k := newKey(t, d)
	k.idle(t, 0, 1)
	x := k.Extents(granules(0, 1))[0]
	var pinned <-chan outcome
	moved := x.Demote(context.Background(), func(_, _ gpubackend.Memory) error {
		asked := k.asked.Load()
		pinned = k.taking(0, 0, 1)
		require.Eventually(t, func() bool { return k.asked.Load() > asked+3 || len(pinned) > 0 }, patient,
			time.Millisecond)
		still(t, pinned)
		return nil
	})
	require.True(t, moved)
	p := soon(t, pinned)
	require.Equal(t, []*Extent{x}, p.Extents())
	p.Free()
}

// TestWhatIsUsedDoesNotMove: an extent that somebody maps or copies from stays in its place.
func TestWhatIsUsedDoesNotMove(t *testing.T) {
	d, _ := newPinnedDevice(t, 1, 1)
	k := newKey(t, d)
	p, err := k.take(0, 0, 1)
	require.NoError(t, err)
	x := p.Extents()[0]
	moves := func() bool {
		return x.Demote(context.Background(), func(_, _ gpubackend.Memory) error { return nil })
	}
	x.LetGo() // so that only the count of pins says that it is mapped
	require.False(t, moves(), "mapped")
	x.Hold()
	p.Free()
	x.Hold()
	require.False(t, moves(), "copied")
	x.LetGo()
	require.True(t, moves())
}

// TestWhoHadMemory: memory that a user may still have is passed on to no other user, whether its extent moved or left.
func TestWhoHadMemory(t *testing.T) {
	for name, gives := range map[string]func(t *testing.T, k *key, x *Extent, own gpubackend.Memory){
		"moves": func(t *testing.T, _ *key, x *Extent, own gpubackend.Memory) {
			moved, err := x.Move(TierVRAM, own, func(gpubackend.Memory) error { return nil })
			require.NoError(t, err)
			require.True(t, moved)
		},
		"leaves": func(t *testing.T, k *key, _ *Extent, own gpubackend.Memory) {
			k.letGo(t)
			require.NoError(t, own.Free())
		},
	} {
		t.Run(name, func(t *testing.T) {
			d, f := newPinnedDevice(t, 2, 3)
			d.info.ReadOnlyExports = false
			k := newKey(t, d)
			k.preference.Store(&Preference{OnHost: true})
			g, err := d.Grant(t.Context(), []Want{k.want(0, 1)}, Asking{By: Tenant{User: 1}, Patience: patient})
			require.NoError(t, err)
			g.Free()
			x := k.Extents(granules(0, 1))[0]
			require.Equal(t, TierHost, x.Placement().Tier)
			mem := x.Memory()
			file, err := mem.Export(true)
			require.NoError(t, err)
			dup, err := syscall.Dup(int(file.Fd()))
			require.NoError(t, err)
			own, err := f.Alloc(granule)
			require.NoError(t, err)
			gives(t, k, x, own)
			other, _, err := d.pinned.take(d, granule, 2)
			require.NoError(t, err)
			require.NotSame(t, mem, other)
			d.pinned.put(d, other, nil)
			require.NoError(t, syscall.Close(dup))
		})
	}
}
