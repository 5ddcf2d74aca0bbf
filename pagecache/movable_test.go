package pagecache

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
)

// TestLargerThanTheDevice uses all of a file that is larger than the device and pinned memory together, one part at a
// time.
func TestLargerThanTheDevice(t *testing.T) {
	const extents = 40
	m := newMovingMachine(t, 1, 4, 4)
	src := m.noisyFile(extents * brick)
	c := m.travel(src, 0, true)
	require.Zero(t, c.mapped(), "memory comes with use")
	want := bytes.Clone(src.home.data)
	for round := range 2 {
		for i := range extents {
			u := c.use(i, i+1)
			requireSame(t, want[i*brick:(i+1)*brick], c.host[i*brick:(i+1)*brick])
			at := i*brick + 100*round
			c.host[at]++
			want[at]++
			u.Done()
		}
	}
	require.LessOrEqual(t, m.devices[0].Used(), int64(4*brick))
	c.end()
	require.NoError(t, src.attached.Sync(context.Background(), nil))
	requireSame(t, want, src.home.data)
}

// TestReleaseAfterMove releases bytes that were stored before an extent moved to pinned memory. They are the program's
// bytes.
func TestReleaseAfterMove(t *testing.T) {
	m := newMovingMachine(t, 1, 4, 2)
	src := m.noisyFile(2 * brick)
	c := m.travel(src, 0, true)
	was := src.home.bytes(5, 1)[0]
	c.stores(5, was+1)
	m.crowd(0, 5)
	require.Zero(t, c.mapped())
	device, host := c.tiers()
	require.Zero(t, device)
	require.Equal(t, 1, host)
	require.Equal(t, was, src.read(t, 5, 1)[0], "not released yet")
	require.EqualValues(t, 1, c.releases())
	require.Equal(t, was+1, src.read(t, 5, 1)[0])
	require.Equal(t, was+1, c.loads(5))
}

// TestStoresInPinnedMemory stores into pinned memory, because the device is full, and releases the bytes.
func TestStoresInPinnedMemory(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 2)
	src := m.noisyFile(4 * brick)
	c := m.travel(src, 0, true)
	u := c.use(0, 4)
	device, host := c.tiers()
	require.Equal(t, 2, device)
	require.Equal(t, 2, host)
	for i := range 4 {
		c.host[i*brick+7] = 200 + byte(i)
	}
	require.EqualValues(t, 4, c.releases())
	for i := range 4 {
		require.Equal(t, 200+byte(i), src.read(t, i*brick+7, 1)[0])
	}
	src.write(t, 3*brick+8, []byte{99})
	_, err := c.Acquire(context.Background(), 0, c.len, false)
	require.NoError(t, err)
	require.Equal(t, byte(99), c.host[3*brick+8])
	u.Done()
}

// TestCleanIsDropped: extents that home has too go without a copy.
func TestCleanIsDropped(t *testing.T) {
	m := newMovingMachine(t, 1, 4, 4)
	c := m.travel(m.noisyFile(2*brick), 0, true)
	c.use(0, 2).Done()
	m.crowd(0, 4)
	device, host := c.tiers()
	require.Zero(t, device+host)
	require.Zero(t, m.cache.counters.MovedOut.Load())
}

// TestNoPinnedMemory: without pinned memory, unreleased bytes are brought home.
func TestNoPinnedMemory(t *testing.T) {
	m := newMovingMachine(t, 1, 4, 0)
	src := m.noisyFile(brick)
	c := m.travel(src, 0, true)
	c.stores(9, 77)
	m.crowd(0, 4)
	device, host := c.tiers()
	require.Zero(t, device+host)
	require.Equal(t, byte(77), src.read(t, 9, 1)[0])
	require.Equal(t, byte(77), c.loads(9))
}

// TestMovesBack: an extent in pinned memory moves to the device once there is room.
func TestMovesBack(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 2)
	c := m.travel(m.noisyFile(3*brick), 0, true)
	other := m.run(m.noisyFile(brick), 0, 0, brick, false) // does not move
	u := c.use(0, 2)
	c.host[0], c.host[brick] = 1, 2
	u.Done()
	_, host := c.tiers()
	require.Equal(t, 1, host)
	other.unmap()
	m.cache.Forget(FileID{1, 2})
	require.Eventually(t, func() bool { // its memory may be freed in the background
		u := c.use(0, 2)
		defer u.Done()
		require.Equal(t, []byte{1, 2}, []byte{c.host[0], c.host[brick]})
		_, host := c.tiers()
		return host == 0
	}, time.Minute, time.Millisecond)
	require.Positive(t, m.cache.counters.MovedIn.Load())
}

// TestMovesBackByItself: extents in pinned memory go back in the background, with every byte, when others give up
// device memory. Their client has them mapped, and no request asks for it.
func TestMovesBackByItself(t *testing.T) {
	m := newMovingMachine(t, 1, 8, 8)
	c := m.travel(m.noisyFile(4*brick), 0, true)
	for i := range 4 {
		c.stores(i*brick, byte(100+i))
	}
	other, err := m.cache.Map(t.Context(), m.noisyFile(8*brick), MapRequest{Len: 8 * brick})
	require.NoError(t, err)
	_, host := c.tiers()
	require.Equal(t, 4, host)
	id := other.f.id
	require.NoError(t, other.Unmap(t.Context()))
	_, err = m.cache.Evict(t.Context(), id, -1)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		device, host := c.tiers()
		return device == 4 && host == 0
	}, time.Minute, 10*time.Millisecond)
	require.Zero(t, c.mapped(), "its client gave the memory up")
	for i := range 4 {
		require.Equal(t, byte(100+i), c.loads(i*brick))
	}
	c.end()
}

// TestOthersKeepTheirs: mappings that are not movable stay in place.
func TestOthersKeepTheirs(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 1)
	src := m.noisyFile(2 * brick)
	p := m.run(src, 0, 0, 2*brick, true)
	p.store(3, 44)
	c := m.travel(m.noisyFile(2*brick), 0, false)
	c.use(0, 1).Done()
	_, host := c.tiers()
	require.Equal(t, 1, host, "the device is full of extents that do not move")
	_, err := c.try(0, 2)
	require.ErrorIs(t, err, syscall.EDEADLK)
	require.ErrorContains(t, err, "a program maps 128 KiB")
	require.Equal(t, byte(44), p.byteAt(3))
	require.EqualValues(t, 1, p.release())
}

func TestNeverFits(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 1)
	c := m.travel(m.noisyFile(4*brick), 0, false)
	_, err := m.cache.Use(context.Background(), []Use{c.over(0, 4)}, UseOptions{})
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.ErrorContains(t, err, "needs 256 KiB on device 0, whose budget is 128 KiB, and there are 64 KiB of pinned memory")
	c.use(0, 3).Done()
}

// TestWhoHoldsWhat: a bracket that waited too long gets an error that says who holds the memory.
func TestWhoHoldsWhat(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 0)
	c, d := m.travel(m.noisyFile(2*brick), 0, false), m.travel(m.noisyFile(2*brick), 0, false)
	u, err := c.try(0, 2)
	require.NoError(t, err)
	_, err = m.cache.Use(context.Background(), []Use{d.over(0, 1)}, UseOptions{Patience: time.Millisecond})
	require.ErrorIs(t, err, syscall.ETIMEDOUT)
	require.Regexp(t, `waited 1ms for 64 KiB on device 0. (process \d+ \(.*\)|a program) holds 128 KiB in a bracket for `, err.Error())
	u.Done()
	d.use(0, 2).Done()
}

// TestWaitsForOthers: a bracket waits for the end of another one, and those behind it keep their order.
func TestWaitsForOthers(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 0)
	c := m.travel(m.noisyFile(2*brick), 0, false)
	u := c.use(0, 2)
	var order []int
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range 5 {
		d := m.travel(m.noisyFile(2*brick), 0, false)
		wg.Go(func() {
			v := d.use(0, 2)
			mu.Lock()
			order = append(order, i)
			mu.Unlock()
			v.Done()
		})
		require.Eventually(t, func() bool { return m.cache.devices[0].room.Status().Waiting == i+1 }, time.Minute,
			time.Millisecond)
	}
	u.Done()
	wg.Wait()
	require.Equal(t, []int{0, 1, 2, 3, 4}, order)
}

// TestDeadlockOfChen is figure 3.2 of Chen's thesis: on 12 GB, four programs hold 3.6, 1.4, 1.9 and 3.9 GB and ask for
// 3.4, 3.1, 3.5 and 2.5 more. Here a brick stands for 100 MB. First each program holds and asks in separate brackets,
// then in one.
func TestDeadlockOfChen(t *testing.T) {
	holds, more := []int{36, 14, 19, 39}, []int{34, 31, 35, 25}
	m := newMovingMachine(t, 1, 120, 0)
	var wg sync.WaitGroup
	var all sync.WaitGroup
	all.Add(len(holds))
	for i := range holds {
		c := m.travel(m.noisyFile((holds[i]+more[i])*brick), 0, true)
		wg.Go(func() {
			u := c.use(0, holds[i])
			all.Done()
			all.Wait()
			v, err := c.try(holds[i], holds[i]+more[i])
			if err == nil {
				v.Done()
			} else {
				require.ErrorIs(t, err, syscall.EDEADLK)
			}
			u.Done()
			for range 3 {
				v := c.use(0, holds[i]+more[i])
				c.host[0]++
				v.Done()
			}
		})
	}
	wg.Wait()
}

// TestStoppedClient: a client that is stopped keeps its memory, and nobody waits for it for long.
func TestStoppedClient(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 1)
	src := m.noisyFile(2 * brick)
	c := m.travel(src, 0, true)
	u := c.use(0, 2)
	c.host[1] = 55
	u.Done()
	c.stopped.Lock()
	d := m.travel(m.noisyFile(2*brick), 0, false)
	d.use(0, 1).Done() // in pinned memory, or in memory that c gave back
	require.Positive(t, c.deaf.Load())
	require.Positive(t, m.cache.devices[0].room.Status().Mapped, "it is charged")
	began := time.Now()
	_, err := d.try(0, 2)
	require.ErrorIs(t, err, syscall.EDEADLK)
	require.Less(t, time.Since(began), time.Minute/2)
	c.stopped.Unlock()
	require.Eventually(t, func() bool { return c.deaf.Load() == 0 }, time.Minute, time.Millisecond)
	d.use(0, 2).Done()
	require.Equal(t, byte(55), c.loads(1))
}

// TestKilledWhileMoving ends a client's mapping while the client is asked to give memory back.
func TestKilledWhileMoving(t *testing.T) {
	m := newMovingMachine(t, 1, 1, 0)
	src := m.noisyFile(brick)
	c := m.travel(src, 0, true)
	c.stores(1, 66)
	c.stopped.Lock()
	d := m.travel(m.noisyFile(brick), 0, false)
	got := make(chan *Bracket)
	go func() { got <- d.use(0, 1) }()
	require.Eventually(t, func() bool { return c.deaf.Load() > 0 || len(c.moves) > 0 }, time.Minute, time.Millisecond)
	c.mu.Lock()
	c.hole(0, brick)
	c.has = nil
	c.mu.Unlock()
	require.NoError(t, c.Unmap(context.Background()))
	c.stopped.Unlock()
	(<-got).Done()
	require.Equal(t, byte(66), src.read(t, 1, 1)[0], "its end releases")
}

// TestClientCannotMap: a bracket fails if the client could not map the memory, and the next one brings it.
func TestClientCannotMap(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 0)
	c := m.travel(m.noisyFile(2*brick), 0, true)
	c.refuses.Store(1)
	_, err := c.try(0, 2)
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.Zero(t, m.cache.devices[0].room.Status().Brackets)
	u := c.use(0, 2)
	requireSame(t, c.f.home.Backing().(*memoryHome).bytes(0, 2*brick), c.host)
	u.Done()
}

// TestTruncatedWhileOut truncates a file with some bytes in pinned memory and the rest at home.
func TestTruncatedWhileOut(t *testing.T) {
	m := newMovingMachine(t, 1, 4, 4)
	src := m.noisyFile(2 * brick)
	c := m.travel(src, 0, true)
	c.stores(brick/2, 1)
	c.stores(brick+brick/2, 1)
	c.use(0, 2).Done()
	m.crowd(0, 5)
	src.truncate(t, brick/4)
	u := c.use(0, 2)
	requireSame(t, make([]byte, 2*brick-brick/4), c.host[brick/4:])
	u.Done()
	c.releases()
	src.truncate(t, 2*brick)
	requireSame(t, make([]byte, 2*brick-brick/4), src.read(t, brick/4, 2*brick))
}

// TestThreshold: a program reads all of a file that is larger than the device, and one part of it again and again. By
// the threshold only that part moves to the device. A part that the program changes moves with the next bracket.
func TestThreshold(t *testing.T) {
	const extents, hot, changed = 12, 11, 10
	m := newMovingMachine(t, 1, 4, 16)
	require.NoError(t, m.cache.SetPlacement(PlacementPolicy{Name: PlaceByThreshold, Threshold: 2, Penalty: 2}))
	src := m.noisyFile(extents * brick)
	c := m.travel(src, 0, true)
	tier := func(i int) Tier { return c.h.Extents(page.Covering(int64(i)*brick, brick))[0].Placement().Tier }
	use := func(i int) {
		u := c.use(i, i+1)
		requireSame(t, src.home.bytes(i*brick, brick), c.host[i*brick:(i+1)*brick])
		u.Done()
	}
	for i := range extents {
		use(i)
	}
	for i := range extents {
		use(i) // two accesses each: enough only while there was room
	}
	require.EqualValues(t, 4*brick, m.devices[0].Used())
	require.Equal(t, TierHost, tier(hot))
	moved := m.cache.counters.MovedIn.Load()
	use(hot)
	use(hot)
	require.Equal(t, TierDevice, tier(hot))
	require.Equal(t, moved+1, m.cache.counters.MovedIn.Load())
	require.Equal(t, TierHost, tier(changed))
	c.stores(changed*brick, 1)
	require.EqualValues(t, 1, c.releases())
	c.use(changed, changed+1).Done()
	require.Equal(t, TierDevice, tier(changed))

	now := m.cache.Status().Devices[0]
	require.Equal(t, "threshold", now.Placement)
	require.Positive(t, now.Delayed.Extents)
	require.ErrorIs(t, m.cache.SetPlacement(PlacementPolicy{Name: "lazy"}), syscall.EINVAL)
	require.NoError(t, m.cache.SetPlacement(PlacementPolicy{}))
	require.Equal(t, "eager", m.cache.Status().Devices[0].Placement)
}

// TestThresholdForgetsFiles: nothing is known of accesses to a file that is gone.
func TestThresholdForgetsFiles(t *testing.T) {
	m := newMovingMachine(t, 1, 4, 16)
	require.NoError(t, m.cache.SetPlacement(PlacementPolicy{Name: PlaceByThreshold}))
	src := m.noisyFile(3 * brick)
	c := m.travel(src, 0, true)
	c.use(0, 3).Done()
	room := m.cache.devices[0].room
	require.Equal(t, 3, room.RememberedForTesting())
	c.end()
	require.Equal(t, 3, room.RememberedForTesting(), "the extents are still there")
	m.cache.Forget(src.id)
	require.Zero(t, room.RememberedForTesting())
}

// TestPinnedMemoryIsMadeAhead: a mapping that is larger than the device gets pinned memory in the background, before a
// bracket asks. Close waits for what is being made. The devices find nothing left.
func TestPinnedMemoryIsMadeAhead(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 32)
	spare := func(bricks int64) func() bool {
		return func() bool { return m.cache.Status().PinnedSpareBytes == bricks*brick }
	}
	m.travel(m.noisyFile(2*brick), 0, true)
	require.Zero(t, m.cache.Status().PinnedBytes, "it fits")
	c := m.travel(m.noisyFile(8*brick), 0, true)
	require.Eventually(t, spare(4), time.Minute, time.Millisecond)
	u := c.use(0, 4)
	require.Eventually(t, spare(4), time.Minute, time.Millisecond, "two were taken, and made again")
	u.Done()
	c.end()

	m.cache.pinned.Trim(0)
	gate := m.devices[0].Hold(faulty.AllocHost)
	m.travel(m.noisyFile(8*brick), 0, true).end()
	<-gate.Arrived()
	closed := make(chan error, 1)
	go func() { closed <- m.cache.Close(context.Background()) }()
	gate.Open()
	require.NoError(t, <-closed)
	used, left := m.cache.pinned.Used()
	require.Zero(t, used+left)
}

// TestDeviceLostWhileOut loses the device of a client with an open bracket and with pinned memory.
func TestDeviceLostWhileOut(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 4)
	src := m.noisyFile(6 * brick)
	c := m.travel(src, 0, true)
	u := c.use(0, 6)
	c.host[0] = 1
	m.devices[0].Lose()
	_, err := c.Release(context.Background(), 0, c.len)
	require.ErrorIs(t, err, syscall.ENODEV)
	u.Done()
	_, err = c.try(0, 1)
	require.ErrorIs(t, err, syscall.ENODEV)
	c.ended.Do(func() {
		require.ErrorIs(t, c.Unmap(context.Background()), syscall.ENODEV)
		close(c.moves)
		c.thread.Wait()
	})
}

// TestRemovedWhileOut removes a file with a client's unreleased stores in pinned memory and on the device.
func TestRemovedWhileOut(t *testing.T) {
	m := newMovingMachine(t, 1, 4, 1)
	src := m.noisyFile(2 * brick)
	c := m.travel(src, 0, true)
	c.stores(1, 11)
	c.stores(brick+1, 22)
	m.cache.Forget(src.id)
	m.crowd(0, 5)
	require.Equal(t, byte(11), c.loads(1))
	require.Equal(t, byte(22), c.loads(brick+1))
}

// TestUsersDoNotShareWhatMoved: two users take turns with a file, and neither finds the other's memory.
func TestUsersDoNotShareWhatMoved(t *testing.T) {
	m := newMovingMachine(t, 1, 4, 4)
	src := m.noisyFile(brick)
	src.home.rights = Rights{Mode: 0o666}
	n := int64(brick)
	a := m.travelAs(src, 0, MapRequest{Len: n, Writable: true, User: 1001})
	b := m.travelAs(src, 0, MapRequest{Len: n, Writable: true, User: 1002})
	a.stores(1, 5)
	a.releases()
	require.Equal(t, 1, a.mapped())
	require.Equal(t, byte(5), b.loads(1))
	require.Zero(t, a.mapped(), "the memory was taken back before another user got it")
	require.Equal(t, byte(5), a.loads(1))
	require.NotEqual(t, page.Index(0), a.pages.End)
}

// TestMemoryPassesOn: a bracket reuses the memory of extents that had to go for it. Its client finds no bytes of
// another file in it, not even past the end of its file or outside its mapping.
func TestMemoryPassesOn(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 0)
	a := m.travel(m.noisyFile(2*brick), 0, true)
	a.use(0, 2).Done()
	had, _ := a.h.at(0)
	was := had.Memory()
	const end = brick + brick/2 + 10
	src := m.noisyFile(end)
	for _, writable := range []bool{false, true} {
		b := m.travelAs(src, 0, MapRequest{Len: brick + page.Size, Writable: writable})
		u := b.use(0, 2)
		require.Zero(t, a.mapped())
		first, _ := b.h.at(0)
		last, _ := b.h.at(brickPages)
		require.Contains(t, []gpubackend.Memory{first.Memory(), last.Memory()}, was)
		got := make([]byte, 2*brick)
		require.NoError(t, m.devices[0].CopyOut(t.Context(), []gpubackend.Copy{
			{Mem: first.Memory(), Host: got[:brick]}, {Mem: last.Memory(), Host: got[brick:]}}))
		for at := range got {
			if at < end && got[at] != 0 {
				require.Equal(t, src.home.data[at], got[at], "byte %d", at)
			} else {
				require.Zero(t, got[at], "byte %d", at)
			}
		}
		u.Done()
		b.end()
		a.use(0, 2).Done()
		had, _ = a.h.at(0)
		was = had.Memory()
	}
	require.Zero(t, m.devices[0].Calls(faulty.Zero)-2*2, "only pages that nobody brings are zeroed")
}

// TestMemoryOfTheKilledIsNotPassedOn: kernels of a killed client may run for a while. They store into no bytes of
// another file, although memory is passed on to programs of the same user.
func TestMemoryOfTheKilledIsNotPassedOn(t *testing.T) {
	for name, moves := range map[string]bool{"memory that moves": true, "memory that does not": false} {
		t.Run(name, func(t *testing.T) {
			m := newMovingMachine(t, 1, 1, 0, func(o *emulated.Options) { o.WritableExports = true })
			src, b := m.noisyFile(brick), m.travel(m.noisyFile(brick), 0, false)
			keeps := func(h *holding) (end func()) {
				x, _ := h.at(0)
				file, err := x.Memory().Export(true)
				require.NoError(t, err)
				fd, err := syscall.Dup(int(file.Fd()))
				require.NoError(t, err)
				return func() { require.NoError(t, syscall.Close(fd)) }
			}
			var kernel func()
			if moves {
				a := m.travel(src, 0, true)
				a.use(0, 1).Done()
				kernel = keeps(a.h)
				a.Abandon()
				a.end()
			} else {
				a := m.mapping(src, MapRequest{Len: brick, Writable: true})
				kernel = keeps(a.h)
				a.Abandon()
				require.NoError(t, a.Unmap(t.Context()))
			}
			_, err := b.try(0, 1)
			require.ErrorIs(t, err, syscall.EDEADLK, "the memory counts as long as it is kept")
			kernel()
			b.use(0, 1).Done()
		})
	}
}

// TestBracketsAtOnce: threads of a client open brackets over the same extent at once. The client gets one MOVE: a
// second one would unmap the memory that the first thread uses already.
func TestBracketsAtOnce(t *testing.T) {
	const extents = 300
	m := newMovingMachine(t, 1, 2, 0)
	c := m.travel(m.noisyFile(extents*brick), 0, false)
	for i := range extents {
		var threads sync.WaitGroup
		for range 3 {
			threads.Go(func() { c.use(i, i+1).Done() })
		}
		threads.Wait()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	require.Equal(t, extents, c.moved)
}

// first returns the client's first extent, and its lease.
func (c *traveller) first() (*extent, *lease) {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	x, _ := c.h.at(0)
	return x, x.leaseLocked(c.Mapping)
}

// TestBracketWhileAnExtentMoves: a bracket comes and goes right after its client gave the extent back, so the client
// has it again. The extent does not move.
func TestBracketWhileAnExtentMoves(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 1)
	src := m.noisyFile(brick)
	c := m.travel(src, 0, true)
	c.stores(1, 77)
	x, _ := c.first()
	mem, err := m.devices[0].AllocHost(brick)
	require.NoError(t, err)
	c.gaveBack = func() {
		c.gaveBack = nil
		c.stores(2, 88)
	}
	require.False(t, c.h.Rehouse(t.Context(), x.Extent, TierHost, mem))
	require.NoError(t, mem.Free())
	require.Equal(t, TierDevice, x.Placement().Tier)
	require.Equal(t, 1, c.mapped())
	require.Equal(t, []byte{77, 88}, c.host[1:3])
	require.EqualValues(t, 1, c.releases())
	require.Equal(t, []byte{77, 88}, src.read(t, 1, 2))
}

// TestStoresDuringAMove: a program stores into an extent while it moves, outside its brackets. The extent stays, and
// nothing is lost.
func TestStoresDuringAMove(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 2)
	src := m.noisyFile(brick)
	c := m.travel(src, 0, true)
	c.stores(1, 77)
	x, _ := c.first()
	mem, err := m.devices[0].AllocHost(brick)
	require.NoError(t, err)
	c.clings.Store(true)
	gate := m.devices[0].HoldAfter(faulty.Digests, 1) // between the copy and the check
	moved := make(chan bool)
	go func() { moved <- c.h.Rehouse(t.Context(), x.Extent, TierHost, mem) }()
	<-gate.Arrived()
	c.host[2] = 88
	gate.Open()
	require.False(t, <-moved)
	require.NoError(t, mem.Free())
	require.EqualValues(t, 1, c.releases())
	require.Equal(t, []byte{77, 88}, src.read(t, 1, 2))
}

// TestBracketAfterAnotherGeneration: a client that has the extent of another generation gets it again.
func TestBracketAfterAnotherGeneration(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 1)
	c := m.travel(m.noisyFile(brick), 0, true)
	c.use(0, 1).Done()
	_, l := c.first()
	l.mu.Lock()
	l.generation++
	l.mu.Unlock()
	moved := c.moved
	c.use(0, 1).Done()
	require.Equal(t, moved+1, c.moved)
}

// TestAnswerToAnOlderMove: the client answers a MOVE late, after another one was sent. Until it answers that one, no
// bracket may assume that it has the extent.
func TestAnswerToAnOlderMove(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 1)
	c := m.travel(m.noisyFile(brick), 0, true)
	c.use(0, 1).Done()
	_, l := c.first()
	now, cancel := context.WithCancel(t.Context())
	cancel()
	hole, extent := make(chan struct{}), make(chan struct{})
	answers := sync.OnceFunc(func() { close(extent) })
	t.Cleanup(answers)
	c.before = func(m Move) error {
		if m.Tier == TierNone {
			<-hole
		} else {
			<-extent
		}
		return nil
	}
	require.False(t, l.takeBack(now), "the client does not answer")
	_, err := l.give()
	require.NoError(t, err)
	close(hole)
	require.Eventually(t, func() bool { return c.deaf.Load() == 0 }, time.Minute, time.Millisecond)
	wait, err := l.give()
	require.NoError(t, err)
	require.NotNil(t, wait, "the client has not answered")
	answers()
	require.NoError(t, wait(t.Context()))
	require.Equal(t, 1, c.mapped())
}

// TestBracketWhileAnExtentIsEvicted is TestBracketWhileAnExtentMoves for an eviction.
func TestBracketWhileAnExtentIsEvicted(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 0)
	src := m.noisyFile(brick)
	c := m.travel(src, 0, true)
	c.stores(1, 77)
	x, _ := c.first()
	c.gaveBack = func() {
		c.gaveBack = nil
		c.stores(2, 88)
	}
	require.False(t, src.attached.evict(t.Context(), c.h, x.Extent, true))
	require.Equal(t, 1, c.mapped())
	require.Equal(t, []byte{77, 88}, c.host[1:3])
}

// TestMemoryOfABracketIsNotTakenBack: while a bracket uses an extent, its client keeps it, and is not even asked.
func TestMemoryOfABracketIsNotTakenBack(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 0)
	c := m.travel(m.noisyFile(brick), 0, true)
	u := c.use(0, 1)
	_, l := c.first()
	require.False(t, l.takeBack(t.Context()))
	require.Equal(t, 1, c.mapped())
	u.Done()
	require.True(t, l.takeBack(t.Context()))
	require.Zero(t, c.mapped())
}

// TestMovesNameTheFormerGeneration: a MOVE says which generation the client has, and a hole has none.
func TestMovesNameTheFormerGeneration(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 0)
	c := m.travel(m.noisyFile(brick), 0, true)
	var seen [][2]uint64
	c.before = func(m Move) error {
		seen = append(seen, [2]uint64{m.Previous, m.Generation})
		return nil
	}
	c.use(0, 1).Done()
	_, l := c.first()
	require.True(t, l.takeBack(t.Context()))
	c.use(0, 1).Done()
	require.Equal(t, [][2]uint64{{0, 1}, {1, 0}, {0, 1}}, seen)
}

// TestHoleThatIsRefused: a client that may not make a hole still has the memory.
func TestHoleThatIsRefused(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 0)
	c := m.travel(m.noisyFile(brick), 0, true)
	c.use(0, 1).Done()
	_, l := c.first()
	c.before = func(m Move) error { return map[Tier]error{TierNone: syscall.EPERM}[m.Tier] }
	require.False(t, l.takeBack(t.Context()))
	require.Equal(t, 1, c.mapped())
}

// TestMoveWithoutAnAnswer: if a MOVE will have no answer, its bracket fails, and the next one sends the extent again.
func TestMoveWithoutAnAnswer(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 0)
	src := m.noisyFile(brick)
	c := m.travel(src, 0, true)
	fails := true
	c.before = func(Move) error {
		if fails {
			fails = false
			return errors.New("the connection has ended")
		}
		return nil
	}
	_, err := c.try(0, 1)
	require.ErrorContains(t, err, "the connection has ended")
	u, err := c.try(0, 1)
	require.NoError(t, err)
	requireSame(t, src.home.bytes(0, brick), c.host)
	u.Done()
}

// TestNothingIsTakenBackFromAClientThatEnded: it is not asked any more.
func TestNothingIsTakenBackFromAClientThatEnded(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 0)
	c := m.travel(m.noisyFile(brick), 0, true)
	c.use(0, 1).Done()
	_, l := c.first()
	c.end()
	require.True(t, l.takeBack(t.Context()))
}

// TestChargesOfSeveralMoves: a client that owes several answers is charged once for each extent, until the last answer.
func TestChargesOfSeveralMoves(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 0)
	c := m.travel(m.noisyFile(2*brick), 0, true)
	c.use(0, 2).Done()
	charged := func() int64 { return m.cache.devices[0].room.Status().Mapped }
	first, second := make(chan struct{}), make(chan struct{})
	answers := sync.OnceFunc(func() { close(second) })
	t.Cleanup(answers)
	c.chargeLeases(func() { <-first })
	c.chargeLeases(func() { <-second })
	require.EqualValues(t, 2*brick, charged())
	close(first)
	require.Eventually(t, func() bool { return c.deaf.Load() == 1 }, time.Minute, time.Millisecond)
	require.EqualValues(t, 2*brick, charged())
	answers()
	require.Eventually(t, func() bool { return charged() == 0 }, time.Minute, time.Millisecond)
}

// TestBracketOverTwoDevices is refused.
func TestBracketOverTwoDevices(t *testing.T) {
	m := newMovingMachine(t, 2, 2, 0)
	src := m.noisyFile(brick)
	c, d := m.travel(src, 0, true), m.travel(src, 1, true)
	_, err := m.cache.Use(t.Context(), []Use{c.over(0, 1), d.over(0, 1)}, UseOptions{})
	require.ErrorIs(t, err, syscall.EINVAL)
}

// TestBracketShowsNoSecrets: a bracket gives its client a whole extent, with nothing in it that was overwritten,
// outside its mapping either.
func TestBracketShowsNoSecrets(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 0)
	src := m.noisyFile(brick)
	m.travel(src, 0, false).use(0, 1).Done()
	src.write(t, 10*page.Size, make([]byte, page.Size))
	c := m.travelAs(src, 0, MapRequest{Len: page.Size})
	u := c.use(0, 1)
	x, _ := c.first()
	got := make([]byte, page.Size)
	require.NoError(t, m.devices[0].CopyOut(t.Context(),
		[]gpubackend.Copy{{Mem: x.Memory(), Off: 10 * page.Size, Host: got}}))
	require.Equal(t, make([]byte, page.Size), got)
	u.Done()
}

// TestBracketAfterAChangeInSource: a bracket knows the file's size in SOURCE.
func TestBracketAfterAChangeInSource(t *testing.T) {
	m := newMovingMachine(t, 1, 2, 0)
	src := m.noisyFile(brick)
	c := m.travelAs(src, 0, MapRequest{Len: 2 * brick})
	c.use(0, 1).Done()
	src.home.resize(2 * brick)
	src.home.editAt(brick+7, []byte("in SOURCE"))
	u := c.use(1, 2)
	require.Equal(t, "in SOURCE", string(c.host[brick+7:][:9]))
	u.Done()
}
