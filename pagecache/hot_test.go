package pagecache

import (
	"context"
	"errors"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

// load brings a file to a device as a view, checks its bytes, and evicts it.
func (m *machine) load(src *source) {
	m.t.Helper()
	v := m.view(ViewRequest{Segments: []view.Segment{bytesOf(0, int64(len(src.home.data)))}}, src)
	v.check()
	v.unmap()
	_, err := m.cache.Evict(m.t.Context(), src.id, -1)
	require.NoError(m.t, err)
}

// heat loads a file until it is hot and its pages are locked. A mapping keeps it attached, which heat returns.
func (m *machine) heat(src *source) (*File, *program) {
	m.t.Helper()
	p := m.run(src, 0, 0, page.Size, false)
	f := m.cache.Lookup(src.id)
	for range 2 {
		require.Nil(m.t, f.locking.now.Load(), "before it has come often enough")
		m.load(src)
		m.cache.collectDue(m.t.Context())
	}
	m.locked(src)
	return f, p
}

// TestHotFile: the pages of a file that devices load again and again are locked, and the next load copies from there.
// Nobody is charged. They are unlocked after a while without loads; until then the file stays attached.
func TestHotFile(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(2*leastLocked+2<<20))
	src := m.noisyFile(leastLocked)
	f, p := m.heat(src)
	p.unmap()
	require.Empty(t, m.cache.Inspect(src.id).Pinned)
	require.EqualValues(t, f.home.Size(), m.cache.Inspect(src.id).LockedBytes)

	before := f.counters.BufferedPages.Load()
	f.locking.heat.used.Store(clock() - int64(2*hotAge))
	m.load(src)
	require.Equal(t, before, f.counters.BufferedPages.Load())
	m.cache.collectDue(t.Context())
	require.Same(t, f, m.cache.Lookup(src.id))
	m.locked(src)
	m.cache.hotAge = time.Nanosecond
	m.cache.collectDue(t.Context())
	m.unlocked(src)
	require.Nil(t, m.cache.Lookup(src.id))
}

// TestWhatMakesHot: what came through the host's page cache counts, what came past it or from locked pages does not.
func TestWhatMakesHot(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, false)
	f := m.cache.Lookup(src.id)
	read := &f.locking.heat.read
	read.Store(0)
	f.countWays(mover.Ways{Locked: 1, Direct: 2})
	require.Zero(t, read.Load())
	f.countWays(mover.Ways{Cached: 4})
	require.EqualValues(t, 4*page.Size, read.Load())
	f.countWays(mover.Ways{Buffered: 8})
	require.EqualValues(t, 12*page.Size, read.Load())
	p.unmap()
}

// TestHotFileBetweenCollects: the background locks hot files, and unlocks them, however rarely it writes home.
func TestHotFileBetweenCollects(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(2*leastLocked), func(o *Options, _ *int64) { o.pinTick = time.Millisecond })
	src := m.noisyFile(leastLocked)
	p := m.run(src, 0, 0, page.Size, false)
	for range 2 {
		m.load(src)
	}
	m.locked(src)
	m.cache.Lookup(src.id).locking.heat.used.Store(clock() - int64(2*hotAge))
	m.unlocked(src)
	p.unmap()
}

// TestHotFileChanges: a change of home unlocks the pages of a hot file. It is hot again after further loads, but not
// soon.
func TestHotFileChanges(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(3*leastLocked))
	m.cache.relockAfter = 0
	src := m.noisyFile(leastLocked)
	f, p := m.heat(src)
	src.write(t, 5, []byte("changed"))
	m.unlocked(src)
	require.Zero(t, f.locking.heat.read.Load())
	m.cache.collectDue(t.Context())
	for range 3 {
		m.load(src)
		m.cache.collectDue(t.Context())
	}
	require.False(t, f.locking.heat.hot.Load())
	m.cache.hotAge = time.Nanosecond
	m.cache.collectDue(t.Context())
	m.locked(src)
	p.unmap()
}

// TestHotFileLeavesDevices: loads count together although the file leaves all devices between them, unless a long time
// has passed.
func TestHotFileLeavesDevices(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(3*leastLocked))
	src := m.noisyFile(leastLocked)
	m.load(src)
	require.Nil(t, m.cache.Lookup(src.id))
	m.cache.mu.Lock()
	of := m.cache.heats[src.id]
	m.cache.heats[src.id] = remembered{read: of.read, used: of.used - int64(heatAge)}
	m.cache.mu.Unlock()
	require.EqualValues(t, leastLocked, of.read)
	m.load(src)
	v := m.view(ViewRequest{Segments: []view.Segment{bytesOf(0, int64(len(src.home.data)))}}, src)
	m.cache.collectDue(t.Context())
	v.unmap()
	m.locked(src)
}

// TestHotFileThatLeavesAtOnce: a file becomes hot at the end of a load, although it is evicted right after each.
func TestHotFileThatLeavesAtOnce(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(2*leastLocked))
	src := m.noisyFile(leastLocked)
	require.Eventually(t, func() bool {
		m.load(src)
		f := m.cache.Lookup(src.id)
		return f != nil && f.locking.now.Load() != nil
	}, time.Minute, time.Microsecond)
}

// TestHotFileTakesNothing: hot files have memory of their own, half as much as pins and extents. When that becomes
// less, they are unlocked.
func TestHotFileTakesNothing(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(2*leastLocked))
	src, other, third := m.noisyFile(leastLocked), m.noisyFile(2*leastLocked-page.Size), m.noisyFile(leastLocked)
	_, p := m.heat(src)
	require.EqualValues(t, leastLocked, m.cache.Status().PinnedHotBytes)
	require.Zero(t, m.cache.Status().PinnedBytes)
	m.lock(other)
	m.locked(src)
	q := m.run(third, 0, 0, page.Size, false)
	for range 2 {
		m.load(third)
	}
	m.cache.collectDue(t.Context())
	require.Eventually(t, func() bool { return !m.cache.Lookup(third.id).locking.heat.hot.Load() }, 10*time.Second,
		time.Millisecond, "there is memory for one")
	require.NoError(t, m.cache.SetPinnedMemory(t.Context(), 2*leastLocked-1))
	require.Zero(t, m.cache.Status().PinnedHotBytes)
	p.unmap()
	q.unmap()
}

// TestHotFileIsPinned: a pin takes over the locked pages of a hot file. Once it is gone, they are unlocked.
func TestHotFileIsPinned(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(2*leastLocked))
	src := m.noisyFile(leastLocked)
	f, p := m.heat(src)
	l := f.locking.now.Load()
	m.pin(src, Pinning{Host: true})
	m.cache.collectDue(t.Context())
	require.Same(t, l, f.locking.now.Load())
	require.EqualValues(t, leastLocked, m.cache.pinned.Files())
	require.Zero(t, m.cache.pinned.Hot())
	require.ErrorContains(t, m.cache.CheckPinning(FileID{9, 9}, 2*leastLocked, Pinning{Host: true}), "leave 16 MiB")
	m.cache.hotAge = time.Nanosecond
	m.cache.collectDue(t.Context())
	m.locked(src)
	f.SetPinning(Pinning{})
	m.unlocked(src)
	p.unmap()
}

// TestHotFileAndShare: a user whose pins have all of the share gets no more because a file was hot before its pin,
// which it may inherit.
func TestHotFileAndShare(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(4*leastLocked))
	require.NoError(t, m.cache.SetUserShare(0.5))
	hot := []*source{m.noisyFile(leastLocked), m.noisyFile(leastLocked)}
	of := Pinning{Host: true, User: 12345}
	for _, src := range hot {
		_, p := m.heat(src)
		defer p.unmap()
	}
	for range 2 {
		src := m.noisyFile(leastLocked)
		m.pin(src, of)
		require.NoError(t, m.cache.LockHome(t.Context(), src))
	}
	m.pin(hot[0], of)
	require.ErrorIs(t, m.cache.LockHome(t.Context(), hot[0]), syscall.EDQUOT)
	m.pin(hot[1], of)
	m.cache.collectDue(t.Context())
	for _, src := range hot {
		require.Eventually(t, func() bool { return src.mapped() == 0 }, 10*time.Second, time.Millisecond,
			"the pin has no memory, and the file is not hot")
		require.Contains(t, m.cache.Inspect(src.id).LockError, "no user may have more than 32 MiB")
	}
	require.NoError(t, m.cache.CheckPinning(FileID{9, 9}, leastLocked, Pinning{Host: true, User: 54321}))
}

// TestHotFileDoesNotHoldUpClose: Close ends with its context, although locking the pages does not end.
func TestHotFileDoesNotHoldUpClose(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(2*leastLocked))
	gate := m.devices[0].Hold(faulty.LockHost)
	src := m.noisyFile(leastLocked)
	p := m.run(src, 0, 0, page.Size, false)
	for range 2 {
		m.load(src)
	}
	m.cache.collectDue(t.Context())
	<-gate.Arrived()
	p.unmap()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, m.cache.Close(ctx), context.DeadlineExceeded)
	gate.Open()
	m.cache.waitWork()
	for _, d := range m.cache.devices {
		require.NoError(t, d.Close())
	}
}

// TestUnpinnedAndHotWhileLocking: memory that was meant for a pin is not that of a file which is only hot. Others' pins
// would wait for it.
func TestUnpinnedAndHotWhileLocking(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(2*leastLocked))
	src, other := m.noisyFile(leastLocked), m.noisyFile(2*leastLocked-page.Size)
	p := m.run(src, 0, 0, page.Size, false)
	gate := m.devices[0].Hold(faulty.LockHost)
	f := m.pin(src, Pinning{Host: true})
	m.cache.collectDue(t.Context())
	<-gate.Arrived()
	f.SetPinning(Pinning{})
	m.cache.lanes.work.Wait()
	for range 2 {
		m.load(src)
	}
	m.cache.collectDue(t.Context())
	require.True(t, f.locking.heat.hot.Load())
	gate.Open()
	require.Eventually(t, func() bool { return len(f.locking.one) == 0 }, 10*time.Second, time.Millisecond)
	require.Zero(t, m.cache.pinned.Files())
	m.cache.collectDue(t.Context())
	m.lock(other)
	p.unmap()
}

// TestLessMemoryForHotFiles: if hot files may have less, only as many are unlocked as have to be. One that has just
// been pinned holds nothing up.
func TestLessMemoryForHotFiles(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(10*leastLocked), memory(256<<20))
	var all []*source
	for i := range 4 {
		all = append(all, m.noisyFile(leastLocked+i*page.Size))
		_, p := m.heat(all[i])
		defer p.unmap()
	}
	require.NoError(t, m.cache.SetPinnedMemory(t.Context(), 2*m.cache.pinned.Hot()-2))
	all = slices.DeleteFunc(all, func(src *source) bool { return src.mapped() == 0 })
	require.Len(t, all, 3)
	m.pin(all[0], Pinning{Host: true})
	done := make(chan error, 1)
	go func() { done <- m.cache.SetPinnedMemory(t.Context(), 2*leastLocked+2*page.Size) }()
	require.Eventually(t, func() bool {
		m.cache.collectDue(t.Context())
		return len(done) == 1
	}, 10*time.Second, time.Millisecond)
	require.NoError(t, <-done)
	require.LessOrEqual(t, m.cache.pinned.Hot(), int64(leastLocked+page.Size))
}

// TestOldHeat: loads of long ago make no file hot.
func TestOldHeat(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(2*leastLocked))
	src := m.noisyFile(leastLocked)
	p := m.run(src, 0, 0, page.Size, false)
	h := &m.cache.Lookup(src.id).locking.heat
	h.read.Store(1 << 40)
	h.used.Store(clock() - int64(2*heatAge))
	m.cache.collectDue(t.Context())
	require.False(t, h.hot.Load())
	h.used.Store(clock())
	m.cache.collectDue(t.Context())
	m.locked(src)
	p.unmap()
}

// TestFewHeats: small files do not displace what is remembered of large ones, and not too much is remembered.
func TestFewHeats(t *testing.T) {
	m := newMachine(t, 1)
	h, detached := make(heats), func(id uint64, read int64) *File {
		f := &File{c: m.cache, id: FileID{1, id}}
		f.locking.heat.read.Store(read)
		return f
	}
	h.keep(detached(1, leastLocked-1))
	require.Empty(t, h)
	for id := range uint64(mostHeats) {
		h.keep(detached(id, leastLocked))
	}
	require.Len(t, h, mostHeats)
	h.keep(detached(mostHeats, leastLocked))
	require.Len(t, h, 1)
}

// TestHotFileOfMappings: what mappings bring counts as what views bring.
func TestHotFileOfMappings(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(2*leastLocked))
	src := m.noisyFile(leastLocked)
	for range 2 {
		m.run(src, 0, 0, leastLocked, false).unmap()
		m.cache.collectDue(t.Context())
		_, err := m.cache.Evict(t.Context(), src.id, -1)
		require.NoError(t, err)
	}
	m.locked(src)
}

// TestHotFilesRest: a file whose pages could not be locked, or were hot before, is not hot again soon, although it
// leaves all devices in between.
func TestHotFilesRest(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(2*leastLocked))
	m.devices[0].Fail(faulty.LockHost, 1, errors.New("injected"))
	src := m.noisyFile(leastLocked)
	heat := func() {
		t.Helper()
		for range 2 {
			m.load(src)
		}
		p := m.run(src, 0, 0, page.Size, false)
		m.cache.collectDue(t.Context())
		f := m.cache.Lookup(src.id)
		require.Eventually(t, func() bool { return !f.locking.heat.hot.Load() && len(f.locking.one) == 0 },
			10*time.Second, time.Millisecond)
		p.unmap()
		_, err := m.cache.Evict(t.Context(), src.id, -1)
		require.NoError(t, err)
		require.Nil(t, m.cache.Lookup(src.id))
	}
	for range 3 {
		heat()
	}
	require.Equal(t, 1, m.devices[0].Calls(faulty.LockHost))
}

// TestHotFileCannotBeLocked: if the pages of a hot file cannot be locked, it is loaded as before, and nobody hears of
// it.
func TestHotFileCannotBeLocked(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(2*leastLocked))
	m.devices[0].Fail(faulty.LockHost, 1, errors.New("injected"))
	src := m.noisyFile(leastLocked)
	p := m.run(src, 0, 0, page.Size, false)
	for range 2 {
		m.load(src)
	}
	f := m.cache.Lookup(src.id)
	m.cache.collectDue(t.Context())
	require.Eventually(t, func() bool { return !f.locking.heat.hot.Load() }, 10*time.Second, time.Millisecond)
	m.unlocked(src)
	require.Empty(t, m.cache.Inspect(src.id).LockError)
	m.load(src)
	p.unmap()
}
