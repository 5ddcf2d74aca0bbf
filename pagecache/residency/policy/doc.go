// Package policy decides which extent of a device is evicted first when memory is needed, and which one is worth moving
// in.
//
// # Model
//
// A Rule is a pure machine. It learns what happens to the extents of one device, Event by Event, and names victims: the
// extents that may leave, in order. It does no I/O, holds no lock and reads no clock. So a recorded trace of events
// gives the same victims again, and rules can be compared offline. Calls on one Rule must not overlap.
//
// A victim does not always leave: package residency skips an extent that is being copied, or whose bytes cannot be
// written back. A Rule drops an extent when the Left event comes, not when it names the extent.
//
// A Threshold decides whether an extent that is accessed moves into device memory, or is served from where it is.
//
// # Evidence
//
// An ordinary driver shows neither the loads and stores of kernels nor access counters. The events are all that is
// known: what programs map, acquire and release, what CPU programs ask for, when brackets begin and end, and how often
// a program says that it used a bracket that it kept. What a kernel does between two events is invisible. An extent
// that a kernel reads a million times in one bracket counts as accessed once.
//
// # Rules
//
// All rules know the same facts about extents (facts.go), and differ in how they order them (rules.go). A new rule
// needs an order there, transcripts in testdata that show what is special about it, and a twin: a test runs random
// traces against slow, obvious twins of the rules.
package policy
