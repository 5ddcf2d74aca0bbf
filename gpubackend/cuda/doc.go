// Package cuda is the device of NVIDIA GPUs behind gpubackend.Device, by the CUDA driver API.
//
// # Model
//
// libcuda.so.1 is loaded when it is first asked for; neither cgo nor the CUDA toolkit is needed to build or run
// gaiafs. A device has the GPU's primary context and five lanes, each a stream and the right to use it: two copy to the
// GPU, one from it, one runs the page kernels and zeroes, and one allocates and frees. A call runs on its caller's
// goroutine, locked to its thread with the context current, and waits there until its work is done. What one lane does
// goes on beside what the others do; within a lane calls wait for each other.
//
// # Memory
//
// A Memory is one physical allocation (cuMemCreate) mapped for the daemon at an address of its own, readable and
// writable. Its descriptor is made at the first Export and kept. Freed memory goes back to the driver; it keeps the
// pages as long as an importer maps them, so they cannot be allocated again before that. The driver promises no zeros.
//
// # What a read-only export can and cannot guarantee
//
// CUDA has one kind of descriptor. Read-only is the wish of the importing process, which maps with read access only
// (cuMemSetAccess): a store by a kernel of that process then faults, in that process alone. The descriptor itself
// does not stop a process that maps it with write access. So it guards against accidents: whoever receives one and
// means harm can change what all programs on this GPU read of that memory. Callers must not take for data what appears
// in memory that nobody was allowed to write.
//
// # Copies
//
// Copies go through the copy engines, so they do not wait for kernels of other processes. Page-locked memory
// (HostBuffer) is copied directly; any other is first gathered in, or scattered from, page-locked chunks, one of which
// is filled while others are on their way. Many pieces are one call to the driver where it has cuMemcpyBatchAsync (CUDA
// 12.8), else queued one by one.
//
// Many scattered pages go side by side in one copy, and a page kernel moves them between there and their places, since
// each piece costs a copy engine microseconds (scatter.go). While that has to wait for kernels of other processes, the
// copy engines do these too.
//
// From GPU to GPU the copy engines of the one that receives read the other's memory, over NVLink or PCIe. A Memory is
// opened to another GPU (cuMemSetAccess) when that copies from it for the first time, and stays so.
//
// # Page kernels
//
// kernels.cu is compiled to kernels.ptx by `make ptx`; the driver compiles that for the GPU when a device is opened.
// The first line of the PTX has the SHA-256 of its source, which a test compares. While a kernel of another process
// runs, a page kernel waits for its time slice.
//
// # Waiting
//
// A call waits by asking, at first without a pause and then between sleeps of 20 µs, because being woken by the driver
// took 0.2 ms where it was measured (an H200 in a virtual machine). That costs part of a core while work is under way;
// after 10 ms the driver wakes it all the same. For the same reason no call is handed to another thread.
//
// # Errors
//
// Every failed driver call is an error with the call's name and the driver's words. Those after which CUDA gives a
// context up for lost are gpubackend.ErrDeviceLost, and from the first one on every call fails with it.
//
// # Who owns foreign memory
//
// Addresses of device memory are numbers here, never Go pointers. Page-locked memory is the driver's: Go slices of it
// are valid until cuMemFreeHost, which only the pool in buffer.go and the owners of staging chunks call. The driver
// keeps no pointer to Go memory after a call returns: asynchronous calls are given page-locked and device memory only.
//
// # Locks
//
//	memory.mu     the calls that are using a Memory, and its descriptors
//	device.mu     the budget
//	peersMu       which GPUs can be reached
//	buffers.mu    the page-locked memory
//
// None is held while another is taken. memory.mu is held during the driver's calls of Export and of opening a Memory to
// another GPU, peersMu while the driver is asked about a GPU; no other is held during a driver call.
package cuda
