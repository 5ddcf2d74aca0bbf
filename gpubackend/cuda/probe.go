package cuda

import (
	"errors"
	"fmt"
	"strings"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// Found is a GPU of this machine.
type Found struct {
	// CUDA is the driver's number of the GPU in this process.
	CUDA int
	// Name is the driver's name for people.
	Name string
	// UUID names the same GPU in every process.
	UUID gpubackend.UUID
	// Memory is all of its memory in bytes, used or not.
	Memory int64
	// Major and Minor are its compute capability.
	Major, Minor int
	// Unusable says why gaiafs cannot use the GPU; nil if it can. It is an ErrUnavailable.
	Unusable error
}

// Probe returns the GPUs of this machine, usable or not. It fails with ErrUnavailable if there is no driver, if the
// driver is too old, or if there is no GPU. It blocks while the driver starts, which may take a second. It makes no
// context, and so takes no GPU memory.
func Probe() ([]Found, error) {
	d, err := loadedDriver()
	if err != nil {
		return nil, err
	}
	return d.probe()
}

func (d *driver) probe() ([]Found, error) {
	var count int32
	if err := d.check("cuDeviceGetCount", d.deviceGetCount(&count)); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	if count == 0 {
		return nil, fmt.Errorf("%w: the NVIDIA driver finds no device", ErrUnavailable)
	}
	all := make([]Found, count)
	for i := range all {
		device, err := d.device(i)
		if err == nil {
			all[i], err = d.inspect(device)
		}
		if err != nil {
			all[i].Unusable = fmt.Errorf("%w: device %d: %w", ErrUnavailable, i, err)
		}
		all[i].CUDA = i
	}
	return all, nil
}

func (d *driver) device(ordinal int) (device deviceHandle, err error) {
	return device, d.check("cuDeviceGet", d.deviceGet(&device, int32(ordinal)))
}

func (d *driver) attribute(device deviceHandle, attribute int32) (value int32, err error) {
	return value, d.check("cuDeviceGetAttribute", d.deviceGetAttribute(&value, attribute, device))
}

// inspect describes a device. With an error, the result is correct but may be incomplete.
func (d *driver) inspect(device deviceHandle) (Found, error) {
	var f Found
	var name [256]byte
	var total uint64
	err := errors.Join(
		d.check("cuDeviceGetName", d.deviceGetName(&name[0], int32(len(name)), device)),
		d.check("cuDeviceGetUuid", d.deviceGetUUID((*[16]byte)(&f.UUID), device)),
		d.check("cuDeviceTotalMem", d.deviceTotalMem(&total, device)))
	f.Name, _, _ = strings.Cut(string(name[:]), "\x00")
	f.Memory = int64(total)
	major, err1 := d.attribute(device, attrCapabilityMajor)
	minor, err2 := d.attribute(device, attrCapabilityMinor)
	f.Major, f.Minor = int(major), int(minor)
	if err = errors.Join(err, err1, err2); err != nil {
		return f, err
	}
	if f.Major*10+f.Minor < 75 {
		return f, fmt.Errorf("%s has compute capability %d.%d, and 7.5 (Turing) or later is needed", f.Name, major,
			minor)
	}
	mode, err := d.attribute(device, attrComputeMode)
	if err != nil {
		return f, err
	}
	if mode == computeModeProhibited {
		return f, fmt.Errorf("%s is in compute mode \"prohibited\"", f.Name)
	}
	for _, need := range []struct {
		attribute int32
		what      string
	}{
		{attrUnifiedAddressing, "unified addressing of host and device memory"},
		{attrVMM, "virtual memory management (cuMemCreate)"},
		{attrPOSIXHandles, "sharing memory by POSIX file descriptors"},
	} {
		has, err := d.attribute(device, need.attribute)
		if err != nil {
			return f, err
		}
		if has == 0 {
			return f, fmt.Errorf("%s has no %s", f.Name, need.what)
		}
	}
	return f, nil
}
