package cuda

import (
	"errors"
	"fmt"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// ErrUnavailable means that CUDA, or one of its devices, cannot be used on this machine. The error's text says why.
var ErrUnavailable = errors.New("CUDA cannot be used")

// result is a CUresult.
type result int32

const (
	success            result = 0
	invalidValue       result = 1
	outOfMemory        result = 2
	deinitialized      result = 4
	stubLibrary        result = 34
	deviceUnavailable  result = 46
	noDevice           result = 100
	deviceNotLicensed  result = 102
	eccUncorrectable   result = 214
	nvlinkUncorrected  result = 220
	contained          result = 226
	notReady           result = 600
	illegalAddress     result = 700
	launchTimeout      result = 702
	contextDestroyed   result = 709
	assertFailed       result = 710
	stackError         result = 714
	illegalInstruction result = 715
	misalignedAddress  result = 716
	invalidSpace       result = 717
	invalidPC          result = 718
	launchFailed       result = 719
	driverMismatch     result = 803
	unknown            result = 999
)

// lost reports whether the context cannot be used after r: for these results the driver's documentation says that the
// process must be restarted, or that the device is gone.
func (r result) lost() bool {
	switch r {
	case deinitialized, deviceUnavailable, eccUncorrectable, nvlinkUncorrected, contained, illegalAddress,
		launchTimeout,
		contextDestroyed, assertFailed, stackError, illegalInstruction, misalignedAddress, invalidSpace, invalidPC,
		launchFailed, unknown:
		return true
	}
	return false
}

// check returns nil for success, otherwise an error with the name of the call and the driver's text for r.
func (d *driver) check(call string, r result) error {
	switch {
	case r == success:
		return nil
	case r == outOfMemory:
		return fmt.Errorf("%w: %s: %s", gpubackend.ErrNoMemory, call, d.describe(r))
	case r.lost():
		return fmt.Errorf("%w: %s: %s", gpubackend.ErrDeviceLost, call, d.describe(r))
	}
	return fmt.Errorf("%s: %s", call, d.describe(r))
}

// describe returns the driver's text for r and its number.
func (d *driver) describe(r result) string {
	var text *byte
	if d.getErrorString == nil || d.getErrorString(r, &text) != success || text == nil {
		return fmt.Sprintf("CUDA error %d", int32(r))
	}
	return fmt.Sprintf("%s (CUDA error %d)", cString(text), int32(r))
}
