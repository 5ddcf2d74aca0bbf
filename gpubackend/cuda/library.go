package cuda

import (
	"fmt"
	"runtime"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"
)

// libraryName is the name of the driver's library in every installation.
const libraryName = "libcuda.so.1"

// library finds the functions of a loaded library. The library stays loaded, because the driver does not support
// unloading.
type library interface {
	symbol(name string) (uintptr, error)
}

// shared is a library that the dynamic linker loaded.
type shared uintptr

func (s shared) symbol(name string) (uintptr, error) { return purego.Dlsym(uintptr(s), name) }

func openLibrary() (library, error) {
	handle, err := purego.Dlopen(libraryName, purego.RTLD_NOW|purego.RTLD_GLOBAL)
	if err != nil {
		return nil, err
	}
	return shared(handle), nil
}

// loadedDriver is the machine's driver, loaded and initialised once.
var loadedDriver = sync.OnceValues(func() (*driver, error) {
	d, err := bind(openLibrary)
	if err != nil {
		return nil, err
	}
	return d, d.start()
})

// bind loads the library and looks all functions up.
func bind(open func() (library, error)) (*driver, error) {
	runtime.LockOSThread() // the loader keeps the reason of a failure for the thread that failed
	defer runtime.UnlockOSThread()
	lib, err := open()
	if err != nil {
		return nil, fmt.Errorf("%w: there is no NVIDIA driver (%w)", ErrUnavailable, err) // err names the library
	}
	d := new(driver)
	for _, f := range d.functions() {
		address, err := lib.symbol(f.name)
		switch {
		case err == nil && address != 0:
			purego.RegisterFunc(f.function, address)
		case !f.optional:
			return nil, fmt.Errorf("%w: the NVIDIA driver is too old: it has no %s; driver 450 (CUDA 11.0) or later is needed",
				ErrUnavailable, f.name)
		}
	}
	return d, nil
}

// start initialises the driver.
func (d *driver) start() error {
	switch r := d.init(0); r {
	case success:
	case noDevice:
		return fmt.Errorf("%w: the NVIDIA driver finds no device (%s)", ErrUnavailable, d.describe(r))
	case stubLibrary:
		return fmt.Errorf("%w: %s is the toolkit's stub for linking, not a driver", ErrUnavailable, libraryName)
	case driverMismatch:
		return fmt.Errorf("%w: %s does not match the version of the kernel's driver; after an upgrade, restart the machine",
			ErrUnavailable, libraryName)
	default:
		return fmt.Errorf("%w: the NVIDIA driver does not start: %s", ErrUnavailable, d.describe(r))
	}
	var version int32
	if err := d.check("cuDriverGetVersion", d.driverGetVersion(&version)); err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	if version < leastVersion {
		return fmt.Errorf("%w: the NVIDIA driver is too old: it supports CUDA %d.%d, and 11.0 or later is needed (driver 450)",
			ErrUnavailable, version/1000, version%1000/10)
	}
	return nil
}

// cString copies the driver's text, which ends with a zero and lives as long as the library.
func cString(text *byte) string {
	const most = 1 << 12
	n := 0
	for n < most && *(*byte)(unsafe.Add(unsafe.Pointer(text), n)) != 0 {
		n++
	}
	return string(unsafe.Slice(text, n))
}
