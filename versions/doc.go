// Package versions has version vectors: which releases of which owners the bytes of a page contain (Parker et al.,
// "Detection of Mutual Inconsistency in Distributed Systems", 1983; GAIA thesis, section 2.4).
//
// # Model
//
// An Owner holds replicas: the CPU, or one device. A Version counts the releases that an owner made of a page. A Vector
// has a version for each owner whose releases a copy contains. It orders copies: one copy dominates another if it
// contains all of the other's releases.
//
// # Ownership
//
// Vectors are immutable values. They can be compared with ==, used as map keys and shared between goroutines without a
// lock. Deriving a vector allocates only if the result is neither operand.
//
// # What it does not do
//
// The package knows no files, pages or devices, holds no locks and does no I/O.
package versions
