package testdisk

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Mount mounts a new filesystem of the given type and size until the test ends. missing says what a machine lacks that
// cannot do that.
func Mount(t testing.TB, kind string, size int64) (dir, missing string) {
	t.Helper()
	image, missing := Make(t, kind, size)
	if missing != "" {
		return "", missing
	}
	dir = t.TempDir()
	return dir, Attach(t, image, dir)
}

// Make makes a filesystem of the given type and size in a file. Arguments are for mkfs. missing is as for Mount.
func Make(t testing.TB, kind string, size int64, arguments ...string) (image, missing string) {
	t.Helper()
	program := "mkfs." + kind
	if _, err := exec.LookPath(program); err != nil {
		return "", "there is no " + program
	}
	if os.Geteuid() != 0 {
		return "", "only root may mount a filesystem that is in a file"
	}
	image = filepath.Join(t.TempDir(), "image")
	require.NoError(t, os.WriteFile(image, nil, 0o600))
	require.NoError(t, os.Truncate(image, size))
	if kind == "ext4" {
		// with smaller blocks, SEEK_DATA and SEEK_HOLE return the same offset there
		arguments = append([]string{"-b", "4096"}, arguments...)
	}
	out, err := exec.Command(program, append(append([]string{"-q"}, arguments...), image)...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return image, ""
}

// Attach mounts the filesystem in an image at dir until the test ends. Options are as for mount -o. missing is as for
// Mount.
func Attach(t testing.TB, image, dir string, options ...string) (missing string) {
	t.Helper()
	with := strings.Join(append([]string{"loop"}, options...), ",")
	if out, err := exec.Command("mount", "-o", with, image, dir).CombinedOutput(); err != nil {
		return fmt.Sprintf("a filesystem in a file cannot be mounted here: %s", strings.TrimSpace(string(out)))
	}
	t.Cleanup(func() { Detach(t, dir) })
	return ""
}

// Overlay mounts an overlay at dir until the test ends. Its directories are in below, and made if missing: "lower", which
// may have files, "upper" and "work". missing is as for Mount.
func Overlay(t testing.TB, below, dir string) (missing string) {
	t.Helper()
	var names []any
	for _, name := range []string{"lower", "upper", "work"} {
		names = append(names, filepath.Join(below, name))
		require.NoError(t, os.MkdirAll(filepath.Join(below, name), 0o755))
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", names...)
	if err := unix.Mount("overlay", dir, "overlay", 0, options); err != nil {
		return fmt.Sprintf("overlay cannot be mounted here: %v", err)
	}
	t.Cleanup(func() { Detach(t, dir) })
	return ""
}

// Detach unmounts what is mounted at dir. If it is in use, the test fails. Tests may have unmounted it before.
func Detach(t testing.TB, dir string) {
	t.Helper()
	if err := unix.Unmount(dir, 0); err != nil && !errors.Is(err, unix.EINVAL) {
		t.Errorf("unmounting %s: %v", dir, err)
		_ = unix.Unmount(dir, unix.MNT_DETACH)
	}
}
