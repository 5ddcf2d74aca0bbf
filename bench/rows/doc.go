// Package rows measures the sides of a row in turn, judges the results, and writes tables of them.
//
// A row is one question: how fast does each of several sides do the same work? Each round measures all sides, and
// begins with another side than the last, so that a slow minute of the machine affects all of them. Ratios are taken
// within the rounds and are speed over speed: 1.20 means that the first side is 1.2 times as fast.
//
// The package knows nothing about gaiafs.
package rows
