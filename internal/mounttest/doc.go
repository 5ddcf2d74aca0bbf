// Package mounttest runs the random programs of package model on real mounts, with every program in a process of its
// own. Two CPU programs use pwrite, pread, mmap, fsync, ftruncate and fallocate; one of them maps a descriptor with
// O_DIRECT. Four GPU programs use client/go on three emulated devices, and two of them share the first device. The
// package has only tests. GAIAFS_TEST_GPUS=cuda:0,1 runs them on GPUs, of which there may be fewer. Without a GPU, some
// programs use the fake libcuda.
//
// # Model
//
// The test binary is the test, the daemon (package testmount) and the programs. The test sends a program one step at a
// time and waits for it, so the test decides the order of the steps. It compares everything with the reference model:
// the bytes read and loaded, and the backing file after every step. That needs a daemon that does nothing by itself. So
// its write-back interval is long, and a client's Flush makes it collect.
//
// GPU programs also make views, and read parts of them that they have acquired. Such a part must show home's bytes.
//
// Other programs run on a busy daemon, which collects, untracks and refreshes all the time, at unknown moments. There
// the model's Oracle alone judges reads, and at the end all programs must see the same bytes.
//
// # Wider programs
//
// TestWidePrograms adds everything else that can happen to a file: other ways to write, to make holes and to copy,
// changes of size and metadata, and changes made directly in SOURCE. SOURCE is on ext4, XFS, tmpfs and overlay. The
// mounts differ in devices, memory, write mode and where reads come from. Only the Oracle judges there. Each operation
// is a kind; -kinds selects some, to tell failures of one kind from failures of another. docs/dev/suites.md has the
// flags.
//
// # Memory that moves
//
// On some mounts of both kinds of programs, most mappings are movable, devices have room for two extents, and there is
// much, little or no pinned memory. Programs begin and end brackets, nested and with several ranges. They leave
// brackets open when they unmap or are killed, and access the memory itself, in brackets only. They alternate between
// the file of the steps and a second file, in which each program checks bytes of its own. A bracket that would wait for
// another program is refused, because only one step runs at a time.
//
// To the model, a movable mapping is like any other. The device's copy of it may be filled anew at any time, so exact
// programs bring it up to date before each use. The tests fail if nothing moved.
//
// # What it does not do
//
// Each step ends before the next one begins. Events during a release or a collect are tested in package lrc.
package mounttest
