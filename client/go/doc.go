// Package gaiafs lets a Go program map files of a gaiafs mount into the memory of a GPU or of an emulated device, and
// share them with every other program on the machine.
//
// # Model
//
// Map gives a window on a file in a device's memory. All processes that map the file on that device share the same
// memory. After Release, everyone sees what the program stored there, including CPU programs with plain reads. After
// Acquire, the program sees what others released or wrote. Two programs may write the same page at the same time:
// gaiafs merges the bytes that each changed, and they conflict only in bytes that both changed. Close releases
// implicitly, and so does the death of the process.
//
//	f, err := os.OpenFile("/mnt/gaia/out.dat", os.O_RDWR, 0)
//	m, err := gaiafs.Map(f, 0, 1<<20, gaiafs.ProtRead|gaiafs.ProtWrite, 0)
//	_, err = m.WriteAt(result, 4096)
//	_, err = m.Release(0, m.Len())
//	err = m.Close()
//
// MapView makes a view: read-only memory with chosen bytes of one or several files, each piece at an aligned address,
// as kernels need it. Views are shared and coherent like mappings.
//
// Begin opens a Group: ranges of several mappings and files whose stores are released together. Each released group has
// a version. AcquireAll returns it, and AcquireAtLeast waits for it.
//
// # Memory that moves
//
// A Movable mapping, or one that is larger than its device's budget, has memory only while a Bracket uses it:
//
//	b, err := m.Use(ctx, off, n)
//	process(m.Bytes()[off : off+n]) // or launch a kernel on it
//	err = b.Done()
//
// # Kinds of memory
//
// GPU memory has an address for kernels, DevicePointer, and none for the CPU: Bytes is nil. Memory of an emulated
// device has one address for everyone. ReadAt and WriteAt work with both. Release and Close wait for kernels that were
// launched in the GPU's primary context. A program that launches kernels in another context must wait for them before
// it releases.
//
// Only processes that map GPU memory load libcuda.so.1; they load it at run time, without cgo. Driver calls need a
// context. The package uses the GPU's primary context, as most programs do. It retains it while a mapping lives and for
// 10 seconds after that, and makes it current only within calls.
//
// # Errors
//
// Every error of this package is an *Error. errors.Is compares it with a syscall.Errno. If the daemon failed the call,
// the text is the daemon's own, and names for example the budget that is spent.
//
// # Ownership
//
// The bytes of a Mapping are device memory, not Go memory. Close unmaps them: touching them after that is a fault that
// Go cannot recover from. A Mapping that is not closed lives as long as the process. It has no finalizer, because a
// slice of the bytes does not keep the Mapping alive.
//
// The process has one connection to each mount that it uses. All mappings share it, and the last one to close closes
// it.
//
// # Locks
//
// Lock order: Mapping.mu, then conn.moving.mu, pool.mu or conn.mu. Only Mapping.mu is held, for reading, while a call
// waits for a reply. So Close waits for calls in progress.
//
// # What it does not do
//
// It moves no data, and shares nothing with the daemon but docs/dev/protocol.md.
package gaiafs
