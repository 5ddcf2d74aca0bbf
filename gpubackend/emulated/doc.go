// Package emulated is a device in host memory. gaiafs uses it if there is no GPU, and so do its tests.
//
// # Model
//
// Every Memory is a memfd that the daemon maps once and each client process maps for itself. It is separate from the
// backing files. So a page has as many replicas as with real devices, and all rules of coherence apply. Memory is taken
// from the host only when it is first touched, by a store or a load: an unused device costs some hundred bytes, and no
// descriptor.
//
// Freed memory goes back to the host at once and is never handed out again. So no importer can see what other programs
// store later, and memory from Alloc is all zeros unless Options.Poison is set.
//
// # Who may do what with an export
//
// The memfd's size is sealed, so an importer cannot make the daemon's loads and stores fail with SIGBUS. It can punch
// holes, which read as zeros; its stores could do the same.
//
// The read-only export is a descriptor that was opened for reading: mmap with PROT_WRITE, mprotect to it, write and
// fallocate fail. The memfd's mode is 0600, so a process of another user cannot open it again for writing through
// /proc. A process that runs as the daemon's user or as root can, just as it can attach a debugger to the daemon.
// Against such processes a read-only export prevents only accidents.
//
// # Concurrency
//
// Processes store into the memory while the device's calls read it. The calls use plain loads and copies. They base
// every decision on bytes that they loaded once, and never assume that a second load gives the same. Calls on more than
// one piece (1 MiB) use up to GOMAXPROCS goroutines, which end before the call returns. They check the context between
// pieces.
//
// # Locks
//
//	memory.mu    the calls that are using a Memory, and its descriptors
//	device.mu    the budget; taken alone
//
// # What it does not do
//
// It emulates neither the speed of a device nor its loss. Package faulty emulates the loss.
package emulated
