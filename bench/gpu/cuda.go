package main

import (
	_ "embed"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"
)

// kernelsPTX has the kernels of GPU programs, compiled from kernels.cu.
//
//go:generate ./ptx.sh
//go:embed kernels.ptx
var kernelsPTX []byte

// Handles of the CUDA driver.
type (
	cudaResult   int32
	cudaDevice   int32
	cudaContext  uintptr
	cudaModule   uintptr
	cudaFunction uintptr
	cudaStream   uintptr
)

// cudaDriver has the functions of libcuda that the bench's GPU programs call. Memory behind a pointer argument belongs
// to the caller and is used only until the call returns. Host memory of copies is in use until the stream has finished.
type cudaDriver struct {
	init           func(flags uint32) cudaResult
	version        func(version *int32) cudaResult
	errorString    func(r cudaResult, text **byte) cudaResult
	deviceCount    func(count *int32) cudaResult
	deviceGet      func(device *cudaDevice, ordinal int32) cudaResult
	deviceName     func(name *byte, n int32, device cudaDevice) cudaResult
	deviceTotal    func(bytes *uint64, device cudaDevice) cudaResult
	contextRetain  func(ctx *cudaContext, device cudaDevice) cudaResult
	contextPush    func(ctx cudaContext) cudaResult
	contextPop     func(ctx *cudaContext) cudaResult
	moduleLoad     func(module *cudaModule, image *byte) cudaResult
	moduleFunction func(f *cudaFunction, module cudaModule, name *byte) cudaResult
	launch         func(f cudaFunction, gridX, gridY, gridZ, blockX, blockY, blockZ, shared uint32, s cudaStream,
		params, extra *unsafe.Pointer) cudaResult
	streamCreate     func(s *cudaStream, flags uint32) cudaResult
	streamWait       func(s cudaStream) cudaResult
	memoryInfo       func(free, total *uint64) cudaResult
	memoryAlloc      func(a *address, n uintptr) cudaResult
	memoryFree       func(a address) cudaResult
	hostAlloc        func(p *unsafe.Pointer, n uintptr, flags uint32) cudaResult
	copyToDevice     func(to address, from unsafe.Pointer, n uintptr, s cudaStream) cudaResult
	copyToHost       func(to unsafe.Pointer, from address, n uintptr, s cudaStream) cudaResult
	copyWithinDevice func(to, from address, n uintptr, s cudaStream) cudaResult
}

// loadCUDA loads the machine's driver once.
var loadCUDA = sync.OnceValues(func() (*cudaDriver, error) {
	const library = "libcuda.so.1"
	handle, err := purego.Dlopen(library, purego.RTLD_NOW|purego.RTLD_GLOBAL)
	if err != nil {
		return nil, fmt.Errorf("there is no NVIDIA driver: %s cannot be loaded (%w); use --gpus emulated:1 to check the program itself", library, err)
	}
	d := new(cudaDriver)
	for name, f := range map[string]any{
		"cuInit":                   &d.init,
		"cuDriverGetVersion":       &d.version,
		"cuGetErrorString":         &d.errorString,
		"cuDeviceGetCount":         &d.deviceCount,
		"cuDeviceGet":              &d.deviceGet,
		"cuDeviceGetName":          &d.deviceName,
		"cuDeviceTotalMem_v2":      &d.deviceTotal,
		"cuDevicePrimaryCtxRetain": &d.contextRetain,
		"cuCtxPushCurrent_v2":      &d.contextPush,
		"cuCtxPopCurrent_v2":       &d.contextPop,
		"cuModuleLoadData":         &d.moduleLoad,
		"cuModuleGetFunction":      &d.moduleFunction,
		"cuLaunchKernel":           &d.launch,
		"cuStreamCreate":           &d.streamCreate,
		"cuStreamSynchronize":      &d.streamWait,
		"cuMemGetInfo_v2":          &d.memoryInfo,
		"cuMemAlloc_v2":            &d.memoryAlloc,
		"cuMemFree_v2":             &d.memoryFree,
		"cuMemHostAlloc":           &d.hostAlloc,
		"cuMemcpyHtoDAsync_v2":     &d.copyToDevice,
		"cuMemcpyDtoHAsync_v2":     &d.copyToHost,
		"cuMemcpyDtoDAsync_v2":     &d.copyWithinDevice,
	} {
		a, err := purego.Dlsym(handle, name)
		if err != nil {
			return nil, fmt.Errorf("%s has no %s: driver 450 (CUDA 11.0) or later is needed", library, name)
		}
		purego.RegisterFunc(f, a)
	}
	return d, d.check("cuInit", d.init(0))
})

// check converts the result of a call to an error.
func (d *cudaDriver) check(call string, r cudaResult) error {
	if r == 0 {
		return nil
	}
	words := "no description"
	var text *byte
	if d.errorString(r, &text) == 0 && text != nil {
		words = cString(text)
	}
	return fmt.Errorf("%s: %s (CUDA error %d)", call, words, r)
}

// cString copies a text of the driver, which ends with a zero byte and is never freed.
func cString(text *byte) string {
	n := 0
	for *(*byte)(unsafe.Add(unsafe.Pointer(text), n)) != 0 {
		n++
	}
	return string(unsafe.Slice(text, n))
}

// cudaGPU is a GPU, used through its primary context. The context lives until the process ends.
type cudaGPU struct {
	// immutable
	drv                  *cudaDriver
	ordinal              int
	name                 string
	context              cudaContext
	touchKernel, painter cudaFunction

	mu   sync.Mutex
	idle []cudaStream // protected by mu
}

// openCUDA opens the GPU with this CUDA ordinal in this process.
func openCUDA(ordinal int) (*cudaGPU, error) {
	drv, err := loadCUDA()
	if err != nil {
		return nil, err
	}
	g := &cudaGPU{drv: drv, ordinal: ordinal}
	var count, version int32
	if err := drv.check("cuDeviceGetCount", drv.deviceCount(&count)); err != nil {
		return nil, err
	}
	if ordinal >= int(count) {
		return nil, fmt.Errorf("there is no GPU %d: this process sees %d, numbered from 0 (see CUDA_VISIBLE_DEVICES)",
			ordinal, count)
	}
	var device cudaDevice
	var name [256]byte
	var total uint64
	if err := errors.Join(
		drv.check("cuDeviceGet", drv.deviceGet(&device, int32(ordinal))),
		drv.check("cuDeviceGetName", drv.deviceName(&name[0], int32(len(name)), device)),
		drv.check("cuDeviceTotalMem", drv.deviceTotal(&total, device)),
		drv.check("cuDriverGetVersion", drv.version(&version)),
		drv.check("cuDevicePrimaryCtxRetain", drv.contextRetain(&g.context, device))); err != nil {
		return nil, err
	}
	text, _, _ := strings.Cut(string(name[:]), "\x00")
	g.name = fmt.Sprintf("GPU %d: %s, %.0f GiB, CUDA %d.%d", ordinal, text, float64(total)/(1<<30), version/1000,
		version%1000/10)
	return g, g.with(g.loadKernels)
}

func (g *cudaGPU) loadKernels() error {
	image := append(kernelsPTX[:len(kernelsPTX):len(kernelsPTX)], 0)
	var module cudaModule
	if err := g.drv.check("cuModuleLoadData", g.drv.moduleLoad(&module, &image[0])); err != nil {
		return err
	}
	for name, f := range map[string]*cudaFunction{"bench_touch": &g.touchKernel, "bench_stripes": &g.painter} {
		text := append([]byte(name), 0)
		if err := g.drv.check("cuModuleGetFunction", g.drv.moduleFunction(f, module, &text[0])); err != nil {
			return err
		}
	}
	return nil
}

// with calls f while the GPU's context is current on the thread, and restores the previous context afterwards.
func (g *cudaGPU) with(f func() error) error {
	runtime.LockOSThread() // a context is current per thread
	defer runtime.UnlockOSThread()
	if err := g.drv.check("cuCtxPushCurrent", g.drv.contextPush(g.context)); err != nil {
		return err
	}
	err := f()
	var popped cudaContext
	return errors.Join(err, g.drv.check("cuCtxPopCurrent", g.drv.contextPop(&popped)))
}

// do queues work into a stream that nothing else uses, and waits for the work.
func (g *cudaGPU) do(call string, queue func(s cudaStream) cudaResult) error {
	return g.with(func() error {
		g.mu.Lock()
		var s cudaStream
		if n := len(g.idle); n > 0 {
			s, g.idle = g.idle[n-1], g.idle[:n-1]
		}
		g.mu.Unlock()
		if s == 0 {
			const nonBlocking = 1
			if err := g.drv.check("cuStreamCreate", g.drv.streamCreate(&s, nonBlocking)); err != nil {
				return err
			}
		}
		err := g.drv.check(call, queue(s))
		if waitErr := g.drv.check("cuStreamSynchronize", g.drv.streamWait(s)); err == nil {
			err = waitErr
		}
		g.mu.Lock()
		g.idle = append(g.idle, s)
		g.mu.Unlock()
		return err
	})
}

func (g *cudaGPU) device() int    { return g.ordinal }
func (g *cudaGPU) String() string { return g.name }

func (g *cudaGPU) alloc(n int64) (a address, err error) {
	return a, g.with(func() error { return g.drv.check("cuMemAlloc", g.drv.memoryAlloc(&a, uintptr(n))) })
}

func (g *cudaGPU) free(a address) error {
	return g.with(func() error { return g.drv.check("cuMemFree", g.drv.memoryFree(a)) })
}

func (g *cudaGPU) pinned(n int64) (p []byte, err error) {
	return p, g.with(func() error {
		const portable = 1
		var start unsafe.Pointer
		if err := g.drv.check("cuMemHostAlloc", g.drv.hostAlloc(&start, uintptr(n), portable)); err != nil {
			return err
		}
		p = unsafe.Slice((*byte)(start), n) // owned by the driver, and never freed
		return nil
	})
}

func (g *cudaGPU) copyIn(to address, from []byte) error {
	return g.do("cuMemcpyHtoDAsync", func(s cudaStream) cudaResult {
		return g.drv.copyToDevice(to, unsafe.Pointer(unsafe.SliceData(from)), uintptr(len(from)), s)
	})
}

func (g *cudaGPU) copyOut(to []byte, from address) error {
	return g.do("cuMemcpyDtoHAsync", func(s cudaStream) cudaResult {
		return g.drv.copyToHost(unsafe.Pointer(unsafe.SliceData(to)), from, uintptr(len(to)), s)
	})
}

func (g *cudaGPU) copyWithin(to, from address, n int64) error {
	return g.do("cuMemcpyDtoDAsync",
		func(s cudaStream) cudaResult { return g.drv.copyWithinDevice(to, from, uintptr(n), s) })
}

// launchFor launches f with a thread for each of n pieces of work, up to a number that fills any GPU. It launches once
// per list of arguments, one after the other.
func (g *cudaGPU) launchFor(f cudaFunction, n int64, each ...[]uint64) error {
	const block, most = 256, 8192
	grid := uint32(max(1, min((n+block-1)/block, most)))
	return g.do("cuLaunchKernel", func(s cudaStream) (r cudaResult) {
		for _, arguments := range each {
			var pin runtime.Pinner // the driver reads the arguments before the call returns
			params := make([]unsafe.Pointer, len(arguments))
			for i := range arguments {
				pin.Pin(&arguments[i])
				params[i] = unsafe.Pointer(&arguments[i])
			}
			r = g.drv.launch(f, grid, 1, 1, block, 1, 1, 0, s, &params[0], nil)
			pin.Unpin()
			if r != 0 {
				break
			}
		}
		return r
	})
}

func (g *cudaGPU) touch(a address, step, n int64, value byte) error {
	return g.launchFor(g.touchKernel, n, []uint64{uint64(a), uint64(step), uint64(n), uint64(value)})
}

func (g *cudaGPU) paint(a address, s stripes, passes int) error {
	each := make([][]uint64, passes)
	for i := range each {
		each[i] = []uint64{uint64(a), uint64(s.size), uint64(s.width), uint64(s.first), uint64(s.writers),
			uint64(s.pass(i, passes).seed)}
	}
	return g.launchFor(g.painter, s.size/s.writers+s.width, each...)
}

func (g *cudaGPU) freeMemory() (int64, error) {
	var free, total uint64
	err := g.with(func() error { return g.drv.check("cuMemGetInfo", g.drv.memoryInfo(&free, &total)) })
	return int64(free), err
}
