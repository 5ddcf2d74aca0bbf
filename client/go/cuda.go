package gaiafs

import (
	"math"
	"runtime"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"
)

// cudaLibrary is the NVIDIA driver's library. Only processes that map GPU memory load it.
const cudaLibrary = "libcuda.so.1"

// The driver's handles and result.
type (
	cudaDevice  int32
	cudaContext uintptr
	cudaHandle  uint64 // CUmemGenericAllocationHandle
	cudaAddress uint64
	cudaResult  int32
)

const (
	cudaPOSIXHandle = 1 // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
	cudaOnDevice    = 1 // CU_MEM_LOCATION_TYPE_DEVICE
	cudaRead        = 1 // CU_MEM_ACCESS_FLAGS_PROT_READ
	cudaReadWrite   = 3
	// cudaGranularity divides the address and the size of every extent.
	cudaGranularity = 2 << 20
	cudaRelaxed     = 2 // CU_STREAM_CAPTURE_MODE_RELAXED
)

// cudaAccess is a CUmemAccessDesc.
type cudaAccess struct {
	location, device int32
	flags            int32
}

// cudaDriver has the driver functions that this package calls. The caller owns what pointer arguments point to; the
// driver uses it only until the call returns.
type cudaDriver struct {
	init           func(flags uint32) cudaResult
	getErrorString func(r cudaResult, text **byte) cudaResult
	deviceGetCount func(count *int32) cudaResult
	deviceGet      func(device *cudaDevice, ordinal int32) cudaResult
	deviceGetUUID  func(uuid *[16]byte, device cudaDevice) cudaResult
	contextRetain  func(ctx *cudaContext, device cudaDevice) cudaResult
	contextRelease func(device cudaDevice) cudaResult
	contextPush    func(ctx cudaContext) cudaResult
	contextPop     func(ctx *cudaContext) cudaResult
	contextSync    func() cudaResult
	streamSync     func(stream uintptr) cudaResult
	captureMode    func(mode *int32) cudaResult // nil in old drivers
	alloc          func(a *cudaAddress, n uintptr) cudaResult
	free           func(a cudaAddress) cudaResult
	memImport      func(h *cudaHandle, fd uintptr, kind int32) cudaResult
	memRelease     func(h cudaHandle) cudaResult
	addressReserve func(a *cudaAddress, n, alignment uintptr, fixed cudaAddress, flags uint64) cudaResult
	addressFree    func(a cudaAddress, n uintptr) cudaResult
	memMap         func(a cudaAddress, n, offset uintptr, h cudaHandle, flags uint64) cudaResult
	memUnmap       func(a cudaAddress, n uintptr) cudaResult
	memSetAccess   func(a cudaAddress, n uintptr, desc *cudaAccess, count uintptr) cudaResult
	copyToDevice   func(to cudaAddress, from unsafe.Pointer, n uintptr) cudaResult
	copyToHost     func(to unsafe.Pointer, from cudaAddress, n uintptr) cudaResult
}

// loadCUDA loads the driver and initialises it, once.
var loadCUDA = sync.OnceValues(func() (*cudaDriver, error) {
	runtime.LockOSThread() // the loader keeps the reason of a failure per thread
	defer runtime.UnlockOSThread()
	handle, err := purego.Dlopen(cudaLibrary, purego.RTLD_NOW|purego.RTLD_GLOBAL)
	if err != nil {
		return nil, failed(syscall.ENODEV, "the mount's devices are GPUs, and %s cannot be loaded here (%v): "+
			"install the NVIDIA driver's library in this environment, or start the container with access to the GPUs",
			cudaLibrary, err)
	}
	d := new(cudaDriver)
	for _, f := range []struct {
		name     string
		function any
		optional bool
	}{
		{"cuInit", &d.init, false},
		{"cuGetErrorString", &d.getErrorString, false},
		{"cuDeviceGetCount", &d.deviceGetCount, false},
		{"cuDeviceGet", &d.deviceGet, false},
		{"cuDeviceGetUuid", &d.deviceGetUUID, false},
		// This one tells the instances of one GPU apart. If the driver has it, it replaces the function above.
		{"cuDeviceGetUuid_v2", &d.deviceGetUUID, true},
		{"cuDevicePrimaryCtxRetain", &d.contextRetain, false},
		{"cuDevicePrimaryCtxRelease_v2", &d.contextRelease, false},
		{"cuCtxPushCurrent_v2", &d.contextPush, false},
		{"cuCtxPopCurrent_v2", &d.contextPop, false},
		{"cuCtxSynchronize", &d.contextSync, false},
		{"cuStreamSynchronize", &d.streamSync, false},
		{"cuThreadExchangeStreamCaptureMode", &d.captureMode, true},
		{"cuMemAlloc_v2", &d.alloc, false},
		{"cuMemFree_v2", &d.free, false},
		{"cuMemImportFromShareableHandle", &d.memImport, false},
		{"cuMemRelease", &d.memRelease, false},
		{"cuMemAddressReserve", &d.addressReserve, false},
		{"cuMemAddressFree", &d.addressFree, false},
		{"cuMemMap", &d.memMap, false},
		{"cuMemUnmap", &d.memUnmap, false},
		{"cuMemSetAccess", &d.memSetAccess, false},
		{"cuMemcpyHtoD_v2", &d.copyToDevice, false},
		{"cuMemcpyDtoH_v2", &d.copyToHost, false},
	} {
		address, err := purego.Dlsym(handle, f.name)
		switch {
		case err == nil:
			purego.RegisterFunc(f.function, address)
		case !f.optional:
			return nil, failed(syscall.ENODEV, "%s is too old: it has no %s; driver 450 (CUDA 11.0) or later is needed",
				cudaLibrary, f.name)
		}
	}
	if err := d.check("cuInit", d.init(0)); err != nil {
		return nil, failed(syscall.ENODEV, "%s finds no GPU for this process: %s; look at CUDA_VISIBLE_DEVICES",
			cudaLibrary, err.Text)
	}
	return d, nil
})

// check turns the result of a driver call into an Error, or nil.
func (d *cudaDriver) check(call string, r cudaResult) *Error {
	if r == 0 {
		return nil
	}
	errno, known := cudaErrno[r]
	if !known {
		errno = syscall.EIO
	}
	words := ""
	var text *byte
	if d.getErrorString(r, &text) == 0 && text != nil {
		// The driver's texts end with a zero byte. They live as long as the library, which is never unloaded.
		for p := unsafe.Pointer(text); *(*byte)(p) != 0; p = unsafe.Add(p, 1) {
			words += string(*(*byte)(p))
		}
		words += " "
	}
	return failed(errno, "%s: %s(CUDA error %d)", call, words, int32(r))
}

// gpu is a GPU of this process. It retains the GPU's primary context until some time after release. Its methods may be
// called from any goroutine. They restore the calling thread's current context.
type gpu struct {
	drv     *cudaDriver
	device  cudaDevice
	uuid    [16]byte
	context cudaContext
}

// cudaKind is the kind of GPUs that CUDA drives.
var cudaKind = deviceKind{
	number: KindCUDA,
	open: func(ordinal int) (ownGPU, error) {
		g, err := openGPU(ordinal)
		if err != nil {
			return nil, err
		}
		return g, nil
	},
	memory: func(a *assembly) (memory, error) {
		stays := cudaMemory{gpu: a.gpu.(*gpu), off: a.off, prot: a.prot} // begin checked the kind
		if a.reply.movable {
			return &movingCUDA{cudaMemory: stays, length: a.size}, nil
		}
		return &stays, nil
	},
}

func (g *gpu) id() [16]byte { return g.uuid }

// openGPU returns the GPU that CUDA numbers ordinal in this process. ENODEV if there is none, or no CUDA.
func openGPU(ordinal int) (*gpu, error) {
	drv, err := loadCUDA()
	if err != nil {
		return nil, err
	}
	var count int32
	if err := drv.check("cuDeviceGetCount", drv.deviceGetCount(&count)); err != nil {
		return nil, err
	}
	if ordinal >= int(min(count, math.MaxInt32)) {
		return nil, failed(syscall.ENODEV,
			"there is no CUDA device %d: %s shows this process %d, numbered from 0 (see CUDA_VISIBLE_DEVICES)",
			ordinal, cudaLibrary, count)
	}
	g := &gpu{drv: drv}
	if err := drv.check("cuDeviceGet", drv.deviceGet(&g.device, int32(ordinal))); err != nil {
		return nil, err
	}
	if err := drv.check("cuDeviceGetUuid", drv.deviceGetUUID(&g.uuid, g.device)); err != nil {
		return nil, err
	}
	if err := drv.check("cuDevicePrimaryCtxRetain", drv.contextRetain(&g.context, g.device)); err != nil {
		return nil, err
	}
	return g, nil
}

// contextLinger is how long a GPU's context outlives the last mapping. Making a context takes a tenth of a second.
// Without the delay, a program with no other use for the context would pay that for each file that it maps and closes.
var contextLinger = 10 * time.Second

// release gives up the GPU. Its context is released later, when nobody could act on an error.
func (g *gpu) release() {
	time.AfterFunc(contextLinger, func() { g.drv.contextRelease(g.device) })
}

// use runs do while the GPU's primary context is the thread's current one. Except for cuCtxSynchronize, no driver call
// in do ends another thread's stream capture.
func (g *gpu) use(do func() *Error) error {
	runtime.LockOSThread() // a context is current to a thread, not to a goroutine
	defer runtime.UnlockOSThread()
	if mode := int32(cudaRelaxed); g.drv.captureMode != nil && g.drv.captureMode(&mode) == 0 {
		defer g.drv.captureMode(&mode) // captureMode swaps: mode now has the thread's old mode
	}
	err := g.drv.check("cuCtxPushCurrent", g.drv.contextPush(g.context))
	if err == nil {
		err = do()
		var popped cudaContext
		if popErr := g.drv.check("cuCtxPopCurrent", g.drv.contextPop(&popped)); err == nil {
			err = popErr
		}
	}
	if err != nil {
		return err
	}
	return nil
}

// cudaMemory is memory of a GPU. The driver can map only a whole handle, so the address range has whole extents, and
// the mapping begins somewhere in the first one. The size of the range is known when the last extent has come.
type cudaMemory struct {
	gpu  *gpu // the assembly's
	off  int64
	prot Prot

	first   int64        // file offset of the first extent
	handles []cudaHandle // imported, not yet mapped
	sizes   []uintptr    // of all extents
	start   cudaAddress  // of the range; 0: none is reserved
	size    uintptr      // of the range
	mapped  uintptr      // bytes from start on that have memory
	block   cudaAddress  // a small allocation: drop frees it to wait for the context; 0: the GPU had no room for it
}

func (c *cudaMemory) place(p extentPlace, fd int) error {
	if p.size%cudaGranularity != 0 {
		return failed(syscall.EPROTO, "an extent of %d bytes is no memory of a GPU", p.size)
	}
	if len(c.sizes) == 0 {
		c.first = p.off
	}
	return c.gpu.use(func() *Error {
		var h cudaHandle
		// The driver keeps its own reference to the memory, but not the descriptor.
		if err := c.gpu.drv.check("cuMemImportFromShareableHandle",
			c.gpu.drv.memImport(&h, uintptr(fd), cudaPOSIXHandle)); err != nil {
			return err
		}
		c.handles = append(c.handles, h)
		c.sizes = append(c.sizes, uintptr(p.size))
		c.size += uintptr(p.size)
		return nil
	})
}

// finish maps the extents side by side, and then releases the handles, because a mapping keeps its memory alive. After
// an error the caller calls drop.
func (c *cudaMemory) finish() error {
	drv := c.gpu.drv
	return c.gpu.use(func() *Error {
		if drv.alloc(&c.block, 1) != 0 {
			c.block = 0
		}
		if err := drv.check("cuMemAddressReserve", drv.addressReserve(&c.start, c.size, cudaGranularity, 0,
			0)); err != nil {
			c.start = 0
			return err
		}
		for i, h := range c.handles {
			if err := drv.check("cuMemMap", drv.memMap(c.start+cudaAddress(c.mapped), c.sizes[i], 0, h,
				0)); err != nil {
				return err
			}
			c.mapped += c.sizes[i]
		}
		access := cudaAccess{cudaOnDevice, int32(c.gpu.device), cudaRead}
		if c.prot&ProtWrite != 0 {
			access.flags = cudaReadWrite
		}
		if err := drv.check("cuMemSetAccess", drv.memSetAccess(c.start, c.size, &access, 1)); err != nil {
			return err
		}
		return c.forget()
	})
}

// forget releases all handles, and returns the first error.
func (c *cudaMemory) forget() (first *Error) {
	for _, h := range c.handles {
		if err := c.gpu.drv.check("cuMemRelease", c.gpu.drv.memRelease(h)); first == nil {
			first = err
		}
	}
	c.handles = nil
	return first
}

// move always fails: this memory was promised to stay. See movingCUDA.
func (c *cudaMemory) move(extentPlace, int) error {
	return failed(syscall.EPERM, "the memory of the mapping does not move")
}

// quiesce waits for all work that was started in the GPU's primary context.
func (c *cudaMemory) quiesce() error {
	return c.gpu.use(func() *Error { return c.gpu.drv.check("cuCtxSynchronize", c.gpu.drv.contextSync()) })
}

// drop waits for the work that was started, and then undoes place and finish. It tries every step: on a failed GPU
// every call fails, and the process keeps nothing of the GPU's memory.
func (c *cudaMemory) drop() error {
	drv := c.gpu.drv
	return c.gpu.use(func() *Error {
		err := c.forget()
		// cuMemUnmap does not wait for kernels. cuMemFree waits for the context and, unlike cuCtxSynchronize, ends no
		// stream capture.
		if c.block != 0 || drv.alloc(&c.block, 1) == 0 {
			if e := drv.check("cuMemFree", drv.free(c.block)); err == nil {
				err = e
			}
		} else if c.mapped > 0 {
			if e := drv.check("cuCtxSynchronize", drv.contextSync()); err == nil {
				err = e
			}
		}
		c.block = 0
		if c.mapped > 0 {
			if e := drv.check("cuMemUnmap", drv.memUnmap(c.start, c.mapped)); err == nil {
				err = e
			}
		}
		if c.start != 0 {
			if e := drv.check("cuMemAddressFree", drv.addressFree(c.start, c.size)); err == nil {
				err = e
			}
		}
		c.start, c.mapped = 0, 0
		return err
	})
}

func (c *cudaMemory) base() uintptr { return uintptr(c.start) + uintptr(c.off-c.first) }

// read returns when the bytes are in p. The driver owns p until then.
func (c *cudaMemory) read(p []byte, off int64) error {
	return c.gpu.use(func() *Error {
		from := cudaAddress(c.base()) + cudaAddress(off)
		return c.gpu.drv.check("cuMemcpyDtoH", c.gpu.drv.copyToHost(unsafe.Pointer(unsafe.SliceData(p)), from,
			uintptr(len(p))))
	})
}

// write returns when the bytes are in the device's memory. The driver's copy alone may return while the bytes are still
// in the driver's own buffer, where another process, such as the daemon, would not see them.
func (c *cudaMemory) write(p []byte, off int64) error {
	drv := c.gpu.drv
	return c.gpu.use(func() *Error {
		to := cudaAddress(c.base()) + cudaAddress(off)
		if err := drv.check("cuMemcpyHtoD", drv.copyToDevice(to, unsafe.Pointer(unsafe.SliceData(p)),
			uintptr(len(p)))); err != nil {
			return err
		}
		return drv.check("cuStreamSynchronize", drv.streamSync(0))
	})
}
