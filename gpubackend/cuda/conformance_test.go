package cuda

import (
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/conformance"
)

func TestConformance(t *testing.T) {
	gpu := requireGPU(t)
	all, err := Probe()
	require.NoError(t, err)
	// A test's second device is another GPU if there is one, otherwise the same GPU.
	second := gpu
	for _, f := range all {
		if f.Unusable == nil && f.CUDA != gpu {
			second = f.CUDA
		}
	}
	for name, change := range map[string]func(d *device){
		"Batches":     func(*device) {},
		"PieceByCopy": func(d *device) { d.drv = withoutBatches(d.drv); copyWith(d, d.drv) },
	} {
		t.Run(name, func(t *testing.T) {
			opened := map[*testing.T]bool{}
			conformance.Run(t, func(t *testing.T) gpubackend.Device {
				use := gpu
				if opened[t] {
					use = second
				}
				opened[t] = true
				d, err := Open(Options{Ordinal: 3, CUDA: use, Memory: 64<<20 + 5})
				require.NoError(t, err)
				change(d.(*device))
				return d
			}, conformance.ReadOnlyIsAdvice, conformance.ImportersAreUnknown)
		})
	}
}

// withoutBatches is the driver as it was before CUDA 12.8.
func withoutBatches(d *driver) *driver {
	older := *d
	older.memcpyBatchAsync = nil
	return &older
}

//go:embed testdata/stamp.ptx
var stampPTX []byte

// view is an export in another process. That process does everything in one thread.
type view struct {
	drv      *driver
	file     *os.File
	handle   memoryHandle
	base     address
	size     int64
	writable bool
	stamp    functionHandle
	module   moduleHandle
}

// importView is the conformance suite's Import.
func importView(f *os.File, size int64, writable bool) (conformance.View, error) {
	// The context is current in one thread, and the peer stays in that thread.
	runtime.LockOSThread()
	drv, err := loadedDriver()
	if err != nil {
		return nil, err
	}
	v := &view{drv: drv, file: f, size: size, writable: writable}
	device, err := firstUsable(drv)
	if err != nil {
		return nil, err
	}
	var ctx contextHandle
	name, image := []byte("stamp\x00"), append(append([]byte{}, stampPTX...), 0)
	access := int32(accessRead)
	if writable {
		access = accessReadWrite
	}
	for _, step := range []func() error{
		func() error { return drv.check("cuDevicePrimaryCtxRetain", drv.devicePrimaryCtxRetain(&ctx, device)) },
		func() error { return drv.check("cuCtxSetCurrent", drv.ctxSetCurrent(ctx)) },
		func() error {
			return drv.check("cuModuleLoadDataEx", drv.moduleLoadDataEx(&v.module, &image[0], 0, nil, nil))
		},
		func() error {
			return drv.check("cuModuleGetFunction", drv.moduleGetFunction(&v.stamp, v.module, &name[0]))
		},
		func() error {
			return drv.check("cuMemImportFromShareableHandle", drv.memImportFromHandle(&v.handle, f.Fd(), handlePOSIX))
		},
		func() (err error) {
			v.base, err = drv.mapMemory(device, v.handle, uintptr(size), access)
			return err
		},
	} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// firstUsable is the device that the tests use.
func firstUsable(drv *driver) (deviceHandle, error) {
	all, err := drv.probe()
	for _, f := range all {
		if f.Unusable == nil {
			return drv.device(f.CUDA)
		}
		err = f.Unusable
	}
	return 0, err
}

// withPinned calls f with page-locked memory, so that an asynchronous copy uses no memory of the garbage collector.
func (v *view) withPinned(n int, f func(p pinned) error) error {
	p, err := v.drv.pin(max(n, 1))
	if err != nil {
		return err
	}
	return errors.Join(f(p), v.drv.check("cuCtxSynchronize", v.drv.ctxSynchronize()),
		v.drv.check("cuMemFreeHost", v.drv.memFreeHost(p.base)))
}

func (v *view) Load(b []byte, off int64) error {
	return v.withPinned(len(b), func(p pinned) error {
		err := v.drv.check("cuMemcpyDtoHAsync", v.drv.memcpyDtoHAsync(p.at(0), v.base+address(off), uintptr(len(b)), 0))
		if err == nil {
			err = v.drv.check("cuCtxSynchronize", v.drv.ctxSynchronize())
		}
		copy(b, p.bytes())
		return err
	})
}

func (v *view) Store(b []byte, off int64) error {
	if !v.writable {
		return v.forbiddenStore()
	}
	return v.withPinned(len(b), func(p pinned) error {
		copy(p.bytes(), b)
		return v.drv.check("cuMemcpyHtoDAsync", v.drv.memcpyHtoDAsync(v.base+address(off), p.at(0), uintptr(len(b)), 0))
	})
}

func (v *view) Stamp(value byte, off, stride int64, n int) error {
	words := []uint64{uint64(v.base) + uint64(off), uint64(stride), uint64(n), uint64(value)}
	params := make([]unsafe.Pointer, len(words))
	for i := range words {
		params[i] = unsafe.Pointer(&words[i])
	}
	err := v.drv.check("cuLaunchKernel", v.drv.launchKernel(v.stamp, 64, 1, 1, 256, 1, 1, 0, 0, &params[0], nil))
	runtime.KeepAlive(words)
	if err != nil {
		return err
	}
	return v.drv.check("cuCtxSynchronize", v.drv.ctxSynchronize())
}

func (v *view) Close() error {
	return errors.Join(v.drv.unmap(v.base, uintptr(v.size)), v.drv.check("cuMemRelease", v.drv.memRelease(v.handle)))
}

// forbiddenEnv makes a test binary try a store into the memory that it maps for reading.
const forbiddenEnv = "GAIAFS_CUDA_FORBIDDEN_STORE"

// forbiddenStore tries the store in a separate process, because the fault destroys that process's context.
func (v *view) forbiddenStore() error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", forbiddenEnv, v.size))
	cmd.ExtraFiles = []*os.File{v.file}
	out, err := cmd.CombinedOutput()
	fmt.Fprintf(os.Stderr, "forbidden store: %s", out)
	return err
}

// tryForbiddenStore returns 0 if the store went through and 1 if it failed as it should. It returns 2 for any other
// failure; the test notices that by its text, or because the memory can no longer be read.
func tryForbiddenStore() int {
	var size int64
	if _, err := fmt.Sscan(os.Getenv(forbiddenEnv), &size); err != nil {
		fmt.Println(err)
		return 2
	}
	v, err := importView(os.NewFile(3, "export"), size, false)
	if err != nil {
		fmt.Println("import:", err)
		return 0 // so that the test fails: nothing was tried
	}
	if err := v.Stamp(0xee, 0, 1, 64); err != nil {
		fmt.Println("store:", err)
		return 1
	}
	return 0
}

// copyWith makes the copiers call another driver. None of them may be in use.
func copyWith(d *device, drv *driver) {
	for _, by := range []copiers{d.in, d.out, d.peer} {
		for range len(by) {
			c := <-by
			c.lane.drv = drv
			by <- c
		}
	}
}
