// Package faulty makes a device fail on demand, for the tests of what uses devices.
//
// # Model
//
// A Device passes every call on to the device it wraps, but for those that a test asked to be otherwise: the n-th call
// of an Op fails, calls of an Op wait behind a Gate or take longer, or the device is lost. A call that fails has not
// reached the wrapped device.
//
// # Ownership
//
// Memory that the Device hands out wraps the other's and goes only with this Device. Closing the Device closes the
// wrapped one.
//
// # Locks
//
// Device.mu guards what the test asked for. It is not held while a call waits or is passed on.
//
// # What it does not do
//
// It corrupts nothing and fails no call half-way: a test that needs a torn copy makes it.
package faulty
