// Package testdevice gives tests their devices: emulated ones, or the machine's GPUs where the environment says so
// (GAIAFS_TEST_GPUS=cuda:0,1). The same tests run on either kind.
package testdevice

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/cuda"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
)

// gpusVariable has tests use GPUs in the place of emulated devices: cuda:0,1 and so on, as --gpus. Numbers begin at 0,
// since tests name devices so; CUDA_VISIBLE_DEVICES says which GPUs those are.
const gpusVariable = "GAIAFS_TEST_GPUS"

// gpus returns how many GPUs tests use, 0 for emulated devices.
func gpus() (int, error) {
	text := os.Getenv(gpusVariable)
	if text == "" {
		return 0, nil
	}
	list, ok := strings.CutPrefix(text, "cuda:")
	numbers := strings.Split(list, ",")
	for i, n := range numbers {
		ok = ok && n == strconv.Itoa(i)
	}
	if !ok {
		return 0, fmt.Errorf("%s=%s: write cuda:0,1 and so on, from 0 without gaps; CUDA_VISIBLE_DEVICES chooses GPUs",
			gpusVariable, text)
	}
	return len(numbers), nil
}

// mustGPUs is gpus for callers that have no test to fail. What is written wrong ends the process.
func mustGPUs() int {
	n, err := gpus()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	return n
}

// GPUs reports whether tests use GPUs.
func GPUs() bool { return mustGPUs() > 0 }

// Count returns how many of n devices a test has: all of emulated ones, and of GPUs those that there are.
func Count(n int) int {
	if g := mustGPUs(); g > 0 {
		return min(n, g)
	}
	return n
}

// Number returns the number of the device that stands in for device i. Where there are too few GPUs, several share one.
func Number(i int) int {
	if g := mustGPUs(); g > 0 && i >= 0 {
		return i % g
	}
	return i
}

// Emulated skips a test on GPUs that needs emulated devices.
func Emulated(t testing.TB, why string) {
	t.Helper()
	if mustGPUs() > 0 {
		t.Skipf("only on emulated devices: %s", why)
	}
}

// Require skips a test where the GPUs that are asked for cannot be used, or fails it if GAIAFS_REQUIRE_GPU is 1.
func Require(t testing.TB) {
	t.Helper()
	n := mustGPUs()
	if n == 0 {
		return
	}
	all, err := cuda.Probe()
	if err == nil && len(all) < n {
		err = fmt.Errorf("this machine has %d", len(all))
	}
	for i := range n {
		if err == nil {
			err = all[i].Unusable
		}
	}
	switch {
	case err == nil:
	case os.Getenv("GAIAFS_REQUIRE_GPU") == "1":
		t.Fatalf("%s asks for %d GPUs: %v", gpusVariable, n, err)
	default:
		t.Skipf("%s asks for %d GPUs: %v", gpusVariable, n, err)
	}
}

// Open makes the device of that number: emulated, poisoned and with that key as its options say, or the GPU.
func Open(o emulated.Options) (gpubackend.Device, error) {
	if mustGPUs() > 0 {
		return cuda.Open(cuda.Options{Ordinal: o.Ordinal, CUDA: o.Ordinal, Memory: o.Memory, Key: o.Key})
	}
	return emulated.New(o)
}
