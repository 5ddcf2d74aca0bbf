// Package gpubackend is the boundary to devices: their memory, copies to and from it, and the few kernels that work on
// its pages. It knows nothing of files, versions or clients.
//
// # Ownership
//
// A Memory belongs to the caller of Alloc until Free. An exported descriptor belongs to the Memory, which closes it in
// Free; duplicate it before you send it. A process that imported the memory keeps it alive on its own. Alloc never
// hands out memory again that was exported, and an emulated device counts such memory as used until the process gives
// it up.
//
// Memory that LockHost locks belongs to the caller, who unmaps it after unlock.
//
// # Concurrency
//
// A Device and a Memory may be used from any goroutine. Every call blocks until the device has done the work. Other
// processes may be storing into the memory at the same time, so no method assumes that two reads of a byte agree: a
// digest is computed from bytes that were read once.
//
// When its context ends, a call returns the context's error early, between two pieces of the work. Finished pieces are
// not undone: bytes that were copied stay.
//
// # Errors
//
// ErrNoMemory means that the memory is not available, ErrDeviceLost that the device is gone for good. ErrRange,
// ErrFreed, ErrInUse and ErrClosed mean that the call is wrong; a call with wrong arguments touches no memory. The
// Memory of a lost device can be freed, and the device closed, as usual: these calls give back what the host holds, and
// do not report the loss. ErrHostGone means that CopyIn was to read a file that has become shorter; the device is well.
//
// # What is where
//
// device.go has the interface, copy.go the pieces of copies, digest.go the page digest that both host and device
// compute, users.go what lets calls end before memory is freed. Package emulated is a device in host memory, package
// faulty makes any device fail for tests, and package conformance is the test suite that every device passes.
package gpubackend
