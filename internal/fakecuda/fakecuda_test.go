package fakecuda

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestStrict runs a program that goes through the life of a mapping and tries calls that the driver refuses.
func TestStrict(t *testing.T) {
	dir := Dir(t)
	program := filepath.Join(dir, "strict")
	out, err := exec.Command("cc", "-std=gnu11", "-Wall", "-Werror", "-pthread", "-o", program, "testdata/strict.c",
		filepath.Join(dir, "libcuda.so.1")).CombinedOutput()
	require.NoError(t, err, "%s", out)
	run := func(env ...string) ([]byte, error) {
		cmd := exec.Command(program)
		cmd.Env = append(append(os.Environ(), "LD_LIBRARY_PATH="+dir, "FAKECUDA_LEAKS=1"), env...)
		return cmd.CombinedOutput()
	}
	out, err = run()
	require.NoError(t, err, "%s", out)

	out, err = run("FAKECUDA_FAIL=cuMemMap:2")
	require.Error(t, err)
	require.Contains(t, string(out), "cuMemMap: 2")

	out, err = run("FAKECUDA_FAIL=cuMemUnmap:999")
	require.Error(t, err)
	require.Contains(t, string(out), "left behind")
}
