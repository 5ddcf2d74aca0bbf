// Package stress tests a whole mount as its users would break it: killed programs, killed daemons, forged input, a
// backing directory that changes or fills up, databases, hours of mixed load. It has tests only.
//
// # Model
//
// The daemon is a process of its own (package testmount). So is every program that uses the mount: this test binary,
// started again with the name of a program of its. CPU programs use ordinary system calls and mmap, GPU programs the
// helper library. A test tells its programs little and learns from them by lines on their standard output, and by files
// outside of the mount which they and the test map. So what a program was promised is known also when it, or the
// daemon, was killed in the middle of something.
//
// # Flags
//
// Each test is made to take some seconds. The two that look for rare events can be given more:
//
//	go test ./internal/stress -run TestNoStaleReads -stress.ops 1000000
//	go test ./internal/stress -run TestSoak -stress.for 1h -timeout 2h
//
// With GAIAFS_REQUIRE_TOOLS=1 in the environment a program that is not installed (strace, PostgreSQL and so on) fails
// the tests that need it instead of skipping them.
//
// GAIAFS_TEST_GPUS=cuda:0,1 has mounts use those GPUs in the place of emulated devices, as far as they go: where there
// is one only, what would be two devices is one. With GAIAFS_REQUIRE_GPU=1 a GPU that cannot be used fails the tests.
//
// # What it does not do
//
// The rules of coherence are checked by random programs in internal/mounttest, the requests of the filesystem one by
// one in package fs, the frames of the socket in package control.
package stress
