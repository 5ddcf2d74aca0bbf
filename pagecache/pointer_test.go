package pagecache

import "unsafe"

// The tests' programs map memory outside the Go heap. The program owns it until the test's cleanup unmaps it.

func addPointer(p unsafe.Pointer, n int64) unsafe.Pointer { return unsafe.Add(p, n) }

func bytesAt(p unsafe.Pointer, n int) []byte { return unsafe.Slice((*byte)(p), n) }
