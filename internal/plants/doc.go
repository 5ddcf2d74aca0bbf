// Package plants checks the tests: it plants faults in the code, one at a time, and sees whether the tests that should
// notice do.
//
// # Model
//
// A plant is a replacement of a few lines of one file that makes the program wrong in one way. Each plant names its
// nets: tests that must fail while the fault is in place. A fault that could lose a byte or show a wrong one has two
// nets at least, in different packages or of different kinds, since a test may be changed without its author knowing
// that it was the only one.
//
// The source is never changed. The go command is given the altered file as an overlay.
//
// # Use
//
// make test-plants runs all nets of all plants, which takes about half an hour on two processors. go test checks only
// that each plant still fits the source, and that the altered file compiles: a plant that does not is mended together
// with the code that it fitted.
//
// # What it does not do
//
// It makes no plants by itself. A fault that got past the tests once becomes a plant when its test is written.
package plants
