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

	"github.com/gaiafs/gaiafs/pagecache"
)

// losses are the ways in which an open file or directory loses its name in SOURCE.
var losses = []struct {
	name string
	lose func(t *testing.T, path string)
}{
	{"removed", func(t *testing.T, path string) { require.NoError(t, os.RemoveAll(path)) }},
	{"replaced", func(t *testing.T, path string) {
		require.NoError(t, os.WriteFile(path+".new", []byte("another"), 0644))
		require.NoError(t, unix.Renameat2(unix.AT_FDCWD, path+".new", unix.AT_FDCWD, path, unix.RENAME_EXCHANGE))
		require.NoError(t, os.RemoveAll(path+".new"))
	}},
	{"renamed", func(t *testing.T, path string) { require.NoError(t, os.Rename(path, path+".moved")) }},
	{"removed with its directory", func(t *testing.T, path string) {
		require.NoError(t,
			os.RemoveAll(filepath.Dir(path)))
	}},
	{"moved with its directory", func(t *testing.T, path string) {
		require.NoError(t, os.Rename(filepath.Dir(path), filepath.Dir(path)+".moved"))
	}},
}

// TestOpenFileLivesOnWithoutItsName does everything that a program can do to an open file that lost its name in SOURCE.
func TestOpenFileLivesOnWithoutItsName(t *testing.T) {
	for _, l := range losses {
		for _, cached := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, names cached %v", l.name, cached), func(t *testing.T) {
				timeouts := uncached
				if cached {
					timeouts = func(o *Options) { o.AttrTimeout, o.EntryTimeout = -1, time.Hour }
				}
				bothModesWithDevices(t, func(t *testing.T, s *scene, cache *pagecache.Cache, n *notary) {
					require.NoError(t, os.Mkdir(filepath.Join(s.mnt, "d"), 0755))
					path, home := filepath.Join(s.mnt, "d/f"), filepath.Join(s.source, "d/f")
					require.NoError(t, os.WriteFile(path, []byte("0123456789"), 0644))
					f, err := os.OpenFile(path, os.O_RDWR, 0)
					require.NoError(t, err)
					defer f.Close()
					l.lose(t, home)
					useWithoutName(t, cache, n, f)
					if cached && l.name == "moved with its directory" {
						return // the kernel does not ask where the directory is
					}
					want := "ENOENT"
					if l.name == "replaced" {
						want = "another"
					}
					got, err := os.ReadFile(path)
					if err != nil {
						got = []byte("ENOENT")
						assert.ErrorIs(t, err, os.ErrNotExist)
					}
					assert.Equal(t, want, string(got[:min(10, len(got))]), "by its name")
				}, timeouts)
			})
		}
	}
}

func useWithoutName(t *testing.T, cache *pagecache.Cache, n *notary, f *os.File) {
	fd := int(f.Fd())
	_, err := f.Stat()
	require.NoError(t, err, "fstat")
	assert.NoError(t, unix.Ftruncate(fd, 8192), "ftruncate")
	assert.NoError(t, unix.Fchmod(fd, 0600), "fchmod")
	assert.NoError(t, unix.Fchown(fd, os.Getuid(), os.Getgid()), "fchown")
	assert.NoError(t, unix.UtimesNanoAt(fd, "", []unix.Timespec{{Sec: 5}, {Sec: 6}}, unix.AT_EMPTY_PATH), "futimens")
	st, err := f.Stat()
	require.NoError(t, err)
	assert.EqualValues(t, 8192, st.Size())
	assert.EqualValues(t, 0600, st.Mode().Perm())
	assert.True(t, time.Unix(6, 0).Equal(st.ModTime()))
	if err := unix.Fsetxattr(fd, "user.x", []byte("y"), 0); err != unix.EOPNOTSUPP {
		assert.NoError(t, err, "fsetxattr")
		b := make([]byte, 8)
		got, err := unix.Fgetxattr(fd, "user.x", b)
		assert.NoError(t, err, "fgetxattr")
		assert.Equal(t, "y", string(b[:max(got, 0)]))
		_, err = unix.Flistxattr(fd, b)
		assert.NoError(t, err, "flistxattr")
		assert.NoError(t, unix.Fremovexattr(fd, "user.x"), "fremovexattr")
	}
	_, err = f.WriteAt([]byte("ab"), 100)
	assert.NoError(t, err)
	assert.NoError(t, unix.Fallocate(fd, 0, 0, 8192))
	assert.NoError(t, f.Sync(), "fsync")

	w := mapOn(t, cache, n, f, 0, 8192)
	assert.Equal(t, "ab", w.loadAt(t, 100, 2))
	w.store(t, 4096, []byte("GPU"))
	w.release(t, 8192)
	w.close(t)
	b := make([]byte, 3)
	_, err = f.ReadAt(b, 4096)
	assert.NoError(t, err)
	assert.Equal(t, "GPU", string(b))
	again, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
	if assert.NoError(t, err, "opened again through the descriptor") {
		_, err = again.ReadAt(b, 4096)
		assert.NoError(t, err)
		assert.Equal(t, "GPU", string(b))
		assert.NoError(t, again.Close())
	}
	assert.NoError(t, f.Sync())
}

// TestOpenDirectoryLivesOnWithoutItsName does the same for directories. A removed directory allows little.
func TestOpenDirectoryLivesOnWithoutItsName(t *testing.T) {
	for _, l := range losses {
		t.Run(l.name, func(t *testing.T) {
			s := mount(t, uncached)
			require.NoError(t, os.MkdirAll(filepath.Join(s.mnt, "p/d/sub"), 0755))
			d, err := os.Open(filepath.Join(s.mnt, "p/d"))
			require.NoError(t, err)
			defer d.Close()
			fd := int(d.Fd())
			l.lose(t, filepath.Join(s.source, "p/d"))
			_, err = d.Stat()
			assert.NoError(t, err, "fstat")
			assert.NoError(t, unix.Fchmod(fd, 0700), "fchmod")
			st, err := d.Stat()
			require.NoError(t, err)
			assert.EqualValues(t, 0700, st.Mode().Perm())
			names, err := d.Readdirnames(-1)
			var sub unix.Stat_t
			found := unix.Fstatat(fd, "sub", &sub, 0)
			made := unix.Mkdirat(fd, "made", 0755)
			if l.name == "renamed" || l.name == "moved with its directory" {
				assert.NoError(t, err)
				assert.Equal(t, []string{"sub"}, names)
				assert.NoError(t, found)
				assert.NoError(t, made)
			} else {
				assert.ErrorIs(t, err, unix.ENOENT, "as on any filesystem")
				assert.ErrorIs(t, found, unix.ENOENT)
				assert.ErrorIs(t, made, unix.ENOENT)
			}
			assert.NoError(t, d.Sync(), "fsync")
		})
	}
}
