// Package controltest replaces the parts around control.Server, so that the server and the clients can be tested
// without a mount. It has a page cache with one memfd per extent, ordinary files instead of open files of a mount, and
// a socket that answers what the ioctl would.
//
// Only tests import it. It merges as the real page cache does, but keeps a pristine copy of every page, moves bytes at
// every release, and has neither budgets nor eviction.
package controltest
