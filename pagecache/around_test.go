package pagecache

import (
	"bytes"
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/cleanread"
	"github.com/gaiafs/gaiafs/pagecache/mover/schedule"
)

// readDirect is read by a program that reads past the kernel's page cache.
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

// TestSmallReadsBringWhatIsAround: small reads at random copy each chunk once, whatever the programs are on, and see
// every write.
func TestSmallReadsBringWhatIsAround(t *testing.T) {
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
	m.cache.clean.Patience = time.Minute // this is not about a device that is slow
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
		src.settle(t) // the reader has its bytes before the chunk is there for others
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

// TestNothingIsReadAgain: where chunks are not read again before they go, no more are fetched, but for a few.
func TestNothingIsReadAgain(t *testing.T) {
	const chunks = 3 * cleanread.AroundDebt / 2
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways), hostMemory(4<<20))
	m.cache.clean.Patience = time.Minute // this is not about a device that is slow
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
	// A chunk that was there by chance pays for two.
	require.Less(t, pass(1), int64(chunks/8*cleanread.ChunkSize))
	require.Less(t, pass(2), int64(chunks/8*cleanread.ChunkSize))
}

// TestAFailedReadBringsNothing: what a copy of a chunk fails with is nobody's error, and the chunk can be fetched
// again.
func TestAFailedReadBringsNothing(t *testing.T) {
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
	m.cache.clean.Patience = time.Minute // this is not about a device that is slow
	src, home := m.sharedFile(sharedSize)
	m.run(src, 0, 0, sharedSize, false)
	m.devices[0].Fail(faulty.CopyOut, 1, bytes.ErrTooLarge)
	require.True(t, bytes.Equal(src.home.bytes(0, 10), src.readDirect(t, 0, 10)))
	require.EqualValues(t, 1, home.reads.Load())
	require.EqualValues(t, 1, m.counter(fallbacks))
	require.Zero(t, m.cache.clean.Bytes())
	require.True(t, bytes.Equal(src.home.bytes(0, 10), src.readDirect(t, 0, 10)))
	require.EqualValues(t, 1, m.counter(deviceReads))
	require.Eventually(t, func() bool { // the rest of the chunk may be on its way still
		require.True(t, bytes.Equal(src.home.bytes(9000, 10), src.readDirect(t, 9000, 10)))
		return m.counter(cleanReads) == 1
	}, time.Minute, time.Millisecond)
	require.EqualValues(t, 1, home.reads.Load())
}

// TestWhatIsIdleChangesNothing: looking for pages that no program stores into any more, as is done again and again,
// leaves chunks usable.
func TestWhatIsIdleChangesNothing(t *testing.T) {
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
	src, _ := m.sharedFile(sharedSize)
	m.run(src, 0, 0, sharedSize, false)
	m.cache.clean.Patience = time.Minute // this is not about a device that is slow
	src.readDirect(t, 0, 10)
	f := src.attached
	f.mu.Lock()
	f.untrackIdleLocked()
	f.mu.Unlock()
	require.True(t, bytes.Equal(src.home.bytes(100, 10), src.readDirect(t, 100, 10)))
	require.EqualValues(t, 1, m.counter(cleanReads))
}

// TestGivenUpTwice: a copy that hangs, and that both the reader who asked for it and another one gave up, leaves its
// device usable once it has ended; so does one that never began.
func TestGivenUpTwice(t *testing.T) {
	for name, before := range map[string]int{"while it runs": 0, "while it waits": schedule.MostCalls} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
			src, _ := m.sharedFile(sharedSize)
			m.run(src, 0, 0, sharedSize, false)
			m.cache.clean.Patience = 400 * time.Millisecond // longer than a reader waits who did not ask for it
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
	}
}

// TestReadersBehindHungCopies: where all that a device does is what nobody waits for, and hangs, the first reader
// behind it is the last one that asks the device.
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

// TestReadersCopyThemselves: from a device without copy engines a reader copies in its own goroutine, and all or
// nothing. What home's part of a read takes is not the device's. A copy that fails is no reader's error.
func TestReadersCopyThemselves(t *testing.T) {
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
	slow := max(10*time.Since(began), 2*time.Millisecond) // whatever the device takes here, that is more
	before := home.reads.Load()
	home.slow.Store(int64(slow))
	for range 8 { // half of it is home's
		require.True(t, bytes.Equal(src.home.bytes(2<<20-256<<10, 512<<10), src.readDirect(t, 2<<20-256<<10, 512<<10)))
	}
	require.EqualValues(t, 8, home.reads.Load()-before)
	m.devices[0].Fail(faulty.CopyOut, 1, bytes.ErrTooLarge)
	require.True(t, bytes.Equal(src.home.bytes(0, 10), src.readDirect(t, 0, 10)))
	require.EqualValues(t, 1, m.counter(fallbacks))
	e := d.reads()
	require.Less(t, e.Latency+time.Duration(float64(512<<10)/e.Bandwidth*1e9), slow)
	require.Zero(t, e.Queued)
}

// TestNoPlaceForMore: where no device has copy engines, reads are neither followed nor given chunks.
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

// TestCopyEngines: a device whose copies take the host's processors gives what is asked for, and nothing around it or
// ahead of it.
func TestCopyEngines(t *testing.T) {
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
}
