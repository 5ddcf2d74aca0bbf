// Command bench measures gaiafs against what it is to be compared with, and prints a table of ratios.
//
//	go run ./bench [-quick] [-run REGEX] [-json FILE] [-markdown FILE]
//
// # Model
//
// A row is one question: how fast does each of several sides do the same work? The sides of a row are measured in turns,
// round after round and each round beginning with another side, so that a slow minute of the machine meets all of them.
// The table shows the median of each side and the median of the ratios taken within the rounds, with their quartiles.
// A ratio is always speed over speed: 1.20 says that gaiafs is 1.2 times as fast as what it is compared with.
//
// # Sides
//
// The directories that file workloads run in are on one backing filesystem: "backing" is that filesystem itself,
// "gaiafs" is a mount of this project's, "loopback" is go-fuse's loopback with kernel passthrough off and otherwise as
// its example mounts it (requests of 128 KiB), and "loopback-1M" the same with requests of 1 MiB, which is the fairer
// comparison for large transfers. Daemons are this program, run again; each has a process of its own, as a user would
// have it.
//
// # Ownership
//
// Everything that is made (processes, mounts, files) belongs to a session, which takes it away again on every way out,
// signals included. A daemon whose bench was killed ends by itself and unmounts.
//
// # What it does not do
//
// It checks what it reads only where losing bytes is the question (false sharing). Correctness is the tests' business.
package main
