package residency

import (
	"context"
	"errors"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"

	"github.com/gaiafs/gaiafs/gpubackend/faulty"
)

// TestStates walks through the transitions in the package comment.
func TestStates(t *testing.T) {
	d, _ := newDevice(t, 4, 1)
	k := newKey(t, d)
	p, err := k.take(7, 0, 1)
	require.NoError(t, err)
	x := p.Extents()[0]
	require.Equal(t, held, x.state)
	require.Equal(t, 1, x.Mapped())
	at := x.Placement()
	require.Equal(t, TierVRAM, at.Tier)
	require.EqualValues(t, 1, at.Generation)
	require.Same(t, at.Memory, x.Memory())
	require.False(t, x.Leave(false), "a client maps it")
	require.Equal(t, []UserPins{{7, granule}}, d.Status().Users)

	again, err := k.take(7, 0, 1)
	require.NoError(t, err)
	require.Same(t, x, again.Extents()[0])
	require.Equal(t, []UserPins{{7, granule}}, d.Status().Users, "it counts once for each user")
	again.Free()
	p.Free()
	require.Equal(t, Status{Eviction: "allocated", Budget: 4 * granule, Extents: 1, Users: []UserPins{},
		Pins: []UserPins{}, Departures: []Departure{},
		Tenants: []tenants.Account{{Tenant: "user 7", Owned: granule, Share: 4 * granule}}}, d.Status())

	x.Hold()
	require.True(t, x.Copied())
	require.True(t, x.Leave(false))
	k.has = nil
	require.Equal(t, left, x.state)
	require.EqualValues(t, granule, d.backend.Used(), "a copy still uses it")
	require.Equal(t, at, x.Placement())
	x.LetGo()
	require.Equal(t, freed, x.state)
	require.Zero(t, d.backend.Used())
	require.Equal(t, Placement{Tier: TierNone, Generation: 2}, x.Placement())
}

// TestWhoMapsIsTold: Watch tells where each extent is, and every change of that.
func TestWhoMapsIsTold(t *testing.T) {
	d, _ := newDevice(t, 4, 1)
	k := newKey(t, d)
	p, err := k.take(7, 0, 3)
	require.NoError(t, err)
	var told []Placement
	p.Watch(func(x *Extent, at Placement) {
		require.Equal(t, x.Placement(), at)
		told = append(told, at)
	})
	require.Len(t, told, len(p.Extents()))
	x := p.Extents()[0]
	x.place(TierVRAM, x.Memory())
	require.Len(t, told, len(p.Extents())+1)
	require.EqualValues(t, 2, told[len(told)-1].Generation)
	p.Free()
	x.place(TierVRAM, x.Memory())
	require.Len(t, told, 2, "a freed Pin hears nothing more")
}

// TestLostWhileMapped: the memory stays until the client unmaps it.
func TestLostWhileMapped(t *testing.T) {
	d, f := newDevice(t, 4, 1)
	k := newKey(t, d)
	p, err := k.take(7, 0, 2)
	require.NoError(t, err)
	f.Lose()
	k.lost.Store(true)
	k.letGo(t)
	require.Zero(t, d.Status().Extents)
	require.EqualValues(t, 2*granule, d.Status().Mapped)
	require.EqualValues(t, 2*granule, f.Used())
	p.Free()
	require.Zero(t, f.Used())
}

// TestLostWhileReserving: at whichever step the device is lost, nothing of the reservation is left.
func TestLostWhileReserving(t *testing.T) {
	for _, op := range []faulty.Op{faulty.Alloc, faulty.Zero} {
		d, f := newDevice(t, 4, 1)
		k := newKey(t, d)
		k.idle(t, 0, 1)
		gate := f.Hold(op)
		done := k.taking(7, 0, 3)
		<-gate.Arrived()
		f.Lose()
		gate.Open()
		o := <-done
		require.ErrorContains(t, o.err, "lost", op)
		require.EqualValues(t, granule, f.Used(), op)
		require.Empty(t, d.Status().Users, op)
	}
}

// TestRefusals: requests that can never fit are refused.
func TestRefusals(t *testing.T) {
	d, _ := newDevice(t, 4, 0.5)
	k := newKey(t, d)
	_, err := k.take(0, 0, 5)
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.ErrorContains(t, err, "the mapping needs 512 KiB of device 0, whose budget is 256 KiB")
	_, err = k.take(0, filePages/granulePages-1, filePages/granulePages)
	require.ErrorIs(t, err, syscall.EOVERFLOW)
	_, err = k.take(7, 0, 3)
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.ErrorContains(t, err, "user 7 may map no more than 128 KiB of its 256 KiB and maps 0 B already")
	require.Zero(t, d.Status().Extents)
}

// TestZeroLater: extents that are not zeroed at once are zeroed by the first who asks. Others wait, as long as their
// contexts last. After an error anyone may try again.
func TestZeroLater(t *testing.T) {
	d, f := newDevice(t, 4, 1)
	k := newKey(t, d)
	p, err := d.Reserve(t.Context(), k, Request{Pages: granules(0, 2), Size: granule, Unzeroed: true})
	require.NoError(t, err)
	require.Zero(t, f.Calls(faulty.Zero))
	x := p.Extents()[0]
	zeros := f.Hold(faulty.Zero)
	first, second := make(chan error, 1), make(chan error, 1)
	go func() { first <- x.Zero(t.Context()) }()
	<-zeros.Arrived()
	ended, end := context.WithCancel(t.Context())
	end()
	require.ErrorIs(t, x.Zero(ended), context.Canceled)
	go func() { second <- x.Zero(t.Context()) }()
	zeros.Open()
	require.NoError(t, <-first)
	require.NoError(t, <-second)
	require.NoError(t, x.Zero(ended), "it is done")
	require.Equal(t, 1, f.Calls(faulty.Zero))

	planned := errors.New("planned")
	f.Fail(faulty.Zero, 1, planned)
	x = p.Extents()[1]
	require.ErrorIs(t, x.Zero(t.Context()), planned)
	require.NoError(t, x.Zero(t.Context()))
	require.Equal(t, 3, f.Calls(faulty.Zero))
	p.Free()
}

// TestNewExtentsAreZeros: unless the caller zeroes them, extents are zeros when their Key gets them.
func TestNewExtentsAreZeros(t *testing.T) {
	d, f := newDevice(t, 4, 1)
	f.OldBytes()
	k := newKey(t, d)
	p, err := d.Reserve(t.Context(), k, Request{Pages: granules(0, 2), Size: granule})
	require.NoError(t, err)
	require.Equal(t, 2, f.Calls(faulty.Zero))
	require.NoError(t, p.Extents()[0].Zero(t.Context()))
	require.Equal(t, 2, f.Calls(faulty.Zero), "it is done")
	p.Free()
}
