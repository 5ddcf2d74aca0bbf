package pagecache

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
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
	for range hotLoads {
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
	require.NoError(t, m.cache.CheckPinning(FileID{9, 9}, 2*leastLocked, Pinning{Host: true}))
	require.Empty(t, m.cache.Inspect(src.id).Pinned)
	require.EqualValues(t, f.size, m.cache.Inspect(src.id).LockedBytes)

	before := f.counters.BufferedPages.Load()
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

// TestHotFileBetweenCollects: the background locks hot files, and unlocks them, however rarely it writes home.
func TestHotFileBetweenCollects(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(2*leastLocked), func(o *Options, _ *int64) { o.pinTick = time.Millisecond })
	m.cache.hotAge = 300 * time.Millisecond
	src := m.noisyFile(leastLocked)
	p := m.run(src, 0, 0, page.Size, false)
	for range hotLoads {
		m.load(src)
	}
	m.locked(src)
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
	m.cache.collectDue(t.Context())
	for range hotLoads + 1 {
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
	m.cache.heats[src.id] = remembered{of.read, of.used - int64(heatAge)}
	m.cache.mu.Unlock()
	require.EqualValues(t, leastLocked, of.read)
	m.load(src)
	for range hotLoads - 1 {
		v := m.view(ViewRequest{Segments: []view.Segment{bytesOf(0, int64(len(src.home.data)))}}, src)
		m.cache.collectDue(t.Context())
		v.unmap()
	}
	m.locked(src)
}

// TestHotFileMakesRoom: a hot file gives its pinned memory to a file that is pinned on the host, and gives it
// back if there shall be less.
func TestHotFileMakesRoom(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(2*leastLocked))
	src, other := m.noisyFile(leastLocked), m.noisyFile(2*leastLocked-page.Size)
	_, p := m.heat(src)
	g := m.lock(other)
	require.Zero(t, src.mapped())
	g.SetPinning(Pinning{})
	m.unlocked(other)
	m.cache.hotAge = 0
	m.load(src)
	m.load(src)
	m.cache.collectDue(t.Context())
	m.locked(src)
	require.NoError(t, m.cache.SetPinnedMemory(t.Context(), leastLocked-1))
	m.unlocked(src)
	p.unmap()
}

// TestHotFileIsPinned: a pin takes over the locked pages of a hot file. Once it is gone, they are unlocked.
func TestHotFileIsPinned(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(2*leastLocked))
	src := m.noisyFile(leastLocked)
	f, p := m.heat(src)
	l := f.locking.now.Load()
	m.lock(src)
	require.Same(t, l, f.locking.now.Load())
	require.ErrorContains(t, m.cache.CheckPinning(FileID{9, 9}, 2*leastLocked, Pinning{Host: true}), "leave 16 MiB")
	m.cache.hotAge = time.Nanosecond
	m.cache.collectDue(t.Context())
	m.locked(src)
	f.SetPinning(Pinning{})
	m.unlocked(src)
	p.unmap()
}

// TestHotFileCannotBeLocked: if the pages of a hot file cannot be locked, it is loaded as before, and nobody hears of
// it.
func TestHotFileCannotBeLocked(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(2*leastLocked))
	m.devices[0].Fail(faulty.LockHost, 1, errors.New("injected"))
	src := m.noisyFile(leastLocked)
	p := m.run(src, 0, 0, page.Size, false)
	for range hotLoads {
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
