// Package faulty makes a device fail on demand, for tests of code that uses devices.
//
// # Model
//
// A Device passes every call on to the device it wraps, except as a test demands: the n-th call of an Op fails, calls
// of an Op wait behind a Gate or take longer, or the device is lost. A call that fails has not reached the wrapped
// device.
//
// # Ownership
//
// Memory of the Device wraps Memory of the wrapped device, and can be used only with this Device. Closing the Device
// closes the wrapped one.
//
// # Locks
//
// Device.mu guards what the test asked for. It is not held while a call waits or is passed on.
//
// # What it does not do
//
// It corrupts nothing and fails no call half-way: a test that needs a torn copy makes one itself.
package faulty
