// Package arrows holds the tests that keep the order of things: the imports of gaiafs's packages go one way, and the locks of the
// daemon are all in the tree of docs/dev/locks.md. It has no code: the table of who may import whom is in arrows_test.go.
package arrows
