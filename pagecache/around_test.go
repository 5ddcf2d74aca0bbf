package pagecache

import (
	"bytes"
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/cleanread"
	"github.com/gaiafs/gaiafs/pagecache/mover/schedule"
)

// readDirect reads like a program that bypasses the kernel's page cache.
func (s *source) readDirect(t *testing.T, off, n int) []byte {
	t.Helper()
	p := make([]byte, n)
	got, fromHome, err := s.attached.Read(context.Background(), p, int64(off), true, s.reader)
	require.NoError(t, err)
	if fromHome {
		got, err = s.backing().ReadAt(p, int64(off))
		require.NoError(t, err)
	}
	return p[:got]
}

// TestSmallReadsBringWhatIsAround: small random reads copy each chunk once, wherever the programs read, and see every
// write.
func TestSmallReadsBringWhatIsAround(t *testing.T) {
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
	m.cache.clean.WaitForDevicesForTesting()
	src, _ := m.sharedFile(sharedSize)
	m.run(src, 0, 0, sharedSize, false)
	rnd := rand.New(rand.NewPCG(1, 2))
	pages := sharedSize>>page.Shift + 1
	at := func() (off, n int) {
		off = rnd.IntN(pages) << page.Shift
		return off, min(page.Size, sharedSize-off)
	}
	for range 2000 {
		off, n := at()
		require.True(t, bytes.Equal(src.home.bytes(off, n), src.readDirect(t, off, n)), off)
		src.settle(t) // the reader has its bytes before others can use the chunk
	}
	m.cache.waitCopies()
	calls := m.devices[0].Calls(faulty.CopyOut)
	require.LessOrEqual(t, int(calls), pages/cleanread.ChunkPages+1)
	require.Greater(t, m.counter(cleanReads), int64(1500))
	for k := range 200 {
		off, n := at()
		src.write(t, off+n/2, []byte{byte(k)})
		require.True(t, bytes.Equal(src.home.bytes(off, n), src.readDirect(t, off, n)), off)
		other, n := at()
		require.True(t, bytes.Equal(src.home.bytes(other, n), src.readDirect(t, other, n)), other)
	}
}

// TestNothingIsReadAgain: if chunks are dropped before they are read again, few more are fetched.
func TestNothingIsReadAgain(t *testing.T) {
	const chunks = 3 * cleanread.AroundDebt / 2
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways), hostMemory(4<<20))
	m.cache.clean.WaitForDevicesForTesting()
	src, _ := m.sharedFile(chunks * cleanread.ChunkSize)
	m.run(src, 0, 0, chunks*cleanread.ChunkSize, false)
	m.cache.clean.Age = 0
	pass := func(in int) (ahead int64) {
		before := m.cache.counters.AheadBytes.Load()
		for _, i := range rand.New(rand.NewPCG(3, uint64(in))).Perm(chunks) {
			at := i*cleanread.ChunkSize + in*page.Size
			require.True(t, bytes.Equal(src.home.bytes(at, page.Size), src.readDirect(t, at, page.Size)))
			src.settle(t)
		}
		return m.cache.counters.AheadBytes.Load() - before
	}
	require.Greater(t, pass(0), int64(cleanread.AroundDebt*cleanread.ChunkSize/2))
	// One lucky hit on a chunk pays for fetching two.
	require.Less(t, pass(1), int64(chunks/8*cleanread.ChunkSize))
	require.Less(t, pass(2), int64(chunks/8*cleanread.ChunkSize))
}

// TestAFailedReadBringsNothing: if the copy of a chunk fails, no reader gets an error, and the chunk can be fetched
// again.
func TestAFailedReadBringsNothing(t *testing.T) {
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
	m.cache.clean.WaitForDevicesForTesting()
	src, home := m.sharedFile(sharedSize)
	m.run(src, 0, 0, sharedSize, false)
	m.devices[0].Fail(faulty.CopyOut, 1, bytes.ErrTooLarge)
	require.True(t, bytes.Equal(src.home.bytes(0, 10), src.readDirect(t, 0, 10)))
	require.EqualValues(t, 1, home.reads.Load())
	require.EqualValues(t, 1, m.counter(fallbacks))
	require.Zero(t, m.cache.clean.Bytes())
	require.True(t, bytes.Equal(src.home.bytes(0, 10), src.readDirect(t, 0, 10)))
	require.EqualValues(t, 1, m.counter(deviceReads))
	require.Eventually(t, func() bool { // the rest of the chunk may still be on its way
		require.True(t, bytes.Equal(src.home.bytes(9000, 10), src.readDirect(t, 9000, 10)))
		return m.counter(cleanReads) == 1
	}, time.Minute, time.Millisecond)
	require.EqualValues(t, 1, home.reads.Load())
}

// TestWhatIsIdleChangesNothing: the regular search for pages that no program stores into any more leaves chunks usable.
func TestWhatIsIdleChangesNothing(t *testing.T) {
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
	src, _ := m.sharedFile(sharedSize)
	m.run(src, 0, 0, sharedSize, false)
	m.cache.clean.WaitForDevicesForTesting()
	src.readDirect(t, 0, 10)
	src.settle(t)
	f := src.attached
	f.mu.Lock()
	f.untrackIdleLocked()
	f.mu.Unlock()
	require.True(t, bytes.Equal(src.home.bytes(100, 10), src.readDirect(t, 100, 10)))
	require.EqualValues(t, 1, m.counter(cleanReads))
}

// TestGivenUpTwice: both the reader that asked for a copy and another reader give up on it, because it hangs or never
// begins. Once it has ended, the device is usable.
func TestGivenUpTwice(t *testing.T) {
	for name, before := range map[string]int{"while it runs": 0, "while it waits": schedule.MostCalls} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
				src, _ := m.sharedFile(sharedSize)
				m.run(src, 0, 0, sharedSize, false)
				m.cache.clean.Patience = 400 * time.Millisecond // longer than a second reader of the copy waits
				gate := m.devices[0].Hold(faulty.CopyOut)
				var readers sync.WaitGroup
				for k := range before + 1 {
					at := k * cleanread.ChunkSize
					read := func() {
						require.True(t, bytes.Equal(src.home.bytes(at, page.Size), src.readDirect(t, at, page.Size)))
					}
					readers.Go(read)
					require.Eventually(t, func() bool {
						return m.cache.Status().Devices[0].Read.QueuedBytes == int64(k+1)*cleanread.ChunkSize
					}, time.Minute, time.Millisecond/10)
					if k == before {
						readers.Go(read)
					}
				}
				readers.Wait()
				gate.Open()
				m.cache.waitCopies()
				state := m.cache.devices[0].reads()
				require.False(t, state.Stuck)
				require.Zero(t, state.Queued)
				require.Zero(t, m.cache.clean.Bytes())
			})
		})
	}
}

// TestReadersBehindHungCopies: a device is busy only with hung copies that nobody waits for. The first reader behind
// them is the last one to ask the device.
func TestReadersBehindHungCopies(t *testing.T) {
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
	src, home := m.sharedFile(sharedSize)
	m.run(src, 0, 0, sharedSize, false)
	gate := m.devices[0].Hold(faulty.CopyOut)
	f := src.attached
	for k := range schedule.MostCalls {
		at := page.Index(k * cleanread.ChunkPages)
		f.clean.AheadForTesting(t.Context(), page.Range{Start: at, End: at + cleanread.ChunkPages}, sharedSize, home)
		require.Eventually(t, func() bool { return m.devices[0].Calls(faulty.CopyOut) == k+1 }, time.Minute,
			time.Millisecond/10)
	}
	stuck := func() bool { return m.cache.devices[0].reads().Stuck }
	require.False(t, stuck())
	require.True(t, bytes.Equal(src.home.bytes(2<<20, page.Size), src.readDirect(t, 2<<20, page.Size)))
	require.True(t, stuck())
	gate.Open()
	m.cache.waitCopies()
	require.False(t, stuck())
}

// TestReadersCopyThemselves: from a device without copy engines, a reader copies in its own goroutine, all or nothing.
// The time that home takes for its part of a read does not count as the device's. A failed copy is no error for the
// reader.
func TestReadersCopyThemselves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, 1)
		d := m.cache.devices[0]
		d.serves.Engines = false
		src, home := m.sharedFile(sharedSize)
		m.run(src, 0, 0, 2<<20, false)
		home.slow.Store(int64(2 * time.Millisecond))
		gate := m.devices[0].Hold(faulty.CopyOut)
		read := make(chan []byte, 1)
		go func() { read <- src.readDirect(t, 0, 1<<20) }()
		<-gate.Arrived()
		gate.Open()
		require.True(t, bytes.Equal(src.home.bytes(0, 1<<20), <-read))
		require.Zero(t, home.reads.Load())
		began := time.Now()
		require.True(t, bytes.Equal(src.home.bytes(0, 1<<20), src.readDirect(t, 0, 1<<20)))
		slow := max(10*time.Since(began), 2*time.Millisecond) // more than the device takes
		before := home.reads.Load()
		home.slow.Store(int64(slow))
		for range 8 { // home serves half of each read
			const at, n = 2<<20 - 256<<10, 512 << 10
			require.True(t, bytes.Equal(src.home.bytes(at, n), src.readDirect(t, at, n)))
		}
		require.EqualValues(t, 8, home.reads.Load()-before)
		m.devices[0].Fail(faulty.CopyOut, 1, bytes.ErrTooLarge)
		require.True(t, bytes.Equal(src.home.bytes(0, 10), src.readDirect(t, 0, 10)))
		require.EqualValues(t, 1, m.counter(fallbacks))
		e := d.reads()
		require.Less(t, e.Latency+time.Duration(float64(512<<10)/e.Bandwidth*1e9), slow)
		require.Zero(t, e.Queued)
	})
}

// TestNoPlaceForMore: if no device has copy engines, reads are not followed, and no chunks are fetched.
func TestNoPlaceForMore(t *testing.T) {
	for _, engines := range []bool{true, false} {
		m := newMachine(t, 0, func(o *Options, memory *int64) {
			d, err := emulated.New(emulated.Options{Memory: *memory, CopyEngines: engines})
			require.NoError(t, err)
			o.Devices = append(o.Devices, d)
		})
		require.Equal(t, engines, m.cache.clean.FetchesMore())
	}
}

// TestCopyEngines: a device whose copies need host processors serves only the bytes asked for, with nothing around or
// ahead of them.
func TestCopyEngines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, engines := range []bool{true, false} {
			m := newMachine(t, 1)
			m.cache.devices[0].serves.Engines = engines
			src, home := m.sharedFile(sharedSize)
			m.run(src, 0, 0, sharedSize, false)
			home.slow.Store(int64(2 * time.Millisecond))
			for k := range 8 {
				at := k * 150 << 10
				require.True(t, bytes.Equal(src.home.bytes(at, 10), src.readDirect(t, at, 10)))
			}
			for k := range 16 {
				at := k << 16
				require.True(t, bytes.Equal(src.home.bytes(at, 1<<16), src.read(t, at, 1<<16)))
			}
			m.cache.waitCopies()
			require.Positive(t, m.counter(deviceReads))
			ahead := m.cache.counters.AheadBytes.Load()
			require.Equal(t, engines, ahead > 0, "%d bytes", ahead)
		}
	})
}
