// Package policy decides which extent of a device goes first when memory is needed, and which one is worth moving in.
//
// # Model
//
// A Rule is a pure machine. It is told what happens to the extents of one device, one Event after the other, and names
// victims: the extents that may go, the first to go first. It does no I/O, holds no lock and reads no clock, so a
// trace of events that was recorded once gives the same victims again, and rules can be compared offline. Calls on one
// Rule must not overlap.
//
// A victim need not go: package residency passes over an extent that is being copied, and one whose bytes cannot be
// brought home. A Rule forgets that an extent has memory when its Left event comes, not when it names it.
//
// A Threshold decides whether an extent that is accessed moves into device memory, or is served from where it is.
//
// # Evidence
//
// An ordinary driver shows neither the loads and stores of kernels nor counters of accesses. The events are all that
// is known: what programs map, acquire and release, what CPU programs ask for, and when brackets begin and end. What a
// kernel does between two of them is invisible, and an extent that a kernel reads a million times in one bracket counts
// as accessed once.
//
// # Rules
//
// All rules know the same facts of extents (facts.go) and differ in the order that they put them in (rules.go). A new
// rule is an order there, and transcripts of what sets it apart in testdata. The test that runs random traces against
// slow, obvious twins wants a twin, too.
package policy
