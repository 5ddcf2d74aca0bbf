// Package rows measures the sides of a row in turns, judges what came out, and writes tables of it.
//
// A row is one question: how fast does each of several sides do the same work? The sides are measured round after
// round, each round beginning with another side, so that a slow minute of the machine meets all of them. Ratios are
// taken within the rounds and are speed over speed: 1.20 says that the first side is 1.2 times as fast.
//
// The package knows nothing of gaiafs.
package rows
