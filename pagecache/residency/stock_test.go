package residency

import (
	"context"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
)

// bracket begins a user's bracket over granules, in extents of one granule each.
func (k *key) bracket(t *testing.T, user uint32, from, to page.Index) *Grant {
	t.Helper()
	g, err := k.d.Grant(context.Background(), []Want{k.want(from, to)}, Asking{By: Tenant{User: user}, Nested: true})
	require.NoError(t, err)
	return g
}

// TestMemoryIsPassedOn: a bracket takes over the memory of its victims. The device neither allocates nor zeroes. The
// extents know that they are littered.
func TestMemoryIsPassedOn(t *testing.T) {
	d, f := newDevice(t, 4, 1)
	f.OldBytes()
	a, b := newKey(t, d), newKey(t, d)
	a.bracket(t, 0, 0, 4).Free()
	zeros := f.Calls(faulty.Zero)
	var was []gpubackend.Memory
	for _, x := range a.Extents(granules(0, 4)) {
		was = append(was, x.Memory())
	}
	g := b.bracket(t, 0, 0, 3)
	for _, x := range b.Extents(granules(0, 3)) {
		require.Contains(t, was, x.Memory())
		require.True(t, x.Littered())
	}
	require.Equal(t, 4+2, f.Calls(faulty.Alloc), "the device says twice that it is full")
	require.Equal(t, zeros, f.Calls(faulty.Zero))
	require.EqualValues(t, 4*granule, f.Used())
	require.Len(t, a.tiers(), 1, "no more extents leave than necessary")
	g.Free()
}

// TestMemoryThatOthersHaveIsNotPassedOn: a user who keeps memory that was given to it never sees what others store
// there.
func TestMemoryThatOthersHaveIsNotPassedOn(t *testing.T) {
	d, _ := newDevice(t, 1, 1)
	a, b := newKey(t, d), newKey(t, d)
	g := a.bracket(t, 1, 0, 1)
	mem := a.Extents(granules(0, 1))[0].Memory()
	file, err := mem.Export(true)
	require.NoError(t, err)
	dup, err := syscall.Dup(int(file.Fd()))
	require.NoError(t, err)
	g.Free()
	_, err = d.Grant(context.Background(), []Want{b.want(0, 1)}, Asking{By: Tenant{User: 2}, Nested: true})
	require.ErrorIs(t, err, syscall.EDEADLK, "kept memory counts as used")
	require.NoError(t, syscall.Close(dup))
	g = b.bracket(t, 2, 0, 1)
	require.NotSame(t, mem, b.Extents(granules(0, 1))[0].Memory())
	g.Free()
}

// TestAbandonedMemoryIsNotPassedOn: programs of one user get each other's memory, but not that of a client that ended
// and may still store there.
func TestAbandonedMemoryIsNotPassedOn(t *testing.T) {
	o := emulated.Options{Memory: granule, Granularity: granule, WritableExports: true}
	d, _ := newDeviceFrom(t, o, 1)
	a, b, c := newKey(t, d), newKey(t, d), newKey(t, d)
	a.bracket(t, 1, 0, 1).Free()
	mem := a.Extents(granules(0, 1))[0].Memory()
	file, err := mem.Export(true)
	require.NoError(t, err)
	dup, err := syscall.Dup(int(file.Fd()))
	require.NoError(t, err)
	b.bracket(t, 1, 0, 1).Free()
	x := b.Extents(granules(0, 1))[0]
	require.Same(t, mem, x.Memory())
	x.Abandon()
	_, err = d.Grant(context.Background(), []Want{c.want(0, 1)}, Asking{By: Tenant{User: 1}, Nested: true})
	require.ErrorIs(t, err, syscall.EDEADLK, "kept memory counts as used")
	require.NoError(t, syscall.Close(dup))
	c.bracket(t, 1, 0, 1).Free()
}

// TestStockIsWaitedForByNobody: a bracket that has memory of its victims goes on, although another reservation has the
// turn and waits for room.
func TestStockIsWaitedForByNobody(t *testing.T) {
	d, _ := newDevice(t, 4, 1)
	a, b, c := newKey(t, d), newKey(t, d), newKey(t, d)
	a.bracket(t, 0, 0, 4).Free()
	b.adopts = make(chan struct{})
	granted := make(chan *Grant, 1)
	go func() { granted <- b.bracket(t, 0, 0, 3) }()
	<-b.adopts // the first extent, and the memory of two more is there
	other := c.taking(0, 0, 2)
	require.Eventually(t, func() bool { return len(a.tiers()) == 0 }, patient, time.Millisecond/4)
	for i := range 3 {
		b.adopts <- struct{}{}
		if i < 2 {
			<-b.adopts
		}
	}
	select {
	case g := <-granted:
		g.Free()
	case <-time.After(patient / 2):
		t.Error("the bracket waits for a reservation that waits for the bracket")
		(<-granted).Free()
	}
	// The other reservation found all memory in the bracket, if it looked before the bracket ended.
	if o := <-other; o.err == nil {
		o.Free()
	} else {
		require.ErrorIs(t, o.err, syscall.ENOMEM)
	}
}

// TestVictimsThatRefuse: some of several victims refuse to leave, and others leave instead. Surplus memory goes back to
// the device.
func TestVictimsThatRefuse(t *testing.T) {
	d, f := newDevice(t, 4, 1)
	a, b, c := newKey(t, d), newKey(t, d), newKey(t, d)
	a.bracket(t, 0, 0, 2).Free()
	b.bracket(t, 0, 0, 2).Free()
	a.refuses.Store(true)
	g := c.bracket(t, 0, 0, 2)
	require.Len(t, a.tiers(), 2)
	require.Empty(t, b.tiers())
	_, err := d.Grant(context.Background(), []Want{c.want(0, 3)}, Asking{Nested: true})
	require.ErrorIs(t, err, syscall.EDEADLK)
	g.Free()
	a.refuses.Store(false)
	a.letGo(t)
	c.letGo(t)
	require.Zero(t, f.Used())
}

// TestFewVictimsAtOnce: if very many extents have to leave, clients do not hear of all of them at once.
func TestFewVictimsAtOnce(t *testing.T) {
	const all = 5 * mostVictims / 2
	d, _ := newDevice(t, all, 1)
	a, b := newKey(t, d), newKey(t, d)
	a.bracket(t, 0, 0, all).Free()
	a.home = make(chan struct{})
	granted := make(chan *Grant)
	go func() { granted <- b.bracket(t, 0, 0, all) }()
	for gone := 0; gone < all; {
		some := min(mostVictims, all-gone)
		for range some {
			<-a.arrived
		}
		require.Empty(t, a.arrived)
		for range some {
			a.home <- struct{}{}
		}
		gone += some
	}
	(<-granted).Free()
	require.Empty(t, a.tiers())
}

// TestVictimsOfSeveralTenants: if several extents leave at once, each is chosen as if the earlier ones had left.
func TestVictimsOfSeveralTenants(t *testing.T) {
	d, _ := newDevice(t, 7, 1)
	a, b, c := newKey(t, d), newKey(t, d), newKey(t, d)
	a.bracket(t, 1, 0, 4).Free()
	b.bracket(t, 2, 0, 3).Free()
	c.bracket(t, 3, 0, 4).Free()
	require.InDelta(t, len(a.tiers()), len(b.tiers()), 1)
}

// TestStockOfOneSize: a stock keeps as many memories of one size as its grant lacks, and frees what is left.
func TestStockOfOneSize(t *testing.T) {
	d, f := newDevice(t, 8, 1)
	s := &stock{dev: d, size: granule, lacks: 1}
	d.mu.Lock()
	d.stock = s
	d.mu.Unlock()
	keeps := func(size int64) bool {
		mem, err := f.Alloc(size)
		require.NoError(t, err)
		kept := s.keep(mem, nil)
		if !kept {
			require.NoError(t, mem.Free())
		}
		return kept
	}
	require.False(t, keeps(2*granule))
	require.True(t, keeps(granule))
	require.False(t, keeps(granule), "the grant lacks no more")
	require.Nil(t, s.take(2*granule))
	s.close()
	s.drop()
	require.Zero(t, f.Used())
}
