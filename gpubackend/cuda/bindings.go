package cuda

import "unsafe"

// leastVersion is CUDA 11.0: the kernels are in its PTX version.
const leastVersion = 11000

// The driver's handles.
type (
	deviceHandle   int32
	contextHandle  uintptr
	moduleHandle   uintptr
	functionHandle uintptr
	streamHandle   uintptr
	eventHandle    uintptr
	memoryHandle   uint64
	// address is an address in the device's address space, which includes the host's page-locked memory.
	address uint64
)

// Attributes of a device (CUdevice_attribute).
const (
	attrMultiprocessors   = 16
	attrComputeMode       = 20
	attrUnifiedAddressing = 41
	attrCapabilityMajor   = 75
	attrCapabilityMinor   = 76
	attrVMM               = 102
	attrPOSIXHandles      = 103
	attrHostNUMA          = 134 // CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
)

const (
	computeModeProhibited = 2
	eventBlocking         = 1 // CU_EVENT_BLOCKING_SYNC
	eventNoTiming         = 2 // CU_EVENT_DISABLE_TIMING
	streamNonBlocking     = 1
	hostPortable          = 1 // CU_MEMHOSTALLOC_PORTABLE and CU_MEMHOSTREGISTER_PORTABLE
	hostReadOnly          = 8 // CU_MEMHOSTREGISTER_READ_ONLY
	handlePOSIX           = 1 // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
	granularityMinimum    = 0
	accessRead            = 1
	accessReadWrite       = 3
	memcpyInStreamOrder   = 1 // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
	memcpyBesideKernels   = 1 // CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: by copy engines
)

// location is a CUmemLocation.
type location struct {
	kind int32
	id   int32
}

func onDevice(d deviceHandle) location { return location{kind: 1, id: int32(d)} }

// onHost is the memory of a NUMA node of the host.
func onHost(node int32) location { return location{kind: 3, id: node} }

// allocationProp is a CUmemAllocationProp.
type allocationProp struct {
	kind        int32 // 1: CU_MEM_ALLOCATION_TYPE_PINNED
	handleTypes int32
	location    location
	_           unsafe.Pointer // of Windows
	_           [8]byte        // compression, RDMA, usage
}

// accessDesc is a CUmemAccessDesc.
type accessDesc struct {
	location location
	flags    int32
}

// copyAttributes is a CUmemcpyAttributes.
type copyAttributes struct {
	order int32
	_, _  location // hints for managed memory
	flags uint32
}

// The kinds of memory of a copySide (CUmemorytype).
const (
	memoryHost   = 1
	memoryDevice = 2
)

// copySide is one side of a CUDA_MEMCPY2D: rows that begin pitch bytes apart, at host or at device.
type copySide struct {
	x, y   uintptr
	kind   uint32
	host   address
	device address
	array  uintptr
	pitch  uintptr
}

// copyRows is a CUDA_MEMCPY2D.
type copyRows struct {
	from, to      copySide
	width, height uintptr
}

// driver has the functions of libcuda that gaiafs calls, under the driver's names without their cu. The caller owns
// what pointer arguments point to; the driver uses it only until the call returns, except for the addresses of
// asynchronous copies.
type driver struct {
	init             func(flags uint32) result
	driverGetVersion func(version *int32) result
	getErrorString   func(r result, text **byte) result

	deviceGetCount          func(count *int32) result
	deviceGet               func(device *deviceHandle, ordinal int32) result
	deviceGetName           func(name *byte, n int32, device deviceHandle) result
	deviceGetUUID           func(uuid *[16]byte, device deviceHandle) result
	deviceTotalMem          func(bytes *uint64, device deviceHandle) result
	deviceGetAttribute      func(value *int32, attribute int32, device deviceHandle) result
	deviceCanAccessPeer     func(can *int32, device, peer deviceHandle) result
	devicePrimaryCtxRetain  func(ctx *contextHandle, device deviceHandle) result
	devicePrimaryCtxRelease func(device deviceHandle) result
	ctxSetCurrent           func(ctx contextHandle) result
	ctxSynchronize          func() result
	memGetInfo              func(free, total *uint64) result
	moduleLoadDataEx        func(module *moduleHandle, image *byte, n uint32, options *int32,
		values *unsafe.Pointer) result
	moduleUnload      func(module moduleHandle) result
	moduleGetFunction func(function *functionHandle, module moduleHandle, name *byte) result
	launchKernel      func(f functionHandle, gridX, gridY, gridZ, blockX, blockY, blockZ, shared uint32,
		s streamHandle, params *unsafe.Pointer, extra *unsafe.Pointer) result
	streamCreate        func(s *streamHandle, flags uint32) result
	streamDestroy       func(s streamHandle) result
	streamSynchronize   func(s streamHandle) result
	eventCreate         func(e *eventHandle, flags uint32) result
	eventDestroy        func(e eventHandle) result
	eventRecord         func(e eventHandle, s streamHandle) result
	eventQuery          func(e eventHandle) result
	eventSynchronize    func(e eventHandle) result
	memAlloc            func(a *address, n uintptr) result
	memFree             func(a address) result
	memHostAlloc        func(p *unsafe.Pointer, n uintptr, flags uint32) result
	memFreeHost         func(p unsafe.Pointer) result
	memHostRegister     func(p unsafe.Pointer, n uintptr, flags uint32) result
	memHostUnregister   func(p unsafe.Pointer) result
	memcpyHtoDAsync     func(to, from address, n uintptr, s streamHandle) result
	memcpyDtoHAsync     func(to, from address, n uintptr, s streamHandle) result
	memcpyDtoDAsync     func(to, from address, n uintptr, s streamHandle) result
	memcpy2DAsync       func(rows *copyRows, s streamHandle) result
	memsetD8Async       func(a address, value uint8, n uintptr, s streamHandle) result
	memGetGranularity   func(n *uintptr, prop *allocationProp, option int32) result
	memCreate           func(m *memoryHandle, n uintptr, prop *allocationProp, flags uint64) result
	memRelease          func(m memoryHandle) result
	memAddressReserve   func(a *address, n, alignment uintptr, fixed address, flags uint64) result
	memAddressFree      func(a address, n uintptr) result
	memMap              func(a address, n, offset uintptr, m memoryHandle, flags uint64) result
	memUnmap            func(a address, n uintptr) result
	memSetAccess        func(a address, n uintptr, desc *accessDesc, count uintptr) result
	memExportToHandle   func(fd *int32, m memoryHandle, kind int32, flags uint64) result
	memImportFromHandle func(m *memoryHandle, fd uintptr, kind int32) result

	// memcpyBatchAsync is nil before CUDA 12.8. failed is the number of the copy that failed.
	memcpyBatchAsync func(to, from *address, sizes *uintptr, count uintptr, attributes *copyAttributes, first *uintptr,
		attributeCount uintptr, failed *uintptr, s streamHandle) result
}

// function is a symbol of the library and the field through which it is called.
type function struct {
	name     string
	function any // a pointer to a field of driver
	optional bool
}

func (d *driver) functions() []function {
	return []function{
		{"cuInit", &d.init, false},
		{"cuDriverGetVersion", &d.driverGetVersion, false},
		{"cuGetErrorString", &d.getErrorString, false},
		{"cuDeviceGetCount", &d.deviceGetCount, false},
		{"cuDeviceGet", &d.deviceGet, false},
		{"cuDeviceGetName", &d.deviceGetName, false},
		{"cuDeviceGetUuid", &d.deviceGetUUID, false},
		{"cuDeviceGetUuid_v2", &d.deviceGetUUID, true}, // tells the instances of one GPU apart
		{"cuDeviceTotalMem_v2", &d.deviceTotalMem, false},
		{"cuDeviceGetAttribute", &d.deviceGetAttribute, false},
		{"cuDeviceCanAccessPeer", &d.deviceCanAccessPeer, false},
		{"cuDevicePrimaryCtxRetain", &d.devicePrimaryCtxRetain, false},
		{"cuDevicePrimaryCtxRelease_v2", &d.devicePrimaryCtxRelease, false},
		{"cuCtxSetCurrent", &d.ctxSetCurrent, false},
		{"cuCtxSynchronize", &d.ctxSynchronize, false},
		{"cuMemGetInfo_v2", &d.memGetInfo, false},
		{"cuModuleLoadDataEx", &d.moduleLoadDataEx, false},
		{"cuModuleUnload", &d.moduleUnload, false},
		{"cuModuleGetFunction", &d.moduleGetFunction, false},
		{"cuLaunchKernel", &d.launchKernel, false},
		{"cuStreamCreate", &d.streamCreate, false},
		{"cuStreamDestroy_v2", &d.streamDestroy, false},
		{"cuStreamSynchronize", &d.streamSynchronize, false},
		{"cuEventCreate", &d.eventCreate, false},
		{"cuEventDestroy_v2", &d.eventDestroy, false},
		{"cuEventRecord", &d.eventRecord, false},
		{"cuEventQuery", &d.eventQuery, false},
		{"cuEventSynchronize", &d.eventSynchronize, false},
		{"cuMemAlloc_v2", &d.memAlloc, false},
		{"cuMemFree_v2", &d.memFree, false},
		{"cuMemHostAlloc", &d.memHostAlloc, false},
		{"cuMemFreeHost", &d.memFreeHost, false},
		{"cuMemHostRegister_v2", &d.memHostRegister, false},
		{"cuMemHostUnregister", &d.memHostUnregister, false},
		{"cuMemcpyHtoDAsync_v2", &d.memcpyHtoDAsync, false},
		{"cuMemcpyDtoHAsync_v2", &d.memcpyDtoHAsync, false},
		{"cuMemcpyDtoDAsync_v2", &d.memcpyDtoDAsync, false},
		{"cuMemcpy2DAsync_v2", &d.memcpy2DAsync, false},
		{"cuMemsetD8Async", &d.memsetD8Async, false},
		{"cuMemGetAllocationGranularity", &d.memGetGranularity, false},
		{"cuMemCreate", &d.memCreate, false},
		{"cuMemRelease", &d.memRelease, false},
		{"cuMemAddressReserve", &d.memAddressReserve, false},
		{"cuMemAddressFree", &d.memAddressFree, false},
		{"cuMemMap", &d.memMap, false},
		{"cuMemUnmap", &d.memUnmap, false},
		{"cuMemSetAccess", &d.memSetAccess, false},
		{"cuMemExportToShareableHandle", &d.memExportToHandle, false},
		{"cuMemImportFromShareableHandle", &d.memImportFromHandle, false},
		{"cuMemcpyBatchAsync", &d.memcpyBatchAsync, true},
	}
}
