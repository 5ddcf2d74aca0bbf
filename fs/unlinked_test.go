package fs

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/pagecache"
)

// TestSpaceOfRemovedFilesIsFreeAtOnce repeatedly writes a file that takes more than half of SOURCE, and removes it.
func TestSpaceOfRemovedFilesIsFreeAtOnce(t *testing.T) {
	const size = 24 << 20
	bytes := bytes.Repeat([]byte("x"), size*5/8)
	for _, kind := range []string{"tmpfs", "ext4"} {
		for name, remove := range map[string]func(path string) error{
			"unlink":      os.Remove,
			"rename over": func(path string) error { return os.Rename(path+".empty", path) },
		} {
			t.Run(kind+", "+name, func(t *testing.T) {
				everyModeWithDevices(t, func(t *testing.T, s *scene, cache *pagecache.Cache, n *notary) {
					for round := range 40 {
						path := filepath.Join(s.mnt, "f")
						require.NoError(t, os.WriteFile(path+".empty", nil, 0644))
						f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_TRUNC, 0644)
						require.NoError(t, err)
						_, err = f.Write(bytes)
						require.NoError(t, err, "round %d", round)
						if s.WriteBack() {
							require.NoError(t, f.Sync(), "round %d", round)
						}
						if round%4 == 0 {
							w := mapOn(t, cache, n, f, 0, 4096)
							w.store(t, 0, []byte("gpu"))
							w.close(t)
						}
						require.NoError(t, f.Close())
						require.NoError(t, remove(path))
					}
				}, sourceOn(t, kind, size))
			})
		}
	}
}

// TestSpaceThatIsBeingGivenBack asks for space while another goroutine lets a removed file go, and after that.
func TestSpaceThatIsBeingGivenBack(t *testing.T) {
	s := mount(t)
	r := &s.fs.removed
	for name, during := range map[string]func(calls int){
		"longer than the call": func(calls int) {
			switch calls {
			case 1:
				r.leave()
			case 3:
				r.stay(true)
			}
		},
		"within the call": func(calls int) {
			if calls == 1 {
				r.leave()
				r.stay(true)
			}
		},
	} {
		calls := 0
		require.NoError(t, s.fs.spend(0, func() error {
			if r.left.Load() > 0 && r.leaving.Load() == 0 && calls > 0 {
				return nil
			}
			calls++
			during(calls)
			return unix.ENOSPC
		}), name)
		r.left.Store(0)
	}
	calls := 0
	require.ErrorIs(t, s.fs.spend(0, func() error { calls++; return unix.ENOSPC }), unix.ENOSPC)
	require.Equal(t, 1, calls)
}

// TestRemovedFileThatWasLookedUp removes a file that a program has found but not opened yet. It can still be opened.
func TestRemovedFileThatWasLookedUp(t *testing.T) {
	bothModes(t, func(t *testing.T, s *scene) {
		for name, remove := range map[string]func(path string) error{
			"unlink":      os.Remove,
			"rename over": func(path string) error { return os.Rename(path+".empty", path) },
		} {
			path := filepath.Join(s.mnt, "f")
			require.NoError(t, os.WriteFile(path+".empty", nil, 0644))
			require.NoError(t, os.WriteFile(path, []byte("bytes"), 0644))
			fd, err := unix.Open(path, unix.O_PATH, 0)
			require.NoError(t, err)
			require.NoError(t, remove(path))
			got, err := os.ReadFile(procPath(fd))
			require.NoError(t, err, name)
			assert.Equal(t, "bytes", string(got))
			require.NoError(t, os.WriteFile(procPath(fd), []byte("more bytes"), 0))
			var st unix.Stat_t
			require.NoError(t, unix.Fstat(fd, &st))
			assert.EqualValues(t, 10, st.Size)
			require.NoError(t, unix.Close(fd))
		}
	})
}

// TestRemovedInSourceIsLetGo removes files in SOURCE that only the daemon uses.
func TestRemovedInSourceIsLetGo(t *testing.T) {
	bothModesWithDevices(t, func(t *testing.T, s *scene, cache *pagecache.Cache, n *notary) {
		const size = 8 << 20
		used := func() int64 {
			var st unix.Statfs_t
			require.NoError(t, unix.Statfs(s.source, &st))
			return int64(st.Blocks-st.Bfree) * st.Bsize
		}
		empty := used()
		f, err := os.OpenFile(filepath.Join(s.mnt, "f"), os.O_CREATE|os.O_RDWR, 0644)
		require.NoError(t, err)
		defer f.Close()
		_, err = f.Write(make([]byte, size))
		require.NoError(t, err)
		require.NoError(t, f.Sync())
		w := mapOn(t, cache, n, f, 0, 2<<20)
		require.NoError(t, os.Chmod(f.Name(), 0600)) // gives the node a descriptor
		require.NoError(t, os.Remove(filepath.Join(s.source, "f")))

		w.store(t, 0, []byte("gpu"))
		w.release(t, 2<<20)
		w.close(t)
		b := make([]byte, 3)
		_, err = f.ReadAt(b, 0)
		require.NoError(t, err)
		assert.Equal(t, "gpu", string(b), "while it is open it stays")
		assert.GreaterOrEqual(t, used(), empty+size)
		require.NoError(t, f.Close())
		assert.Eventually(t, func() bool { return used() < empty+size }, eventually, tick, "blocks")
		assert.Eventually(t, func() bool { return n.devices[0].Used() == 0 }, eventually, tick, "device memory")
	}, sourceOn(t, "tmpfs", 64<<20))
}

// TestRemovedWhileInUse removes, through the mount, a file that a device maps and a file that is open.
func TestRemovedWhileInUse(t *testing.T) {
	everyModeWithDevices(t, func(t *testing.T, s *scene, cache *pagecache.Cache, n *notary) {
		path := filepath.Join(s.mnt, "f")
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0644)
		require.NoError(t, err)
		require.NoError(t, f.Truncate(8192))
		w := mapOn(t, cache, n, f, 0, 8192)
		require.NoError(t, os.Link(path, path+".link"))
		require.NoError(t, os.Remove(path))
		w.store(t, 0, []byte("one"))
		w.release(t, 8192)
		got, err := os.ReadFile(path + ".link")
		require.NoError(t, err)
		assert.Equal(t, "one", string(got[:3]), "another name is left")
		require.NoError(t, os.Remove(path+".link"))
		w.store(t, 0, []byte("two"))
		w.release(t, 8192)
		b := make([]byte, 3)
		_, err = f.ReadAt(b, 0)
		require.NoError(t, err)
		assert.Equal(t, "two", string(b))
		_, err = f.Stat()
		require.NoError(t, err)
		require.NoError(t, f.Chmod(0600))
		require.NoError(t, f.Close())
		w.store(t, 0, []byte("three"))
		w.release(t, 8192)
		assert.Equal(t, "three", w.load(t, 5), "the mapping is left")
		w.close(t)
		assert.Eventually(t, func() bool { return n.devices[0].Used() == 0 }, eventually, tick)
	})
}

// TestSyncAfterRemovals: the kernel sends the times of files that it caches writes of, also of files that programs have
// removed. That is no failure.
func TestSyncAfterRemovals(t *testing.T) {
	everyMode(t, func(t *testing.T, s *scene) {
		root, err := os.Open(s.mnt)
		require.NoError(t, err)
		defer root.Close()
		for range 2 * maxRemoved {
			path := filepath.Join(s.mnt, "f")
			require.NoError(t, os.WriteFile(path, []byte("text"), 0o644))
			require.NoError(t, os.Remove(path))
		}
		require.NoError(t, unix.Syncfs(int(root.Fd())))
	})
}
