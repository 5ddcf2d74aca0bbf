package main

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// An error names its file once. It does not repeat the library's prefix, which the command prints itself.
func TestErrorsNameAFileOnce(t *testing.T) {
	refused := &gaiafs.Error{Op: "profile", Errno: syscall.EPERM, Text: "only root may"}
	for _, c := range []struct {
		part string
		err  error
		says string
	}{
		{"", pathError("dir/model", syscall.EACCES),
			"dir/model: permission denied: you need permission to read a file to see it or " +
				"bring it to devices"},
		{"gpu0", pathError("dir/model", syscall.ENOENT), "dir/model does not exist: check the spelling"},
		{"gpu0", syscall.EIO, "dir/model: gpu0: input/output error"},
		{"", refused, "dir/model: operation not permitted: only root may"},
		{"gpu1", fmt.Errorf("half of it: %w",
			refused), "dir/model: gpu1: half of it: gaiafs: profile: operation not permitted: only root may"},
	} {
		err := about("dir/model", c.part, c.err)
		require.EqualError(t, err, c.says)
		require.ErrorIs(t, err, c.err)
	}
	require.NoError(t, about("dir/model", "", nil))
}

// In a chroot, the root directory may be in no mount that /proc shows.
func TestPathsInAChroot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, for a chroot")
	}
	p := newPlace(t)
	root := filepath.Dir(p.mountpoint)
	program, err := os.ReadFile("/proc/self/exe")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(root, "gaiafs"), program, 0o755))
	for _, name := range []string{"dev", "proc", "usr", "lib", "lib64"} { // what the program needs to run
		at := filepath.Join(root, name)
		if target, err := os.Readlink("/" + name); err == nil {
			require.NoError(t, os.Symlink(target, at))
			continue
		}
		require.NoError(t, os.Mkdir(at, 0o755))
		if err := unix.Mount("/"+name, at, "", unix.MS_BIND, ""); err != nil {
			require.ErrorIs(t, err, syscall.ENOENT, name)
			continue
		}
		t.Cleanup(func() { require.NoError(t, unix.Unmount(at, 0)) })
	}
	require.NoError(t, os.WriteFile(filepath.Join(p.source, "file"), nil, 0o600))
	require.NoError(t, os.Mkdir(filepath.Join(p.source, "inside"), 0o755))
	require.NoError(t, os.Symlink("/mnt/file", filepath.Join(root, "link")))
	s := mountAt(t, p, "--gpus=none")
	inside := func(args ...string) result {
		cmd := command(t, args...)
		cmd.Path, cmd.Dir = "/gaiafs", "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
		return execute(t, cmd)
	}
	r := inside("info", "/gaiafs")
	require.Contains(t, r.err, "/gaiafs is not on a mount of gaiafs")
	r = inside("info", "/link")
	require.NotContains(t, r.err, "is not on a mount of gaiafs", "a link into the mount")
	r = inside("mount", "--gpus=none", "/source", "/source/inside")
	require.Equal(t, exitFailure, r.code, r.err)
	require.Contains(t, r.err, "MOUNTPOINT /source/inside is inside SOURCE /source")
	require.Equal(t, exitOK, gaiafsCommand(t, "umount", s.mountpoint).code)
	require.Equal(t, exitOK, s.end(t))
}
