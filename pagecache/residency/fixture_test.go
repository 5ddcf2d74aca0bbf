package residency

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// granule is the size of the smallest extent of the tests, in bytes and in pages.
const (
	granule      = 64 << 10
	granulePages = granule / page.Size
)

// patient is how long tests wait for something to happen.
const patient = 20 * time.Second

// newDevice makes a device of so many granules. At the end of the test, nobody may use any of it.
func newDevice(t *testing.T, granules int64, share float64) (*Device, *faulty.Device) {
	t.Helper()
	return newDeviceFrom(t, emulated.Options{Memory: granules * granule, Granularity: granule, Poison: true}, share)
}

func newDeviceFrom(t *testing.T, o emulated.Options, share float64) (*Device, *faulty.Device) {
	t.Helper()
	e, err := emulated.New(o)
	require.NoError(t, err)
	f := faulty.Wrap(e)
	d, err := New(f, Options{Share: share, Log: slog.New(slog.DiscardHandler),
		Patience: func() time.Duration { return patient }})
	require.NoError(t, err)
	t.Cleanup(func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		require.Empty(t, d.extents)
		require.Empty(t, d.charges)
		require.Empty(t, d.ledger.Accounts())
		require.Empty(t, d.turns)
		require.Zero(t, d.mapped+d.taken+d.promised+int64(d.making+d.leaving))
		require.NoError(t, f.Close())
	})
	return d, f
}

// key is a Key whose behaviour the test controls.
type key struct {
	d  *Device
	mu sync.Mutex
	// has are protected by mu.
	has []*Extent
	// If home is not nil, Clean waits for it, and sends to arrived when it does.
	home       chan struct{}
	arrived    chan struct{}
	preference atomic.Pointer[Preference]
	adopts     chan struct{} // if not nil, Adopt sends an element and then waits for one
	refuses    atomic.Bool   // Clean reports that it cannot write back the bytes
	lost       atomic.Bool
	pinned     atomic.Pointer[Tenant] // what Pinned returns
	asked      atomic.Int64           // number of calls of Extents
}

func newKey(t *testing.T, d *Device) *key {
	k := &key{d: d, arrived: make(chan struct{}, 100)}
	t.Cleanup(func() { k.letGo(t) })
	return k
}

func (k *key) Extents(rg page.Range) (list []*Extent) {
	k.asked.Add(1)
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, x := range k.has {
		if x.Pages().Overlaps(rg) {
			list = append(list, x)
		}
	}
	return list
}

func (k *key) Adopt(x *Extent) bool {
	if k.adopts != nil {
		k.adopts <- struct{}{}
		<-k.adopts // waits for the test
	}
	if len(k.Extents(x.Pages())) > 0 {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.has = append(k.has, x)
	slices.SortFunc(k.has, func(a, b *Extent) int { return int(a.Pages().Start - b.Pages().Start) })
	return true
}

func (k *key) Clean(ctx context.Context, x *Extent, copied bool) bool {
	if k.home != nil {
		k.arrived <- struct{}{}
		<-k.home
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	i := slices.Index(k.has, x)
	if i < 0 || k.refuses.Load() || !copied && x.Copied() || !x.Leave(false) {
		return false
	}
	k.has = slices.Delete(k.has, i, i+1)
	return true
}

// Rehouse copies nothing.
func (k *key) Rehouse(_ context.Context, x *Extent, tier Tier, mem gpubackend.Memory) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.refuses.Load() {
		return false
	}
	moved, _ := x.Move(tier, mem, func(gpubackend.Memory) error { return nil })
	return moved
}

func (k *key) Pinned() (Tenant, bool) {
	if by := k.pinned.Load(); by != nil {
		return *by, true
	}
	return Tenant{}, false
}

func (k *key) Preference() Preference {
	if p := k.preference.Load(); p != nil {
		return *p
	}
	return Preference{}
}

// letGo makes all extents leave.
func (k *key) letGo(t *testing.T) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, x := range k.has {
		require.True(t, x.Leave(k.lost.Load()))
	}
	k.has = nil
}

// granules returns the granules [from, to) of a file.
func granules(from, to page.Index) page.Range {
	return page.Range{Start: from * granulePages, End: to * granulePages}
}

// take reserves granules for a user, in one extent if possible.
func (k *key) take(user uint32, from, to page.Index) (*Pin, error) {
	return k.takeWith(context.Background(), user, from, to)
}

func (k *key) takeWith(ctx context.Context, user uint32, from, to page.Index) (*Pin, error) {
	size := int64(granule)
	for size < int64(to-from)*granule {
		size *= 2
	}
	return k.d.Reserve(ctx, k, Request{Pages: granules(from, to), Size: size,
		By: Tenant{User: user, Limited: user != 0}})
}

// idle makes an extent that nobody maps.
func (k *key) idle(t *testing.T, from, to page.Index) {
	t.Helper()
	p, err := k.take(0, from, to)
	require.NoError(t, err)
	p.Free()
}

// taking starts a take in the background.
func (k *key) taking(user uint32, from, to page.Index) <-chan outcome {
	done := make(chan outcome, 1)
	go func() {
		p, err := k.take(user, from, to)
		done <- outcome{p, err}
	}()
	return done
}

type outcome struct {
	*Pin
	err error
}

// soon returns the outcome, and fails the test if there is none within patient.
func soon(t *testing.T, done <-chan outcome) *Pin {
	t.Helper()
	select {
	case o := <-done:
		require.NoError(t, o.err)
		return o.Pin
	case <-time.After(patient / 2):
		t.Fatal("a reservation waits without need")
	}
	return nil
}

// still checks that there is no outcome yet.
func still(t *testing.T, done <-chan outcome) {
	t.Helper()
	select {
	case o := <-done:
		t.Fatal("a reservation ended that should wait", o.err)
	default:
	}
}

// setTenants is SetTenants with a valid list.
func (d *Device) setTenants(t *testing.T, list []tenants.Tenant) {
	t.Helper()
	require.NoError(t, SetTenants([]*Device{d}, list))
}

// waitTurns waits until n reservations need room.
func (d *Device) waitTurns(t *testing.T, n int) {
	t.Helper()
	require.Eventually(t, func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.turns) == n
	}, patient, time.Millisecond/4)
}
