package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/fs"
)

const mib = 1 << 20

// fullPlace is a place whose SOURCE is a filesystem of 8 MiB of its own.
func fullPlace(t *testing.T) place {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to mount a small filesystem")
	}
	p := newPlace(t)
	require.NoError(t, unix.Mount("tmpfs", p.source, "tmpfs", 0, "size=8m"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(p.source, unix.MNT_DETACH)) })
	return p
}

// fill takes all room of SOURCE, and returns a function that gives it back.
func (p place) fill(t *testing.T) (room func()) {
	t.Helper()
	name := filepath.Join(p.source, "filler")
	f, err := os.Create(name)
	require.NoError(t, err)
	for err == nil {
		_, err = f.Write(make([]byte, 64<<10))
	}
	require.ErrorIs(t, err, syscall.ENOSPC)
	require.NoError(t, f.Close())
	return func() { require.NoError(t, os.Remove(name)) }
}

// releases has a device store into a new file, of which home has nothing, and release it.
func (p place) releases(t *testing.T, name string, size int64) *gaiafs.Mapping {
	t.Helper()
	f, err := os.Create(filepath.Join(p.mountpoint, name))
	require.NoError(t, err)
	require.NoError(t, f.Truncate(size))
	m, err := gaiafs.Map(f, 0, size, gaiafs.ProtRead|gaiafs.ProtWrite, 0)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	copy(m.Bytes(), bytes.Repeat([]byte("x"), int(size)))
	_, err = m.Release(0, size)
	require.NoError(t, err)
	return m
}

func (p place) requireHome(t *testing.T, name string, size int) {
	t.Helper()
	got, err := os.ReadFile(filepath.Join(p.source, name))
	require.NoError(t, err)
	require.Equal(t, size, bytes.Count(got, []byte("x")))
}

func (p place) isMounted(t *testing.T) bool {
	t.Helper()
	mounted, err := fs.IsMount(p.mountpoint)
	require.NoError(t, err)
	return mounted
}

func (p place) logged(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(p.log)
	require.NoError(t, err)
	return string(text)
}

func (p place) status(t *testing.T) (s statusDocument) {
	t.Helper()
	r := gaiafsCommand(t, "status", "--json", p.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.NoError(t, json.Unmarshal([]byte(r.out), &s))
	return s
}

// While SOURCE is full the mount cannot be taken away, by whatever means ask first. The bytes arrive when there is room.
func TestUmountRefusesWhileSourceIsFull(t *testing.T) {
	for _, daemon := range []bool{false, true} {
		p := fullPlace(t)
		flags := []string{"--gpus=emulated:1", "--gpu-memory=64M", "--log-file=" + p.log}
		if daemon {
			r := gaiafsCommand(t, append(append([]string{"mount", "--daemon"}, flags...), p.source, p.mountpoint)...)
			require.Equal(t, exitOK, r.code, r.err)
		} else {
			mountAt(t, p, flags[:2]...)
		}
		pid := p.status(t).Mount.PID
		room := p.fill(t)
		require.NoError(t, p.releases(t, "out", 3*mib).Close())
		require.Equal(t, syscall.EBUSY, unix.Unmount(p.mountpoint, 0), "umount(8), before anybody tried to bring the bytes home")
		r := gaiafsCommand(t, "umount", p.mountpoint)
		require.Equal(t, exitFailure, r.code)
		require.Contains(t, r.err, "is not unmounted")
		require.Contains(t, r.err, "3145728 bytes of out: no space left on device")
		require.True(t, p.isMounted(t))
		require.Equal(t, syscall.EBUSY, unix.Unmount(p.mountpoint, 0))
		s := p.status(t)
		require.Equal(t, int64(3*mib), s.Files[0].WaitingBytes)
		require.Contains(t, s.Files[0].Error, "no space left")
		require.Contains(t, gaiafsCommand(t, "status", p.mountpoint).out, "3.0 MiB wait to be written back: no space left")
		require.Contains(t, p.logged(t), "released bytes cannot be written back")

		room()
		require.Eventually(t, func() bool { return p.status(t).Files[0].WaitingBytes == 0 }, 30*time.Second, time.Millisecond)
		p.requireHome(t, "out", 3*mib)
		require.True(t, runs(pid))
		r = gaiafsCommand(t, "umount", p.mountpoint)
		require.Equal(t, exitOK, r.code, r.err)
		require.False(t, daemon && runs(pid))
		require.Contains(t, p.logged(t), "unmounted by gaiafs umount")
	}
}

// The daemon is a child of this process, which does not wait for it: the verdict comes another way.
func TestUmountForceNamesWhatIsLost(t *testing.T) {
	p := fullPlace(t)
	s := mountAt(t, p, "--gpus=emulated:1", "--gpu-memory=64M")
	require.NoError(t, p.releases(t, "kept", mib).Close())
	require.NoError(t, syncFile(filepath.Join(p.mountpoint, "kept")))
	p.fill(t)
	require.NoError(t, p.releases(t, "out", 3*mib).Close())
	r := gaiafsCommand(t, "umount", "--force", p.mountpoint)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "bytes are lost: 3145728 bytes of out that devices wrote are lost: no space left on device")
	require.False(t, p.isMounted(t))
	require.Equal(t, exitFailure, s.end(t))
	p.requireHome(t, "kept", mib)
}

func syncFile(name string) error {
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// SIGTERM is no other than umount: it does not lose bytes in silence. The mount stays in service meanwhile.
func TestSigtermWaitsForRoom(t *testing.T) {
	for _, again := range []bool{false, true} {
		p := fullPlace(t)
		s := mountAt(t, p, "--gpus=emulated:1", "--gpu-memory=64M")
		room := p.fill(t)
		m := p.releases(t, "out", 3*mib)
		s.signal(t, syscall.SIGTERM)
		require.Eventually(t, func() bool { return strings.Contains(p.logged(t), "this process ends when") }, 30*time.Second, time.Millisecond)
		require.Contains(t, p.logged(t), "3145728 bytes of out: no space left on device")
		require.True(t, p.isMounted(t))
		require.Equal(t, int64(3*mib), p.status(t).Files[0].WaitingBytes)
		require.Equal(t, exitFailure, gaiafsCommand(t, "umount", p.mountpoint).code)
		if again {
			s.signal(t, syscall.SIGTERM)
			require.Equal(t, exitFailure, s.end(t))
			require.Contains(t, p.logged(t), "3145728 bytes of out that devices wrote are lost")
		} else {
			room()
			require.Equal(t, exitOK, s.end(t), p.logged(t))
			p.requireHome(t, "out", 3*mib)
		}
		require.False(t, p.isMounted(t))
		_ = m.Close()
	}
}

// A mount that was detached, which nobody can refuse, has a daemon that keeps the bytes until there is room.
func TestDaemonKeepsBytesOfADetachedMount(t *testing.T) {
	p := fullPlace(t)
	s := mountAt(t, p, "--gpus=emulated:1", "--gpu-memory=64M")
	room := p.fill(t)
	require.NoError(t, p.releases(t, "out", 3*mib).Close())
	require.NoError(t, unix.Unmount(p.mountpoint, unix.MNT_DETACH))
	require.Eventually(t, func() bool { return strings.Contains(p.logged(t), "cannot be written back") }, 30*time.Second, time.Millisecond)
	room()
	require.Equal(t, exitOK, s.end(t), p.logged(t))
	p.requireHome(t, "out", 3*mib)
}

// A daemon that is killed while it holds a detached mount ends: the descriptor of its own keeps nothing.
func TestKilledDaemonDoesNotHoldItself(t *testing.T) {
	p := fullPlace(t)
	s := mountAt(t, p, "--gpus=emulated:1", "--gpu-memory=64M", "--write-back")
	require.NoError(t, os.WriteFile(filepath.Join(p.mountpoint, "dirty"), make([]byte, mib), 0o600))
	p.fill(t)
	require.NoError(t, p.releases(t, "out", 3*mib).Close())
	require.NoError(t, unix.Unmount(p.mountpoint, unix.MNT_DETACH))
	require.NoError(t, s.cmd.Process.Kill())
	state, err := waitFor(s.cmd.Process, 30*time.Second)
	require.NoError(t, err)
	require.Equal(t, -1, state.ExitCode())
}
