package cuda

import (
	"crypto/sha256"
	"encoding/hex"
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/conformance"
)

// ptxFolder replaces the embedded kernels with newly compiled ones, so that a machine with nvcc but without Go can try
// them.
var ptxFolder = flag.String("cuda.ptx", os.Getenv(ptxEnv), "folder of kernels.ptx and testdata/stamp.ptx to test")

// ptxEnv passes ptxFolder on to peers.
const ptxEnv = "GAIAFS_TEST_PTX"

func TestMain(m *testing.M) {
	flag.Parse()
	if *ptxFolder != "" {
		if err := useFolder(*ptxFolder); err != nil {
			panic(err)
		}
	}
	if os.Getenv(forbiddenEnv) != "" {
		os.Exit(tryForbiddenStore())
	}
	imports := importView
	if os.Getenv(fakeEnv) != "" {
		imports = importFake
	}
	os.Exit(conformance.Main(m, imports))
}

func useFolder(folder string) (err error) {
	if err := os.Setenv(ptxEnv, folder); err != nil {
		return err
	}
	if kernelsPTX, err = os.ReadFile(folder + "/kernels.ptx"); err != nil {
		return err
	}
	stampPTX, err = os.ReadFile(folder + "/testdata/stamp.ptx")
	return err
}

// requireGPU returns the first usable GPU's number, or skips the test.
func requireGPU(t testing.TB) int {
	t.Helper()
	all, err := Probe()
	for _, f := range all {
		if f.Unusable == nil {
			return f.CUDA
		}
		err = f.Unusable
	}
	if os.Getenv("GAIAFS_REQUIRE_GPU") == "1" {
		require.FailNow(t, "GAIAFS_REQUIRE_GPU=1 and no GPU", "%v", err)
	}
	t.Skipf("no GPU: %v", err)
	return 0
}

// TestPTXBelongsToSource compares the source's hash with that in the PTX's first line.
func TestPTXBelongsToSource(t *testing.T) {
	for source, ptx := range map[string][]byte{"kernels.cu": kernelsPTX, "testdata/stamp.cu": stampPTX} {
		text, err := os.ReadFile(source)
		if os.IsNotExist(err) {
			t.Skipf("the source is not here: %v", err)
		}
		require.NoError(t, err)
		sum := sha256.Sum256(text)
		first, _, _ := strings.Cut(string(ptx), "\n")
		require.Contains(t, first, hex.EncodeToString(sum[:]), "%s was changed: run make ptx", source)
		require.Contains(t, string(ptx), ".version 7.0\n.target sm_75\n")
	}
}
