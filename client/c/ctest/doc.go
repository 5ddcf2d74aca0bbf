// Package ctest tests the C library. It compiles the library together with programs of testdata, without and with the
// compiler's sanitizers, and runs them against a live control.Server over a small page cache. All its code is in tests.
package ctest
