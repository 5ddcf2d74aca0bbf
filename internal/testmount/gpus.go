package testmount

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/cuda"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/internal/fakecuda"
)

// gpusVariable has tests use GPUs in the place of emulated devices: cuda:0,1 and so on, as --gpus. Numbers begin at 0, since
// tests name devices so; CUDA_VISIBLE_DEVICES says which GPUs those are.
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
		return 0, fmt.Errorf("%s=%s: write cuda:0,1 and so on, from 0 without gaps; CUDA_VISIBLE_DEVICES chooses GPUs", gpusVariable, text)
	}
	return len(numbers), nil
}

func mustGPUs() int {
	n, err := gpus()
	if err != nil {
		panic(err)
	}
	return n
}

// Devices returns how many of n devices a mount of the test has: all of emulated ones, and of GPUs those that there are.
func Devices(n int) int {
	if g := mustGPUs(); g > 0 {
		return min(n, g)
	}
	return n
}

// Device returns the number of the device that stands in for device i. Where there are too few GPUs, several share one.
func Device(i int) int {
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

// requireGPUs skips a test on GPUs that cannot be used, or fails it where GAIAFS_REQUIRE_GPU is 1.
func requireGPUs(t testing.TB) {
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

// disguise is an emulated device that says that it is a CUDA device.
type disguise struct{ gpubackend.Device }

func (d disguise) Info() gpubackend.Info {
	info := d.Device.Info()
	info.Kind = gpubackend.KindCUDA
	info.UUID = fakecuda.UUID(info.Ordinal)
	return info
}

// open makes device i of the mount.
func (o Options) open(i int) (gpubackend.Device, error) {
	if mustGPUs() > 0 && !o.Disguised {
		return cuda.Open(cuda.Options{Ordinal: i, CUDA: i, Memory: o.Memory})
	}
	d, err := emulated.New(emulated.Options{Ordinal: i, Memory: o.Memory, Poison: o.Poison})
	if err != nil || !o.Disguised {
		return d, err
	}
	return disguise{d}, nil
}
