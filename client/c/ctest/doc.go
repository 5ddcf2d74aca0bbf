// Package ctest tests the C library: it compiles the library together with testdata/client.c, plainly and with the
// sanitizers that the compiler has, and runs that against a live control.Server over a small page cache. It has no code
// outside its tests.
package ctest
