// Package controltest stands in for the parts around control.Server, so that the server and the clients can be tested
// without a mount: a page cache of one memfd for each extent, files that are ordinary files, and a socket that answers
// what the ioctl would.
//
// Only tests import it. It merges like the real page cache does but keeps a pristine copy of every page, moves bytes
// at every release, and has neither budgets nor eviction.
package controltest
