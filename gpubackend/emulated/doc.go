// Package emulated is a device in host memory: what gaiafs uses where there is no GPU, and what its tests use.
//
// # Model
//
// Every Memory is a memfd that the daemon maps once and client processes map for themselves. It is apart from the
// backing files, so a page has as many replicas as with real devices and every rule of coherence is at work. Nothing
// is taken from the host before it is touched, be it only read: a device that nobody uses costs some hundred bytes,
// and no descriptor.
//
// Freed memory goes back to the host at once and is never handed out again, so no importer can see what somebody
// else puts into it later, and memory from Alloc is all zeros but for Options.Poison.
//
// # Who may do what with an export
//
// The memfd's size is sealed, so an importer cannot make the daemon's loads and stores fail with SIGBUS. It can punch
// holes, which read as zeros: no more than its stores can do.
//
// The read-only export is a descriptor that was opened for reading: mmap with PROT_WRITE, mprotect to it, write and
// fallocate fail. The memfd's mode is 0600, so a process of another user cannot open it again for writing through
// /proc. One that runs as the daemon's user or as root can, just as it can attach a debugger to the daemon; against
// such a process a read-only export is a guard against accidents and no more.
//
// # Concurrency
//
// Processes store into the memory while the device's calls read it. The calls use plain loads and copies, take every
// decision from bytes that they loaded once, and never assume that a second look gives the same. Calls on more than a
// piece (1 MiB) use up to GOMAXPROCS goroutines, which end before the call returns, and look at the context between
// pieces.
//
// # Locks
//
//	memory.mu    the calls that are using a Memory, and its descriptors
//	device.mu    the budget; taken alone
//
// # What it does not do
//
// It does not emulate the speed of a device, nor the loss of one: package faulty does the latter.
package emulated
