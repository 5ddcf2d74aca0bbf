// Package plants checks the tests: it plants one fault at a time in the code and checks that the tests notice it.
//
// # Model
//
// A plant replaces a few lines of one file so that the program is wrong in one way. Each plant names its nets: tests
// that must fail while the fault is in place. A fault that could lose a byte or show a wrong one has at least two nets,
// in different packages or of different kinds. Otherwise somebody might change the only test without knowing that it is
// the only one.
//
// The source is never changed. The go command gets the altered file as an overlay.
//
// # Use
//
// make test-plants runs all nets of all plants, which takes about half an hour on two processors. go test only checks
// that each plant still fits the source, and that the altered file compiles. If a code change breaks a plant, adapt the
// plant together with the code.
//
// # What it does not do
//
// It generates no plants. If a fault once got past the tests, it becomes a plant when its test is written.
package plants
