// Package gaiafs lets a Go program map files of a gaiafs mount on a GPU, or on the emulated device that stands in for
// one, and share them with every other program of the machine.
//
// # Model
//
// Map gives a window on a file in a device's memory. All processes that map the file on that device share the same
// memory. What the program stores there is seen by everyone else, CPU programs with plain reads included, after
// Release; what others released or wrote is seen here after Acquire. Two programs may write the same page at once:
// the bytes that each changed are merged, and only bytes that both changed are contended. Close is an implicit
// Release, and so is the death of the process.
//
//	f, err := os.OpenFile("/mnt/gaia/out.dat", os.O_RDWR, 0)
//	m, err := gaiafs.Map(f, 0, 1<<20, gaiafs.ProtRead|gaiafs.ProtWrite, 0)
//	_, err = m.WriteAt(result, 4096)
//	_, err = m.Release(0, m.Len())
//	err = m.Close()
//
// MapView gives a view: memory that is only read, with chosen bytes of one file or of several, each piece at an
// aligned address, as kernels like it. It is shared, and as coherent, as a mapping is.
//
// Begin opens a Group: ranges of several mappings and files of which all stores are released at once, with a version
// that AcquireAll returns and AcquireAtLeast waits for.
//
// # Memory that moves
//
// A Movable mapping, or one that is larger than its device may have, has memory only while a Bracket uses it:
//
//	b, err := m.Use(ctx, off, n)
//	process(m.Bytes()[off : off+n]) // or launch a kernel on it
//	err = b.Done()
//
// # Kinds of memory
//
// The memory of a GPU has an address for kernels, DevicePointer, and none for the CPU: Bytes is nil. That of an
// emulated device has one address for everyone. ReadAt and WriteAt copy out of and into either. Release and Close
// wait for the kernels that were launched in the GPU's primary context. A program that launches kernels elsewhere
// waits for them before it releases.
//
// libcuda.so.1 is loaded at run time, without cgo, by processes that map memory of a GPU and by no others. Calls need
// a context: the GPU's primary one, which most programs use anyway, is retained while a mapping lives and for 10
// seconds after it, and is current only inside of calls.
//
// # Errors
//
// Every error is an *Error: errors.Is compares it with a syscall.Errno, and its text is the daemon's own, which names
// for example the budget that is spent.
//
// # Ownership
//
// The bytes of a Mapping are device memory, not Go memory. They go away with Close; touching them afterwards is a
// fault that Go cannot recover from. A Mapping that is not closed lives as long as the process: there is no
// finalizer, because a slice of the bytes does not keep the Mapping alive.
//
// The process has one connection for each mount it uses, shared by its mappings and closed with the last of them.
//
// # Locks
//
// Mapping.mu, then conn.moving.mu, pool.mu or conn.mu. None is held while a reply is awaited but Mapping.mu for
// reading, which makes Close wait for the calls that run.
//
// # What it does not do
//
// It moves no data and knows nothing of the daemon but docs/dev/protocol.md.
package gaiafs
