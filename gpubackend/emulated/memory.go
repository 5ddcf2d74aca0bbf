package emulated

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// The patterns of Options.Poison. Neither is a byte that text or small numbers are made of.
const (
	poisonAlloc  = 0xa5
	poisonFree   = 0xdb
	poisonBuffer = 0xc3
)

// memory is one memfd and the daemon's mapping of it.
type memory struct {
	// immutable
	dev  *device
	size int64

	// data is the mapping. Who is counted in users may load and store; the last one out of a freed memory unmaps it.
	// Other processes store into it at any time.
	data []byte

	mu       sync.Mutex
	users    int           // protected by mu; calls that are using data
	freed    bool          // protected by mu; no further user is let in
	idle     chan struct{} // protected by mu; closed when users falls to 0 after freed was set
	file     *os.File      // immutable until Free; the memfd, open for reading and writing
	readOnly *os.File      // protected by mu; nil until the first read-only export
}

func newMemory(d *device, size int64) (*memory, error) {
	fd, err := createMemfd("gaiafs:" + strconv.Itoa(d.info.Ordinal))
	if err != nil {
		return nil, err
	}
	data, err := mapMemfd(fd, size)
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	if d.poison {
		fill(data, poisonAlloc)
	}
	return &memory{dev: d, size: size, data: data, file: os.NewFile(uintptr(fd), "memfd:gaiafs")}, nil
}

// createMemfd makes a memfd that cannot be executed: some systems allow no other (vm.memfd_noexec, sysctl(5)), and Linux
// before 6.3 knows no such thing.
func createMemfd(name string) (int, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err != nil {
		return -1, hostError("create a memfd", err)
	}
	return fd, nil
}

// mapMemfd gives a memfd its size for good and maps it.
func mapMemfd(fd int, size int64) ([]byte, error) {
	// Nobody but the daemon's own user may open the memfd again through /proc.
	if err := unix.Fchmod(fd, 0o600); err != nil {
		return nil, hostError("protect a memfd", err)
	}
	if err := unix.Ftruncate(fd, size); err != nil {
		return nil, hostError("size a memfd", err)
	}
	// An importer that could shrink it would make the daemon die of SIGBUS.
	const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return nil, hostError("seal a memfd", err)
	}
	data, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, hostError("map a memfd", err)
	}
	return data, nil
}

// hostError is ErrNoMemory where the host has no memory or descriptor left.
func hostError(what string, err error) error {
	switch {
	case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOSPC):
		return fmt.Errorf("%w: %s: %w", gpubackend.ErrNoMemory, what, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

func (m *memory) Size() int64 { return m.size }

func (m *memory) Zeroed() bool { return !m.dev.poison }

func (m *memory) Export(writable bool) (*os.File, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.freed {
		return nil, gpubackend.ErrFreed
	}
	if writable {
		return m.file, nil
	}
	if m.readOnly == nil {
		// A duplicate would share the memfd's access mode; opening it again makes one that can only read.
		path := fmt.Sprintf("/proc/self/fd/%d", m.file.Fd())
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, hostError("open a memfd for reading", err)
		}
		m.readOnly = os.NewFile(uintptr(fd), "memfd:gaiafs (read-only)")
	}
	return m.readOnly, nil
}

// use lets a call in. It must end with done.
func (m *memory) use() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.freed {
		return gpubackend.ErrFreed
	}
	m.users++
	return nil
}

func (m *memory) done() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.users--
	if m.users == 0 && m.idle != nil {
		close(m.idle)
	}
}

func (m *memory) Free() error {
	m.mu.Lock()
	if m.freed {
		m.mu.Unlock()
		return gpubackend.ErrFreed
	}
	m.freed = true
	var idle chan struct{}
	if m.users > 0 {
		idle = make(chan struct{})
		m.idle = idle
	}
	m.mu.Unlock()
	if idle != nil {
		<-idle
	}
	// Nobody is let in any more, so everything is this call's now.
	if m.dev.poison {
		fill(m.data, poisonFree)
	}
	err := unix.Munmap(m.data)
	m.data = nil
	err = errors.Join(err, m.file.Close())
	if m.readOnly != nil {
		err = errors.Join(err, m.readOnly.Close())
	}
	m.dev.giveBack(m.size)
	return err
}

// fill stores b into all of p, by copies that double.
func fill(p []byte, b byte) {
	if len(p) == 0 {
		return
	}
	p[0] = b
	for n := 1; n < len(p); n *= 2 {
		copy(p[n:], p[:n])
	}
}
