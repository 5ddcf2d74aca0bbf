// Package arrows holds the test that keeps the imports of gaiafs's packages going one way. It has no code. The table of
// allowed imports is in arrows_test.go.
package arrows
