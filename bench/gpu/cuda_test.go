package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// fakeVariable is set in a process that uses the fake libcuda.
const fakeVariable = "GAIAFS_TEST_FAKE_CUDA"

// withFake runs the test again in a process that finds the fake libcuda. It reports whether this is that process.
func withFake(t *testing.T, env ...string) bool {
	if os.Getenv(fakeVariable) != "" {
		return true
	}
	compiler, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("there is no C compiler to build the fake libcuda with")
	}
	var source []byte
	for _, name := range []string{"../../internal/fakecuda/src/libcuda.c", "testdata/device.c"} {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		source = append(source, text...)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "libcuda.c")
	require.NoError(t, os.WriteFile(file, source, 0o600))
	for library, source := range map[string]string{"libcuda.so.1": file, "libcufile.so.0": "testdata/cufile.c"} {
		out, err := exec.Command(compiler, "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC",
			"-pthread",
			"-o", filepath.Join(dir, library), source).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.v")
	cmd.Env = append(append(os.Environ(), fakeVariable+"=1", "LD_LIBRARY_PATH="+dir), env...)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "--- PASS: "+t.Name())
	return false
}

// A cudaGPU does the same as a hostGPU.
func TestCUDAGPUDoesAsTheHost(t *testing.T) {
	if !withFake(t) {
		return
	}
	g, err := openCUDA(1)
	require.NoError(t, err)
	require.Equal(t, 1, g.device())
	require.Contains(t, g.String(), "GPU 1: Fake GPU 1")
	const size = 1 << 20
	var results [2][]byte
	for i, x := range []gpu{g, hostGPU(0)} {
		a, err := x.alloc(size)
		require.NoError(t, err)
		b, err := x.alloc(size)
		require.NoError(t, err)
		p, err := x.pinned(size)
		require.NoError(t, err)
		clear(p)
		require.NoError(t, x.copyIn(a, p))
		var wg sync.WaitGroup // from several goroutines at once
		for first := range 2 {
			wg.Go(func() {
				require.NoError(t, x.paint(a, stripes{size: size, width: 100, first: int64(first), writers: 3, seed: 9},
					3))
			})
		}
		wg.Wait()
		require.NoError(t, x.touch(a+5, 4096, size/4096, 3))
		require.NoError(t, x.copyWithin(b, a, size))
		require.NoError(t, x.copyOut(p, b))
		results[i] = p
		require.NoError(t, x.free(a))
		require.NoError(t, x.free(b))
	}
	require.Equal(t, results[1], results[0])
	n, err := g.freeMemory()
	require.NoError(t, err)
	require.Positive(t, n)
	g.mu.Lock()
	require.NotEmpty(t, g.idle, "streams are used again")
	g.mu.Unlock()
	_, err = openCUDA(7)
	require.ErrorContains(t, err, "CUDA_VISIBLE_DEVICES")
}

func TestFailingCallsAreErrors(t *testing.T) {
	if !withFake(t, "FAKECUDA_FAIL=cuMemAlloc:2,cuLaunchKernel:1,cuMemcpyHtoDAsync:1") {
		return
	}
	g, err := openCUDA(0)
	require.NoError(t, err)
	_, err = g.alloc(4096)
	require.ErrorContains(t, err, "cuMemAlloc: ")
	require.ErrorContains(t, err, "(CUDA error 2)")
	require.ErrorContains(t, g.touch(4096, 1, 1, 1), "cuLaunchKernel: ")
	require.ErrorContains(t, g.copyIn(4096, make([]byte, 1)), "cuMemcpyHtoDAsync: ")
}

func TestWithoutADriver(t *testing.T) {
	if _, err := loadCUDA(); err == nil {
		t.Skip("this machine has a driver")
	}
	_, err := openCUDA(0)
	require.ErrorContains(t, err, "libcuda.so.1")
	require.ErrorContains(t, err, "--gpus emulated:1")
	_, err = startWorker(t.Context(), "cuda:0", 0)
	require.ErrorContains(t, err, "libcuda.so.1")
}
