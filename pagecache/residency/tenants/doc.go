// Package tenants keeps the account of who owns how much of a device's memory, and says who has to give some up.
//
// # Model
//
// A Ledger is pure: no lock, no clock, no I/O. A tenant's share is its part of the memory by weight, among the tenants
// that own something or ask for it; without configuration that is 1/n. Somebody may own more than the share while
// nobody needs it.
//
// Who needs memory has it counted as owned before anybody gives way (Add, then Victims). Then whoever exceeds the share
// by most gives up an extent (GPUswap, 5.2.1): it may be the one who asks. That is decided anew after each extent, so
// that tenants who own similar amounts take turns. Which extent of the victim goes is up to a policy.Rule.
//
// A tenant is a user, or a cgroup with those below it where that is configured. What is guaranteed to a tenant is taken
// by nobody, and none gets more than the most that it may own.
package tenants
