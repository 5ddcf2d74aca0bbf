// Package bench implements "gaiafs bench": it measures gaiafs on the user's machine against other ways to do the same.
//
// # Model
//
// A row is one question: how fast does each of several sides do the same work? Each round measures all sides of a row,
// and each round begins with another side. So a slow minute of the machine affects all of them. The table shows the
// median of each side, and the median of the ratios within the rounds, with quartiles. A ratio is always speed over
// speed: 1.20 means that gaiafs is 1.2 times as fast as the other side.
//
// Rows come in groups (groups.go). The rows of a group share their files and mounts. A group makes its rows when its
// turn comes.
//
// # Sides
//
// All directories of file workloads are on one backing filesystem. "backing" is that filesystem itself. "gaiafs" is a
// mount of gaiafs. "loopback" is go-fuse's loopback, mounted as its example does (requests of 128 KiB) but with kernel
// passthrough off. "loopback-1M" is the same with requests of 1 MiB, the fairer comparison for large transfers. The
// program that contains this package serves them all, in separate processes (process.go). So all sides are from one
// build, each has its own process as for a user, and nothing else needs to be installed.
//
// # States
//
// The cost of a read depends on where the bytes are. Cold: only on the disk. Host-warm: in the host's page cache.
// Device-cached: on a device and on the disk, and nowhere else; sides without devices are then cold. The state is set
// up before each measurement, and checked as far as the kernel reports it (state.go). A row whose state cannot be
// reached is left out, with the reason.
//
// # Right bytes
//
// After the first round of a row that reads, each side's file is read once more in the same state and compared with
// what was written to it. In a row that writes, fio writes, reads back and verifies, and the mount is compared with the
// backing file. A user's file is only ever opened for reading. If it changes during a row, the row is an error.
//
// # Ownership
//
// Everything that bench makes (processes, mounts, files) belongs to a session. The session removes it however bench
// ends, also after signals. If bench was killed, its daemons end by themselves and unmount.
//
// # What it does not do
//
// It measures through the mount and the client library, as a user would; only package parts looks inside. bench/gpu
// measures what programs on GPUs see. Correctness is left to the tests.
package bench
