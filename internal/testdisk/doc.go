// Package testdisk makes filesystems inside files, for tests that need a certain one, a small one, or one that can be
// broken. It needs root and a loop device.
package testdisk
