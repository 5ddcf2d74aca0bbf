package cuda

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// symbols is a library that lacks one function.
type symbols struct{ missing string }

func (s symbols) symbol(name string) (uintptr, error) {
	if name == s.missing {
		return 0, errors.New("undefined symbol: " + name)
	}
	return 1, nil // never called
}

func TestNoLibrary(t *testing.T) {
	_, err := bind(func() (library, error) { return nil, errors.New("libcuda.so.1: cannot open shared object file") })
	require.ErrorIs(t, err, ErrUnavailable)
	require.EqualError(t, err, "CUDA cannot be used: there is no NVIDIA driver (libcuda.so.1: cannot open shared object file)")
}

func TestMissingFunctions(t *testing.T) {
	for _, f := range new(driver).functions() {
		d, err := bind(func() (library, error) { return symbols{f.name}, nil })
		if f.optional {
			require.NoError(t, err, f.name)
			require.Equal(t, f.name == "cuMemcpyBatchAsync", d.memcpyBatchAsync == nil)
			require.NotNil(t, d.deviceGetUUID, "the first version's, if not the second's")
			continue
		}
		require.ErrorIs(t, err, ErrUnavailable)
		require.EqualError(t, err, "CUDA cannot be used: the NVIDIA driver is too old: it has no "+f.name+
			"; driver 450 (CUDA 11.0) or later is needed")
	}
}

func TestDriverDoesNotStart(t *testing.T) {
	for r, want := range map[result]string{
		noDevice:       "the NVIDIA driver finds no device (what the driver says (CUDA error 100))",
		stubLibrary:    "libcuda.so.1 is the toolkit's stub for linking, not a driver",
		driverMismatch: "libcuda.so.1 does not match the version of the kernel's driver; after an upgrade, restart the machine",
		invalidValue:   "the NVIDIA driver does not start: what the driver says (CUDA error 1)",
		unknown:        "the NVIDIA driver does not start: CUDA error 999",
	} {
		g := newFake()
		g.fail["cuInit"] = r
		err := g.driver().start()
		require.ErrorIs(t, err, ErrUnavailable)
		require.EqualError(t, err, "CUDA cannot be used: "+want)
	}
	g := newFake()
	require.NoError(t, g.driver().start())
	g.version = 10020
	require.EqualError(t, g.driver().start(),
		"CUDA cannot be used: the NVIDIA driver is too old: it supports CUDA 10.2, and 11.0 or later is needed (driver 450)")
}

func TestProbe(t *testing.T) {
	g := newFake()
	all, err := g.driver().probe()
	require.NoError(t, err)
	require.Equal(t, []Found{{Name: "Fake GPU", UUID: gpubackend.UUID{7}, Memory: 1 << 30, Major: 9}}, all)

	g.fail["cuDeviceGetCount"] = invalidValue
	_, err = g.driver().probe()
	require.ErrorIs(t, err, ErrUnavailable)
}

// TestUnusable: a GPU that lacks one thing is found, with a reason, and cannot be opened for that reason.
func TestUnusable(t *testing.T) {
	for _, x := range []struct {
		attribute, value int32
		want             string
	}{
		{attrCapabilityMajor, 6, "Fake GPU has compute capability 6.0, and 7.5 (Turing) or later is needed"},
		{attrComputeMode, computeModeProhibited, "Fake GPU is in compute mode \"prohibited\""},
		{attrUnifiedAddressing, 0, "Fake GPU has no unified addressing of host and device memory"},
		{attrVMM, 0, "Fake GPU has no virtual memory management (cuMemCreate)"},
		{attrPOSIXHandles, 0, "Fake GPU has no sharing memory by POSIX file descriptors"},
	} {
		g := newFake()
		g.attributes[x.attribute] = x.value
		all, err := g.driver().probe()
		require.NoError(t, err)
		require.Len(t, all, 1)
		require.Equal(t, "Fake GPU", all[0].Name)
		require.EqualError(t, all[0].Unusable, "CUDA cannot be used: device 0: "+x.want)
		_, err = open(g.driver(), Options{Memory: 32 << 20}, kernelsPTX)
		require.ErrorIs(t, err, ErrUnavailable)
		require.ErrorContains(t, err, x.want)
		require.Zero(t, g.left())
	}
}

// TestOpenHere probes the test's machine: there is a GPU, or a reason why there is none.
func TestOpenHere(t *testing.T) {
	all, err := Probe()
	if err != nil {
		require.ErrorIs(t, err, ErrUnavailable)
		_, err = Open(Options{})
		require.ErrorIs(t, err, ErrUnavailable)
		require.ErrorContains(t, err, "CUDA device 0: ")
		return
	}
	require.NotEmpty(t, all)
	_, err = Open(Options{CUDA: len(all)})
	require.ErrorIs(t, err, ErrUnavailable)
}
