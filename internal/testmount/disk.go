package testmount

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

// Disk mounts a new filesystem of the given type and size, which is in a file, until the test ends. missing says what a
// machine lacks that cannot do that.
func Disk(t testing.TB, kind string, size int64) (dir, missing string) {
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
	t.Cleanup(func() { Detach(t, dir) })
	return dir, ""
}

// Detach unmounts what is mounted at dir. If it is in use, the test fails.
func Detach(t testing.TB, dir string) {
	if err := unix.Unmount(dir, 0); err != nil {
		t.Errorf("unmounting %s: %v", dir, err)
		_ = unix.Unmount(dir, unix.MNT_DETACH)
	}
}
