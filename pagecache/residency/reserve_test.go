package residency

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
)

// TestWhatFitsDoesNotWait: while one reservation evicts to a slow home, others get the room that it has not freed for
// itself, and no more.
func TestWhatFitsDoesNotWait(t *testing.T) {
	d, f := newDevice(t, 8, 1)
	quick, slow, others := newKey(t, d), newKey(t, d), newKey(t, d)
	quick.idle(t, 0, 2)
	slow.idle(t, 0, 4)
	slow.home = make(chan struct{})

	big := others.taking(7, 8, 16) // needs all of it: evicts 2 extents, then waits for the other 4
	<-slow.arrived
	require.EqualValues(t, 4*granule, f.Used())
	small := soon(t, others.taking(8, 0, 2))
	more := others.taking(8, 2, 3) // of the evicted memory
	d.waitTurns(t, 2)
	still(t, more)
	small.Free()
	others.mu.Lock()
	require.True(t, others.has[0].Leave(false))
	others.has = others.has[1:]
	others.mu.Unlock()
	still(t, big)
	close(slow.home)
	all := soon(t, big)
	if o := <-more; o.err == nil {
		t.Error("a reservation got more room than there is")
	}
	all.Free()
}

// TestTurns: reservations that need room get it in order of arrival.
func TestTurns(t *testing.T) {
	const n = 6
	d, _ := newDevice(t, n, 1)
	slow, others := newKey(t, d), newKey(t, d)
	for i := range page.Index(n) {
		slow.idle(t, i, i+1)
	}
	slow.home, slow.arrived = make(chan struct{}), make(chan struct{})
	var all []<-chan outcome
	for i := range page.Index(n) {
		all = append(all, others.taking(7, i, i+1))
		d.waitTurns(t, len(all))
	}
	var got []*Pin
	for i, done := range all {
		<-slow.arrived
		for _, later := range all[i:] {
			still(t, later)
		}
		slow.home <- struct{}{}
		got = append(got, soon(t, done))
	}
	for _, p := range got {
		p.Free()
	}
}

// TestSamePagesAtOnce: two clients reserve the same pages, and there is room for one extent.
func TestSamePagesAtOnce(t *testing.T) {
	d, f := newDevice(t, 1, 1)
	k := newKey(t, d)
	gate := f.Hold(faulty.Zero)
	first := k.taking(7, 0, 1)
	<-gate.Arrived()
	second := k.taking(8, 0, 1)
	require.Eventually(t, func() bool { return f.Calls(faulty.Alloc) >= 2 }, patient, time.Millisecond)
	still(t, second)
	gate.Open()
	a, b := soon(t, first), soon(t, second)
	require.Same(t, a.Extents()[0], b.Extents()[0])
	a.Free()
	b.Free()
}

// TestSamePagesWhileTheyAreAdopted: a waiting reservation does not give up while the memory has been made and the Key
// has not adopted it yet.
func TestSamePagesWhileTheyAreAdopted(t *testing.T) {
	d, f := newDevice(t, 1, 1)
	k := newKey(t, d)
	k.adopts = make(chan struct{})
	first := k.taking(7, 0, 1)
	<-k.adopts
	second := k.taking(8, 0, 1)
	d.waitTurns(t, 1)
	// The other reservation asks again and again.
	require.Eventually(t, func() bool { return f.Calls(faulty.Alloc) >= 4 }, patient, time.Millisecond)
	still(t, second)
	k.adopts <- struct{}{}
	a, b := soon(t, first), soon(t, second)
	require.Same(t, a.Extents()[0], b.Extents()[0])
	a.Free()
	b.Free()
}

// TestWhoGivesUpTakesNoTurn: a reservation that waits for its turn ends when its context ends.
func TestWhoGivesUpTakesNoTurn(t *testing.T) {
	d, _ := newDevice(t, 2, 1)
	slow, others := newKey(t, d), newKey(t, d)
	slow.idle(t, 0, 1)
	slow.idle(t, 1, 2)
	slow.home = make(chan struct{})
	first := others.taking(7, 0, 1)
	<-slow.arrived
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := others.takeWith(ctx, 8, 1, 2)
		done <- err
	}()
	d.waitTurns(t, 2)
	third := others.taking(9, 2, 3)
	d.waitTurns(t, 3)
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
	still(t, third)
	close(slow.home)
	a, b := soon(t, first), soon(t, third)
	a.Free()
	b.Free()
}

// TestFull: extents that cannot be written back make no room, and requests that can never fit are refused at once.
func TestFull(t *testing.T) {
	d, _ := newDevice(t, 2, 1)
	k, stubborn := newKey(t, d), newKey(t, d)
	stubborn.idle(t, 0, 1)
	stubborn.refuses.Store(true)
	p, err := k.take(7, 0, 1)
	require.NoError(t, err)
	_, err = k.take(7, 1, 2)
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.ErrorContains(t, err, "only 0 B of its 128 KiB can be had: a program maps 64 KiB, 64 KiB are in use for a moment, or hold bytes that cannot be written back")
	p.Free()
	p, err = k.take(7, 1, 2)
	require.NoError(t, err)
	p.Free()
}

// TestTheLargestOwnerGivesWay: the tenant that owns most above its share gives way, even if it is the one who asks. The
// rule chooses the extent.
func TestTheLargestOwnerGivesWay(t *testing.T) {
	d, _ := newDevice(t, 6, 1)
	k := newKey(t, d)
	keep := func(user uint32, i page.Index) {
		p, err := k.take(user, i, i+1)
		require.NoError(t, err)
		p.Free()
	}
	owners := func() string {
		s := ""
		for _, a := range d.Status().Tenants {
			s += fmt.Sprintf("%s: %d of %d; ", a.Tenant, a.Owned/granule, a.Share/granule)
		}
		return s
	}
	keep(8, 0) // the oldest
	for i := range page.Index(5) {
		keep(7, 1+i)
	}
	require.Equal(t, "user 7: 5 of 3; user 8: 1 of 3; ", owners())
	keep(8, 10)
	keep(8, 11)
	require.Equal(t, "user 7: 3 of 3; user 8: 3 of 3; ", owners())
	keep(8, 12)
	require.Equal(t, "user 7: 3 of 3; user 8: 3 of 3; ", owners(), "the tenant that asked gave way itself")
	require.Empty(t, k.Extents(granules(0, 1)), "with its oldest")
	keep(9, 20)
	require.Equal(t, "user 7: 2 of 2; user 8: 3 of 2; user 9: 1 of 2; ", owners())
	keep(8, 4)
	require.Equal(t, "user 7: 1 of 2; user 8: 4 of 2; user 9: 1 of 2; ", owners(), "whoever maps it now owns it")
	for _, x := range k.Extents(granules(0, 64)) {
		require.True(t, k.Clean(t.Context(), x, true))
	}
}

// TestCopiedGoesLast: an extent that is being copied is evicted only if there is no other one; then its memory is
// waited for.
func TestCopiedGoesLast(t *testing.T) {
	d, _ := newDevice(t, 2, 1)
	k, copied := newKey(t, d), newKey(t, d)
	copied.idle(t, 0, 1)
	x := copied.has[0]
	x.Hold()
	k.idle(t, 0, 1)
	p, err := k.take(7, 1, 2)
	require.NoError(t, err)
	require.Len(t, copied.has, 1, "the other one, though younger, made room")
	second := k.taking(7, 2, 3)
	require.Eventually(t, func() bool { return d.look().leaving == 1 }, patient, time.Millisecond)
	still(t, second)
	x.LetGo()
	soon(t, second).Free()
	p.Free()
}

// TestManyUsersOfTwoDevices: whatever users do concurrently, nobody gets more than a device has or more than a share,
// and nothing is leaked.
func TestManyUsersOfTwoDevices(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("go test -run TestManyUsersOfTwoDevices; seed %d", seed)
	const memory, share = 16, 8
	for range 2 {
		d, f := newDevice(t, memory, float64(share)/memory)
		var keys []*key
		for range 3 {
			keys = append(keys, newKey(t, d))
		}
		stop, watched := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(watched)
			for {
				select {
				case <-stop:
					return
				default:
				}
				s := d.Status()
				assert.LessOrEqual(t, f.Used(), int64(memory*granule))
				for _, u := range s.Users {
					assert.True(t, u.User == 0 || u.Bytes <= share*granule, "%v", u)
				}
				assert.LessOrEqual(t, s.Mapped, int64(memory*granule))
			}
		}()
		var users sync.WaitGroup
		for user := range uint32(6) {
			rnd := rand.New(rand.NewPCG(seed, uint64(user)))
			users.Go(func() {
				for range 300 {
					manyOnce(t, rnd, user, keys, f)
				}
			})
		}
		users.Wait()
		close(stop)
		<-watched
		for _, k := range keys {
			k.refuses.Store(false)
		}
	}
}

// manyOnce does one thing at random.
func manyOnce(t *testing.T, rnd *rand.Rand, user uint32, keys []*key, f *faulty.Device) {
	k := keys[rnd.IntN(len(keys))]
	from := page.Index(rnd.IntN(24))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	switch rnd.IntN(20) {
	case 0:
		cancel()
	case 1:
		f.Fail(faulty.Zero, 1, fmt.Errorf("no zeros: %w", gpubackend.ErrRange))
	case 2:
		k.refuses.Store(rnd.IntN(2) == 0)
	case 3:
		if list := k.Extents(granules(from, from+8)); len(list) > 0 {
			k.Clean(ctx, list[0], true)
		}
	}
	p, err := k.takeWith(ctx, user, from, from+1+page.Index(rnd.IntN(6)))
	if err != nil {
		return
	}
	next := granules(from, from+1).Start
	for _, x := range p.Extents() {
		assert.LessOrEqual(t, x.Pages().Start, next)
		next = x.Pages().End
	}
	for _, x := range p.Extents() {
		if rnd.IntN(4) == 0 {
			x.Hold()
			defer x.LetGo()
		}
	}
	p.Free()
}

// rivalKey is a key that gets an extent for the first granule from another reservation, right before it adopts one.
type rivalKey struct {
	*key
	t    *testing.T
	once sync.Once
}

func (k *rivalKey) Adopt(x *Extent) bool {
	k.once.Do(func() { soon(k.t, k.taking(0, 0, 1)).Free() })
	return k.key.Adopt(x)
}

// TestExtentThatIsNotAdopted: an extent that comes too late is freed, and its reservation gets the other one.
func TestExtentThatIsNotAdopted(t *testing.T) {
	d, f := newDevice(t, 2, 1)
	k := &rivalKey{key: newKey(t, d), t: t}
	p, err := d.Reserve(t.Context(), k, Request{Pages: granules(0, 1), Size: granule})
	require.NoError(t, err)
	require.Equal(t, k.has, p.Extents())
	require.EqualValues(t, granule, f.Used())
	p.Free()
}
