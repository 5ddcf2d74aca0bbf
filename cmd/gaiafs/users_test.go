package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/fs"
)

func TestUsersOfADirectory(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	require.Empty(t, mountUsers(dir))
	own := fmt.Sprintf("/proc/%d", os.Getpid())

	name := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(name, make([]byte, 4096), 0o600))
	f, err := os.Open(name)
	require.NoError(t, err)
	require.Equal(t, "open file "+name, usage(own, dir))
	memory, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.Equal(t, "mapped file "+name, usage(own, dir))
	require.NoError(t, unix.Munmap(memory))
	require.Empty(t, usage(own, dir))
	require.Empty(t, usage(own, dir[:len(dir)-1]), "a directory with a common prefix is another directory")

	cmd := exec.Command("sh", "-c", "echo; read x")
	cmd.Dir = dir
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	_, err = out.Read(make([]byte, 1))
	require.NoError(t, err)
	users := mountUsers(dir)
	require.Equal(t, []user{{pid: cmd.Process.Pid, command: "sh", what: "working directory"}}, users)
	require.Equal(t, fmt.Sprintf("sh (process %d, working directory)", cmd.Process.Pid), describe(users))
	require.NoError(t, in.Close())
	require.Error(t, cmd.Wait(), "read got the end of its input")

	require.Contains(t, describe(make([]user, 8)), "and 3 more")
	require.Contains(t, describe(nil), "cannot be seen")
}

// TestMountedElsewhereKnowsTheSource: after a mount has ended, another one may get its device number.
func TestMountedElsewhereKnowsTheSource(t *testing.T) {
	s := mountForeground(t, "--gpus=none")
	m, err := fs.MountAt(s.mountpoint)
	require.NoError(t, err)
	require.NotEmpty(t, mountedElsewhere(m.Device, ""))
	require.NotEmpty(t, mountedElsewhere(m.Device, s.source))
	require.Empty(t, mountedElsewhere(m.Device, s.source+"2"))
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}
