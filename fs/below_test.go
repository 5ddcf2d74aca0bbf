package fs

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// lookAround looks at everything below a directory, and makes every kind of change in it.
const lookAround = `
	mkdir -p a/b/c; echo one >a/b/c/f; ln a/b/c/f a/g; ln -s g a/link; mv a/g a/h; cat a/h a/b/c/f; : >a/h
	ls -lR . >/dev/null; chmod 750 a/b a/h; touch -d @0 a/b/c; cp a/b/c/f a/i; rm a/i; find . -type f | xargs cat
	readlink a/link; truncate -s 5000 a/h; (cd a/b/c && ls -l ../../h); mkdir gone; rmdir gone`

// nameLater makes a file without a name and then gives it one.
func (s *scene) nameLater(t *testing.T, dir, name string) {
	t.Helper()
	dir = filepath.Join(s.mnt, dir)
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR, 0o644)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.Eventually(t, func() bool { // it keeps a descriptor as long as it has no name
		s.fs.descriptors.mu.Lock()
		defer s.fs.descriptors.mu.Unlock()
		return len(s.fs.descriptors.below) == 0
	}, eventually, tick)
	require.NoError(t, unix.Linkat(unix.AT_FDCWD, procPath(fd), unix.AT_FDCWD, filepath.Join(dir, name),
		unix.AT_SYMLINK_FOLLOW))
}

// TestMountBelowSourceGoes: a filesystem mounted below SOURCE can be unmounted after programs looked at everything in
// it on the mount.
func TestMountBelowSourceGoes(t *testing.T) {
	requireRoot(t)
	test := func(t *testing.T, s *scene) {
		for name, prepare := range map[string]func(at string) error{
			"tmpfs": func(at string) error { return unix.Mount("tmpfs", at, "tmpfs", 0, "size=64M,mode=755") },
			"bind": func(at string) error {
				bound := filepath.Join(s.source, "bound")
				require.NoError(t, os.Mkdir(bound, 0o755))
				return unix.Mount(bound, at, "", unix.MS_BIND, "")
			},
		} {
			at := filepath.Join(s.source, "dir", name)
			require.NoError(t, os.MkdirAll(at, 0o755))
			require.NoError(t, prepare(at))
			t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
			require.Eventually(t, func() bool { // the kernel may have cached that the directory does not exist
				_, err := os.Stat(filepath.Join(s.mnt, "dir", name))
				return err == nil
			}, eventually, tick)
			sh(t, filepath.Join(s.mnt, "dir", name), lookAround)
			s.nameLater(t, filepath.Join("dir", name), "named")
			assert.Eventually(t, func() bool { // the daemon learns only after close(2) that a file was closed
				return unix.Unmount(at, unix.UMOUNT_NOFOLLOW) == nil
			}, eventually, tick, name)
		}
	}
	everyMode(t, test)
	t.Run("watched", func(t *testing.T) { test(t, mountWatched(t)) })
}

// TestMountBelowSourceShows: if a filesystem is mounted below SOURCE, on a directory that the kernel knows, it shows
// long before the kernel would ask again. The same holds for unmounting it.
func TestMountBelowSourceShows(t *testing.T) {
	s := mountWatched(t, withFiles(t, map[string]string{"dir/at/f": "before"}))
	s.shows(t, "dir/at/f", "before")
	s.stays(t, "dir/at/f")
	at := filepath.Join(s.source, "dir/at")
	require.NoError(t, unix.Mount("tmpfs", at, "tmpfs", 0, "size=1M,mode=755"))
	mounted := true
	t.Cleanup(func() {
		if mounted {
			_ = unix.Unmount(at, unix.MNT_DETACH)
		}
	})
	require.NoError(t, os.WriteFile(filepath.Join(at, "f"), []byte("nested"), 0o644))
	s.shows(t, "dir/at/f", "nested")
	require.Eventually(t, func() bool { return unix.Unmount(at, unix.UMOUNT_NOFOLLOW) == nil }, eventually, tick)
	mounted = false
	s.shows(t, "dir/at/f", "before")
}

// TestFileMountedBelowSourceGoes: a file of SOURCE is mounted on another one, and unmounted, while the kernel has both
// names cached. The right file shows under the other name.
func TestFileMountedBelowSourceGoes(t *testing.T) {
	s := mountWatched(t, withFiles(t, map[string]string{"dir/one": "one", "dir/two": "two"}))
	s.shows(t, "dir/two", "two")
	s.stays(t, "dir/two")
	at := filepath.Join(s.source, "dir/two")
	require.NoError(t, unix.Mount(filepath.Join(s.source, "dir/one"), at, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW) })
	s.shows(t, "dir/two", "one")
	s.shows(t, "dir/one", "one")
	s.stays(t, "dir/two")
	s.stays(t, "dir/one")
	require.Eventually(t, func() bool { return unix.Unmount(at, unix.UMOUNT_NOFOLLOW) == nil }, eventually, tick)
	s.shows(t, "dir/two", "two")
}

// TestSpaceBelowSource: statfs(2) in a filesystem mounted below SOURCE reports its space.
func TestSpaceBelowSource(t *testing.T) {
	requireRoot(t)
	everyMode(t, func(t *testing.T, s *scene) {
		at := filepath.Join(s.source, "disk")
		require.NoError(t, os.Mkdir(at, 0o755))
		require.NoError(t, unix.Mount("tmpfs", at, "tmpfs", 0, "size=1M"))
		t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
		sh(t, at, "mkdir dir; echo >dir/file")
		size := func(path string) uint64 {
			var st unix.Statfs_t
			require.NoError(t, unix.Statfs(path, &st))
			return st.Blocks * uint64(st.Bsize)
		}
		require.Eventually(t, func() bool {
			_, err := os.Stat(filepath.Join(s.mnt, "disk/dir/file"))
			return err == nil
		}, eventually, tick)
		for _, name := range []string{"disk", "disk/dir", "disk/dir/file"} {
			assert.EqualValues(t, 1<<20, size(filepath.Join(s.mnt, name)), name)
		}
		assert.Equal(t, size(s.source), size(s.mnt))
		f, err := os.Create(filepath.Join(s.mnt, "gone"))
		require.NoError(t, err)
		defer f.Close()
		sh(t, s.source, "rm gone")
		var st unix.Statfs_t
		require.NoError(t, unix.Fstatfs(int(f.Fd()), &st))
		assert.Equal(t, size(s.source), st.Blocks*uint64(st.Bsize))
	})
}
