// Package page has the units that every part of gaiafs counts in: pages, ranges of pages, and the sizes that follow
// from them.
//
// A page is 4 KiB of a file and the unit of versions and of merging. Page k of a file holds its bytes
// [k*Size, (k+1)*Size). The package knows no files, devices or owners, and does no I/O.
package page
