// Package bench measures gaiafs on the user's machine against what it is to be compared with: "gaiafs bench".
//
// # Model
//
// A row is one question: how fast does each of several sides do the same work? The sides of a row are measured in
// turns, round after round and each round beginning with another side, so that a slow minute of the machine meets all
// of them. The table shows the median of each side and the median of the ratios taken within the rounds, with their
// quartiles. A ratio is always speed over speed: 1.20 says that gaiafs is 1.2 times as fast as what it is compared
// with.
//
// Rows come in groups (groups.go), which share what they run on. A group makes its rows when its turn comes.
//
// # Sides
//
// The directories that file workloads run in are on one backing filesystem: "backing" is that filesystem itself,
// "gaiafs" is a mount of this project's, "loopback" is go-fuse's loopback with kernel passthrough off and otherwise as
// its example mounts it (requests of 128 KiB), and "loopback-1M" the same with requests of 1 MiB, which is the fairer
// comparison for large transfers. All are served by the program that the package is part of, run again (process.go): so
// what is compared is one build, each side has a process of its own as a user would have it, and nothing else need be
// installed.
//
// # States
//
// What a read costs depends on who holds the bytes. Cold: nobody but the disk. Host-warm: the host's page cache.
// Device-cached: a device, and nobody else but the disk; the sides that know no devices are cold then. The state is
// brought about before each measurement and looked at where the kernel tells (state.go): a row whose state cannot be
// had is left out with the reason.
//
// # Right bytes
//
// After the first round of a row that reads, each side's file is read once more in the same state and compared with
// what was written to it; a row that writes has fio write, read back and verify, and the mount compared with the
// backing file. A file of the user's is only ever opened for reading, and a row during which it changed is an error.
//
// # Ownership
//
// Everything that is made (processes, mounts, files) belongs to a session, which takes it away again on every way out,
// signals included. A daemon whose bench was killed ends by itself and unmounts.
//
// # What it does not do
//
// It measures through the mount and the client library, as a user would; only package parts looks inside. What programs
// on GPUs see is measured by bench/gpu. Correctness is the tests' business.
package bench
