package fs

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

// clockStep is how far the times of files may lag behind the clock.
const clockStep = 20 * time.Millisecond

// TestReleaseIsTheMomentOfModification follows a file's mtime through releases, collects, and programs' changes in
// between.
func TestReleaseIsTheMomentOfModification(t *testing.T) {
	everyModeWithDevices(t, func(t *testing.T, s *scene, cache *pagecache.Cache, n *notary) {
		const size = 64 << 10
		path, home := filepath.Join(s.mnt, "f"), filepath.Join(s.source, "f")
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0644)
		require.NoError(t, err)
		defer f.Close()
		_, err = f.Write(make([]byte, size))
		require.NoError(t, err)
		w := mapOn(t, cache, n, f, 0, size)
		defer w.close(t)
		mtime := func() time.Time {
			t.Helper()
			st, err := os.Stat(path)
			require.NoError(t, err)
			return st.ModTime()
		}
		homes := func() time.Time {
			t.Helper()
			st, err := os.Stat(home)
			require.NoError(t, err)
			return st.ModTime()
		}
		set := func(at time.Time) {
			t.Helper()
			require.NoError(t, os.Chtimes(path, time.Time{}, at))
			require.True(t, at.Equal(mtime()))
		}
		release := func(text string) time.Time {
			t.Helper()
			before := time.Now().Add(-clockStep)
			w.store(t, 5000, []byte(text))
			w.release(t, size)
			got := mtime()
			assert.True(t, got.After(before), "%v is not after %v", got, before)
			assert.False(t, got.After(time.Now()))
			return got
		}
		old, newer := time.Unix(1e9, 0), time.Unix(11e8, 5)

		set(old)
		at := release("one")
		require.NoError(t, f.Sync())
		assert.True(t, at.Equal(mtime()), "fsync brings bytes home, and modifies nothing")
		assert.True(t, at.Equal(homes()), "%v in SOURCE, %v on the mount", homes(), at)
		w.release(t, size)
		assert.True(t, at.Equal(mtime()), "a release of nothing")

		release("two")
		set(newer)
		require.NoError(t, f.Sync())
		assert.True(t, newer.Equal(mtime()), "set after the release")
		assert.True(t, newer.Equal(homes()))

		release("ten")
		set(old)
		w.release(t, size)
		assert.True(t, old.Equal(mtime()), "what was released before the time was set is not released again")

		at = release("six")
		b := make([]byte, 3)
		_, err = f.ReadAt(b, 5000) // makes the daemon collect
		require.NoError(t, err)
		require.Equal(t, "six", string(b))
		assert.True(t, at.Equal(mtime()), "reading modifies nothing")

		set(old)
		release("ten")
		set(old)
		before := time.Now().Add(-clockStep)
		_, err = f.WriteAt([]byte("cpu"), 5100)
		require.NoError(t, err)
		assert.True(t, mtime().After(before), "a write after the release")
		require.NoError(t, f.Sync())
		assert.True(t, mtime().After(before))
		assert.True(t, homes().After(before))

		// The comparisons that make does.
		sh(t, s.mnt, "touch -d '1 hour ago' f; touch -d '1 minute ago' made")
		release("new")
		sh(t, s.mnt, "test f -nt made")
		sh(t, s.mnt, "touch -d '1 hour ago' f; sync f; test made -nt f; cat f > /dev/null; test made -nt f")
		assert.Zero(t, s.fs.changed.Load(), "the mount's own change was taken for a foreign one")
	})
}

// TestReleaseMovesTheTimeOfAFileWithoutName does this with an open file that was removed.
func TestReleaseMovesTheTimeOfAFileWithoutName(t *testing.T) {
	everyModeWithDevices(t, func(t *testing.T, s *scene, cache *pagecache.Cache, n *notary) {
		f, err := os.OpenFile(filepath.Join(s.mnt, "f"), os.O_CREATE|os.O_RDWR, 0644)
		require.NoError(t, err)
		defer f.Close()
		require.NoError(t, f.Truncate(4096))
		require.NoError(t, os.Remove(f.Name()))
		w := mapOn(t, cache, n, f, 0, 4096)
		require.NoError(t, unix.UtimesNanoAt(int(f.Fd()), "", []unix.Timespec{{Sec: 5}, {Sec: 6}}, unix.AT_EMPTY_PATH))
		before := time.Now().Add(-clockStep)
		w.store(t, 0, []byte("x"))
		w.release(t, 4096)
		st, err := f.Stat()
		require.NoError(t, err)
		if os.Geteuid() == 0 || !s.WriteBack() {
			assert.True(t, st.ModTime().After(before), "%v", st.ModTime())
		}
		w.close(t)
	})
}

// TestTimesOfATruncationToTheSameSize: on XFS, truncate(2) to a file's current size leaves its times, and ftruncate(2)
// does not.
func TestTimesOfATruncationToTheSameSize(t *testing.T) {
	s := mount(t, sourceOn(t, "xfs", 512<<20))
	path := filepath.Join(s.mnt, "f")
	require.NoError(t, os.WriteFile(path, []byte("text"), 0o644))
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	require.NoError(t, err)
	defer f.Close()
	old := time.Unix(1e9, 0)
	for moves, truncate := range map[bool]func() error{
		false: func() error { return unix.Truncate(path, 4) },
		true:  func() error { return f.Truncate(4) },
	} {
		require.NoError(t, os.Chtimes(path, old, old))
		require.NoError(t, truncate())
		for _, at := range []string{path, filepath.Join(s.source, "f")} {
			st, err := os.Stat(at)
			require.NoError(t, err)
			assert.Equal(t, moves, !st.ModTime().Equal(old), at)
		}
	}
}
