package fs

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func watchAll(o *Options) { o.Events = EventsAll }

// mountWatched mounts with events of the whole tree.
func mountWatched(t *testing.T, change ...func(*Options)) *scene {
	t.Helper()
	requireRoot(t)
	s := mount(t, append(change, watchAll)...)
	if s.fs.tree == nil {
		t.Skip("this filesystem is not watched")
	}
	require.Equal(t, EventsAll, s.Events())
	return s
}

// asked returns the number of requests of some kinds.
func (s *scene) asked(kinds ...requestKind) (n int64) {
	for _, k := range kinds {
		n += s.fs.times[k].Snapshot().Count
	}
	return n
}

// stays looks at a file on the mount until the daemon gets no more requests for it, and then for longer than a kernel
// keeps names and attributes on other mounts. If that failed, the kernel would ask all the time.
func (s *scene) stays(t *testing.T, name string) {
	t.Helper()
	look := func() int64 {
		_, err := os.Stat(filepath.Join(s.mnt, name))
		require.NoError(t, err)
		return s.asked(requestLookup, requestGetattr)
	}
	before := look()
	require.Eventually(t, func() bool {
		last := before
		before = look()
		return last == before
	}, eventually, againAfter+defaultTimeout/2, "the kernel does not cache %s", name)
}

// TestWatchedMountKeepsNames: the kernel does not ask again for unchanged names.
func TestWatchedMountKeepsNames(t *testing.T) {
	s := mountWatched(t, withFiles(t, map[string]string{"dir/a": "first"}))
	s.stays(t, "dir/a")
}

// TestWatchedMountSeesChangesInSource: changes in SOURCE show long before the kernel would ask.
func TestWatchedMountSeesChangesInSource(t *testing.T) {
	s := mountWatched(t, withFiles(t, map[string]string{"a": "first", "gone": "x", "dir/b": "b"}))
	s.shows(t, "a", "first")
	s.shows(t, "gone", "x")
	s.shows(t, "dir/b", "b")
	var of unix.Statfs_t
	require.NoError(t, unix.Statfs(s.source, &of))
	if of.Type == unix.EXT4_SUPER_MAGIC {
		require.True(t, s.fs.tree.plain, "each event of the filesystem costs system calls")
	}
	_, err := os.Stat(filepath.Join(s.mnt, "new"))
	require.ErrorIs(t, err, os.ErrNotExist)
	sh(t, s.source, `printf longer >a; rm gone; printf new >new; mv dir other; chmod 600 new`)
	s.shows(t, "a", "longer")
	s.shows(t, "new", "new")
	s.shows(t, "other/b", "b")
	for _, name := range []string{"gone", "dir/b"} {
		require.Eventually(t, func() bool {
			_, err := os.Stat(filepath.Join(s.mnt, name))
			return os.IsNotExist(err)
		}, eventually, tick, name)
	}
	require.Eventually(t, func() bool {
		st, err := os.Stat(filepath.Join(s.mnt, "new"))
		return err == nil && st.Mode().Perm() == 0600
	}, eventually, tick)
}

// TestWatchedMountChanges: changes through the mount show at once, and the kernel's caches stay valid after them.
func TestWatchedMountChanges(t *testing.T) {
	for name, change := range map[string]func(*Options){"write-through": func(*Options) {}, "write-back": writeBack} {
		t.Run(name, func(t *testing.T) {
			s := mountWatched(t, change)
			sh(t, s.mnt, `mkdir d; printf one >d/a; ln d/a d/b; printf two >>d/b; mv d/a d/c; [ "$(cat d/c)" = onetwo ]
				[ "$(stat -c %h,%s d/b)" = 2,6 ]; rm d/b; [ "$(stat -c %h d/c)" = 1 ]; chmod 640 d/c
				[ "$(stat -c %a d/c)" = 640 ]; [ ! -e d/a ]; truncate -s 3 d/c; [ "$(cat d/c)" = one ]`)
			s.stays(t, "d/c")
			assert.True(t, s.fs.tree.alive.Load())
		})
	}
}

// TestWatchedMountWithPassthrough: writes past the daemon look like foreign changes, so nothing is watched.
func TestWatchedMountWithPassthrough(t *testing.T) {
	s := mount(t, passThrough, watchAll)
	if !s.Passthrough() {
		t.Skip("passthrough needs root and Linux 6.9")
	}
	require.NotEqual(t, EventsAll, s.Events())
	require.Equal(t, time.Second, s.fs.keeps(s.fs.root, defaultTimeout))
}
