package pagecache

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/cleanread"
)

// withoutLock runs do while the file's lock is held. A read that wants the lock never returns.
func withoutLock(t *testing.T, f *File, do func()) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	do()
}

// readTwice makes the File publish its knowledge of the regions that are read.
func readTwice(t *testing.T, src *source, off, n int) {
	t.Helper()
	for range 2 {
		src.read(t, off, n)
	}
}

// unlocked reports whether a read of the page at off would take no lock.
func unlocked(src *source, off int64, direct bool) bool {
	_, ok := src.attached.nothingPending(page.Covering(off, page.Size), direct, src.reader)
	return ok
}

// A region that did not change since it was read twice can be read while others hold the lock.
func TestReadsOfWhatDidNotChangeTakeNoLock(t *testing.T) {
	m := newMachine(t, 1)
	src, home := m.sharedFile(sharedSize)
	home.warm.Store(true)
	p := m.run(src, 0, 0, sharedSize, true)
	want := src.home.bytes(0, sharedSize)
	readTwice(t, src, 0, 4096)
	readTwice(t, src, 2<<20-4096, 8192)
	withoutLock(t, src.attached, func() {
		require.True(t, bytes.Equal(want[1<<20:1<<20+65536], src.read(t, 1<<20, 65536)), "another part of the region")
		require.True(t, bytes.Equal(want[2<<20-100:2<<20+100], src.read(t, 2<<20-100, 200)), "two regions")
	})
	require.False(t, unlocked(src, 4<<20, false), "another region")

	p.add(7)
	p.release()
	require.False(t, unlocked(src, 0, false), "a page is pending")
	want[7]++
	require.True(t, bytes.Equal(want[:4096], src.read(t, 0, 4096)))
	require.False(t, unlocked(src, 0, false), "one read is not enough")
	readTwice(t, src, 0, 4096)
	require.True(t, unlocked(src, 0, false))
	withoutLock(t, src.attached, func() { require.True(t, bytes.Equal(want[:4096], src.read(t, 0, 4096))) })
}

// Pages that a program may get without the lock are dropped by the next release, including those that no locked read
// asked for.
func TestReadsWithoutLockAreDroppedByReleases(t *testing.T) {
	m := newMachine(t, 1)
	src, home := m.sharedFile(sharedSize)
	home.warm.Store(true)
	p := m.run(src, 0, 0, sharedSize, true)
	p.add(5 * page.Size)
	p.release() // from now on the kernel does not hold page 5
	src.read(t, 0, 4096)
	require.NoError(t, src.attached.Sync(context.Background(), func() error { return nil }))
	readTwice(t, src, 0, 4096)
	src.kernel.take()
	withoutLock(t, src.attached, func() { src.read(t, 5*page.Size, 4096) })
	p.add(5 * page.Size)
	p.release()
	require.Contains(t, src.kernel.take(), page.Range{Start: 5, End: 6})
}

// A read past the kernel's page cache says nothing about the kernel's pages. So later reads still take the lock.
func TestDirectReadsDoNotLetOthersPass(t *testing.T) {
	m := newMachine(t, 1)
	src, home := m.sharedFile(sharedSize)
	home.warm.Store(true)
	m.run(src, 0, 0, sharedSize, true)
	for range 2 {
		_, _, err := src.attached.Read(context.Background(), make([]byte, 4096), 0, true, src.reader)
		require.NoError(t, err)
	}
	require.True(t, unlocked(src, 0, true))
	require.False(t, unlocked(src, 0, false))
	readTwice(t, src, 0, 4096)
	require.True(t, unlocked(src, 0, false))
	require.True(t, unlocked(src, 0, true))
}

// A file that becomes longer is read to its new end, and so is one that becomes shorter.
func TestReadsWithoutLockKnowTheSize(t *testing.T) {
	m := newMachine(t, 1)
	src, home := m.sharedFile(10_000)
	home.warm.Store(true)
	m.run(src, 0, 0, 10_000, false)
	readTwice(t, src, 0, 4096)
	require.True(t, unlocked(src, 0, false))
	src.write(t, 10_000, make([]byte, 20_000))
	require.Len(t, src.read(t, 8192, 16<<10), 16<<10)
	readTwice(t, src, 0, 4096)
	src.truncate(t, 4096)
	require.Empty(t, src.read(t, 4096, 4096))
	require.Len(t, src.read(t, 0, 8192), 4096)
}

// A change made directly in SOURCE is noticed without the lock, too.
func TestReadsWithoutLockLookAtSource(t *testing.T) {
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
	src, _ := m.sharedFile(sharedSize)
	m.run(src, 0, 0, sharedSize, false)
	readTwice(t, src, 0, 4096)
	require.True(t, unlocked(src, 0, false))
	changed := bytes.Repeat([]byte{0xaa}, 4096)
	src.home.editAt(0, changed)
	require.False(t, unlocked(src, 0, false))
	require.True(t, bytes.Equal(changed, src.read(t, 0, 4096)), "the device has old bytes")
}

// A detached file answers no reads.
func TestReadsWithoutLockEndWithTheFile(t *testing.T) {
	m := newMachine(t, 1)
	src, home := m.sharedFile(sharedSize)
	home.warm.Store(true)
	p := m.run(src, 0, 0, sharedSize, false)
	readTwice(t, src, 0, 4096)
	f := src.attached
	p.unmap()
	require.NoError(t, m.cache.Close(context.Background()))
	_, ok := f.nothingPending(page.Range{End: 1}, false, src.reader)
	require.False(t, ok)
}

// A read past the kernel's page cache does not take away what a snapshot allows, even if it has to publish another
// snapshot.
func TestDirectReadsKeepOthersPassing(t *testing.T) {
	m := newMachine(t, 1)
	src, home := m.sharedFile(sharedSize)
	home.warm.Store(true)
	m.run(src, 0, 0, sharedSize, true)
	readTwice(t, src, 0, 4096)
	require.True(t, unlocked(src, 0, false))
	f := src.attached
	f.mu.Lock()
	defer f.mu.Unlock()
	for range 2 { // another size needs another snapshot
		f.home.SetSize(f.home.Size() - 1)
		now := cleanread.State{Size: f.home.Size(), Serves: true, Changes: f.home.LookedAt()}
		f.clean.Publish(page.Range{End: 1}, true, now)
	}
	require.True(t, unlocked(src, 0, false))
}

// While home changes, no read publishes what it gets. Otherwise, of two reads in a row, the first could see the new
// bytes at home, and the second the old bytes of a device.
func TestReadsDuringAChangeTakeTheLock(t *testing.T) {
	for name, c := range map[string]Change{
		"a concurrent write": {Kind: ChangeWrite, Len: 10},
		"a write that keeps": {Kind: ChangeZero, Len: 10},
		"a truncation":       {Kind: ChangeTruncate, Len: 100},
	} {
		m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
		src, _ := m.sharedFile(sharedSize)
		m.run(src, 0, 0, sharedSize, false)
		readTwice(t, src, 0, 4096)
		require.True(t, unlocked(src, 0, false))
		asked := false
		require.NoError(t, src.attached.ChangeHome(t.Context(), c, func(_, n int64) error {
			asked = true
			require.False(t, unlocked(src, 0, false), name)
			if c.Kind == ChangeTruncate {
				return src.backing().truncate(c.Len)
			}
			_, err := src.backing().WriteAt(make([]byte, n), 0)
			return err
		}))
		require.True(t, asked)
	}
}
