// Package kernel keeps track of the pages of a file that the kernel caches: the CPU's replica.
//
// # Model
//
// A Kernel belongs to one file. The lrc machine knows which pages the kernel may hold. A Kernel knows the rest:
//
//   - Releases under way. A release returns when the kernel holds no old copy of its pages. Others may wait for that.
//   - Merged pages. If home does not take released bytes, a read gives the kernel pages with these bytes merged in
//     (merged.go).
//   - Growth. A kernel that caches writes extends files without a request (growth.go).
//
// # Locks
//
// The file's lock guards a Kernel. Its methods are called with that lock held, unless they say otherwise. The lock is
// never held while the kernel is asked for anything: the kernel waits for page locks, and a page may be locked by a
// read that waits for the file's lock.
//
// # What it does not do
//
// It does not decide what the kernel has to drop. It reads and writes no file.
package kernel
