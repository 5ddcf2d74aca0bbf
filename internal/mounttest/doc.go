// Package mounttest runs the random programs of package model on real mounts, with every program in a process of its
// own: two CPU programs that use pwrite, pread, mmap, fsync, ftruncate and fallocate, and four GPU programs that use
// client/go on three emulated devices, of which two share the first. It has only tests. GAIAFS_TEST_GPUS=cuda:0,1 has
// them run on GPUs, of which there may be fewer; without a GPU, some programs run through the fake libcuda.
//
// # Model
//
// The test binary is the test, the daemon (package testmount) and the programs. The test sends a program one step at a
// time and waits for it, so the order of steps is the test's. Everything is compared with the reference model: what is
// read and loaded, and the backing file after every step. That needs a daemon that does nothing of its own: its
// write-back interval is long, and a collect is made by a client's Flush.
//
// GPU programs make views, too, and read parts of them that they acquired. A view must show what home has then.
//
// Other programs run on a daemon that collects, untracks and refreshes all the time. When it does is not known, so
// there the model's Oracle judges alone what may be read, and at the end everybody must see the same bytes.
//
// # Wider programs
//
// TestWidePrograms adds everything else that can happen to a file: other ways to write, to make holes and to copy,
// changes of size and metadata, and changes in SOURCE directly. SOURCE is on ext4, XFS, tmpfs and overlay, and the
// mounts differ in devices, memory, write mode and where reads come from. Only the Oracle judges there. Each operation
// is a kind; -kinds selects some, so that what one of them breaks can be told from what another breaks.
// docs/dev/suites.md has the flags.
//
// # Memory that moves
//
// On some mounts of both kinds of programs most mappings are movable, devices have room for two extents, and pinned
// memory is plenty, some or none. Programs open and end brackets, nested and of several ranges, leave them open when
// they unmap or are killed, and use the memory itself, in brackets only. A second file takes turns with the one that
// steps are about: each program looks after bytes of its own there. A bracket that would wait for another program is
// refused, since steps happen one after the other. To the model a movable mapping is as any other. What the device has
// of it may be brought anew at any time, so exact programs bring it up to date before each use. The tests fail where
// nothing moved.
//
// # What it does not do
//
// A step has ended before the next one begins. What may happen in the midst of a release or a collect is tested on lrc.
package mounttest
