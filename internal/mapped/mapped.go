// Package mapped accesses memory that shows a file. If the file becomes shorter meanwhile, the kernel sends SIGBUS,
// which would end the process.
package mapped

import "runtime/debug"

// Try calls f and reports whether f could access all memory that it touched in the calling goroutine. If not, f ended
// at that access. Any other panic of f passes through.
func Try(f func()) (ok bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if ok {
			return
		}
		r := recover()
		if _, fault := r.(interface{ Addr() uintptr }); !fault {
			panic(r)
		}
	}()
	f()
	return true
}
