package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/internal/testdisk"
)

// attribute returns the value of an extended attribute, or "".
func attribute(t *testing.T, path, name string) string {
	t.Helper()
	value := make([]byte, 100)
	n, err := unix.Getxattr(path, name, value)
	if errors.Is(err, syscall.ENODATA) {
		return ""
	}
	require.NoError(t, err)
	return string(value[:n])
}

// warmFiles makes files on a mount and brings them to its devices.
func warmFiles(t *testing.T, size int, paths ...string) {
	t.Helper()
	for _, path := range paths {
		require.NoError(t, os.WriteFile(path, make([]byte, size), 0o600))
		require.Equal(t, exitOK, gaiafsCommand(t, "warm", path).code)
	}
}

// A pinned file stays on the device until it is unpinned, even if others need the memory. evict says who pins it, and
// SOURCE keeps the pin.
func TestPinKeepsFiles(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=8M")
	in := func(name string) string { return filepath.Join(s.mountpoint, name) }
	ok := func(args ...string) string {
		t.Helper()
		r := gaiafsCommand(t, args...)
		require.Equal(t, exitOK, r.code, r.err)
		return r.out
	}
	require.NoError(t, os.WriteFile(in("model"), make([]byte, 4*mib), 0o600))
	require.Equal(t, in("model")+": 4.0 MiB on gpu0, 0 B of it was there before\n"+in("model")+": pinned on all devices\n",
		ok("pin", in("model")))
	require.Equal(t, "all", attribute(t, filepath.Join(s.source, "model"), pinAttribute))
	require.Contains(t, ok("info", in("model")), "pinned  on all devices, on account of user 0\n")
	require.Contains(t, ok("status", s.mountpoint), "stays\n  gpu0  4.0 MiB  on account of user 0\n")
	warmFiles(t, 4*mib, in("a"), in("b"), in("c"))
	require.Contains(t, ok("warm", "--check", in("model")), "4.0 MiB current\n")
	require.Equal(t, in("model")+": 0 B freed; 4.0 MiB stays: pinned on account of user 0 ('gaiafs unpin' undoes that)\n",
		ok("evict", in("model")))
	require.Contains(t, ok("pin", in("model")), "4.0 MiB of it was there before", "it needs no more room")

	require.NoError(t, os.WriteFile(in("large"), make([]byte, 6*mib), 0o600))
	r := gaiafsCommand(t, "pin", in("large"))
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "6.0 MiB are needed for 1 file, and 4.0 MiB of its 8.0 MiB are neither mapped by programs nor pinned: "+
		"nothing was pinned")
	require.ErrorIs(t, unix.Setxattr(in("large"), pinAttribute, []byte("0"), 0), syscall.ENOSPC)
	f, err := os.Open(in("large"))
	require.NoError(t, err)
	_, err = gaiafs.Map(f, 0, 6*mib, gaiafs.ProtRead, 0)
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.ErrorContains(t, err, "4.0 MiB are pinned by user 0")

	require.Equal(t, in("model")+": unpinned\n", ok("unpin", in("model")))
	m, err := gaiafs.Map(f, 0, 6*mib, gaiafs.ProtRead, 0)
	require.NoError(t, err)
	require.NoError(t, errors.Join(m.Close(), f.Close()))
	require.Equal(t, exitFailure, gaiafsCommand(t, "warm", "--check", in("model")).code)
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

// A directory's pin applies to the files below it, except those with a pin of their own. A file that moves gets the pin
// of its new directory.
func TestPinsAreInherited(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:2", "--gpu-memory=8M")
	in := func(name string) string { return filepath.Join(s.mountpoint, name) }
	require.NoError(t, os.MkdirAll(in("models/small"), 0o755))
	pinned := func(path string) string {
		t.Helper()
		r := gaiafsCommand(t, "info", path)
		require.Equal(t, exitOK, r.code, r.err)
		return r.out
	}
	require.Equal(t, exitOK, gaiafsCommand(t, "pin", "--device=1", in("models")).code)
	warmFiles(t, 2*mib, in("models/small/a"), in("outside"))
	require.Contains(t, pinned(in("models/small/a")), "pinned  on gpu1,")
	require.NotContains(t, pinned(in("outside")), "pinned")
	require.Equal(t, "", attribute(t, in("models/small/a"), pinAttribute))

	require.NoError(t, unix.Setxattr(in("models/small/a"), pinAttribute, []byte("0,1"), 0))
	require.Contains(t, pinned(in("models/small/a")), "pinned  on gpu0, gpu1,")
	require.Equal(t, exitOK, gaiafsCommand(t, "unpin", in("models/small/a")).code)
	require.Equal(t, "none", attribute(t, in("models/small/a"), pinAttribute))
	require.NotContains(t, pinned(in("models/small/a")), "pinned")

	require.NoError(t, os.Rename(in("outside"), in("models/inside")))
	require.Contains(t, pinned(in("models/inside")), "pinned  on gpu1,")
	require.Equal(t, exitOK, gaiafsCommand(t, "unpin", in("models")).code)
	require.NotContains(t, pinned(in("models/inside")), "pinned")
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

// A rename reads the pins of what moves, and of nothing else: it takes no longer if devices hold many other files.
func TestPinsOfWhatMoves(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=8M")
	in := func(name string) string { return filepath.Join(s.mountpoint, name) }
	for _, dir := range []string{"models/small", "here", "there"} {
		require.NoError(t, os.MkdirAll(in(dir), 0o755))
	}
	warmFiles(t, 2*mib, in("models/small/a"), in("here/b"))
	pinned := func() bool {
		t.Helper()
		r := gaiafsCommand(t, "status", s.mountpoint)
		require.Equal(t, exitOK, r.code, r.err)
		return strings.Contains(r.out, "stays\n  gpu0  2.0 MiB  on account of")
	}
	// Nothing tells the mount of pins that are set in SOURCE.
	require.NoError(t, unix.Setxattr(filepath.Join(s.source, "models"), pinAttribute, []byte("all"), 0))
	require.False(t, pinned())
	require.NoError(t, os.Rename(in("here/b"), in("there/b")))
	require.False(t, pinned(), "another file was moved")
	require.NoError(t, os.Rename(in("there"), in("here/there")))
	require.False(t, pinned(), "another directory was moved")
	require.NoError(t, os.Rename(in("models"), in("here/models")))
	require.True(t, pinned(), "a directory above was moved")
	require.NoError(t, os.Rename(in("here/models/small/a"), in("a")))
	require.False(t, pinned(), "the file was moved out")
	require.NoError(t, unix.Renameat2(unix.AT_FDCWD, in("a"), unix.AT_FDCWD, in("here/models"), unix.RENAME_EXCHANGE))
	require.False(t, pinned())
	require.NoError(t, unix.Renameat2(unix.AT_FDCWD, in("here/there"), unix.AT_FDCWD, in("a/small"),
		unix.RENAME_EXCHANGE))
	require.True(t, pinned(), "a directory came in by an exchange")
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

// Attributes with the mount's own names are checked. Other attributes pass through.
func TestCacheAttributes(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=8M", "--allow-other")
	path := filepath.Join(s.mountpoint, "f")
	warmFiles(t, 2*mib, path)
	set := func(name, value string) error { return unix.Setxattr(path, name, []byte(value), 0) }
	require.NoError(t, set("user.mine", "1"))
	require.NoError(t, unix.Setxattr(filepath.Join(s.source, "f"), "user.gaiafs.other", []byte("1"), 0))
	require.NoError(t, set(pinAttribute, "0"))
	for name, value := range map[string]string{"user.gaiafs.other": "1", pinAttribute: "x", "user.gaiafs.": "",
		"user.gaiafs.evict": "all"} {
		require.ErrorIs(t, set(name, value), syscall.EINVAL, name)
	}
	require.ErrorIs(t, set(pinAttribute, "3"), syscall.ENODEV)
	_, err := unix.Getxattr(path, "user.gaiafs.other", nil)
	require.ErrorIs(t, err, syscall.EINVAL)
	require.ErrorIs(t, unix.Removexattr(path, "user.gaiafs.other"), syscall.EINVAL)
	names := make([]byte, 1000)
	n, err := unix.Listxattr(path, names)
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"user.mine", pinAttribute}, splitNames(names[:n]))

	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

func splitNames(list []byte) (names []string) {
	for name := range bytes.SplitSeq(bytes.TrimSuffix(list, []byte{0}), []byte{0}) {
		if !bytes.HasPrefix(name, []byte("security.")) {
			names = append(names, string(name))
		}
	}
	return names
}

// Pinning needs permission to write the file, and nobody can pin more than their share. On a read-only mount, the pin
// is set in SOURCE.
func TestPinsAreOfWhoMayWrite(t *testing.T) {
	const alice = 65534
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=8M", "--user-share=50", "--allow-other")
	path, own := filepath.Join(s.mountpoint, "f"), filepath.Join(s.mountpoint, "own")
	for dir := s.mountpoint; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		require.NoError(t, os.Chmod(dir, 0o755))
	}
	require.NoError(t, os.WriteFile(path, make([]byte, 2*mib), 0o644))
	require.NoError(t, os.WriteFile(own, make([]byte, 6*mib), 0o600))
	require.NoError(t, os.Chown(own, alice, alice))
	as := func(args ...string) result { return execute(t, asUser(t, alice, command(t, args...))) }
	r := as("pin", path)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "permission denied: pinning needs permission to write the file")
	r = as("pin", own)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "this exceeds what its owner may pin")
	require.NoError(t, os.Truncate(own, 4*mib))
	r = as("pin", own)
	require.Equal(t, exitOK, r.code, r.err)
	r = gaiafsCommand(t, "evict", own)
	require.Contains(t, r.out, "pinned on account of user 65534")
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))

	again := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=8M", "--read-only")
	require.NoError(t, os.WriteFile(filepath.Join(again.source, "f"), make([]byte, 2*mib), 0o644))
	shown := filepath.Join(again.mountpoint, "f")
	r = gaiafsCommand(t, "pin", shown)
	require.Equal(t, exitOK, r.code, r.err)
	require.Contains(t, gaiafsCommand(t, "info", shown).out, "pinned  on all devices")
	require.Equal(t, exitOK, gaiafsCommand(t, "unpin", shown).code)
	require.NotContains(t, gaiafsCommand(t, "info", shown).out, "pinned")
	again.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, again.end(t))
}

// TestHotFile: the pages of a file that is loaded again and again are locked without a pin, and commands say so. A
// write unlocks them.
func TestHotFile(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=32M", "--pinned-memory=64M")
	path := filepath.Join(s.mountpoint, "model")
	require.NoError(t, os.WriteFile(path, make([]byte, 20*mib), 0o600))
	run := func(args ...string) string {
		t.Helper()
		r := gaiafsCommand(t, args...)
		require.Equal(t, exitOK, r.code, r.err)
		return r.out
	}
	locked := func() bool {
		return strings.Contains(run("info", path),
			"locked   20 MiB of 20 MiB in the host's memory, because the file is loaded again and again\n")
	}
	require.Eventually(t, func() bool {
		run("warm", path)
		run("evict", path)
		return locked()
	}, time.Minute, time.Millisecond)
	run("warm", path)
	require.Contains(t, run("warm", "--verify", path), "20 MiB as in the backing file")
	status := run("status", s.mountpoint)
	require.Contains(t, status, "0 B spare; another 20 MiB for files that are loaded again and again\n")
	require.Contains(t, status, "20 MiB from where it is locked in memory")
	w, err := os.OpenFile(path, os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = w.WriteAt([]byte("changed"), 10*mib)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	require.False(t, locked())
	run("warm", path)
	require.Contains(t, run("warm", "--verify", path), "20 MiB as in the backing file")
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

// TestPinOnTheHostOfAnOverlay: devices get what the file has, although SOURCE is an overlay and the mount opened the
// file before its first write. Mappings of that descriptor show the earlier bytes for ever.
func TestPinOnTheHostOfAnOverlay(t *testing.T) {
	below, missing := testdisk.Mount(t, "ext4", 64*mib)
	if missing != "" {
		t.Skip(missing)
	}
	require.NoError(t, os.Mkdir(filepath.Join(below, "lower"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(below, "lower/model"), bytes.Repeat([]byte("A"), 4*mib), 0o644))
	p := newPlace(t)
	if missing := testdisk.Overlay(t, below, p.source); missing != "" {
		t.Skip(missing)
	}
	s := mountAt(t, p, "--gpus=emulated:1", "--gpu-memory=16M", "--pinned-memory=64M")
	path := filepath.Join(s.mountpoint, "model")
	f, err := os.Open(path)
	require.NoError(t, err)
	m, err := gaiafs.Map(f, 0, 4096, gaiafs.ProtRead, 0)
	require.NoError(t, err)
	w, err := os.OpenFile(path, os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = w.WriteAt([]byte("BBBB"), 3*mib)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	for _, args := range [][]string{{"pin", "--device=host", path}, {"warm", path}, {"warm", "--verify", path}} {
		r := gaiafsCommand(t, args...)
		require.Equal(t, exitOK, r.code, r.err)
	}
	require.Contains(t, gaiafsCommand(t, "info", "--json", path).out, `"locked_pages": 1`)
	require.NoError(t, m.Close())
	require.NoError(t, f.Close())
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

// A file that is pinned on the host is locked in the host's page cache. A change unlocks it for a while. The next mount
// locks it again.
func TestPinOnTheHost(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=8M", "--pinned-memory=64M")
	path := filepath.Join(s.mountpoint, "model")
	ok := func(args ...string) string {
		t.Helper()
		r := gaiafsCommand(t, args...)
		require.Equal(t, exitOK, r.code, r.err)
		return r.out
	}
	locked := func(at string) {
		t.Helper()
		require.Eventually(t, func() bool {
			return regexp.MustCompile("locked +4.0 MiB of 4.0 MiB in the host's memory\n").MatchString(ok("info", at))
		}, 20*time.Second, 50*time.Millisecond)
	}
	data := make([]byte, 4*mib)
	for i := range data {
		data[i] = byte(i*i>>10 + i)
	}
	require.NoError(t, os.WriteFile(path, data, 0o600))
	require.Equal(t, path+": 4.0 MiB locked in the host's memory\n"+path+": pinned on the host\n",
		ok("pin", "--device=host", path))
	require.Equal(t, "host", attribute(t, filepath.Join(s.source, "model"), pinAttribute))
	require.Regexp(t, "pinned +on the host, on account of user 0\n", ok("info", path))
	locked(path)
	require.Contains(t, ok("status", "--json", s.mountpoint), `"pinned_file_bytes": 16777216,`)
	require.Contains(t, ok("status", s.mountpoint),
		"Pinned memory: 16 MiB of 64 MiB; 16 MiB for files that are pinned on the host, 0 B for extents, 0 B spare")
	ok("warm", path)
	require.Contains(t, ok("warm", "--verify", path), "4.0 MiB as in the backing file")
	require.Contains(t, ok("info", "--json", path), `"locked_pages": 1024,`)

	require.NoError(t, os.WriteFile(path, data[mib:], 0o600)) // it becomes shorter, and longer
	require.NoError(t, os.WriteFile(path, data, 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(s.source, "model"), data, 0o600)) // the same in SOURCE
	ok("warm", path)
	require.Contains(t, ok("warm", "--verify", path), "4.0 MiB as in the backing file")
	locked(path)

	require.NoError(t, os.WriteFile(filepath.Join(s.mountpoint, "large"), nil, 0o600))
	require.NoError(t, os.Truncate(filepath.Join(s.mountpoint, "large"), 60*mib))
	r := gaiafsCommand(t, "pin", "--device=host", filepath.Join(s.mountpoint, "large"))
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "does not fit into the mount's pinned memory (64 MiB)")
	require.Equal(t, "", attribute(t, filepath.Join(s.mountpoint, "large"), pinAttribute))
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))

	again := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=8M", "--pinned-memory=64M", "--read-only")
	require.NoError(t, os.WriteFile(filepath.Join(again.source, "model"), data, 0o600))
	require.NoError(t, unix.Setxattr(filepath.Join(again.source, "model"), pinAttribute, []byte("host"), 0))
	path = filepath.Join(again.mountpoint, "model")
	ok("warm", path) // a program uses the file
	locked(path)
	require.Equal(t, path+": unpinned\n", ok("unpin", path))
	require.NotContains(t, ok("info", path), "locked")
	again.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, again.end(t))
}
