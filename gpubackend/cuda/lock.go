package cuda

import (
	"unsafe"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// LockHost registers the memory with the driver, for all GPUs. The driver pins the pages, so a file that becomes
// shorter keeps them until unlock. Registering reads what is missing from the file, so it is no job of a lane.
func (d *device) LockHost(mem []byte) (unlock func() error, err error) {
	p := pinned{base: unsafe.Pointer(unsafe.SliceData(mem)), size: len(mem), file: true}
	if err := gpubackend.CheckHostPages(mem); err != nil {
		return nil, err
	}
	if err := d.reserve(0); err != nil {
		return nil, err
	}
	err = d.beside(func() error {
		return d.drv.check("cuMemHostRegister", d.drv.memHostRegister(p.base, uintptr(p.size),
			hostPortable|hostReadOnly))
	})
	if err != nil {
		d.giveBack(0)
		return nil, err
	}
	locked.add(p)
	return func() error {
		defer d.giveBack(0)
		locked.forget(p)
		return d.beside(func() error {
			return d.drv.check("cuMemHostUnregister", d.drv.memHostUnregister(p.base))
		})
	}, nil
}

// beside runs f with the device's context current, unless the device is lost. It does not wait for the jobs of lanes.
func (d *device) beside(f func() error) error {
	if err := d.lost(); err != nil {
		return err
	}
	return d.allocLane.here(f)
}
