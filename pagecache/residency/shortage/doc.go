// Package shortage says in words why a request gets no memory of a device: what was asked for, what is free, who has
// the rest, and what helps. A user without rights to the mount learns which of its own programs have memory, and how
// much the programs of others have together.
//
// The package is pure: package residency shows it each extent once.
package shortage
