// Package cuda implements gpubackend.Device for NVIDIA GPUs by the CUDA driver API.
//
// # Model
//
// libcuda.so.1 is loaded at its first use; neither cgo nor the CUDA toolkit is needed to build or run gaiafs. A device
// has the GPU's primary context and six lanes, each a stream and the right to use it: two copy to the GPU, one from it,
// one runs the page kernels and zeroes, one allocates and frees, and one does that with host memory. A call runs on its
// caller's goroutine, locked to its thread with the context current, and waits there until its work is done. Lanes work
// concurrently; within a lane calls wait for each other.
//
// # Memory
//
// A Memory is one physical allocation (cuMemCreate) mapped for the daemon at an address of its own, readable and
// writable. Its descriptor is made at the first Export and kept. Freed memory goes back to the driver. The driver keeps
// the pages as long as an importer maps them, so they cannot be allocated again before that. New memory need not be
// zeros.
//
// # What a read-only export can and cannot guarantee
//
// CUDA has one kind of descriptor. The importing process itself chooses to map with read access only (cuMemSetAccess).
// A store by a kernel of that process then faults, in that process alone. The descriptor does not stop a process that
// maps it with write access. So it prevents only accidents: a malicious process that receives one can change what all
// programs on this GPU read of that memory. Callers must not treat stores into memory that nobody was allowed to write
// as data.
//
// # Copies
//
// Copies go through the copy engines, so they do not wait for kernels of other processes. Page-locked memory
// (HostBuffer) is copied directly. Other memory is first gathered in, or scattered from, page-locked chunks; one chunk
// is filled while others are under way. If the driver has cuMemcpyBatchAsync (CUDA 12.8), many pieces are one call;
// otherwise they are queued one by one. Rows in page-locked memory are one call (cuMemcpy2DAsync), however many they
// are; rows in other memory are gathered like other pieces. Each device copies from the page-locked memory of all
// devices (CU_MEMHOSTALLOC_PORTABLE).
//
// The pages of a file can be locked, too (lock.go). The driver reads small copies with the CPU, which would end the
// process if the file has become shorter. So small pieces of files are staged (leastOfFile), where faults are caught.
//
// Each piece costs a copy engine microseconds. So many scattered pages are copied side by side in one piece, and a page
// kernel moves them to or from their places (scatter.go). While page kernels have to wait for kernels of other
// processes, the copy engines copy these pages too.
//
// From GPU to GPU, the copy engines of the receiving GPU read the other's memory, over NVLink or PCIe. A Memory is
// opened to another GPU (cuMemSetAccess) when that GPU first copies from it, and stays open. These copies have copiers
// of their own, so they do not wait for copies from the host.
//
// # Page kernels
//
// kernels.cu is compiled to kernels.ptx by `make ptx`; the driver compiles that for the GPU when a device is opened.
// The first line of the PTX has the SHA-256 of its source, which a test compares. While a kernel of another process
// runs, a page kernel waits for its time slice.
//
// # Waiting
//
// A call waits by polling, at first without a pause and then with sleeps of 20 µs, because being woken by the driver
// took 0.2 ms on an H200 in a virtual machine. Polling costs part of a core while work is under way. After 10 ms the
// call lets the driver wake it. For the same reason no call is handed to another thread.
//
// # Errors
//
// Every failed driver call is an error with the call's name and the driver's text. Errors that destroy a CUDA context
// are gpubackend.ErrDeviceLost. After the first of them, every call fails with it.
//
// # Who owns foreign memory
//
// Addresses of device memory are numbers here, never Go pointers. Page-locked memory belongs to the driver: Go slices
// of it are valid until cuMemFreeHost, which only the pool in buffer.go and the owners of staging chunks call. Memory
// of LockHost belongs to its caller; the driver has its pages from cuMemHostRegister to cuMemHostUnregister. The
// driver keeps no pointer to Go memory after a call returns: asynchronous calls get only page-locked and device memory.
//
// # Locks
//
//	memory.mu     the calls that are using a Memory, and its descriptors
//	device.mu     the budget
//	peersMu       which GPUs can be reached
//	buffers.mu    the page-locked memory
//
// None is held while another is taken. memory.mu is held during the driver calls of Export and of opening a Memory to
// another GPU, peersMu while the driver is asked about a GPU. No other lock is held during a driver call.
package cuda
