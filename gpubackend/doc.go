// Package gpubackend is the boundary to devices: their memory, copies to and from it, and the few kernels that work
// on pages of it. It knows nothing of files, versions or clients.
//
// # Ownership
//
// A Memory belongs to whoever called Alloc until Free. An exported descriptor belongs to the Memory, which closes it
// in Free; whoever sends it on duplicates it first. A process that imported the memory keeps it alive on its own:
// what was exported once is never handed out again by Alloc, and an emulated device counts it as used for so long.
//
// # Concurrency
//
// A Device and a Memory may be used from any goroutine. Every call blocks until the device has done the work.
// Programs of other processes may be storing into the memory at the same time, so no method assumes that two readings
// of a byte agree: a digest is computed from the bytes that were read once.
//
// A context that ends makes a call return its error early, between two pieces of the work. What was not done by then
// is undone in no way: bytes copied in so far stay.
//
// # Errors
//
// ErrNoMemory when the memory cannot be had, ErrDeviceLost when the device is gone for good; ErrRange, ErrFreed,
// ErrInUse and ErrClosed when the call is at fault. A call whose arguments are at fault touches no memory. The Memory
// of a lost device is freed, and the device closed, as always: they give back what the host holds and do not report the
// loss.
//
// # What is where
//
// device.go has the interface, digest.go the page digest that host and device both compute. Package emulated is a
// device in host memory, package faulty makes any device fail for tests, and package conformance is the test that
// every device passes.
package gpubackend
