package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/cmd/gaiafs/demo"
	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/cuda"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
)

// replaceCUDA makes the machine appear to have these GPUs, each with that much free memory.
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

// opened opens devices and returns their numbers, the log and the error.
func opened(t *testing.T, text string, memory int64) (numbers []int, log string, err error) {
	t.Helper()
	var g gpuChoice
	require.NoError(t, g.Set(text))
	var b bytes.Buffer
	devices, _, err := g.open(memory, slog.New(slog.NewTextHandler(&b, nil)))
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
	numbers, log, err = opened(t, "emulated:2,cuda:0,2", 8<<20)
	require.NoError(t, err)
	require.Equal(t, []int{0, 2, 1, 3}, numbers, "GPUs keep their own numbers, and the others get what is left")
	require.Contains(t, log, "number=3 kind=emulated")
	numbers, _, err = opened(t, "cuda:-0", 8<<20)
	require.NoError(t, err)
	require.Equal(t, []int{2}, numbers, "all that can be used, but 0")
	numbers, _, err = opened(t, "cuda:-1,-2,emulated:1", 8<<20)
	require.NoError(t, err)
	require.Equal(t, []int{0, 1}, numbers)
	_, _, err = opened(t, "cuda:-0,-2", 0)
	require.ErrorContains(t, err, "none is left that can be used")
	require.ErrorContains(t, new(gpuChoice).Set("cuda:-0,2"), "name either devices, or with - before each number")
	_, _, err = opened(t, "emulated:2,cuda:0,1", 0)
	require.ErrorContains(t, err, "Old GPU has compute capability 3.5")
	_, _, err = opened(t, "cuda:0,1", 0)
	require.ErrorContains(t, err,
		"--gpus cuda:0,1: the devices cannot be opened: CUDA cannot be used: device 1: Old GPU has compute capability 3.5")
	require.ErrorContains(t, err, "--gpus emulated:1 works everywhere")
	_, _, err = opened(t, "cuda:3", 0)
	require.ErrorContains(t, err, "there is no CUDA device 3: this machine has 0 (A), 1 (Old GPU, not usable: ")
	for _, choice := range []string{"auto", "cuda:0"} {
		_, _, err = opened(t, choice, 2<<30)
		require.ErrorIs(t, err, gpubackend.ErrNoMemory)
		require.ErrorContains(t, err, "change --gpu-memory, or leave it out")
		require.NotContains(t, err.Error(), "emulated", "other devices are no substitute")
	}
	require.Equal(t, "0 (A), 1 (Old GPU, not usable: "+old.Error()+"), 2 (B)", cudaSummary())

	replaceCUDA(t, nil, none, 1<<30)
	numbers, log, err = opened(t, "auto", 1<<30)
	require.NoError(t, err)
	require.Equal(t, []int{0}, numbers)
	require.Contains(t, log, "level=INFO msg=\"devices of a kind are not used\" kind=cuda reason=\"CUDA cannot be "+
		"used: there is no NVIDIA driver\"")
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

// requireGPUs returns the numbers of the usable GPUs. If there are none, it skips the test, or fails it if
// GAIAFS_REQUIRE_GPU is 1.
func requireGPUs(t *testing.T) []int {
	t.Helper()
	numbers, err := foundCUDA(slog.New(slog.DiscardHandler))
	if err != nil && os.Getenv("GAIAFS_REQUIRE_GPU") == "1" {
		t.Fatal(err)
	}
	if err != nil {
		t.Skip(err)
	}
	return numbers
}

func TestCommandOnGPUs(t *testing.T) {
	for _, gpu := range requireGPUs(t) {
		s := mountForeground(t, fmt.Sprint("--gpus=cuda:", gpu), "--gpu-memory=64M")
		f, err := os.Create(filepath.Join(s.mountpoint, "file"))
		require.NoError(t, err)
		require.NoError(t, f.Truncate(5<<20))
		_, err = f.WriteAt([]byte("from the cpu"), 3<<20)
		require.NoError(t, err)
		m, err := gaiafs.Map(f, 4096, 5<<20-4096, gaiafs.ProtWrite, gpu)
		require.NoError(t, err)
		require.Equal(t, gaiafs.KindCUDA, m.Kind())
		require.NotZero(t, m.DevicePointer())
		got := make([]byte, 12)
		_, err = m.ReadAt(got, 3<<20-4096)
		require.NoError(t, err)
		require.Equal(t, "from the cpu", string(got))
		_, err = m.WriteAt([]byte("from a gpu"), 3<<20-4096+100)
		require.NoError(t, err)
		_, err = m.Release(0, m.Len())
		require.NoError(t, err)
		_, err = f.ReadAt(got[:10], 3<<20+100)
		require.NoError(t, err)
		require.Equal(t, "from a gpu", string(got[:10]))

		doc := gaiafsCommand(t, "status", "--json", s.mountpoint)
		require.Equal(t, exitOK, doc.code, doc.err)
		var status statusDocument
		require.NoError(t, json.Unmarshal([]byte(doc.out), &status))
		require.Len(t, status.Devices, 1)
		require.Equal(t, "cuda", status.Devices[0].Kind)
		require.Equal(t, gpu, status.Devices[0].Device)
		require.Equal(t, int64(64<<20), status.Devices[0].MemoryBytes)
		require.Regexp(t, "^GPU-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$", status.Devices[0].UUID)
		require.Contains(t, gaiafsCommand(t, "status", s.mountpoint).out, status.Devices[0].UUID)
		require.NoError(t, m.Close())
		require.NoError(t, f.Close())
		s.signal(t, syscall.SIGTERM)
		require.Equal(t, exitOK, s.end(t))
	}
}

func TestCommandGPUHasNoRoom(t *testing.T) {
	requireGPUs(t)
	p := newPlace(t)
	r := gaiafsCommand(t, "mount", "--gpus=cuda:0", "--gpu-memory=100T", p.source, p.mountpoint)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "change --gpu-memory, or leave it out")
}

func TestCommandDemoOnGPUs(t *testing.T) {
	numbers := requireGPUs(t)
	for n := 1; n <= min(len(numbers), 2); n++ {
		dir := t.TempDir()
		choice := strings.Trim(strings.ReplaceAll(fmt.Sprint(numbers[:n]), " ", ","), "[]")
		cmd := command(t, "demo", "--gpus=cuda:"+choice, "--json", "--output", filepath.Join(dir, "out.png"))
		cmd.Env = append(cmd.Env, "TMPDIR="+dir)
		r := execute(t, cmd)
		require.Equal(t, exitOK, r.code, r.err)
		var report demo.Report
		require.NoError(t, json.Unmarshal([]byte(r.out), &report))
		require.Equal(t, "cuda", report.Device.Kind)
		require.Equal(t, n == 2, report.CPU.Kind == "cuda")
		require.Equal(t, report.Device.ExpectedPages, report.Device.Pages)
	}
}
