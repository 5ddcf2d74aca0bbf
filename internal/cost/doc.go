// Package cost estimates how long it takes to read from each of several places that have the same bytes, so that a
// reader can choose, or read from two of them at once. It is pure: no I/O, no locks, no clock.
//
// # Model
//
// A read of n bytes that finds q bytes under way takes
//
//	latency + (q + n) / bandwidth
//
// and both are moving averages: every read that ends corrects the one that its size says more about, as normalised
// least mean squares do. A disk that serves many requests at once shows a high bandwidth by this measure, a bus that
// serves one after the other its own. When a disk becomes busy with others, its latency goes up with the next few
// reads.
//
// Reads of about one size that find about as many others under way are told apart besides (cells): what those took is
// what counts, where some were measured, and the model is for the others. When several of them in a row are far from
// what was thought, the place has changed, and what was measured before is forgotten.
//
// A reader asks the place where its read is thought to take least. Two mistakes would be for good then: a place that is
// thought slower than it is is not asked, and not measured. So a small part of what reads take is spent on trials of
// the other places (Trials). With that, reads come from the better one of two places to 99 % and more, whatever the
// places are like (trials_test.go simulates that), and from both where many readers have more of that.
//
// What nobody reads from is not measured. So a place says when it is due: the caller then reads from it although
// another is faster, at the cost of nobody who waits.
//
// A read that its caller gave up leaves the place stuck until it ends after all. Nobody should ask it meanwhile.
package cost
