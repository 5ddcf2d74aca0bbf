// Package conformance is the test that every device of package gpubackend passes: all that the interfaces Device and
// Memory promise, also towards other processes that map the memory and store into it.
//
// # Use
//
// A backend's tests call Main from TestMain and Run from a test:
//
//	func TestMain(m *testing.M) { os.Exit(conformance.Main(m, conformance.MapShared)) }
//
//	func TestConformance(t *testing.T) { conformance.Run(t, open) }
//
// Run starts the test binary again for the other processes, which Main recognises by an environment variable and
// serves instead of running tests. An Import says how such a process maps an exported descriptor.
//
// # Ownership
//
// open returns a new device every time; several are open at once, never more than two. Run frees what it allocates
// and closes every device, which must then succeed.
//
// # What it does not do
//
// It measures no speed, and knows nothing of how a backend makes its memory: what only one backend promises is tested
// beside it.
package conformance
