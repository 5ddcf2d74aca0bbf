// Package page defines the units in which gaiafs counts: pages, ranges of pages, ranges of bytes, and their sizes.
//
// A page is 4 KiB of a file. It is the unit of versions and of merging. Page k of a file holds its bytes [k*Size,
// (k+1)*Size). The package knows no files, devices or owners, and does no I/O.
package page
