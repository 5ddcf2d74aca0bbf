// Package tenants keeps account of how much of a device's memory each tenant owns, and decides which one has to give
// some up.
//
// # Model
//
// A Ledger is pure: no lock, no clock, no I/O. A tenant's share is its part of the memory by weight, among the tenants
// that own or ask for some. Without configuration that is 1/n. A tenant may own more than its share while nobody needs
// it.
//
// Memory that a tenant asks for is counted as owned before anybody gives way (Add, then Victims). Then the tenant that
// exceeds its share by most gives up an extent (GPUswap, 5.2.1); that may be the one who asks. This is decided anew
// after each extent, so tenants who own similar amounts take turns. A policy.Rule chooses the victim's extent.
//
// A tenant is a user or, if configured, a cgroup with those below it, a directory, or a name. Nobody takes what is
// guaranteed to a tenant, and no tenant gets more than its maximum.
package tenants
