package control

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestSocketModes(t *testing.T) {
	for _, allowOther := range []bool{false, true} {
		path := filepath.Join(t.TempDir(), "run", "s")
		l, err := listen(path, allowOther)
		require.NoError(t, err)
		st, err := os.Stat(path)
		require.NoError(t, err)
		dir, err := os.Stat(filepath.Dir(path))
		require.NoError(t, err)
		if allowOther {
			require.Equal(t, os.FileMode(0o666), st.Mode().Perm())
			require.Equal(t, os.FileMode(0o755), dir.Mode().Perm())
		} else {
			require.Equal(t, os.FileMode(0o600), st.Mode().Perm())
			require.Equal(t, os.FileMode(0o700), dir.Mode().Perm())
		}
		require.NoError(t, l.Close())
		_, err = os.Stat(path)
		require.ErrorIs(t, err, os.ErrNotExist, "Close removes the socket")
	}
}

func TestDirectoryOfAnEarlierMountIsOpened(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	l, err := listen(filepath.Join(dir, "private"), false)
	require.NoError(t, err)
	defer l.Close()
	shared, err := listen(filepath.Join(dir, "shared"), true)
	require.NoError(t, err)
	defer shared.Close()
	st, err := os.Stat(dir)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o711), st.Mode().Perm())
}

func TestStaleSocketIsReplacedAndLiveOneRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := listen(path, false)
	require.NoError(t, err)
	_, err = listen(path, false)
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	require.ErrorContains(t, err, "another gaiafs")

	l.SetUnlinkOnClose(false) // as after a kill
	require.NoError(t, l.Close())
	_, err = os.Stat(path)
	require.NoError(t, err)
	l, err = listen(path, false)
	require.NoError(t, err)
	conn, err := net.Dial("unixpacket", path)
	require.NoError(t, err)
	conn.Close()
	require.NoError(t, l.Close())
}

// The daemon is stopped, for example by SIGSTOP.
func TestSocketWithAFullQueueIsLive(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.NoError(t, unix.Bind(fd, &unix.SockaddrUnix{Name: path}))
	require.NoError(t, unix.Listen(fd, 1))
	for range 5 {
		_, err = listen(path, false)
		require.ErrorIs(t, err, syscall.EADDRINUSE)
		require.ErrorIs(t, RemoveStale(path), syscall.EADDRINUSE)
	}
	require.ErrorContains(t, err, "does not answer")
	require.FileExists(t, path)
}

func TestRemoveStale(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	path := filepath.Join(dir, "s")
	require.NoError(t, RemoveStale(path))
	require.NoDirExists(t, dir)
	l, err := listen(path, false)
	require.NoError(t, err)
	require.ErrorIs(t, RemoveStale(path), syscall.EADDRINUSE)
	l.SetUnlinkOnClose(false) // as after a kill
	require.NoError(t, l.Close())
	require.NoError(t, RemoveStale(path))
	require.NoFileExists(t, path)
	require.NoError(t, os.WriteFile(path, []byte("keep"), 0o600))
	require.ErrorIs(t, RemoveStale(path), syscall.EEXIST)
	require.FileExists(t, path)
}

func TestSocketPathsThatAreRefused(t *testing.T) {
	dir := t.TempDir()
	_, err := listen("relative/s", false)
	require.ErrorContains(t, err, "must be absolute")
	_, err = listen(filepath.Join(dir, strings.Repeat("x", maxSocketPath)), false)
	require.ErrorContains(t, err, "shorter")
	require.Error(t, CheckSocket("relative/s"))
	require.NoError(t, CheckSocket("/"+strings.Repeat("x", maxSocketPath-1)))
	require.EqualError(t, CheckSocket("/"+strings.Repeat("x", maxSocketPath)),
		"the path has 104 bytes, but at most 103 are possible: choose a shorter one")
	_, err = listen(filepath.Join(dir, "no", "such", "s"), false)
	require.ErrorIs(t, err, os.ErrNotExist)

	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, []byte("keep"), 0o600))
	_, err = listen(file, false)
	require.ErrorIs(t, err, syscall.EEXIST)
	kept, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "keep", string(kept))

	open := filepath.Join(dir, "open")
	require.NoError(t, os.Mkdir(open, 0o777))
	require.NoError(t, os.Chmod(open, 0o777))
	_, err = listen(filepath.Join(open, "s"), false)
	require.ErrorContains(t, err, "could replace the socket")
	require.NoError(t, os.Chmod(open, os.ModeSticky|0o777)) // as /tmp is
	l, err := listen(filepath.Join(open, "s"), false)
	require.NoError(t, err)
	l.Close()
}

// In a directory where everybody may make names, a directory or link that somebody else made is not used, wherever it
// leads. Nothing is changed where it leads.
func TestDirectoriesOfOthersAreRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to make files of another user")
	}
	const other = 4711
	tmp := t.TempDir()
	require.NoError(t, os.Chmod(tmp, os.ModeSticky|0o777))
	mine := filepath.Join(t.TempDir(), "mine")
	require.NoError(t, os.Mkdir(mine, 0o700))
	for name, makes := range map[string]func(path string) error{
		"directory": func(path string) error {
			return errors.Join(os.Mkdir(path, 0o755),
				os.Chown(path, other, other))
		},
		"link to one of ours": func(path string) error {
			return errors.Join(os.Symlink(mine, path),
				os.Lchown(path, other, other))
		},
		"link to nothing": func(path string) error {
			return errors.Join(os.Symlink(filepath.Join(mine, "new"), path), os.Lchown(path, other, other))
		},
	} {
		for _, allowOther := range []bool{false, true} {
			dir := filepath.Join(tmp, name)
			require.NoError(t, makes(dir))
			_, err := listen(filepath.Join(dir, "s"), allowOther)
			require.ErrorContains(t, err, "user 4711", name)
			require.ErrorContains(t, err, "--socket chooses another place")
			require.NoError(t, os.Remove(dir))
		}
	}
	entries, err := os.ReadDir(mine)
	require.NoError(t, err)
	require.Empty(t, entries)
	st, err := os.Stat(mine)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), st.Mode().Perm())

	// A link of the user's own is followed.
	require.NoError(t, os.Symlink(mine, filepath.Join(tmp, "own")))
	l, err := listen(filepath.Join(tmp, "own", "s"), false)
	require.NoError(t, err)
	require.NoError(t, l.Close())
}

func TestDefaultSocketFitsTheIoctl(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", "/run/user/"+strings.Repeat("9", 200))
	a, b, another := DefaultSocket("/mnt/a", 0), DefaultSocket("/mnt/b", 0), DefaultSocket("/mnt/a", 1)
	require.NotEqual(t, a, b)
	require.NotEqual(t, a, another)
	require.Equal(t, a, DefaultSocket("/mnt/a", 0))
	for _, path := range []string{a, another} {
		require.LessOrEqual(t, len(path), maxSocketPath)
		require.True(t, filepath.IsAbs(path))
	}
}
