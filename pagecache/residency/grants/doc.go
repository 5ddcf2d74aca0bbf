// Package grants decides whose bracket is granted next.
//
// A bracket says what a launch will use. Its grant is made whole, before the launch, or not at all: who waits holds
// nothing of what he waits for. So brackets cannot block each other in a circle, as programs do that each hold a part
// of a device and ask for more (Chen, Figure 3.2).
//
// # Model
//
// A Queue is a pure machine: no lock, no clock, no I/O, and no idea of memory. The caller tells it what happens
// (Ask, Done, Withdraw, Leave), and Next says what is decided, where the caller says what fits. Only memory that grants
// hold is missing for others: what a client maps and no grant covers can be moved away. The calls on one Queue must not
// overlap.
//
// # States of an ask
//
//	           Ask           Next                  Done, Leave
//	unknown ────────▶ waits ────────▶ granted ─────────────────▶ unknown
//	                    │
//	                    ├─ Next: refused, with a Refusal that says why ─▶ unknown
//	                    └─ Withdraw, Leave ─▶ unknown
//
// # Order
//
// Higher priorities go first, and among equals who came first. An ask never goes before an earlier one of its client:
// its priority counts as that of the lowest one of the client that waits when it comes.
// The first in the queue is the only one that may be granted: where it does not fit, nobody overtakes it, however
// little he needs. So whoever needs much is not starved by many who need little, and when all that was granted is done
// the first one fits, provided that the caller lets no ask in that never can.
//
// # Asks of those who hold
//
// A nested bracket is opened by a thread that holds a grant and cannot end it before it has the next one. It never
// waits, since others may wait for what its thread holds: it is granted at once if it fits, before those who wait, and
// refused otherwise (Holds). The program then ends the outer bracket and asks for both at once. Two threads of one
// client are not nested; each of them waits.
package grants
