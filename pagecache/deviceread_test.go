package pagecache

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/cleanread"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

func readsFrom(when DeviceReads) machineOption {
	return func(o *Options, _ *int64) { o.DeviceReads = when }
}

// openHome reads home for requests. The host's page cache is empty unless warm is set.
type openHome struct {
	Home
	warm  atomic.Bool
	slow  atomic.Int64 // extra ns per read
	reads atomic.Int64
	asked atomic.Int64 // queries of what the host's page cache has
}

func (h *openHome) ReadAt(p []byte, off int64) (int, error) {
	h.reads.Add(1)
	if slow := h.slow.Load(); slow > 0 {
		time.Sleep(time.Duration(slow))
	}
	return h.Home.ReadAt(p, off)
}

func (h *openHome) ReadCached(p []byte, off int64) (int, error) {
	h.asked.Add(1)
	if !h.warm.Load() {
		return 0, nil
	}
	return h.Home.ReadAt(p, off)
}

func (h *openHome) Cached(int64, int64) bool { return h.warm.Load() }

// sharedFile makes a file of random bytes whose reads devices may serve.
func (m *machine) sharedFile(size int) (*source, *openHome) {
	src := m.noisyFile(size)
	home := &openHome{Home: src.home}
	src.reader = home
	return src, home
}

func (m *machine) counter(pick func(c *Counters) *atomic.Int64) int64 {
	return pick(&m.cache.counters).Load()
}

func deviceReads(c *Counters) *atomic.Int64 { return &c.DeviceReads }
func diskReads(c *Counters) *atomic.Int64   { return &c.DiskReads }
func hostReads(c *Counters) *atomic.Int64   { return &c.HostReads }
func cleanReads(c *Counters) *atomic.Int64  { return &c.CleanReads }
func fallbacks(c *Counters) *atomic.Int64   { return &c.DeviceReadFallbacks }

const sharedSize = 4<<20 + 100

// TestReadFromDevice: bytes that a device shares with home are read there, up to the last byte of the file. They may be
// mapped for reading, for writing, or no longer.
func TestReadFromDevice(t *testing.T) {
	for _, how := range []string{"read", "write", "unmapped"} {
		t.Run(how, func(t *testing.T) {
			m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
			m.cache.clean.WaitForDevicesForTesting()
			src, home := m.sharedFile(sharedSize)
			p := m.run(src, 0, 0, sharedSize, how == "write")
			if how == "unmapped" {
				p.unmap()
			}
			for _, at := range []int{0, 3 << 20, 1<<20 + 5, sharedSize - 100, sharedSize - 4196} {
				n := min(64<<10, sharedSize-at)
				require.True(t, bytes.Equal(src.home.bytes(at, n), src.read(t, at, n)), at)
				src.settle(t)
			}
			require.Empty(t, src.read(t, sharedSize, 10))
			require.Len(t, src.read(t, sharedSize-10, 4096), 10)
			require.Zero(t, home.reads.Load())
			require.Positive(t, m.counter(deviceReads))
			require.Positive(t, src.attached.counters.DeviceReadBytes.Load())
		})
	}
}

// TestReadsOff: with DeviceReadsOff no read uses a device.
func TestReadsOff(t *testing.T) {
	m := newMachine(t, 1, readsFrom(DeviceReadsOff))
	src, _ := m.sharedFile(sharedSize)
	m.run(src, 0, 0, sharedSize, false)
	before := m.devices[0].Calls(faulty.CopyOut)
	require.True(t, bytes.Equal(src.home.bytes(0, sharedSize), src.read(t, 0, sharedSize)))
	require.Equal(t, before, m.devices[0].Calls(faulty.CopyOut))
}

// TestHostCacheFirst: bytes in the host's page cache are read there.
func TestHostCacheFirst(t *testing.T) {
	m := newMachine(t, 1)
	src, home := m.sharedFile(sharedSize)
	m.run(src, 0, 0, sharedSize, false)
	home.warm.Store(true)
	for at := 0; at < sharedSize; at += 128 << 10 {
		n := min(128<<10, sharedSize-at)
		require.True(t, bytes.Equal(src.home.bytes(at, n), src.read(t, at, n)))
	}
	require.Zero(t, m.devices[0].Calls(faulty.CopyOut))
	require.Zero(t, home.reads.Load())
	require.EqualValues(t, 33, m.counter(hostReads))
}

// TestUnreleasedStoresAreNotRead: pages that a program stores into are read from home until it releases them. They are
// not copied from the device again and again without use.
func TestUnreleasedStoresAreNotRead(t *testing.T) {
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
	m.cache.clean.WaitForDevicesForTesting()
	src, _ := m.sharedFile(sharedSize)
	p := m.run(src, 0, 0, sharedSize, true)
	want := src.home.bytes(0, sharedSize)
	p.add(5*page.Size + 7)
	p.add(9 * page.Size)
	require.True(t, bytes.Equal(want[:64<<10], src.read(t, 0, 64<<10)))
	require.EqualValues(t, 1, m.counter(fallbacks))
	copies := m.devices[0].Calls(faulty.CopyOut)
	require.True(t, bytes.Equal(want[:64<<10], src.read(t, 0, 64<<10)))
	require.Equal(t, copies, m.devices[0].Calls(faulty.CopyOut))
	p.release()
	want[5*page.Size+7]++
	want[9*page.Size]++
	require.True(t, bytes.Equal(want[:64<<10], src.read(t, 0, 64<<10)), "on its way home")
	require.NoError(t, src.attached.Sync(context.Background(), nil))
	before := m.counter(deviceReads) + m.counter(cleanReads)
	require.True(t, bytes.Equal(want[:64<<10], src.read(t, 0, 64<<10)))
	require.Greater(t, m.counter(deviceReads)+m.counter(cleanReads), before)
}

// TestStoresAfterTheEnd: a program that is being killed may store after its mapping was released. Such stores belong to
// no file and are not read.
func TestStoresAfterTheEnd(t *testing.T) {
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
	m.cache.clean.WaitForDevicesForTesting()
	src, _ := m.sharedFile(sharedSize)
	m.run(src, 0, 0, page.Size, false)
	p := m.run(src, 0, 0, sharedSize, true)
	p.add(3 * page.Size)
	p.unmapAndKeep()
	want := src.home.bytes(0, sharedSize)
	want[3*page.Size]++
	p.add(5*page.Size + 1)
	for tick := range 3 {
		require.NoError(t, src.attached.Sync(context.Background(), nil))
		require.True(t, bytes.Equal(want[:64<<10], src.read(t, 0, 64<<10)))
		require.True(t, bytes.Equal(want[1<<20:2<<20], src.read(t, 1<<20, 1<<20)))
		require.Positive(t, m.counter(deviceReads))
		m.cache.collectDue(t.Context())
		p.add((6+tick)*page.Size + 1)
	}
	require.True(t, bytes.Equal(want, src.home.bytes(0, sharedSize)))
}

// TestStoresBesideTheMapping: clients are given memory by the extent. Stores outside the mapping belong to no file.
// Stores without an acquire are released like all others.
func TestStoresBesideTheMapping(t *testing.T) {
	for name, request := range map[string]MapRequest{
		"past its end":       {Len: page.Size, Writable: true},
		"without an acquire": {Len: sharedSize, Writable: true, Lazy: true},
	} {
		m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
		src, _ := m.sharedFile(sharedSize)
		m.run(src, 0, 0, sharedSize, false)
		mapping, err := m.cache.Map(t.Context(), src, request)
		require.NoError(t, err)
		p := m.attach(mapping, 0, max(request.Len, 2*page.Size), true)
		p.add(page.Size + 3)
		want := src.home.bytes(0, sharedSize)
		read := func() {
			require.True(t, bytes.Equal(want[page.Size:3*page.Size], src.read(t, page.Size, 2*page.Size)), name)
		}
		read()
		p.unmap()
		if request.Lazy {
			want[page.Size+3]++
		}
		require.NoError(t, src.attached.Sync(context.Background(), nil))
		read()
		again := m.run(src, 0, 0, sharedSize, true) // tracks the present bytes
		read()
		again.unmap()
		m.cache.collectDue(t.Context())
		read()
	}
}

// during starts a read of n bytes at off, and calls do while the device copies them.
func during(t *testing.T, m *machine, src *source, off, n int, do func()) []byte {
	t.Helper()
	m.cache.clean.WaitForDevicesForTesting()
	gate := m.devices[0].Hold(faulty.CopyOut)
	got := make(chan []byte, 1)
	go func() { got <- src.read(t, off, n) }()
	<-gate.Arrived()
	do()
	gate.Open()
	return <-got
}

// TestChangesDuringTheCopy: whatever happens to the pages while a device copies them for a read, the read returns
// home's bytes.
func TestChangesDuringTheCopy(t *testing.T) {
	const off, n = 8 * page.Size, 16 * page.Size
	for name, do := range map[string]func(t *testing.T, m *machine, src *source){
		"write": func(t *testing.T, _ *machine, src *source) {
			src.write(t, off+10, []byte("new bytes"))
		},
		"store": func(t *testing.T, m *machine, src *source) {
			m.run(src, 0, 0, sharedSize, true).add(off + 77)
		},
		"truncate and grow": func(t *testing.T, _ *machine, src *source) {
			src.truncate(t, off+3*page.Size+5)
			src.truncate(t, sharedSize)
		},
		"another device": func(t *testing.T, m *machine, src *source) {
			q := m.run(src, 1, 0, sharedSize, true)
			q.add(off + 99)
			q.release()
			require.NoError(t, src.attached.Sync(context.Background(), nil))
		},
	} {
		for _, writable := range []bool{false, true} {
			t.Run(fmt.Sprint(name, writable), func(t *testing.T) {
				m := newMachine(t, 2, readsFrom(DeviceReadsAlways))
				src, _ := m.sharedFile(sharedSize)
				m.run(src, 0, 0, sharedSize, writable)
				got := during(t, m, src, off, n, func() { do(t, m, src) })
				now := src.home.bytes(off, n)
				if writable && name != "store" {
					// With digests, these may be the bytes that home had when the read began.
					require.True(t, len(got) == n)
					return
				}
				require.True(t, bytes.Equal(now, got))
				require.True(t, bytes.Equal(now, src.read(t, off, n)), "and so does the next read")
			})
		}
	}
}

// TestStoresFarBesideTheMapping: a program stores into memory that it was given, 2 MiB behind its mapping, while a
// device copies that memory for a read.
func TestStoresFarBesideTheMapping(t *testing.T) {
	const size, off, n = 66 << 20, 3 << 20, 16 * page.Size
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways), memory(128<<20))
	src, _ := m.sharedFile(size)
	m.run(src, 0, 0, size, false)
	got := during(t, m, src, off, n, func() {
		mapping, err := m.cache.Map(t.Context(), src, MapRequest{Len: page.Size, Writable: true})
		require.NoError(t, err)
		require.EqualValues(t, 4<<20, mapping.Extents()[0].Size)
		m.attach(mapping, 0, 4<<20, true).add(off + 77)
	})
	require.True(t, bytes.Equal(src.home.bytes(off, n), got))
}

// TestMemoryIsKeptForACopy: an extent is not reused while it is being copied, even if its file is gone.
func TestMemoryIsKeptForACopy(t *testing.T) {
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
	src, _ := m.sharedFile(sharedSize)
	m.run(src, 0, 0, sharedSize, false).unmap()
	var used int64
	got := during(t, m, src, 0, 4096, func() {
		m.cache.Forget(src.id)
		require.True(t, src.attached.Detached())
		used = m.devices[0].Used()
	})
	require.Positive(t, used)
	require.True(t, bytes.Equal(src.home.bytes(0, 4096), got))
	require.Eventually(t, func() bool { return m.devices[0].Used() == 0 }, 10*time.Second, time.Millisecond)
}

// TestNoEvictionDuringACopy: an extent that is being read is not evicted.
func TestNoEvictionDuringACopy(t *testing.T) {
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways), memory(8<<20))
	src, _ := m.sharedFile(2 << 20)
	m.run(src, 0, 0, 2<<20, false).unmap()
	other := m.noisyFile(6 << 20)
	m.run(other, 0, 0, 6<<20, false).unmap()
	third := m.noisyFile(2 << 20)
	got := during(t, m, src, 0, 4096, func() {
		m.run(third, 0, 0, 2<<20, false)
		require.False(t, src.attached.Detached(), "the other extent made room, although it is younger")
	})
	require.True(t, bytes.Equal(src.home.bytes(0, 4096), got))
}

// TestMapWaitsForCopies: if only memory that is being read can make room, a Map waits for the read. No client maps that
// memory, or its file is gone.
func TestMapWaitsForCopies(t *testing.T) {
	const size = 4 << 20
	for _, deleted := range []bool{false, true} {
		t.Run(fmt.Sprint(deleted), func(t *testing.T) {
			m := newMachine(t, 1, readsFrom(DeviceReadsAlways), memory(size))
			src, _ := m.sharedFile(size)
			m.run(src, 0, 0, size, false).unmap()
			other := m.noisyFile(size)
			mapped := make(chan error, 1)
			got := during(t, m, src, 0, 4096, func() {
				if deleted {
					m.cache.Forget(src.id)
				}
				before := m.devices[0].Calls(faulty.Alloc)
				go func() {
					_, err := m.cache.Map(t.Context(), other, MapRequest{Len: size})
					mapped <- err
				}()
				require.Eventually(t, func() bool {
					return src.attached.Detached() && m.devices[0].Calls(faulty.Alloc) >= before+2
				}, 10*time.Second, time.Millisecond, "it has reached the memory that is being read")
			})
			require.NoError(t, <-mapped)
			require.True(t, bytes.Equal(src.home.bytes(0, 4096), got))
		})
	}
}

// TestMapDuringAHungCopy: a Map does not wait for a device that does not answer, and its error says why. It evicts no
// more than it would have needed. It succeeds once the device answers.
func TestMapDuringAHungCopy(t *testing.T) {
	const size = 4 << 20
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways), memory(size))
	src, _ := m.sharedFile(size)
	m.run(src, 0, 0, size, false).unmap()
	gate := m.devices[0].Hold(faulty.CopyOut)
	read := make(chan []byte, 1)
	go func() { read <- src.read(t, size/2-2048, 4096) }() // touches both extents
	<-gate.Arrived()
	other := m.noisyFile(size)
	for range 2 {
		_, err := m.cache.Map(t.Context(), other, MapRequest{Len: size / 2})
		require.ErrorIs(t, err, syscall.ENOMEM)
		require.ErrorContains(t, err, "still being copied")
		require.EqualValues(t, 1, m.cache.counters.Evictions.Load())
	}
	require.True(t, bytes.Equal(src.home.bytes(size/2-2048, 4096), <-read))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := m.cache.Map(ctx, other, MapRequest{Len: size / 2})
	require.ErrorIs(t, err, context.Canceled)
	gate.Open()
	m.cache.waitCopies()
	m.run(other, 0, 0, size, false)
}

// TestHungDevice: reads get their bytes from home within a bounded time, nothing else waits, and no read asks the
// device again until it answers.
func TestHungDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
		src, home := m.sharedFile(sharedSize)
		m.run(src, 0, 0, sharedSize, false)
		gate := m.devices[0].Hold(faulty.CopyOut)
		began := time.Now()
		var readers sync.WaitGroup
		for k := range 8 {
			readers.Go(func() {
				at := k * 300 << 10
				require.True(t, bytes.Equal(src.home.bytes(at, 4096), src.read(t, at, 4096)))
			})
		}
		<-gate.Arrived()
		src.write(t, 4<<20, []byte("nobody waits")) // File.mu is free
		readers.Wait()
		require.Less(t, time.Since(began), 10*time.Second)
		require.Positive(t, m.counter(fallbacks))
		calls, reads := m.devices[0].Calls(faulty.CopyOut), home.reads.Load()
		for k := range 20 {
			at := k * 100 << 10
			require.True(t, bytes.Equal(src.home.bytes(at, 4096), src.read(t, at, 4096)))
		}
		require.Equal(t, calls, m.devices[0].Calls(faulty.CopyOut), "no read asks the device")
		require.Equal(t, reads+20, home.reads.Load())
		require.True(t, m.cache.Status().Devices[0].Read.Stuck)

		gate.Open()
		require.Eventually(t, func() bool { return !m.cache.Status().Devices[0].Read.Stuck }, 10*time.Second,
			time.Millisecond)
		before := m.counter(deviceReads)
		require.True(t, bytes.Equal(src.home.bytes(0, 4096), src.read(t, 0, 4096)))
		require.Equal(t, before+1, m.counter(deviceReads))
	})
}

// TestHungReadAhead: read-ahead from a hung device does not delay readers for long either.
func TestHungReadAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const step = 64 << 10
		m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
		src, _ := m.sharedFile(16 << 20)
		m.run(src, 0, 0, 16<<20, false)
		k := 0
		for ; k < 16; k++ {
			src.read(t, k*step, step)
		}
		gate := m.devices[0].Hold(faulty.CopyOut)
		began := time.Now()
		for ; k < 256; k++ {
			require.True(t, bytes.Equal(src.home.bytes(k*step, step), src.read(t, k*step, step)))
		}
		require.Less(t, time.Since(began), 5*time.Second)
		require.LessOrEqual(t, m.counter(fallbacks), int64(40), "those under way, and one more")
		gate.Open()
		require.Eventually(t, func() bool { return !m.cache.Status().Devices[0].Read.Stuck }, 10*time.Second,
			time.Millisecond)
		src.settle(t)
		require.LessOrEqual(t, m.cache.clean.Bytes(), m.cache.clean.Limit+cleanread.ChunkSize)
	})
}

// TestFailingDevice: if a copy fails or the device is lost, reads are served from home.
func TestFailingDevice(t *testing.T) {
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
	m.cache.clean.WaitForDevicesForTesting()
	src, _ := m.sharedFile(sharedSize)
	m.run(src, 0, 0, sharedSize, false)
	m.devices[0].Fail(faulty.CopyOut, 1, context.DeadlineExceeded)
	m.devices[0].Fail(faulty.HostBuffer, 2, context.DeadlineExceeded)
	for _, at := range []int{0, 3 << 20, 1 << 20} { // an order that starts no read-ahead
		require.True(t, bytes.Equal(src.home.bytes(at, 4096), src.read(t, at, 4096)))
	}
	require.EqualValues(t, 2, m.counter(fallbacks))
	require.EqualValues(t, 1, m.counter(deviceReads))
	m.devices[0].Lose()
	require.True(t, bytes.Equal(src.home.bytes(0, 4096), src.read(t, 0, 4096)))
	require.True(t, bytes.Equal(src.home.bytes(0, 4096), src.read(t, 0, 4096)))
	require.EqualValues(t, 3, m.counter(fallbacks), "the second one did not ask")
}

// TestReadsMove: reads move to the faster side, and back, on their own.
func TestReadsMove(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, 1)
		src, home := m.sharedFile(sharedSize)
		m.run(src, 0, 0, sharedSize, false)
		rnd := rand.New(rand.NewPCG(1, 1))
		// until reads until ten reads in a row came from the expected side.
		until := func(from func(*Counters) *atomic.Int64, what string) {
			t.Helper()
			deadline := time.Now().Add(30 * time.Second)
			for streak := 0; streak < 10; streak++ {
				require.True(t, time.Now().Before(deadline), "%s: %+v", what, m.cache.Status())
				before := m.counter(from)
				const n = (cleanread.AroundPages + 1) * page.Size // more than is kept in host memory here
				at := rnd.IntN((sharedSize-n)>>page.Shift) << page.Shift
				require.True(t, bytes.Equal(src.home.bytes(at, n), src.readDirect(t, at, n)))
				if m.counter(from) == before {
					streak = -1
					time.Sleep(time.Millisecond) // let others run: probes are made in the background
				}
			}
		}
		home.slow.Store(int64(3 * time.Millisecond))
		until(deviceReads, "the disk is busy")
		m.devices[0].Slow(faulty.CopyOut, 10*time.Millisecond)
		until(diskReads, "the device is slower still")
		m.devices[0].Slow(faulty.CopyOut, 0)
		until(deviceReads, "the device is fast again")
		home.slow.Store(0)
		m.devices[0].Slow(faulty.CopyOut, 2*time.Millisecond)
		until(diskReads, "the disk is idle again")
	})
}

// TestHomeStaysOpenWhileItIsMeasured: while a probe reads home, it is neither closed nor replaced by a writable one.
func TestHomeStaysOpenWhileItIsMeasured(t *testing.T) {
	m := newMachine(t, 1)
	src, _ := m.sharedFile(sharedSize)
	p := m.run(src, 0, 0, sharedSize, false)
	f := src.attached
	home := &closingHome{Home: src.home, arrived: make(chan struct{}), open: make(chan struct{})}
	f.mu.Lock()
	f.home.SetBackingForTesting(home)
	f.mu.Unlock()
	f.clean.ProbeHomeForTesting(page.Range{End: 1})
	<-home.arrived
	p.unmap()
	m.cache.Forget(src.id)
	require.True(t, f.Detached())
	require.False(t, home.closed.Load())
	close(home.open)
	require.Eventually(t, home.closed.Load, 10*time.Second, time.Millisecond)
}

// TestHomeStaysOpenWhileItIsSynced: home is neither closed nor replaced while its bytes are made durable.
func TestHomeStaysOpenWhileItIsSynced(t *testing.T) {
	for name, held := range map[string]func(*syncingHome) *atomic.Bool{
		"whole": func(h *syncingHome) *atomic.Bool { return &h.holdSync },
		"begun": func(h *syncingHome) *atomic.Bool { return &h.holdBegin },
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, 1)
			src, _ := m.sharedFile(sharedSize)
			p := m.run(src, 0, 0, sharedSize, false)
			home := &syncingHome{closingHome: closingHome{Home: src.home, arrived: make(chan struct{}),
				open: make(chan struct{})}}
			held(home).Store(true)
			f := src.attached
			f.mu.Lock()
			f.home.SetBackingForTesting(home)
			f.mu.Unlock()
			synced := make(chan error, 1)
			go func() { synced <- p.Sync(t.Context(), 0, sharedSize, true) }()
			<-home.arrived
			m.run(src, 0, 0, page.Size, true)
			closed := home.closed.Load()
			close(home.open)
			require.NoError(t, <-synced)
			require.False(t, closed)
			require.True(t, home.closed.Load())
			require.False(t, home.usedClosed.Load())
		})
	}
}

// syncingHome is a home whose Sync can be held up.
type syncingHome struct {
	closingHome
	holdSync, holdBegin, usedClosed atomic.Bool
}

func (h *syncingHome) hold(held bool) {
	if held {
		close(h.arrived)
		<-h.open
	}
	if h.closed.Load() {
		h.usedClosed.Store(true)
	}
}

func (h *syncingHome) Sync() error {
	h.hold(h.holdSync.Load())
	return nil
}

func (h *syncingHome) StartWriteBack(int64, int64) { h.hold(h.holdBegin.Load()) }

// closingHome is a home whose reads can be held up.
type closingHome struct {
	Home
	arrived, open chan struct{}
	closed        atomic.Bool
}

func (h *closingHome) Writable() bool { return false }

func (h *closingHome) ReadAt(p []byte, off int64) (int, error) {
	close(h.arrived)
	<-h.open
	return h.Home.ReadAt(p, off)
}

func (h *closingHome) Close() error {
	h.closed.Store(true)
	return h.Home.Close()
}

// TestReadInPart: if a device has the beginning or the end of a read, that part comes from the device, and the rest
// from home in one piece.
func TestReadInPart(t *testing.T) {
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
	m.cache.clean.WaitForDevicesForTesting()
	src, home := m.sharedFile(sharedSize)
	m.run(src, 0, 0, 1<<20, false)
	for _, c := range []struct{ off, n, reads int }{
		{1<<20 - 64<<10, 128 << 10, 1},
		{1<<20 - 64<<10 + 5, 100 << 10, 1},
		{1 << 20, 4096, 1},
		{512 << 10, 4096, 0},
	} {
		before := home.reads.Load()
		require.True(t, bytes.Equal(src.home.bytes(c.off, c.n), src.read(t, c.off, c.n)))
		require.EqualValues(t, c.reads, home.reads.Load()-before)
	}
	// The end of a read, with a mapping in the middle of the file.
	other, home := m.sharedFile(sharedSize)
	m.run(other, 0, 1<<20, 1<<20, false)
	require.True(t, bytes.Equal(other.home.bytes(1<<20-64<<10, 128<<10), other.read(t, 1<<20-64<<10, 128<<10)))
	require.EqualValues(t, 1, home.reads.Load())
	require.EqualValues(t, 64<<10, other.attached.counters.DeviceReadBytes.Load())
}

// TestSplitRead: a large read comes from both sides if neither is much faster.
func TestSplitRead(t *testing.T) {
	m := newMachine(t, 1)
	m.cache.clean.WaitForDevicesForTesting()
	src, _ := m.sharedFile(sharedSize)
	m.run(src, 0, 0, sharedSize, false)
	for _, p := range []*mover.Place{m.cache.clean.Disk(), m.cache.devices[0].moves.Cost} {
		for n := int64(4096); n <= 1<<20; n *= 2 {
			for range 50 {
				now := time.Now()
				p.Note(n, now.Add(-100*time.Microsecond-time.Duration(n)), now)
			}
		}
	}
	require.True(t, bytes.Equal(src.home.bytes(0, 1<<20), src.read(t, 0, 1<<20)))
	require.EqualValues(t, 1, m.counter(deviceReads))
	require.EqualValues(t, 1, m.counter(diskReads))
}

// settle waits until all read-ahead has arrived.
func (s *source) settle(t *testing.T) {
	t.Helper()
	f := s.attached
	require.Eventually(t, f.clean.ArrivedForTesting, 10*time.Second, 100*time.Microsecond)
}

func (s *source) chunks() (n int) { return s.attached.clean.ChunksForTesting() }

// TestReadAheadFromDevice: for several streams in each direction, the next pages are there before they are asked for,
// and are dropped once they were read.
func TestReadAheadFromDevice(t *testing.T) {
	const size, step = 16 << 20, 64 << 10
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
	m.cache.clean.WaitForDevicesForTesting()
	src, home := m.sharedFile(size)
	m.run(src, 0, 0, size, false)
	for k := range 60 {
		for _, at := range []int{k * step, 8<<20 - (k+1)*step, 8<<20 + k*2*step} {
			require.True(t, bytes.Equal(src.home.bytes(at, step), src.read(t, at, step)), at)
			src.settle(t)
		}
	}
	require.Zero(t, home.reads.Load())
	require.Greater(t, m.counter(cleanReads), int64(140), "of 180")
	require.Less(t, m.cache.clean.Bytes(), int64(10<<20))
	m.cache.Forget(src.id)
}

// TestCleanPagesAreNeverStale: pages read ahead never outlive a change of home or a release.
func TestCleanPagesAreNeverStale(t *testing.T) {
	const size, step = 8<<20 + 1000, 64 << 10
	for name, do := range map[string]func(t *testing.T, m *machine, src *source, at int){
		"write": func(t *testing.T, _ *machine, src *source, at int) {
			src.write(t, at, []byte{src.home.data[at] + 1})
		},
		"release": func(t *testing.T, m *machine, src *source, at int) {
			p := m.run(src, 1, 0, size, true)
			p.add(at)
			p.release()
		},
		"truncate": func(t *testing.T, _ *machine, src *source, at int) {
			src.truncate(t, int64(at))
			src.truncate(t, size)
		},
		"truncate, and write behind": func(t *testing.T, _ *machine, src *source, at int) {
			src.truncate(t, int64(at+1))
			src.write(t, size-1, []byte{1})
		},
		"zero": func(t *testing.T, _ *machine, src *source, at int) {
			require.NoError(t, src.tryWrite(Change{Kind: ChangeZero, Off: int64(at), Len: 10}, make([]byte, 10)))
		},
		"SOURCE": func(t *testing.T, _ *machine, src *source, at int) {
			src.home.editAt(at, []byte{src.home.data[at] + 1})
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, 2, readsFrom(DeviceReadsAlways))
			m.cache.clean.WaitForDevicesForTesting()
			src, _ := m.sharedFile(size)
			m.run(src, 0, 0, size, false)
			for k := range 8 {
				src.read(t, k*step, step)
				src.settle(t)
			}
			at := 8*step + 10*page.Size + 50
			require.Greater(t, src.chunks(), 1)
			do(t, m, src, at)
			f, want := src.attached, src.released(m)
			for k := 8; k < 16; k++ {
				got := make([]byte, step)
				n, fromHome, err := f.Read(context.Background(), got, int64(k*step), false, src.reader)
				require.NoError(t, err)
				if fromHome {
					n, err = src.home.ReadAt(got, int64(k*step))
					require.NoError(t, err)
				}
				require.True(t, bytes.Equal(want[k*step:][:step], got[:n]), k)
			}
		})
	}
}

// TestCleanPagesAreBounded: abandoned streams take no more than their share, and later streams still get read-ahead.
func TestCleanPagesAreBounded(t *testing.T) {
	const size, step = 48 << 20, 64 << 10
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways), hostMemory(4<<20))
	m.cache.clean.WaitForDevicesForTesting()
	src, _ := m.sharedFile(size)
	m.run(src, 0, 0, size, false)
	require.EqualValues(t, 2<<20, m.cache.Status().CleanLimit)
	m.cache.clean.Age = 0 // leftovers may be dropped at once
	for k := range 40 {
		for i := range 3 {
			src.read(t, k<<20+i*step, step)
		}
		src.settle(t)
		require.LessOrEqual(t, m.cache.clean.Bytes(), int64(2<<20+2*cleanread.AheadChunks*cleanread.ChunkSize))
	}
	require.Positive(t, m.cache.counters.AheadUnusedBytes.Load())
	before := m.counter(cleanReads)
	for k := range 40 {
		src.read(t, 44<<20+k*step, step)
		src.settle(t)
	}
	require.Greater(t, m.counter(cleanReads), before+20)
}

// TestReadersSeeWhatWasWritten: many readers read while programs on the CPU and on devices write, map and unmap. Every
// word of a page is a growing number. No reader sees a number older than the one at the start of its read.
func TestReadersSeeWhatWasWritten(t *testing.T) {
	const pages, words = 256, page.Size / 8
	const size = pages * page.Size
	m := newMachine(t, 2, readsFrom(DeviceReadsAlways))
	src, _ := m.sharedFile(size)
	clear(src.home.data)
	m.run(src, 0, 0, size, false)
	onCPU := *src // a copy: Map attaches to the source again
	var latest [pages]atomic.Uint64
	ended := make(chan struct{})
	var group sync.WaitGroup
	for r := range 4 {
		group.Go(func() {
			rnd := rand.New(rand.NewPCG(7, uint64(r)))
			next := 0
			for {
				select {
				case <-ended:
					return
				default:
				}
				n := 1 + rnd.IntN(16)
				if rnd.IntN(4) == 0 {
					next = rnd.IntN(pages)
				}
				first := next % (pages - n)
				next = first + n
				var least [16]uint64
				for i := range n {
					least[i] = latest[first+i].Load()
				}
				for i, got := 0, onCPU.read(t, first*page.Size, n*page.Size); i < n*words; i++ {
					if v := binary.LittleEndian.Uint64(got[8*i:]); v < least[i/words] {
						t.Errorf("page %d has %d, and %d was written before", first+i/words, v, least[i/words])
						return
					}
				}
			}
		})
	}
	// One device refreshes its pages, and serves reads. Another one is mapped and unmapped, also for writing, and
	// stores nothing new.
	group.Go(func() {
		rnd := rand.New(rand.NewPCG(8, 8))
		for {
			select {
			case <-ended:
				return
			default:
			}
			first := rnd.IntN(pages - 32)
			device := rnd.IntN(2)
			q, err := m.cache.Map(context.Background(), src, MapRequest{
				Device: device, Off: int64(first) * page.Size, Len: 32 * page.Size, Writable: device == 1 &&
					rnd.IntN(2) == 0,
			})
			if err == nil {
				err = q.Unmap(context.Background())
			}
			if err != nil {
				t.Error(err)
				return
			}
		}
	})
	rnd := rand.New(rand.NewPCG(9, 9))
	buf := make([]byte, page.Size)
	for n := uint64(1); n < 3000 || m.counter(deviceReads) < 300 && n < 1_000_000; n++ {
		i := rnd.IntN(pages)
		for w := range words {
			binary.LittleEndian.PutUint64(buf[8*w:], n)
		}
		onCPU.write(t, i*page.Size, buf)
		latest[i].Store(n)
	}
	close(ended)
	group.Wait()
	require.Positive(t, m.counter(deviceReads))
}

// BenchmarkSharedRead measures reads of 4 KiB without the request: with the bytes in the host's page cache, from a
// device, and with no device that has them.
func BenchmarkSharedRead(b *testing.B) {
	const size = 64 << 20
	for _, where := range []string{"host", "device", "disk"} {
		b.Run(where, func(b *testing.B) {
			d, err := emulated.New(emulated.Options{Memory: size})
			require.NoError(b, err)
			c, err := New(Options{Devices: []gpubackend.Device{d}})
			require.NoError(b, err)
			defer func() { require.NoError(b, c.Close(b.Context())) }()
			src := &source{id: FileID{1, 1}, home: newHome(size), kernel: &testKernel{}}
			home := &openHome{Home: src.home}
			home.warm.Store(where == "host")
			n := int64(size)
			if where == "disk" {
				n = 1 << 20
			}
			_, err = c.Map(b.Context(), src, MapRequest{Len: n})
			require.NoError(b, err)
			f := src.attached
			reader := HomeReader(home)
			if where == "device" {
				reader = farHome{home}
			}
			b.RunParallel(func(pb *testing.PB) {
				p := make([]byte, page.Size)
				rnd := rand.New(rand.NewPCG(1, rand.Uint64()))
				for pb.Next() {
					at := (1<<20 + rnd.Int64N(size-1<<20)) &^ (page.Size - 1)
					if _, _, err := f.Read(context.Background(), p, at, true, reader); err != nil {
						b.Fatal(err)
					}
				}
			})
		})
	}
}

// farHome is on a disk that is slower than any device.
type farHome struct{ *openHome }

func (h farHome) ReadAt(p []byte, off int64) (int, error) {
	time.Sleep(time.Millisecond)
	return h.openHome.ReadAt(p, off)
}
