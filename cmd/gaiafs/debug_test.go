package main

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// unpacked returns the files in an archive of debug.
func unpacked(t *testing.T, path string) map[string]string {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	require.NoError(t, err)
	files := make(map[string]string)
	for r := tar.NewReader(z); ; {
		head, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		require.NoError(t, err)
		content, err := io.ReadAll(r)
		require.NoError(t, err)
		files[filepath.Base(head.Name)] = string(content)
	}
}

// A directory that is no mount has no diagnostics, and no archive.
func TestDebugNeedsAMount(t *testing.T) {
	archive := filepath.Join(t.TempDir(), "a.tar.gz")
	for path, says := range map[string]string{t.TempDir(): "is not a mountpoint of gaiafs", "/": "is not a mountpoint"} {
		r := gaiafsCommand(t, "debug", path, "-o", archive)
		require.Equal(t, exitFailure, r.code)
		require.Contains(t, r.err, says)
		require.NoFileExists(t, archive)
	}
}

// An archive has diagnostics, and no contents of files. Profiles are for the owner.
func TestDebugAndProfile(t *testing.T) {
	p := newPlace(t)
	r := gaiafsCommand(t, "mount", "--daemon", "--gpus=emulated:1", "--gpu-memory=16M", "--log-file="+p.log, p.source,
		p.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.NoError(t, os.WriteFile(filepath.Join(p.mountpoint, "file"), []byte("a secret"), 0o600))
	archive := filepath.Join(t.TempDir(), "a.tar.gz")
	r = gaiafsCommand(t, "debug", p.mountpoint, "-o", archive)
	require.Equal(t, exitOK, r.code, r.err)
	require.Empty(t, r.err)
	files := unpacked(t, archive)
	for name, has := range map[string]string{"version.txt": "gaiafs ", "doctor.txt": "kernel",
		"status.json": p.mountpoint,
		"command.txt": "--gpus=emulated:1", "limits.txt": "Max open files", "log.txt": "msg=mounted",
		"stacks.txt": "goroutine ", "heap.pprof": "\x1f\x8b"} {
		require.Contains(t, files[name], has, name)
		require.NotContains(t, files[name], "a secret", name)
	}
	require.NotContains(t, files, "errors.txt")
	r = gaiafsCommand(t, "debug", p.mountpoint, "-o", archive)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "exists: remove it")
	r = gaiafsCommand(t, "profile", p.mountpoint, "-o", "-", "--for", "200ms")
	require.Equal(t, exitOK, r.code, r.err)
	require.Equal(t, "\x1f\x8b", r.out[:2])
	r = gaiafsCommand(t, "profile", p.mountpoint, "-o", "-", "--kind=stacks")
	require.Contains(t, r.out, "goroutine ")
	require.Equal(t, exitOK, gaiafsCommand(t, "umount", p.mountpoint).code)
	r = gaiafsCommand(t, "profile", p.mountpoint, "-o", archive+".pprof")
	require.Equal(t, exitFailure, r.code)
	require.NoFileExists(t, archive+".pprof")

	s := mountForeground(t, "--gpus=none", "--allow-other")
	for dir := s.mountpoint; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		require.NoError(t, os.Chmod(dir, 0o755))
	}
	r = execute(t, asUser(t, 65534, command(t, "profile", s.mountpoint, "-o", "-")))
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "only root and the user who mounted may profile the daemon")
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}
