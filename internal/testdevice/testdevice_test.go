package testdevice

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
)

func TestVariable(t *testing.T) {
	for text, want := range map[string]int{"": 0, "cuda:0": 1, "cuda:0,1,2": 3} {
		t.Setenv(gpusVariable, text)
		n, err := gpus()
		require.NoError(t, err)
		require.Equal(t, want, n, text)
	}
	for _, text := range []string{"cuda", "cuda:", "cuda:1", "cuda:0,2", "cuda:0,0", "emulated:1", "1"} {
		t.Setenv(gpusVariable, text)
		_, err := gpus()
		require.ErrorContains(t, err, "CUDA_VISIBLE_DEVICES chooses GPUs", text)
	}
}

func TestFewerGPUsThanDevices(t *testing.T) {
	t.Setenv(gpusVariable, "")
	require.Equal(t, 3, Count(3))
	require.Equal(t, 2, Number(2))
	d, err := Open(emulated.Options{Ordinal: 2, Memory: 4 << 20})
	require.NoError(t, err)
	require.Equal(t, gpubackend.KindEmulated, d.Info().Kind)
	require.NoError(t, d.Close())
	t.Setenv(gpusVariable, "cuda:0,1")
	require.Equal(t, 2, Count(3))
	require.Equal(t, 1, Count(1))
	require.Equal(t, 0, Number(2))
	require.Equal(t, 1, Number(1))
	require.Equal(t, -1, Number(-1))
}
