package mounttest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// backings are the filesystems for SOURCE. Each function returns a fresh, empty directory, or says why it cannot make
// one.
var backings = []struct {
	name string
	make func(t testing.TB) (dir string, missing string)
}{
	{"ext4", func(t testing.TB) (string, string) { return loop(t, "ext4", 128<<20) }},
	{"xfs", func(t testing.TB) (string, string) { return loop(t, "xfs", 512<<20) }},
	{"tmpfs", func(t testing.TB) (string, string) { return attach(t, "tmpfs", "tmpfs", 0, "size=256m") }},
	{"overlay", overlay},
}

// loop makes a filesystem in a file and mounts it.
func loop(t testing.TB, kind string, size int64) (dir, missing string) {
	program := "mkfs." + kind
	if _, err := exec.LookPath(program); err != nil {
		return "", "there is no " + program
	}
	if os.Getuid() != 0 {
		return "", "only root may mount a filesystem that is in a file"
	}
	image := filepath.Join(t.TempDir(), "image")
	f, err := os.Create(image)
	require.NoError(t, err)
	require.NoError(t, f.Truncate(size))
	require.NoError(t, f.Close())
	arguments := []string{"-q", image}
	if kind == "ext4" {
		// with smaller blocks, SEEK_DATA and SEEK_HOLE return the same offset there
		arguments = []string{"-q", "-b", "4096", image}
	}
	out, err := exec.Command(program, arguments...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	dir = t.TempDir()
	if out, err := exec.Command("mount", "-o", "loop", image, dir).CombinedOutput(); err != nil {
		return "", fmt.Sprintf("%s cannot be mounted here: %s", kind, strings.TrimSpace(string(out)))
	}
	t.Cleanup(func() { detach(t, dir) })
	return dir, ""
}

func attach(t testing.TB, source, kind string, flags uintptr, options string) (dir, missing string) {
	dir = t.TempDir()
	if err := unix.Mount(source, dir, kind, flags, options); err != nil {
		return "", fmt.Sprintf("%s cannot be mounted here: %v", kind, err)
	}
	t.Cleanup(func() { detach(t, dir) })
	return dir, ""
}

// overlay mounts an overlay. Its upper directory is on a filesystem that supports that; another overlay does not.
func overlay(t testing.TB) (dir, missing string) {
	below, missing := attach(t, "tmpfs", "tmpfs", 0, "size=256m")
	if missing != "" {
		return "", missing
	}
	var names []any
	for _, name := range []string{"lower", "upper", "work"} {
		names = append(names, filepath.Join(below, name))
		require.NoError(t, os.Mkdir(filepath.Join(below, name), 0o755))
	}
	return attach(t, "overlay", "overlay", 0, fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", names...))
}

func detach(t testing.TB, dir string) {
	if err := unix.Unmount(dir, 0); err != nil {
		t.Errorf("unmounting %s: %v", dir, err)
		_ = unix.Unmount(dir, unix.MNT_DETACH)
	}
}
