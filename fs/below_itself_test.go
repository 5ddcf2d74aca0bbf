package fs

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// requireTree checks that the locators of all nodes lead to the root, or to a node that has none.
func (s *scene) requireTree(t *testing.T) {
	t.Helper()
	nodes := s.fs.table.byID.all()
	for _, n := range nodes {
		at := n
		for steps := 0; at != nil; steps++ {
			require.LessOrEqual(t, steps, len(nodes)+1, "node %d is below itself", n.id)
			at.mu.Lock()
			parent := at.where.parent
			at.mu.Unlock()
			at = parent
		}
	}
}

// TestDirectoriesChangePlacesInSource: in SOURCE, a directory is moved into one that was below it, while a program on
// the mount has the lower one open.
func TestDirectoriesChangePlacesInSource(t *testing.T) {
	everyMode(t, func(t *testing.T, s *scene) {
		require.NoError(t, os.MkdirAll(filepath.Join(s.source, "outer/inner"), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(s.source, "outer/f"), []byte("text"), 0o644))
		require.Eventually(t, func() bool {
			_, err := os.Stat(filepath.Join(s.mnt, "outer/inner"))
			return err == nil
		}, eventually, tick)
		inner, err := unix.Open(filepath.Join(s.mnt, "outer/inner"), unix.O_RDONLY|unix.O_DIRECTORY, 0)
		require.NoError(t, err)
		defer unix.Close(inner)
		require.NoError(t, os.Rename(filepath.Join(s.source, "outer/inner"), filepath.Join(s.source, "inner")))
		require.NoError(t, os.Rename(filepath.Join(s.source, "outer"), filepath.Join(s.source, "inner/outer")))
		var st unix.Stat_t
		_ = unix.Fstatat(inner, "outer", &st, 0) // ELOOP until the kernel learns that inner has moved
		s.requireTree(t)
		require.Eventually(t, func() bool {
			text, err := os.ReadFile(filepath.Join(s.mnt, "inner/outer/f"))
			return err == nil && string(text) == "text"
		}, eventually, tick)
		require.NoError(t, unix.Fstatat(inner, "outer/f", &st, 0))
		s.requireTree(t)
	})
}

// TestDirectoryMountedBelowItself: on a filesystem below SOURCE, a directory is also mounted inside itself.
func TestDirectoryMountedBelowItself(t *testing.T) {
	requireRoot(t)
	everyMode(t, func(t *testing.T, s *scene) {
		at := filepath.Join(s.source, "at")
		require.NoError(t, os.Mkdir(at, 0o755))
		require.NoError(t, unix.Mount("tmpfs", at, "tmpfs", 0, "size=1M,mode=755"))
		t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
		outer, inner := filepath.Join(at, "outer"), filepath.Join(at, "outer/middle/inner")
		require.NoError(t, os.MkdirAll(inner, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(outer, "f"), []byte("text"), 0o644))
		require.NoError(t, unix.Mount(outer, inner, "", unix.MS_BIND, ""))
		t.Cleanup(func() { _ = unix.Unmount(inner, unix.MNT_DETACH) })
		shows := func() bool {
			text, err := os.ReadFile(filepath.Join(s.mnt, "at/outer/f"))
			return err == nil && string(text) == "text"
		}
		require.Eventually(t, shows, eventually, tick)
		_, err := os.Stat(filepath.Join(s.mnt, "at/outer/middle/inner"))
		assert.ErrorIs(t, err, unix.ELOOP, "the kernel has each directory in one place")
		s.requireTree(t)
		require.Eventually(t, func() bool { return unix.Unmount(inner, unix.UMOUNT_NOFOLLOW) == nil }, eventually, tick)
		require.Eventually(t, func() bool {
			_, err := os.Stat(filepath.Join(s.mnt, "at/outer/middle/inner"))
			return err == nil && shows()
		}, eventually, tick)
		s.requireTree(t)
	})
}

// TestDirectoryMountedInItself: a directory of which the mount knows no entry yet is mounted on one of its own.
func TestDirectoryMountedInItself(t *testing.T) {
	requireRoot(t)
	everyMode(t, func(t *testing.T, s *scene) {
		at := filepath.Join(s.source, "at")
		require.NoError(t, os.Mkdir(at, 0o755))
		require.NoError(t, unix.Mount("tmpfs", at, "tmpfs", 0, "size=1M,mode=755"))
		t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
		outer, inner := filepath.Join(at, "outer"), filepath.Join(at, "outer/inner")
		require.NoError(t, os.MkdirAll(inner, 0o755))
		require.NoError(t, unix.Mount(outer, inner, "", unix.MS_BIND, ""))
		t.Cleanup(func() { _ = unix.Unmount(inner, unix.MNT_DETACH) })
		require.Eventually(t, func() bool {
			_, err := os.Stat(filepath.Join(s.mnt, "at/outer"))
			return err == nil
		}, eventually, tick)
		_, err := os.Stat(filepath.Join(s.mnt, "at/outer/inner"))
		assert.ErrorIs(t, err, unix.ELOOP)
		s.requireTree(t)
	})
}
