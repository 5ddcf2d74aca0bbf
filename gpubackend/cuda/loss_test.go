package cuda

import (
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// lossEnv makes TestLossOfGPU lose the GPU. A lost context is lost to the whole process, so the test uses a separate
// process.
const lossEnv = "GAIAFS_TEST_LOSE_GPU"

func TestLossOfGPU(t *testing.T) {
	gpu := requireGPU(t)
	if os.Getenv(lossEnv) == "" {
		exe, err := os.Executable()
		require.NoError(t, err)
		cmd := exec.Command(exe, "-test.run=^TestLossOfGPU$", "-test.v")
		cmd.Env = append(os.Environ(), lossEnv+"=1")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "--- PASS: TestLossOfGPU")
		return
	}
	opened, err := Open(Options{CUDA: gpu, Memory: 32 << 20})
	require.NoError(t, err)
	d := opened.(*device)
	m, err := d.Alloc(2 << 20)
	require.NoError(t, err)
	_, err = m.Export(true)
	require.NoError(t, err)
	buffer, giveBack, err := d.HostBuffer(page.Size)
	require.NoError(t, err)
	stray := &memory{dev: d, size: 2 << 20, base: m.(*memory).base + 1<<40}
	sums := make([]gpubackend.Digest, 1)
	err = d.Digests(t.Context(), stray, 0, sums)
	require.ErrorIs(t, err, gpubackend.ErrDeviceLost)
	t.Log(err)
	require.ErrorIs(t, d.CopyIn(t.Context(), []gpubackend.Copy{{Mem: m, Host: buffer}}), gpubackend.ErrDeviceLost)
	_, err = d.Alloc(2 << 20)
	require.ErrorIs(t, err, gpubackend.ErrDeviceLost)
	giveBack()
	require.NoError(t, m.Free())
	require.NoError(t, d.Close())
}

// TestMemoryIsFull lets another device of the same GPU take memory that was free when the first one was opened.
func TestMemoryIsFull(t *testing.T) {
	gpu := requireGPU(t)
	opened, err := Open(Options{CUDA: gpu})
	require.NoError(t, err)
	whole := opened.Info().Memory
	other, err := Open(Options{CUDA: gpu, Memory: whole})
	require.NoError(t, err)
	taken, err := other.Alloc(whole)
	require.NoError(t, err)
	_, err = opened.Alloc(whole)
	require.ErrorIs(t, err, gpubackend.ErrNoMemory)
	require.ErrorContains(t, err, "cuMemCreate")
	_, err = Open(Options{CUDA: gpu, Memory: whole})
	require.ErrorIs(t, err, gpubackend.ErrNoMemory, "a budget that cannot be had")
	require.NoError(t, taken.Free())
	require.NoError(t, other.Close())
	require.Zero(t, opened.Used())
	m, err := opened.Alloc(2 << 20)
	require.NoError(t, err)
	require.NoError(t, opened.Zero(t.Context(), m, 0, 2<<20))
	require.NoError(t, m.Free())
	require.NoError(t, opened.Close())
}
