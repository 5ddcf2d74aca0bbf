// Package cost estimates how long a read takes from each of several places that have the same bytes. A reader can then
// choose a place, or read from two of them at once. The package is pure: no I/O, no locks, no clock.
//
// # Model
//
// A read of n bytes that finds q bytes under way takes
//
//	latency + (q + n) / bandwidth
//
// Both latency and bandwidth are moving averages. Every read that ends corrects mainly the one that depends more on its
// size, as in the normalised least mean squares method. By this measure, a disk that serves many requests at once shows
// a high bandwidth, and a bus that serves one request after the other shows its own. When other readers make a disk
// busy, its latency goes up with the next few reads.
//
// In addition, reads are classified by size and by the number of others under way (cells). If reads of a class were
// measured, their mean counts; the model serves the other classes. If several reads of a class in a row are far from
// the mean, the place has changed, and its earlier measurements are forgotten.
//
// A reader asks the place with the lowest estimated time. That alone would make some errors permanent: a place that is
// believed slower than it is would not be asked, and so not measured. So a small part of the time of reads is spent on
// trials of the other places (Trials). With trials, at least 99 % of the reads come from the better one of two places,
// whatever the places are like (trials_test.go simulates that). If many readers get more from both places, reads come
// from both.
//
// A place from which nobody reads is not measured. So a place says when it is due. The caller then reads from it
// although another place is faster, in a way that delays no reader.
//
// If its caller abandons a read, the place is stuck until that read ends. No reader should ask it until then.
package cost
