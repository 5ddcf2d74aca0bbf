package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/pagecache"
)

// A file is brought to devices, found there, compared with the backing file, shown, and evicted.
func TestWarmInfoEvict(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:2", "--gpu-memory=16M")
	path := filepath.Join(s.mountpoint, "weights")
	require.NoError(t, os.WriteFile(path, make([]byte, 3*mib+5), 0o600))
	ok := func(args ...string) string {
		t.Helper()
		r := gaiafsCommand(t, args...)
		require.Equal(t, exitOK, r.code, r.err)
		return r.out
	}
	r := gaiafsCommand(t, "warm", "--check", "--device=1", path)
	require.Equal(t, exitFailure, r.code)
	require.Equal(t, path+": gpu1: 0 B current, 3.0 MiB absent\n", r.out)
	require.Equal(t, path+": 3.0 MiB on gpu1, 0 B of it was there before\n", ok("warm", "--device=1", path))
	require.Equal(t, path+": 3.0 MiB on gpu1, 3.0 MiB of it was there before\n", ok("warm", "--device", "1", path))
	require.Equal(t, path+": gpu1: 3.0 MiB current\n", ok("warm", "--check", "--device=1", path))
	require.Equal(t, path+": gpu1: 3.0 MiB as in the backing file\n", ok("warm", "--verify", "--device=1", path))
	require.Equal(t, path+"\n  size    3.0 MiB\n  gpu1    3.0 MiB current\n  memory  4.0 MiB of devices, counted once\n",
		ok("info", path))
	ok("warm", "--recursive", s.mountpoint)
	ok("warm", "--check", path)
	ok("warm", "--device=host", path)

	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	m, err := gaiafs.Map(f, 0, 2*mib, gaiafs.ProtRead|gaiafs.ProtWrite, 0)
	require.NoError(t, err)
	_, err = m.WriteAt([]byte("new"), 4096)
	require.NoError(t, err)
	_, err = m.Release(0, m.Len())
	require.NoError(t, err)
	require.NoError(t, f.Sync())
	require.Regexp(t, "gpu1 +3.0 MiB current, 4.0 KiB stale\n", ok("info", path))
	require.Regexp(t, fmt.Sprintf("mapped by +.*, process %d of user 0: 2.0 MiB at 0 on gpu0, to write\n", os.Getpid()),
		ok("info", path))
	var all []fileInfo
	require.NoError(t, json.Unmarshal([]byte(ok("info", "--json", path)), &all))
	require.Equal(t, int64(8*mib), all[0].MemoryBytes)
	require.Equal(t, int64(4096), all[0].Residency[1].Stale)
	require.Equal(t, path+": 6.0 MiB freed; 2.0 MiB stays because programs map it\n", ok("evict", path))
	require.NoError(t, errors.Join(m.Close(), f.Close()))
	require.Equal(t, path+": 2.0 MiB freed\n", ok("evict", path))
	require.Regexp(t, "devices +none has any of it\n", ok("info", path))

	for _, name := range []string{"a", "b", "c"} {
		require.NoError(t, os.WriteFile(filepath.Join(s.mountpoint, name), make([]byte, mib), 0o600))
	}
	ok("warm", "--device=0", filepath.Join(s.mountpoint, "b"))
	require.Equal(t, filepath.Join(s.mountpoint, "b")+": 2.0 MiB freed\n3 other files had nothing there\n",
		ok("evict", "-r", s.mountpoint))
	require.Equal(t, "4 files had nothing there\n", ok("evict", "-r", s.mountpoint))
	require.Equal(t, path+": 0 B freed\n", ok("evict", path), "a file that was named")
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

// warm reports what does not fit, and brings what does.
func TestWarmMoreThanFits(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=8M")
	for _, name := range []string{"a", "b", "c"} {
		require.NoError(t, os.WriteFile(filepath.Join(s.mountpoint, name), make([]byte, 3*mib), 0o600))
	}
	r := gaiafsCommand(t, "warm", "-r", s.mountpoint)
	require.Equal(t, exitFailure, r.code)
	require.Equal(t, "gaiafs: gpu0: 12 MiB are needed for 3 files, and 8.0 MiB of its 8.0 MiB are neither mapped by programs nor "+
		"pinned: 6.0 MiB of 2 files fit, and the others were left out; give the mount more memory with 'gaiafs set MOUNTPOINT "+
		"gpu-memory=SIZE', or name fewer\n", r.err)
	require.Equal(t, exitOK, gaiafsCommand(t, "warm", "--check", s.mountpoint+"/a", s.mountpoint+"/b").code)
	require.Equal(t, exitFailure, gaiafsCommand(t, "warm", "--check", s.mountpoint+"/c").code)
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"warm", s.mountpoint}, exitUsage, "is a directory: --recursive takes the files below it"},
		{[]string{"warm", s.source + "/a"}, exitFailure, "is not on a mount of gaiafs"},
		{[]string{"info", s.mountpoint + "/missing"}, exitFailure, "does not exist"},
		{[]string{"warm", "--device=3", s.mountpoint + "/a"}, exitFailure, "the mount has no device 3"},
		{[]string{"warm", "--device=x", s.mountpoint + "/a"}, exitUsage,
			"neither a device's number, nor all, nor host"},
		{[]string{"warm", "--check", "--verify", s.mountpoint + "/a"}, exitUsage,
			"give --check or --verify, not both"},
		{[]string{"warm", "--check", "--device=gpu0", s.mountpoint + "/b"}, exitOK, ""},
		{[]string{"evict", "--device=3", s.mountpoint + "/a"}, exitFailure, "the mount has no device 3: 'gaiafs status"},
		{[]string{"status", "a", "b"}, exitUsage, "takes one MOUNTPOINT, or none; 2 arguments were given"},
		{[]string{"version", "a"}, exitUsage, "takes no arguments; 1 argument was given"},
		{[]string{"trace", s.mountpoint}, exitUsage, "'gaiafs trace --live " + s.mountpoint + "' shows what"},
		{[]string{"trace", "--live", s.mountpoint, "--kind=reed"}, exitUsage, `there is no kind "reed"; there are abort-group, acquire, `},
		{[]string{"evict"}, exitUsage, "needs the PATH"},
	} {
		r := gaiafsCommand(t, c.args...)
		require.Equal(t, c.code, r.code, "%v: %s", c.args, r.err)
		require.Contains(t, r.err, c.says, "%v", c.args)
	}
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

// Users who may not read a file learn nothing about it and cannot bring it to devices. Users who may read it see only
// their own mappings, and cannot evict it.
func TestFilesOfOthers(t *testing.T) {
	const alice = 65534
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=16M", "--allow-other")
	require.NoError(t, os.WriteFile(filepath.Join(s.mountpoint, "secret"), make([]byte, 4096), 0o600))
	shared := filepath.Join(s.mountpoint, "shared")
	require.NoError(t, os.WriteFile(shared, make([]byte, 4096), 0o644))
	for dir := s.mountpoint; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		require.NoError(t, os.Chmod(dir, 0o755))
	}
	f, err := os.Open(shared)
	require.NoError(t, err)
	m, err := gaiafs.Map(f, 0, 4096, gaiafs.ProtRead, 0)
	require.NoError(t, err)
	as := func(args ...string) result { return execute(t, asUser(t, alice, command(t, args...))) }
	for _, name := range []string{"info", "warm", "evict"} {
		r := as(name, filepath.Join(s.mountpoint, "secret"))
		require.Equal(t, exitFailure, r.code)
		require.Contains(t, r.err, "permission denied", name)
	}
	closed := filepath.Join(s.mountpoint, "closed")
	require.NoError(t, os.Mkdir(closed, 0o700))
	for _, args := range [][]string{{"info", "--recursive"}, {"info", "--json", "-r"}, {"warm", "-r"}, {"warm", "-r", "--check"}} {
		r := as(append(args, s.mountpoint)...)
		require.Equal(t, exitFailure, r.code)
		require.Contains(t, r.out, shared, "%v goes on with what she may read", args)
		require.NotContains(t, r.out, "secret")
		for _, path := range []string{closed, filepath.Join(s.mountpoint, "secret")} {
			require.Contains(t, r.err, "gaiafs: "+path+": permission denied", "%v", args)
		}
		require.Equal(t, 2, strings.Count(r.err, "\n"), "%v: %s", args, r.err)
	}
	require.Equal(t, exitOK, gaiafsCommand(t, "evict", shared).code)
	r := as("info", shared)
	require.Equal(t, exitOK, r.code, r.err)
	require.Regexp(t, "mapped by +1 mapping of other users\n", r.out)
	require.NotContains(t, r.out, fmt.Sprint(os.Getpid()))
	require.Equal(t, exitOK, as("warm", shared).code)
	r = as("evict", shared)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "only root and the user who mounted may evict files")
	require.NoError(t, errors.Join(m.Close(), f.Close()))
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

func TestProgressText(t *testing.T) {
	require.Equal(t, "1.0 GiB of 4.0 GiB (25 %), 512 MiB/s, 6s left", progressText(1<<30, 4<<30, 2*time.Second))
	require.Equal(t, "0 B of 4.0 GiB", progressText(0, 4<<30, time.Second))
}

// On a terminal, progress is one line, which fits. A dumb terminal, a pipe and a file get separate lines.
func TestProgressOnTerminals(t *testing.T) {
	screen, tty := terminal(t)
	defer tty.Close()
	size := unix.Winsize{Row: 24, Col: 40}
	require.NoError(t, unix.IoctlSetWinsize(int(tty.Fd()), unix.TIOCSWINSZ, &size))
	said := func() string {
		b := make([]byte, 1<<10)
		n, err := screen.Read(b)
		require.NoError(t, err)
		return string(b[:n])
	}
	for kind, want := range map[string]string{
		"xterm": "\r\x1b[K" + strings.Repeat("x", 38) + "…",
		"dumb":  strings.Repeat("x", 80) + "\r\n",
	} {
		t.Setenv("TERM", kind)
		newProgress(tty, 1).say(strings.Repeat("x", 80))
		require.Equal(t, want, said(), kind)
	}
	var pipe bytes.Buffer
	newProgress(&pipe, 1).say("x")
	require.Equal(t, "x\n", pipe.String())
}

func TestFitting(t *testing.T) {
	files := []target{{"a", 1}, {"b", 9 * mib}, {"c", 2 * mib}}
	nothing := func(target) (int64, error) { return 0, nil }
	fit, need, room, err := fitting(files, pagecache.DeviceStatus{MemoryBytes: 10 * mib, MappedBytes: 2 * mib}, nothing)
	require.NoError(t, err)
	require.Equal(t, []target{{"a", 1}, {"c", 2 * mib}}, fit)
	require.EqualValues(t, 14*mib, need)
	require.EqualValues(t, 8*mib, room)

	// What stays there needs no additional memory.
	all := func(f target) (int64, error) { return 2 * mib, nil }
	fit, _, _, err = fitting(files[2:], pagecache.DeviceStatus{MemoryBytes: 4 * mib, PinnedIdleBytes: 4 * mib}, all)
	require.NoError(t, err)
	require.Len(t, fit, 1)
}

// info sums up several files.
func TestInfoSumsUp(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:2", "--gpu-memory=64M")
	require.NoError(t, os.Mkdir(filepath.Join(s.source, "d"), 0o755))
	for name, size := range map[string]int{"a": mib, "d/b": 2 * mib, "d/c": 5 * mib} {
		require.NoError(t, os.WriteFile(filepath.Join(s.source, name), make([]byte, size), 0o600))
	}
	in := func(name string) string { return filepath.Join(s.mountpoint, name) }
	require.Equal(t, exitOK, gaiafsCommand(t, "warm", "--device=1", in("a"), in("d/b")).code)
	r := gaiafsCommand(t, "info", "--recursive", s.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.True(t, strings.HasSuffix(r.out, "\n\n3 files\n  size  8.0 MiB\n  gpu1  3.0 MiB current, 5.0 MiB absent\n"), r.out)
	require.NotContains(t, gaiafsCommand(t, "info", in("a")).out, "1 file\n")
	require.Equal(t, exitOK, gaiafsCommand(t, "umount", s.mountpoint).code)
	require.Equal(t, exitOK, s.end(t))
}
