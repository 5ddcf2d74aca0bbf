package main

import (
	"bytes"
	"fmt"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/cuda"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
)

// replaceCUDA makes the machine have these GPUs, each with memory of that size free.
func replaceCUDA(t *testing.T, all []cuda.Found, reason error, free int64) {
	oldProbe, oldOpen := probeCUDA, openGPU
	t.Cleanup(func() { probeCUDA, openGPU = oldProbe, oldOpen })
	probeCUDA = func() ([]cuda.Found, error) { return all, reason }
	openGPU = func(o cuda.Options) (gpubackend.Device, error) {
		if o.Memory > free {
			return nil, fmt.Errorf("CUDA device %d: %w", o.CUDA, gpubackend.ErrNoMemory)
		}
		if free == 0 {
			return nil, fmt.Errorf("CUDA device %d is odd", o.CUDA)
		}
		return emulated.New(emulated.Options{Ordinal: o.Ordinal, Memory: max(o.Memory, 4<<20)})
	}
}

// opened opens devices and returns their numbers, what the log says and the error.
func opened(t *testing.T, text string, memory int64) (numbers []int, log string, err error) {
	t.Helper()
	var g gpuChoice
	require.NoError(t, g.Set(text))
	var b bytes.Buffer
	devices, err := g.open(memory, slog.New(slog.NewTextHandler(&b, nil)))
	for _, d := range devices {
		numbers = append(numbers, d.Info().Ordinal)
	}
	require.NoError(t, closeDevices(devices))
	return numbers, b.String(), err
}

func TestGPUsAreChosen(t *testing.T) {
	none := fmt.Errorf("%w: there is no NVIDIA driver", cuda.ErrUnavailable)
	old := fmt.Errorf("%w: device 1: Old GPU has compute capability 3.5", cuda.ErrUnavailable)
	three := []cuda.Found{{CUDA: 0, Name: "A"}, {CUDA: 1, Name: "Old GPU", Unusable: old}, {CUDA: 2, Name: "B"}}

	replaceCUDA(t, three, nil, 1<<30)
	numbers, log, err := opened(t, "auto", 0)
	require.NoError(t, err)
	require.Equal(t, []int{0, 2}, numbers)
	require.Contains(t, log, "compute capability 3.5")
	numbers, _, err = opened(t, "cuda:2,0", 8<<20)
	require.NoError(t, err)
	require.Equal(t, []int{2, 0}, numbers)
	_, _, err = opened(t, "cuda:0,1", 0)
	require.ErrorContains(t, err, "--gpus cuda:0,1 cannot be had: CUDA cannot be used: device 1: Old GPU has compute capability 3.5")
	require.ErrorContains(t, err, "--gpus emulated:1 and --gpus none work everywhere")
	_, _, err = opened(t, "cuda:3", 0)
	require.ErrorContains(t, err, "there is no CUDA device 3: this machine has 0 (A), 1 (Old GPU, not usable: ")
	for _, choice := range []string{"auto", "cuda:0"} {
		_, _, err = opened(t, choice, 2<<30)
		require.ErrorIs(t, err, gpubackend.ErrNoMemory)
		require.ErrorContains(t, err, "ask for less with --gpu-memory")
	}
	require.Equal(t, "0 (A), 1 (Old GPU, not usable: "+old.Error()+"), 2 (B)", cudaSummary())

	replaceCUDA(t, nil, none, 1<<30)
	numbers, log, err = opened(t, "auto", 1<<30)
	require.NoError(t, err)
	require.Equal(t, []int{0}, numbers)
	require.Contains(t, log, "level=INFO msg=\"devices of a kind are not used\" kind=cuda reason=\"CUDA cannot be used: there is no NVIDIA driver\"")
	_, _, err = opened(t, "cuda", 0)
	require.ErrorContains(t, err, "there is no NVIDIA driver; --gpus emulated:1")

	replaceCUDA(t, three, nil, 0)
	numbers, log, err = opened(t, "auto", 0)
	require.NoError(t, err)
	require.Equal(t, []int{0}, numbers, "an emulated one")
	require.Contains(t, log, "CUDA device 2 is odd")
	require.Contains(t, log, "kind=emulated")

	replaceCUDA(t, three[1:2], nil, 1<<30)
	_, log, err = opened(t, "auto", 0)
	require.NoError(t, err)
	require.Contains(t, log, "kind=emulated")
}
