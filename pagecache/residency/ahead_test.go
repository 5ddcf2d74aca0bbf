package residency

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// pinAhead makes what is wanted, as the owner of d does in the background.
func (d *Device) pinAhead(t *testing.T) {
	t.Helper()
	select {
	case <-d.Expected():
		d.Ahead(context.Background())
	default:
	}
}

// requirePinned checks how many granules are pinned, and how many of these are spares.
func (p *Pinned) requirePinned(t *testing.T, used, spare int64) {
	t.Helper()
	u, s := p.Used()
	require.Equal(t, []int64{used * granule, spare * granule}, []int64{u, s})
}

// TestPinnedAhead: once brackets use pinned memory, an eighth of it is made ahead of need. The next brackets take that,
// and it is made again. It is zeros, unlike memory that an extent had.
func TestPinnedAhead(t *testing.T) {
	d, f := newPinnedDevice(t, 1, 32)
	d.pinAhead(t)
	d.pinned.requirePinned(t, 0, 0)
	k := newKey(t, d)
	k.use(t, 0, 1)
	d.pinAhead(t)
	d.pinned.requirePinned(t, 0, 0) // nobody used any
	g, err := k.grant(false, 0, 2)
	require.NoError(t, err)
	d.pinAhead(t)
	d.pinned.requirePinned(t, 5, 4)

	for n := range 10 {
		f.Fail(faulty.AllocHost, n+1, errors.New("this would take long"))
	}
	mem, littered, err := d.pinned.take(d, granule, 1)
	require.NoError(t, err, "it was there")
	require.Equal(t, !mem.Zeroed(), littered)
	d.pinned.requirePinned(t, 5, 3)
	d.pinned.put(d, mem, nil)
	mem, littered, err = d.pinned.take(d, granule, 1)
	require.NoError(t, err)
	require.True(t, littered, "an extent had it")
	d.pinned.put(d, mem, nil)
	g.Free()
}

// TestPinnedAheadIsBounded: spares of all sizes and devices together are an eighth of the limit, and as much again
// stays free. Nobody is refused because of them.
func TestPinnedAheadIsBounded(t *testing.T) {
	pinned := NewPinned(32 * granule)
	a, _ := newDeviceOf(t, 1, pinned)
	b, _ := newDeviceOf(t, 1, pinned)
	a.Expect(granule)
	a.pinAhead(t)
	pinned.requirePinned(t, 4, 4)
	b.Expect(granule)
	b.pinAhead(t)
	pinned.requirePinned(t, 4, 4)
	var mems []gpubackend.Memory
	for range 31 {
		mem, _, err := pinned.take(b, granule, 1)
		require.NoError(t, err, "the spares of the other device are freed")
		mems = append(mems, mem)
	}
	pinned.requirePinned(t, 32, 1)
	pinned.Trim(0)
	b.Expect(granule)
	b.pinAhead(t)
	pinned.requirePinned(t, 31, 0)
	for _, mem := range mems {
		pinned.put(b, mem, nil)
	}
	pinned.Trim(0)
	pinned.requirePinned(t, 0, 0)
	b.pinAhead(t)
	pinned.requirePinned(t, 0, 0) // nothing new was asked for

	a.Expect(8 * granule)
	a.pinAhead(t)
	pinned.requirePinned(t, 0, 0) // one would be more than an eighth
	pinned.SetLimit(64 * granule)
	a.Expect(8 * granule)
	a.pinAhead(t)
	pinned.requirePinned(t, 8, 8)
	pinned.SetLimit(4 * granule)
	pinned.requirePinned(t, 0, 0)
	pinned.SetLimit(1 << 40)
	a.Expect(64 << 20)
	a.pinAhead(t)
	pinned.requirePinned(t, mostAhead/granule, mostAhead/granule)
}

// TestPinnedAheadIsGivenBack: spares that nobody takes are freed like all others, and not made again.
func TestPinnedAheadIsGivenBack(t *testing.T) {
	d, _ := newPinnedDevice(t, 1, 32)
	d.Expect(granule)
	d.pinAhead(t)
	d.pinned.requirePinned(t, 4, 4)
	d.pinned.Trim(time.Hour)
	d.pinned.requirePinned(t, 4, 4)
	d.pinned.Trim(0)
	d.pinAhead(t)
	d.pinned.requirePinned(t, 0, 0)
}

// TestPinnedAheadRefused: the host refuses. That is logged once, nobody tries again soon, and brackets do not notice.
func TestPinnedAheadRefused(t *testing.T) {
	d, f := newPinnedDevice(t, 1, 32)
	var log bytes.Buffer
	d.options.Log = slog.New(slog.NewTextHandler(&log, nil))
	for range 3 {
		f.Fail(faulty.AllocHost, 1, gpubackend.ErrNoMemory)
		d.Expect(granule)
		d.pinAhead(t)
		d.pinned.requirePinned(t, 0, 0)
		d.pinned.mu.Lock()
		d.ahead.refused = d.ahead.refused.Add(-aheadAgain)
		d.pinned.mu.Unlock()
	}
	require.Equal(t, 3, f.Calls(faulty.AllocHost))
	require.Equal(t, 1, strings.Count(log.String(), "ahead of need"))
	f.Fail(faulty.AllocHost, 1, gpubackend.ErrNoMemory)
	d.Expect(granule)
	d.pinAhead(t)
	d.Expect(granule)
	d.pinAhead(t)
	d.pinned.requirePinned(t, 0, 0)
	require.Equal(t, []Tier{TierVRAM, TierHost}, newKey(t, d).use(t, 0, 2))
	d.pinned.Trim(0)
}

// TestPinnedAheadIsNobodys: what is made ahead of need belongs to no tenant, and gives none more than its maximum.
func TestPinnedAheadIsNobodys(t *testing.T) {
	d, _ := newPinnedDevice(t, 1, 32)
	d.setTenants(t, []tenants.Tenant{{ID: tenants.User(1), Weight: 1, MostPinned: granule}})
	d.Expect(granule)
	d.pinAhead(t)
	require.Empty(t, d.pinned.Tenants())
	k := newKey(t, d)
	_, err := d.Grant(context.Background(), []Want{k.want(0, 3)}, Asking{By: Tenant{User: 1}, Nested: true})
	require.ErrorContains(t, err, "1 may own no more")
	g, err := d.Grant(context.Background(), []Want{k.want(0, 2)}, Asking{By: Tenant{User: 1}, Patience: patient})
	require.NoError(t, err)
	g.Free()
}

// newDeviceMakingASpare returns a device that makes a spare of a granule once gate is opened. Then ended is closed.
func newDeviceMakingASpare(t *testing.T) (d *Device, gate *faulty.Gate, ended chan struct{}) {
	t.Helper()
	d, f := newPinnedDevice(t, 1, 8)
	gate, ended = f.Hold(faulty.AllocHost), make(chan struct{})
	d.Expect(granule)
	go func() {
		d.pinAhead(t)
		close(ended)
	}()
	<-gate.Arrived()
	return d, gate, ended
}

// TestPinnedAheadIsAwaited: whoever needs the room of a spare that is being made waits for it.
func TestPinnedAheadIsAwaited(t *testing.T) {
	d, gate, ended := newDeviceMakingASpare(t)
	taken := make(chan error, 1)
	go func() {
		mem, _, err := d.pinned.take(d, 8*granule, 1)
		if err == nil {
			d.pinned.put(d, mem, nil)
		}
		taken <- err
	}()
	select {
	case err := <-taken:
		t.Fatal("it did not wait", err)
	case <-time.After(10 * time.Millisecond):
	}
	gate.Open()
	require.NoError(t, <-taken)
	<-ended
}

// TestPinnedAheadIsTooLate: the limit becomes lower while a spare is made. The spare is freed.
func TestPinnedAheadIsTooLate(t *testing.T) {
	d, gate, ended := newDeviceMakingASpare(t)
	lower := make(chan struct{})
	go func() {
		d.pinned.SetLimit(0)
		close(lower)
	}()
	require.Eventually(t, func() bool { return d.pinned.Limit() == 0 }, patient, time.Millisecond)
	gate.Open()
	<-lower
	d.pinned.requirePinned(t, 0, 0)
	<-ended
}

// TestPinnedAheadIsLittered: memory that nobody had may hold old bytes, too, if the device does not clear it.
func TestPinnedAheadIsLittered(t *testing.T) {
	e, err := emulated.New(emulated.Options{Memory: granule, Granularity: granule, Poison: true})
	require.NoError(t, err)
	d, err := New(e, Options{Share: 1, Log: slog.New(slog.DiscardHandler), Pinned: NewPinned(32 * granule)})
	require.NoError(t, err)
	d.Expect(granule)
	d.pinAhead(t)
	mem, littered, err := d.pinned.take(d, granule, 1)
	require.NoError(t, err)
	require.True(t, littered)
	d.pinned.put(d, mem, nil)
	d.pinned.Trim(0)
	require.NoError(t, e.Close())
}

// TestPinnedAheadAndTakers: while memory is made ahead of need, others use and need all of the pool. Nobody is refused
// what fits, and nothing is left. A context that ends ends the making.
func TestPinnedAheadAndTakers(t *testing.T) {
	const limit = 24
	d, _ := newPinnedDevice(t, 1, limit)
	ctx, stop := context.WithCancel(context.Background())
	var owner, takers sync.WaitGroup
	owner.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-d.Expected():
				d.Ahead(ctx)
			}
		}
	})
	for i := range 4 {
		takers.Go(func() {
			size := int64(granule << (i % 2))
			for range 300 {
				var mems []gpubackend.Memory
				for range limit / 4 / (size / granule) {
					mem, _, err := d.pinned.take(d, size, nobody)
					if !assert.NoError(t, err) {
						return
					}
					mems = append(mems, mem)
				}
				for _, mem := range mems {
					d.pinned.drop([]spare{{dev: d, mem: mem}})
				}
			}
		})
	}
	takers.Wait()
	stop()
	owner.Wait()
	d.pinned.Trim(0)
	d.pinned.requirePinned(t, 0, 0)
	require.Empty(t, d.pinned.working)
}
