package mounttest

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/testdisk"
)

// backings are the filesystems for SOURCE. Each function returns a fresh, empty directory, or says why it cannot make
// one.
var backings = []struct {
	name string
	make func(t testing.TB) (dir string, missing string)
}{
	{"ext4", func(t testing.TB) (string, string) { return testdisk.Mount(t, "ext4", 128<<20) }},
	{"xfs", func(t testing.TB) (string, string) { return testdisk.Mount(t, "xfs", 512<<20) }},
	{"tmpfs", func(t testing.TB) (string, string) { return attach(t, "tmpfs", "tmpfs", 0, "size=256m") }},
	{"overlay", overlay},
}

func attach(t testing.TB, source, kind string, flags uintptr, options string) (dir, missing string) {
	dir = t.TempDir()
	if err := unix.Mount(source, dir, kind, flags, options); err != nil {
		return "", fmt.Sprintf("%s cannot be mounted here: %v", kind, err)
	}
	t.Cleanup(func() { testdisk.Detach(t, dir) })
	return dir, ""
}

// overlay mounts an overlay. Its upper directory is on a filesystem that supports that; another overlay does not.
func overlay(t testing.TB) (dir, missing string) {
	below, missing := attach(t, "tmpfs", "tmpfs", 0, "size=256m")
	if missing != "" {
		return "", missing
	}
	dir = t.TempDir()
	return dir, testdisk.Overlay(t, below, dir)
}
