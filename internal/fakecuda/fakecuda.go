// Package fakecuda builds a libcuda.so.1 for tests of programs that map device memory, so that they run without a GPU.
// src/libcuda.c describes what it can do and which environment variables it reads. Programs find it through
// LD_LIBRARY_PATH, which must be set before they start.
package fakecuda

import (
	_ "embed"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

//go:embed src/libcuda.c
var source []byte

// UUID returns the UUID of the fake device with that number.
func UUID(ordinal int) (id [16]byte) {
	copy(id[:], "fakecuda-device")
	id[15] = byte(ordinal)
	return id
}

// Dir builds the library, with compiler flags such as -DOLD_DRIVER, and returns its folder. If there is no C compiler,
// it skips the test, or fails it if GAIAFS_REQUIRE_TOOLS is set.
func Dir(t testing.TB, flags ...string) string {
	t.Helper()
	compiler, err := exec.LookPath("cc")
	if err != nil {
		if os.Getenv("GAIAFS_REQUIRE_TOOLS") != "" {
			require.NoError(t, err)
		}
		t.Skip("there is no C compiler to build the fake libcuda with")
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "libcuda.c")
	require.NoError(t, os.WriteFile(file, source, 0o600))
	out, err := exec.Command(compiler, append(flags, "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror",
		"-shared", "-fPIC",
		"-pthread", "-Wl,-soname,libcuda.so.1", "-o", filepath.Join(dir, "libcuda.so.1"), file)...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return dir
}
