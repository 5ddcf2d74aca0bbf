// Package cost estimates how long it takes to read from each of several places that have the same bytes, so that a reader
// can choose, or read from two of them at once. It is pure: no I/O, no locks, no clock.
//
// # Model
//
// A read of n bytes that finds q bytes under way takes
//
//	latency + (q + n) / bandwidth
//
// and both are moving averages: every read that ends corrects the one that its size says more about, as normalised least
// mean squares do. A disk that serves many requests at once shows a high bandwidth by this measure, a bus that serves one after
// the other its own. When a disk becomes busy with others, its latency goes up with the next few reads.
//
// What nobody reads from is not measured. So a place says when it is due: the caller then reads from it although another is
// faster, at the cost of nobody who waits.
//
// A read that its caller gave up leaves the place stuck until it ends after all. Nobody should ask it meanwhile.
package cost
