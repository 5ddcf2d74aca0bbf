package fs

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func kernelOpens(o *Options) { o.ReadOnly, o.KernelOpens = true, true }

// withFiles makes files in SOURCE before there is a mount.
func withFiles(t *testing.T, files map[string]string) func(*Options) {
	return func(o *Options) {
		for name, text := range files {
			path := filepath.Join(o.Source, name)
			require.NoError(t, os.MkdirAll(filepath.Dir(path), 0755))
			require.NoError(t, os.WriteFile(path, []byte(text), 0644))
		}
	}
}

// eachWatch runs a test with events that report changes in SOURCE, and without.
func eachWatch(t *testing.T, test func(t *testing.T, change func(*Options))) {
	t.Helper()
	t.Run("watched", func(t *testing.T) {
		requireRoot(t)
		test(t, kernelOpens)
	})
	t.Run("timeouts", func(t *testing.T) {
		test(t, func(o *Options) {
			kernelOpens(o)
			o.unwatched, o.AttrTimeout, o.EntryTimeout = true, tick, tick
		})
	})
}

// shows waits until a file of the mount contains text. Each look opens the file.
func (s *scene) shows(t *testing.T, name, text string) {
	t.Helper()
	require.Eventually(t, func() bool {
		got, err := os.ReadFile(filepath.Join(s.mnt, name))
		return err == nil && string(got) == text
	}, eventually, tick, "%s on the mount never had %q", name, text)
}

// lists waits until a directory of the mount has these names.
func (s *scene) lists(t *testing.T, dir string, names ...string) {
	t.Helper()
	var got []string
	require.Eventually(t, func() bool {
		entries, err := os.ReadDir(filepath.Join(s.mnt, dir))
		got = got[:0]
		for _, e := range entries {
			got = append(got, e.Name())
		}
		return err == nil && assert.ObjectsAreEqual(names, got)
	}, eventually, tick, "%s on the mount never had %q", dir, names)
}

func TestKernelOpensFiles(t *testing.T) {
	eachWatch(t, func(t *testing.T, change func(*Options)) {
		s := mount(t, change, withFiles(t, map[string]string{"a": "first", "dir/b": "second"}))
		s.shows(t, "a", "first")
		s.shows(t, "dir/b", "second")
		s.lists(t, "", "a", "dir")
		s.lists(t, "dir", "b")
		assert.Zero(t, s.fs.lastHandle.Load(), "the kernel still asks at each open")
		require.Eventually(t, func() bool { return s.fs.kept.count() == 0 }, eventually, tick, "opens stay for ever")
		s.shows(t, "a", "first")

		_, err := os.OpenFile(filepath.Join(s.mnt, "a"), os.O_RDWR, 0)
		assert.ErrorIs(t, err, unix.EROFS)
		assert.ErrorIs(t, os.Remove(filepath.Join(s.mnt, "a")), unix.EROFS)
		_, err = os.ReadFile(filepath.Join(s.mnt, "none"))
		assert.ErrorIs(t, err, os.ErrNotExist)
	})
}

// count returns the number of opens.
func (o *keptOpens) count() (n int) {
	for i := range o.shards {
		s := &o.shards[i]
		s.mu.Lock()
		n += len(s.m)
		s.mu.Unlock()
	}
	return n
}

func TestKernelOpensSeeChangesInSource(t *testing.T) {
	eachWatch(t, func(t *testing.T, change func(*Options)) {
		s := mount(t, change, withFiles(t, map[string]string{"a": "first", "gone": "x", "dir/b": "b",
			"dir/sub/c": "c"}))
		in := func(name string) string { return filepath.Join(s.source, name) }
		s.shows(t, "a", "first")
		s.shows(t, "dir/sub/c", "c")
		s.lists(t, "", "a", "dir", "gone")
		s.lists(t, "dir", "b", "sub")
		_, err := os.Stat(filepath.Join(s.mnt, "new"))
		require.ErrorIs(t, err, os.ErrNotExist)

		require.NoError(t, os.WriteFile(in("a"), []byte("other"), 0644)) // of the same size
		s.shows(t, "a", "other")
		require.NoError(t, os.WriteFile(in("a"), []byte("longer than before"), 0644))
		s.shows(t, "a", "longer than before")
		require.NoError(t, os.Truncate(in("a"), 3))
		s.shows(t, "a", "lon")

		require.NoError(t, os.WriteFile(in("new"), []byte("new"), 0644)) // cached as a name that does not exist
		s.shows(t, "new", "new")
		require.NoError(t, os.Remove(in("gone")))
		s.lists(t, "", "a", "dir", "new")
		require.NoError(t, os.WriteFile(in("dir/c"), nil, 0644))
		s.lists(t, "dir", "b", "c", "sub")
		require.NoError(t, os.Rename(in("dir/b"), in("dir/sub/d")))
		s.lists(t, "dir", "c", "sub")
		s.lists(t, "dir/sub", "c", "d")
		s.shows(t, "dir/sub/d", "b")

		require.NoError(t, os.WriteFile(in("replaced"), []byte("by rename"), 0644))
		require.NoError(t, os.Rename(in("replaced"), in("a")))
		s.shows(t, "a", "by rename")

		require.NoError(t, os.Chmod(in("a"), 0600))
		require.Eventually(t, func() bool {
			info, err := os.Stat(filepath.Join(s.mnt, "a"))
			return err == nil && info.Mode().Perm() == 0600
		}, eventually, tick, "the mode stays")
	})
}

// TestKernelOpensOfOpenFiles: a program that has a file open and mapped sees changes in it, and keeps it when its name
// goes.
func TestKernelOpensOfOpenFiles(t *testing.T) {
	eachWatch(t, func(t *testing.T, change func(*Options)) {
		s := mount(t, change, withFiles(t, map[string]string{"a": "first"}))
		f, err := os.Open(filepath.Join(s.mnt, "a"))
		require.NoError(t, err)
		defer f.Close()
		reads := func() string {
			_, _ = f.Stat() // without events, the kernel learns of changes when it asks for attributes
			var buf [32]byte
			n, _ := f.ReadAt(buf[:], 0)
			return string(buf[:n])
		}
		require.Equal(t, "first", reads())
		source, err := os.OpenFile(filepath.Join(s.source, "a"), os.O_RDWR, 0)
		require.NoError(t, err)
		defer source.Close()
		for i := range 20 {
			text := fmt.Sprintf("%0*d", 5+i/2, i)
			_, err = source.WriteAt([]byte(text), 0)
			require.NoError(t, err)
			require.Eventually(t, func() bool { return reads() == text }, eventually, tick,
				"the open file never had %q", text)
		}
		s.fs.kept.closeIdle()
		s.fs.kept.closeIdle()
		off, err := unix.Seek(int(f.Fd()), 0, unix.SEEK_HOLE)
		require.NoError(t, err)
		assert.EqualValues(t, 14, off)
	})
}

// TestKernelOpensWhenEventsAreLost: if the kernel drops events, everything counts as changed once, and timeouts are
// those of other mounts from then on.
func TestKernelOpensWhenEventsAreLost(t *testing.T) {
	requireRoot(t)
	s := mount(t, kernelOpens, withFiles(t, map[string]string{"a": "first"}))
	if s.fs.tree == nil {
		t.Skip("this filesystem is not watched")
	}
	s.shows(t, "a", "first")
	s.lists(t, "", "a")
	require.Equal(t, watchedTimeout, s.fs.keeps(s.fs.root, defaultTimeout))
	s.fs.tree.file.Close() // as if reading had failed
	require.Eventually(t, func() bool { return !s.fs.tree.alive.Load() }, eventually, tick)
	require.Equal(t, defaultTimeout, s.fs.keeps(s.fs.root, defaultTimeout))
	<-s.fs.tree.ended
	time.Sleep(10 * tick) // so that mtime moves on filesystems with coarse clocks
	require.NoError(t, os.WriteFile(filepath.Join(s.source, "a"), []byte("other"), 0644))
	require.NoError(t, os.WriteFile(filepath.Join(s.source, "b"), nil, 0644))
	s.shows(t, "a", "other")
	s.lists(t, "", "a", "b")
}

func TestTreeEventsAreParsed(t *testing.T) {
	for _, b := range [][]byte{nil, {1}, make([]byte, unix.FAN_EVENT_METADATA_LEN), make([]byte, 100)} {
		for range parseTree(b) {
			t.Fatal("nothing was reported")
		}
	}
}
