package pagecache

import (
	"context"
	"errors"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

// pin pins a file, and returns its File.
func (m *machine) pin(src *source, p Pinning) *File {
	m.t.Helper()
	f, done, err := m.cache.open(context.Background(), src, false)
	require.NoError(m.t, err)
	f.SetPinning(p)
	done()
	return f
}

// lock pins a file on the host, and locks its pages.
func (m *machine) lock(src *source) *File {
	m.t.Helper()
	f := m.pin(src, Pinning{Host: true})
	require.NoError(m.t, m.cache.LockHome(context.Background(), src))
	require.NotNil(m.t, f.locking.now.Load())
	return f
}

// mapped returns how many maps of a home exist.
func (s *source) mapped() int {
	s.home.mu.Lock()
	defer s.home.mu.Unlock()
	return s.home.maps
}

// unlocked waits until no pages of a file are locked.
func (m *machine) unlocked(src *source) {
	m.t.Helper()
	require.Eventually(m.t, func() bool {
		return src.mapped() == 0 && m.cache.pinned.Files()+m.cache.pinned.Hot() == 0
	}, 10*time.Second, time.Millisecond)
}

// locked waits until the pages of a file are locked.
func (m *machine) locked(src *source) {
	m.t.Helper()
	require.Eventually(m.t, func() bool {
		f := m.cache.Lookup(src.id)
		return f != nil && f.locking.now.Load() != nil
	}, 10*time.Second, time.Millisecond)
}

// copying makes a device copy from a locked file, and returns a function that lets it end.
func (m *machine) copying(src *source) (end func()) {
	m.t.Helper()
	gate := m.devices[0].Hold(faulty.CopyIn)
	m.t.Cleanup(gate.Open)
	done := make(chan error)
	go func() {
		v, err := m.tryView(ViewRequest{Segments: []view.Segment{bytesOf(0, int64(len(src.home.data)))}}, src)
		if err == nil {
			v.unmap()
		}
		done <- err
	}()
	<-gate.Arrived()
	return func() {
		m.t.Helper()
		gate.Open()
		require.NoError(m.t, <-done)
	}
}

// TestLockedHome: devices copy from the locked pages of a file that is pinned on the host. Every change of home unlocks
// them, and the background locks them again.
func TestLockedHome(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(64<<20))
	m.cache.relockAfter = time.Hour
	const pages = 3000
	src := m.noisyFile(pages*page.Size - 100)
	f := m.lock(src)
	require.EqualValues(t, leastLocked, m.cache.pinned.Files())
	require.EqualValues(t, f.home.Size(), m.cache.Inspect(src.id).LockedBytes)
	require.Equal(t, "host", m.cache.Inspect(src.id).Pinned)
	locked := func() int64 { return f.counters.LockedPages.Load() }

	v := m.view(ViewRequest{Segments: []view.Segment{
		bytesOf(0, 2000*page.Size), {Offset: 2000*page.Size + 77, Length: 30, Stride: 5000, Count: 500},
		bytesOf(2990*page.Size, 20*page.Size), bytesOf(1, 1), bytesOf(2500*page.Size+1, 3),
	}}, src)
	v.check()
	require.InDelta(t, 2010, locked(), 15, "of rows, only what the view has is copied")
	before := locked()
	p := m.run(src, 0, 0, pages*page.Size, false)
	require.Equal(t, src.released(m), p.load(0, int(f.home.Size())))
	require.InDelta(t, pages, locked()-before, mover.PieceBytes>>page.Shift, "the end of the file is read")

	relock := func() {
		t.Helper()
		m.unlocked(src)
		m.cache.collectDue(t.Context())
		require.Nil(t, f.locking.now.Load(), "home has just been changed")
		m.cache.relockAfter = 0
		m.cache.collectDue(t.Context())
		require.Eventually(t, func() bool { return f.locking.now.Load() != nil }, 10*time.Second, time.Millisecond)
		m.cache.relockAfter = time.Hour
		p.unmap()
		_, err := m.cache.Evict(t.Context(), src.id, -1) // nothing but home has the bytes of a new view
		require.NoError(t, err)
		before := locked()
		fresh := m.view(ViewRequest{Segments: []view.Segment{bytesOf(before, 3000*page.Size)}}, src)
		fresh.check()
		fresh.unmap()
		require.Greater(t, locked(), before)
		v.acquire()
		v.check()
		p = m.run(src, 0, 0, pages*page.Size, false)
		require.Equal(t, src.released(m), p.load(0, int(f.home.Size())))
	}
	src.write(t, 5000, []byte("written through the mount"))
	relock()
	src.home.editAt(9000, []byte("written directly"))
	v.acquire()
	v.check()
	src.home.editAt(9000, []byte("WRITTEN DIRECTLY"))
	p.acquire()
	relock()
	src.truncate(t, 1000*page.Size+5)
	src.truncate(t, 2000*page.Size+5)
	relock()
	w := m.run(src, 0, 0, 1000*page.Size, true)
	w.store(12345, 7)
	w.release()
	require.NoError(t, w.Sync(t.Context(), 0, 1000*page.Size, false))
	relock()
	w.unmap()

	p.unmap()
	v.unmap()
	require.NotNil(t, m.cache.Lookup(src.id))
	f.SetPinning(Pinning{})
	m.unlocked(src)
	_, err := m.cache.Evict(t.Context(), src.id, -1)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return m.cache.Lookup(src.id) == nil }, 10*time.Second, time.Millisecond)
}

// TestLockedHomeStays: a file that is pinned on the host stays locked while nobody uses it, until it is removed.
func TestLockedHomeStays(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(64<<20))
	src, empty := m.noisyFile(10*page.Size), m.noisyFile(0)
	f := m.lock(src)
	m.lock(empty)
	m.cache.collectDue(t.Context())
	require.False(t, f.Detached())
	require.Equal(t, 1, src.mapped())
	m.cache.Forget(src.id)
	m.cache.Forget(empty.id)
	require.True(t, f.Detached())
	m.unlocked(src)
}

// TestLockedPagesOutliveCopies: pages stay mapped while a device copies from them, even if home changes meanwhile.
func TestLockedPagesOutliveCopies(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(64<<20))
	m.cache.relockAfter = time.Hour
	src := m.noisyFile(1000 * page.Size)
	m.lock(src)
	gate := m.devices[0].Hold(faulty.CopyIn)
	defer gate.Open()
	done := make(chan *viewer)
	go func() {
		v, err := m.tryView(ViewRequest{Segments: []view.Segment{bytesOf(0, 1000*page.Size)}}, src)
		if err != nil {
			t.Error(err)
		}
		done <- v
	}()
	<-gate.Arrived()
	src.write(t, 5000, []byte("written meanwhile"))
	time.Sleep(20 * time.Millisecond)
	require.Equal(t, 1, src.mapped())
	gate.Open()
	v := <-done
	m.unlocked(src)
	v.acquire()
	v.check()
	v.unmap()
}

// TestLockedFileBecomesShorter: if a file becomes shorter while a device copies from its locked pages, the bytes are
// read from home.
func TestLockedFileBecomesShorter(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(64<<20))
	src := m.noisyFile(1000 * page.Size)
	m.lock(src)
	require.NoError(t, src.home.shown.Truncate(10*page.Size))
	whole := m.view(ViewRequest{Segments: []view.Segment{bytesOf(0, 1000*page.Size)}}, src)
	whole.check()
	gathered := m.view(ViewRequest{Segments: []view.Segment{{Offset: 5, Length: 10, Stride: 1000, Count: 4000}}}, src)
	gathered.check()
	p := m.run(src, 0, 0, 1000*page.Size, false)
	require.Equal(t, src.released(m), p.load(0, 1000*page.Size))
	p.unmap()
	whole.unmap()
	gathered.unmap()
}

// TestLockingFails: a file that cannot be locked takes nothing, and is used like any other.
func TestLockingFails(t *testing.T) {
	m := newMachine(t, 2, pinnedMemory(64<<20))
	lock := func(src *source) error { return m.cache.LockHome(context.Background(), src) }
	src := m.noisyFile(100 * page.Size)
	require.ErrorIs(t, lock(src), syscall.EINVAL, "it is not pinned")
	fails := func(want error, text string) {
		t.Helper()
		f := m.pin(src, Pinning{Host: true})
		err := lock(src)
		require.ErrorIs(t, err, want)
		require.ErrorContains(t, err, text)
		require.Empty(t, m.cache.Inspect(src.id).LockedBytes)
		m.unlocked(src)
		m.cache.collectDue(t.Context())
		require.True(t, f.Detached(), "nothing keeps it")
	}
	m.devices[0].Fail(faulty.LockHost, 1, errors.New("no such pages"))
	fails(syscall.EOPNOTSUPP, "device 0 cannot lock pages of this file: no such pages")
	require.NoError(t, m.cache.SetPinnedMemory(t.Context(), 1<<20))
	fails(syscall.ENOSPC, "raise pinned-memory")
	require.NoError(t, m.cache.SetPinnedMemory(t.Context(), 64<<20))
	src.home.mu.Lock()
	src.home.afterMap = func() { src.home.clock++ }
	src.home.mu.Unlock()
	f := m.pin(src, Pinning{Host: true})
	require.ErrorIs(t, lock(src), syscall.EAGAIN, "home changes all the time")
	m.unlocked(src)
	src.home.mu.Lock()
	src.home.afterMap = nil
	src.home.mu.Unlock()
	m.cache.relockAfter = 0
	m.cache.collectDue(t.Context())
	require.Eventually(t, func() bool { return f.locking.now.Load() != nil }, 10*time.Second, time.Millisecond,
		"the background tries again")
}

// TestShareOfLockedFiles: what users pin on the host counts for them, and none has more than the share.
func TestShareOfLockedFiles(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(4*leastLocked))
	require.NoError(t, m.cache.SetUserShare(0.5))
	var files []*source
	for range 3 {
		files = append(files, m.noisyFile(100*page.Size))
	}
	theirs := Pinning{Host: true, User: 12345}
	for _, src := range files[:2] {
		require.NoError(t, m.cache.CheckPinning(src.id, 100*page.Size, theirs))
		m.pin(src, theirs)
		require.NoError(t, m.cache.LockHome(t.Context(), src))
		require.NoError(t, m.cache.CheckPinning(src.id, 100*page.Size, theirs), "it counts already")
	}
	require.ErrorIs(t, m.cache.CheckPinning(files[2].id, 100*page.Size, theirs), syscall.EDQUOT)
	v := m.view(ViewRequest{Segments: []view.Segment{bytesOf(0, 100)}}, files[2])
	m.pin(files[2], theirs)
	require.ErrorIs(t, m.cache.LockHome(t.Context(), files[2]), syscall.EDQUOT)
	lockError := func(src *source) string { return m.cache.Inspect(src.id).LockError }
	require.Contains(t, lockError(files[2]), "more than user 12345 may pin")
	m.pin(files[2], Pinning{})
	require.Empty(t, lockError(files[2]), "it is not pinned")
	m.pin(files[2], Pinning{Host: true})
	require.Empty(t, lockError(files[2]), "it is another pin")
	v.unmap()
	require.NoError(t, m.cache.LockHome(t.Context(), files[2]), "root has all")
	require.ErrorIs(t, m.cache.CheckPinning(FileID{9, 9}, 2*leastLocked, Pinning{Host: true}), syscall.ENOSPC)

	require.NoError(t, m.cache.SetUserShare(0.1))
	require.NoError(t, m.cache.CheckPinning(files[0].id, 100*page.Size, theirs), "it still counts already")
	require.ErrorIs(t, m.cache.CheckPinning(files[0].id, 2*leastLocked, theirs), syscall.EDQUOT, "the file became larger")
	require.NoError(t, m.cache.SetUserShare(0.5))

	require.NoError(t, m.cache.SetPinnedMemory(t.Context(), 2*leastLocked))
	require.EqualValues(t, 2*leastLocked, m.cache.pinned.Files())
	used, _ := m.cache.pinned.Used()
	require.EqualValues(t, 2*leastLocked, used)
	unlocked := slices.DeleteFunc(files, func(src *source) bool { return m.cache.Inspect(src.id).LockedBytes > 0 })
	require.Len(t, unlocked, 1)
	require.Contains(t, lockError(unlocked[0]), "the pinned memory became less")
	m.cache.collectDue(t.Context())
	require.Contains(t, lockError(unlocked[0]), "pinned files leave 0 B")
	require.NoError(t, m.cache.SetPinnedMemory(t.Context(), 4*leastLocked))
	m.cache.collectDue(t.Context())
	m.locked(unlocked[0])
	require.Empty(t, lockError(unlocked[0]))
}

// TestLockedByLostDevice: what was locked by a device that is lost is locked again by another one.
func TestLockedByLostDevice(t *testing.T) {
	m := newMachine(t, 2, pinnedMemory(64<<20))
	m.cache.relockAfter = 0
	src := m.noisyFile(100 * page.Size)
	f := m.lock(src)
	first := f.locking.now.Load()
	m.devices[0].Lose()
	_, err := m.tryView(ViewRequest{Segments: []view.Segment{bytesOf(0, 100)}}, src)
	require.ErrorIs(t, err, gpubackend.ErrDeviceLost)
	require.Eventually(t, func() bool {
		m.cache.collectDue(t.Context())
		now := f.locking.now.Load()
		return now != nil && now != first
	}, 10*time.Second, 10*time.Millisecond)
	v := m.view(ViewRequest{Device: 1, Segments: []view.Segment{bytesOf(0, 100*page.Size)}}, src)
	v.check()
	require.EqualValues(t, 100, f.counters.LockedPages.Load())
	v.unmap()
}

// TestLockingIsGivenUp: a client that ends while it locks a file does not make the background forget the file.
func TestLockingIsGivenUp(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(64<<20))
	m.cache.relockAfter = time.Hour
	src := m.noisyFile(100 * page.Size)
	f := m.pin(src, Pinning{Host: true})
	ctx, cancel := context.WithCancel(t.Context())
	src.home.mu.Lock()
	src.home.afterMap = cancel
	src.home.mu.Unlock()
	require.ErrorIs(t, m.cache.LockHome(ctx, src), context.Canceled)
	m.unlocked(src)
	require.Empty(t, m.cache.Inspect(src.id).LockError)
	m.cache.relockAfter = 0
	m.cache.collectDue(t.Context())
	require.Eventually(t, func() bool { return f.locking.now.Load() != nil }, 10*time.Second, time.Millisecond)
}

// TestLockedAgainAfterCopies: pages are locked again once devices no longer copy from the earlier ones. These take the
// pinned memory until then.
func TestLockedAgainAfterCopies(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(leastLocked))
	m.cache.relockAfter = 0
	src := m.noisyFile(1000 * page.Size)
	f := m.lock(src)
	gate := m.devices[0].Hold(faulty.CopyIn)
	defer gate.Open()
	done := make(chan error)
	go func() {
		v, err := m.tryView(ViewRequest{Segments: []view.Segment{bytesOf(0, 1000*page.Size)}}, src)
		if err == nil {
			v.unmap()
		}
		done <- err
	}()
	<-gate.Arrived()
	src.write(t, 5000, []byte("written meanwhile"))
	m.cache.collectDue(t.Context())
	failed := func() bool { return m.cache.Inspect(src.id).LockError != "" }
	require.Never(t, failed, 50*time.Millisecond, time.Millisecond)
	gate.Open()
	require.NoError(t, <-done)
	require.Eventually(t, func() bool { return f.locking.now.Load() != nil }, 10*time.Second, time.Millisecond)
}

// TestUnlockedMeanwhile: a smaller pinned memory does not wait for a file that a change of home has just unlocked.
func TestUnlockedMeanwhile(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(64<<20))
	m.cache.relockAfter = time.Hour
	src, other := m.noisyFile(10*page.Size), m.noisyFile(10*page.Size)
	m.lock(other)
	f := m.lock(src)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	g := m.cache.Lookup(other.id)
	f.mu.Lock()
	g.mu.Lock()
	done := make(chan error)
	go func() { done <- m.cache.SetPinnedMemory(ctx, 1<<20) }()
	time.Sleep(20 * time.Millisecond) // it waits for one of the files
	f.spoilHomeLocked()
	g.spoilHomeLocked()
	require.Eventually(t, func() bool { return m.cache.pinned.Files() == 0 }, 10*time.Second, time.Millisecond)
	f.mu.Unlock()
	g.mu.Unlock()
	require.NoError(t, <-done)
}

// TestLockedPastEnd: what another program stored past the end of the file, in a mapping of the last page, gets to no
// device. Only that page is read for a view.
func TestLockedPastEnd(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(64<<20))
	const size = 1000*page.Size + 100
	src := m.noisyFile(size)
	f := m.lock(src)
	_, err := src.home.shown.WriteAt([]byte("a stranger's"), size)
	require.NoError(t, err)
	v := m.view(ViewRequest{Segments: []view.Segment{bytesOf(0, 1001*page.Size)}}, src)
	v.check()
	require.EqualValues(t, 1000, f.counters.LockedPages.Load())
	v.unmap()
	p := m.run(src, 0, 0, 1001*page.Size, false)
	require.Equal(t, make([]byte, 50), p.load(size, size+50))
	p.unmap()
}

// TestPinWhileOthersAreUnlocked: nobody is charged for pages that are being unlocked. Another file is locked as soon as
// their memory is free.
func TestPinWhileOthersAreUnlocked(t *testing.T) {
	for name, unlock := range map[string]func(*File, *source){
		"changed":  func(_ *File, src *source) { src.write(t, 5000, []byte("written meanwhile")) },
		"unpinned": func(f *File, _ *source) { f.SetPinning(Pinning{}) },
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, 1, pinnedMemory(leastLocked))
			m.cache.relockAfter = time.Hour
			first, second := m.noisyFile(100*page.Size), m.noisyFile(100*page.Size)
			f := m.lock(first)
			end := m.copying(first)
			unlock(f, first)
			host := Pinning{Host: true}
			require.NoError(t, m.cache.CheckPinning(second.id, 100*page.Size, host))
			g := m.pin(second, host)
			locked := make(chan error)
			go func() { locked <- m.cache.LockHome(t.Context(), second) }()
			require.Eventually(t, func() bool { return len(g.locking.one) > 0 }, 10*time.Second, time.Millisecond)
			require.EqualValues(t, leastLocked, m.cache.pinned.Files())
			end()
			require.NoError(t, <-locked)
			m.locked(second)
			require.ErrorIs(t, m.cache.CheckPinning(first.id, 100*page.Size, host), syscall.ENOSPC)
		})
	}
}

// TestPinWhileItIsLocked: a file whose pages are being locked counts once if it is pinned again.
func TestPinWhileItIsLocked(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(leastLocked))
	src, host := m.noisyFile(100*page.Size), Pinning{Host: true}
	m.pin(src, host)
	var err error
	src.home.mu.Lock()
	src.home.afterMap = func() { err = m.cache.CheckPinning(src.id, 100*page.Size, host) }
	src.home.mu.Unlock()
	require.NoError(t, m.cache.LockHome(t.Context(), src))
	require.NoError(t, err)
}

// TestLockedOnceThereIsRoom: a changed file whose memory another one took meanwhile is locked again when that gives it
// back. Until then it says why it is not locked.
func TestLockedOnceThereIsRoom(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(leastLocked))
	m.cache.relockAfter = 0
	first, second := m.noisyFile(10*page.Size), m.noisyFile(10*page.Size)
	f := m.lock(first)
	first.write(t, 5, []byte("changed"))
	m.unlocked(first)
	g := m.lock(second)
	for range 3 {
		m.cache.collectDue(t.Context())
		require.Contains(t, m.cache.Inspect(first.id).LockError, "pinned files leave 0 B")
	}
	require.False(t, f.Detached())
	g.SetPinning(Pinning{})
	m.unlocked(second)
	m.cache.collectDue(t.Context())
	m.locked(first)
	require.Empty(t, m.cache.Inspect(first.id).LockError)
}

// TestOwnerOfLockedFile: after a file was given to another user, that user is charged for its locked pages.
func TestOwnerOfLockedFile(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(4*leastLocked))
	require.NoError(t, m.cache.SetUserShare(0.5))
	large, other := m.noisyFile(100*page.Size), FileID{9, 9}
	before, after := Pinning{Host: true, User: 12345}, Pinning{Host: true, User: 12346}
	m.pin(large, before)
	require.NoError(t, m.cache.LockHome(t.Context(), large))
	require.ErrorIs(t, m.cache.CheckPinning(other, 2*leastLocked, before), syscall.EDQUOT)
	require.NoError(t, m.cache.CheckPinning(other, 2*leastLocked, after))
	m.pin(large, after)
	require.NoError(t, m.cache.CheckPinning(other, 2*leastLocked, before))
	require.ErrorIs(t, m.cache.CheckPinning(other, 2*leastLocked, after), syscall.EDQUOT)
	require.NoError(t, m.cache.CheckPinning(large.id, 2*leastLocked, after), "its own pages do not count twice")
	m.locked(large)
}

// TestLockingBesideExtents: extents in pinned memory leave too little for a file. The error says so, and what helps.
func TestLockingBesideExtents(t *testing.T) {
	m := newMovingMachine(t, 1, 4, (leastLocked+brick)/brick)
	c := m.travel(m.noisyFile(8*brick), 0, false)
	b := c.use(0, 8)
	src := m.noisyFile(10 * page.Size)
	m.pin(src, Pinning{Host: true})
	require.NoError(t, m.cache.CheckPinning(src.id, 10*page.Size, Pinning{Host: true}))
	err := m.cache.LockHome(t.Context(), src)
	require.ErrorIs(t, err, syscall.ENOSPC)
	require.ErrorContains(t, err, "extents that did not fit on devices have 256 KiB")
	require.ErrorContains(t, err, "'gaiafs evict'")
	b.Done()
	c.end()
	_, err = m.cache.Evict(t.Context(), c.f.id, -1)
	require.NoError(t, err)
	m.pin(src, Pinning{Host: true})
	require.NoError(t, m.cache.LockHome(t.Context(), src))
}

// TestUnpinnedWhileLocking: a file that is unpinned while its pages are being locked does not stay locked, and says
// nothing about a pin that it does not have.
func TestUnpinnedWhileLocking(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(64<<20))
	src := m.noisyFile(100 * page.Size)
	f := m.pin(src, Pinning{Host: true})
	src.home.mu.Lock()
	src.home.afterMap = func() {
		f.SetPinning(Pinning{})
		m.cache.lanes.work.Wait()
	}
	src.home.mu.Unlock()
	v := m.view(ViewRequest{Segments: []view.Segment{bytesOf(0, 100)}}, src)
	require.ErrorIs(t, m.cache.LockHome(t.Context(), src), syscall.EINVAL)
	m.unlocked(src)
	require.Empty(t, m.cache.Inspect(src.id).LockError)
	v.unmap()
}

// TestLessMemoryWhileLocking: a file is not locked if there is too little pinned memory for it by the time it has been.
func TestLessMemoryWhileLocking(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(64<<20))
	src := m.noisyFile(100 * page.Size)
	m.pin(src, Pinning{Host: true})
	var err error
	src.home.mu.Lock()
	src.home.afterMap = func() { err = m.cache.SetPinnedMemory(t.Context(), 1<<20) }
	src.home.mu.Unlock()
	require.ErrorIs(t, m.cache.LockHome(t.Context(), src), syscall.ENOSPC)
	require.NoError(t, err)
	m.unlocked(src)
}

// TestLockedInOnePiece: memory is not locked across two chunks, or past the pages that the file has in full.
func TestLockedInOnePiece(t *testing.T) {
	mem, err := unix.Mmap(-1, 0, lockChunk+page.Size, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(mem)) }()
	l := &lockedHome{mem: mem, whole: lockChunk}
	at := func(off, n int64) int64 { return int64(len(l.At(off, n))) } // a failure would print the bytes
	require.EqualValues(t, lockChunk, at(0, lockChunk))
	require.Zero(t, at(lockChunk, page.Size))
	l.whole += page.Size
	require.EqualValues(t, page.Size, at(lockChunk, page.Size))
	require.Zero(t, at(lockChunk-page.Size, 2*page.Size))
	require.Nil(t, l.At(0, 0))
}

// TestUnpinnedPagesAreSpoilt: pages of a file that was just unpinned, and that are still locked, are unlocked by a
// change of home.
func TestUnpinnedPagesAreSpoilt(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(64<<20))
	src := m.noisyFile(100 * page.Size)
	f := m.lock(src)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.SetPinning(Pinning{})
	require.NotNil(t, f.locking.now.Load(), "that waits for the file")
	f.spoilHomeLocked()
	require.Nil(t, f.locking.now.Load())
}

// TestPinnedAgainMeanwhile: if a file is pinned again before its pages were unlocked, nobody waits for their memory any
// more.
func TestPinnedAgainMeanwhile(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(leastLocked))
	src, other := m.noisyFile(10*page.Size), m.noisyFile(10*page.Size)
	f := m.lock(src)
	m.pin(other, Pinning{Host: true})
	meanwhile := func(wait func(ctx context.Context) error) error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		f.mu.Lock()
		defer f.mu.Unlock()
		f.SetPinning(Pinning{})
		done := make(chan error)
		go func() { done <- wait(ctx) }()
		time.Sleep(20 * time.Millisecond) // it waits
		f.SetPinning(Pinning{Host: true})
		return <-done
	}
	err := meanwhile(func(ctx context.Context) error { return m.cache.LockHome(ctx, other) })
	require.ErrorIs(t, err, syscall.ENOSPC)
	m.cache.pinned.SetLimit(1)
	require.NoError(t, meanwhile(m.cache.pinned.WaitRetired))
}

// TestPinnedAgainWhileUnlocking: a file that was unpinned while its pages were being locked, and pinned again before
// they are unlocked, is locked.
func TestPinnedAgainWhileUnlocking(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(64<<20))
	m.cache.relockAfter = 0
	src := m.noisyFile(100 * page.Size)
	f := m.pin(src, Pinning{Host: true})
	src.home.mu.Lock()
	src.home.afterMap = func() {
		f.SetPinning(Pinning{})
		m.cache.lanes.work.Wait()
	}
	src.home.afterUnmap = func() { f.SetPinning(Pinning{Host: true}) }
	src.home.mu.Unlock()
	v := m.view(ViewRequest{Segments: []view.Segment{bytesOf(0, 100)}}, src)
	defer v.unmap()
	require.Error(t, m.cache.LockHome(t.Context(), src))
	src.home.mu.Lock()
	src.home.afterMap, src.home.afterUnmap = nil, nil
	src.home.mu.Unlock()
	m.cache.collectDue(t.Context())
	m.locked(src)
}

// TestForgottenWhileWaiting: a file that is forgotten while it waits for pinned memory is not mapped any more, because
// its home is closed.
func TestForgottenWhileWaiting(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(leastLocked))
	m.cache.relockAfter = time.Hour
	first, src := m.noisyFile(1000*page.Size), m.noisyFile(10*page.Size)
	m.lock(first)
	f := m.pin(src, Pinning{Host: true})
	end := m.copying(first)
	m.pin(first, Pinning{})
	m.cache.lanes.work.Wait() // the first file's pages leave
	done := make(chan error)
	go func() { done <- f.lockHome(t.Context()) }()
	require.Eventually(t, func() bool { return len(f.locking.one) == 1 }, 10*time.Second, time.Millisecond)
	require.Never(t, func() bool { return len(f.locking.one) == 0 }, 20*time.Millisecond, time.Millisecond)
	m.cache.Forget(src.id)
	require.True(t, f.Detached())
	src.home.mu.Lock()
	src.home.afterMap = func() { t.Error("it is mapped") }
	src.home.mu.Unlock()
	end()
	require.ErrorIs(t, <-done, syscall.ESHUTDOWN)
	m.unlocked(src)
}

// TestLockingAgain: the background does not try again to lock what no device can lock, until the file is used again. It
// tries again if the owner may lock more.
func TestLockingAgain(t *testing.T) {
	m := newMachine(t, 1, pinnedMemory(2*leastLocked))
	m.cache.relockAfter = 0
	src := m.noisyFile(10 * page.Size)
	v := m.view(ViewRequest{Segments: []view.Segment{bytesOf(0, 100)}}, src)
	defer v.unmap()
	m.devices[0].Fail(faulty.LockHost, 1, errors.New("no such pages"))
	theirs := Pinning{Host: true, User: 12345}
	f := m.pin(src, theirs)
	require.ErrorIs(t, m.cache.LockHome(t.Context(), src), syscall.EOPNOTSUPP)
	for range 10 {
		m.cache.collectDue(t.Context())
		time.Sleep(time.Millisecond)
	}
	require.Equal(t, 1, m.devices[0].Calls(faulty.LockHost))

	require.NoError(t, m.cache.SetUserShare(0.1))
	f.SetPinning(theirs)
	m.cache.collectDue(t.Context())
	require.Contains(t, m.cache.Inspect(src.id).LockError, "more than user 12345 may pin")
	require.NoError(t, m.cache.SetUserShare(1))
	m.cache.collectDue(t.Context())
	m.locked(src)
}
