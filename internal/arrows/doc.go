// Package arrows holds the test that keeps the imports of gaiafs's packages going one way. It has no code: the table of
// who may import whom is in arrows_test.go.
package arrows
