// Package policy decides which extent of a device goes first when memory is needed.
//
// # Model
//
// A Rule is a pure machine. It is told what happens to the extents of one device, one Event after the other, and names
// victims: the extents that nobody maps, the first to go first. It does no I/O, holds no lock and reads no clock, so a
// trace of events that was recorded once gives the same victims again, and rules can be compared offline. Calls on one
// Rule must not overlap.
//
// A victim need not go: package residency passes over an extent that is being copied, and one whose bytes cannot be
// brought home. A Rule forgets an extent when its Left event comes, not when it names it.
//
// # Adding a rule
//
// One file with the rule, one line in Rules, and transcripts of what sets it apart in testdata. The test that runs
// random traces against slow, obvious twins wants a twin, too.
package policy
