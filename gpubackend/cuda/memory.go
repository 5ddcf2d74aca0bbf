package cuda

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// memory is one physical allocation and the daemon's mapping of it.
type memory struct {
	// immutable
	dev     *device
	size    int64
	counted int64 // bytes that it takes of the budget
	host    bool  // pinned memory of the host

	// handle and base are set by create and freed by destroy. Calls that users has let in may use base.
	handle memoryHandle
	base   address
	users  gpubackend.Users

	mu       sync.Mutex
	file     *os.File // protected by mu; the export for writing, nil until the first export. None is made after Free
	readOnly *os.File // protected by mu; a duplicate of file
	// peers are the other GPUs that may use base. Protected by mu.
	peers map[deviceHandle]bool
}

// create allocates and maps, in the allocation lane. After an error nothing stays allocated.
func (m *memory) create() (err error) {
	drv, n, prop := m.dev.drv, uintptr(m.size), m.dev.prop()
	if m.host {
		prop.location = onHost(m.dev.hostNode())
	}
	if err := drv.check("cuMemCreate", drv.memCreate(&m.handle, n, &prop, 0)); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = drv.memRelease(m.handle)
		}
	}()
	m.base, err = drv.mapMemory(m.dev.handle, m.handle, n, accessReadWrite)
	return err
}

// destroy undoes create. It makes all calls even if some fail: on a lost device all of them do.
func (m *memory) destroy() error {
	drv := m.dev.drv
	return errors.Join(
		drv.unmap(m.base, uintptr(m.size)),
		drv.check("cuMemRelease", drv.memRelease(m.handle)))
}

func (m *memory) Size() int64 { return m.size }

// Zeroed is false: the driver promises nothing about the contents.
func (m *memory) Zeroed() bool { return false }

// Export returns one descriptor for writing and another for reading. They are the same to the driver: the package
// comment says what read-only can guarantee.
func (m *memory) Export(writable bool) (*os.File, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.users.Freed() {
		return nil, gpubackend.ErrFreed
	}
	if m.file == nil {
		if err := m.dev.run(context.Background(), m.dev.allocLane, m.exportLocked); err != nil {
			return nil, err
		}
	}
	if writable {
		return m.file, nil
	}
	if m.readOnly == nil {
		fd, err := unix.FcntlInt(m.file.Fd(), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			return nil, fmt.Errorf("duplicate an export: %w", err)
		}
		m.readOnly = os.NewFile(uintptr(fd), "cuda memory (read-only)")
	}
	return m.readOnly, nil
}

// Held is true from the first Export on: the driver does not tell which processes have imported the memory.
func (m *memory) Held() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.users.Freed() && m.file != nil
}

func (m *memory) exportLocked() error {
	var fd int32
	err := m.dev.drv.check("cuMemExportToShareableHandle", m.dev.drv.memExportToHandle(&fd, m.handle, handlePOSIX, 0))
	if err != nil {
		return err
	}
	unix.CloseOnExec(int(fd))
	m.file = os.NewFile(uintptr(fd), "cuda memory")
	return nil
}

func (m *memory) Free() error {
	if err := m.users.Free(); err != nil {
		return err
	}
	m.mu.Lock() // an Export may still go on
	file, readOnly := m.file, m.readOnly
	m.mu.Unlock()
	// No call is let in any more, so this call owns everything now.
	var err error
	for _, f := range []*os.File{file, readOnly} {
		if f != nil {
			err = errors.Join(err, f.Close())
		}
	}
	destroyed := m.lane().do(context.Background(), m.destroy)
	if m.dev.lost() == nil && !errors.Is(destroyed, gpubackend.ErrDeviceLost) {
		err = errors.Join(err, destroyed)
	}
	m.dev.giveBack(m.counted)
	return err
}

// lane returns the lane that makes and frees m.
func (m *memory) lane() *lane {
	if m.host {
		return m.dev.hostLane
	}
	return m.dev.allocLane
}

// mapMemory maps all n bytes of an allocation at an address that the driver chooses, for loads, or for loads and
// stores, of the device. After an error nothing stays mapped.
func (d *driver) mapMemory(device deviceHandle, m memoryHandle, n uintptr, access int32) (base address, err error) {
	if err := d.check("cuMemAddressReserve", d.memAddressReserve(&base, n, 0, 0, 0)); err != nil {
		return 0, err
	}
	if err := d.check("cuMemMap", d.memMap(base, n, 0, m, 0)); err != nil {
		_ = d.memAddressFree(base, n)
		return 0, err
	}
	desc := accessDesc{location: onDevice(device), flags: access}
	if err := d.check("cuMemSetAccess", d.memSetAccess(base, n, &desc, 1)); err != nil {
		_ = d.unmap(base, n)
		return 0, err
	}
	return base, nil
}

// unmap undoes mapMemory.
func (d *driver) unmap(base address, n uintptr) error {
	return errors.Join(
		d.check("cuMemUnmap", d.memUnmap(base, n)),
		d.check("cuMemAddressFree", d.memAddressFree(base, n)))
}
