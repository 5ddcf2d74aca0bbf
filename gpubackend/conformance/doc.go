// Package conformance is the test suite that every device of package gpubackend passes. It tests all contracts of the
// interfaces Device and Memory, including those for other processes that map the memory and store into it.
//
// # Use
//
// A backend's tests call Main from TestMain and Run from a test:
//
//	func TestMain(m *testing.M) { os.Exit(conformance.Main(m, conformance.MapShared)) }
//
//	func TestConformance(t *testing.T) { conformance.Run(t, open) }
//
// Run starts the test binary again for the other processes. Main recognises these by an environment variable, and
// serves requests there instead of running tests. An Import maps an exported descriptor in such a process.
//
// # Ownership
//
// open returns a new device each time; at most two are open at once. Run frees everything that it allocates and closes
// every device, and Close must succeed then.
//
// # What it does not do
//
// It measures no speed, and does not know how a backend makes its memory. Contracts of a single backend are tested in
// its own package.
package conformance
