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

// The patterns of Options.Poison. Neither byte occurs in text or small numbers.
const (
	poisonAlloc  = 0xa5
	poisonFree   = 0xdb
	poisonBuffer = 0xc3
)

// memory is one memfd and the daemon's mapping of it.
type memory struct {
	// immutable
	dev     *device
	size    int64
	counted int64 // bytes that it takes of the budget
	host    bool  // it stands for memory of the host

	// data is the mapping, which create makes. Calls that users has let in may load and store. Free waits for them, and
	// then unmaps it. Other processes store into it at any time.
	data  []byte
	users gpubackend.Users

	file *os.File // immutable until Free; the memfd, open for reading and writing. Nobody else is given it

	mu       sync.Mutex
	writable *os.File // protected by mu; the export for writing, nil until there is one. None is made after Free
	readOnly *os.File // protected by mu; the export for reading, nil until there is one. None is made after Free
	exported bool     // protected by mu
}

// create makes the memfd and maps it. After an error nothing stays.
func (m *memory) create() error {
	fd, err := createMemfd("gaiafs:" + strconv.Itoa(m.dev.info.Ordinal))
	if err != nil {
		return err
	}
	if m.data, err = mapMemfd(fd, m.size); err != nil {
		_ = unix.Close(fd)
		return err
	}
	if m.dev.poison {
		fill(m.data, poisonAlloc)
	}
	m.file = os.NewFile(uintptr(fd), "memfd:gaiafs")
	return nil
}

// createMemfd makes a memfd that cannot be executed: some systems allow no other (vm.memfd_noexec, sysctl(5)). Linux
// before 6.3 does not have that flag.
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
	// Only the daemon's own user may open the memfd again through /proc.
	if err := unix.Fchmod(fd, 0o600); err != nil {
		return nil, hostError("protect a memfd", err)
	}
	if err := unix.Ftruncate(fd, size); err != nil {
		return nil, hostError("size a memfd", err)
	}
	// If an importer could shrink it, the daemon would die of SIGBUS.
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

// hostError returns ErrNoMemory if the host has no memory or descriptor left.
func hostError(what string, err error) error {
	switch {
	case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE),
		errors.Is(err, unix.ENOSPC):
		return fmt.Errorf("%w: %s: %w", gpubackend.ErrNoMemory, what, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

func (m *memory) Size() int64 { return m.size }

func (m *memory) Zeroed() bool { return !m.dev.poison }

func (m *memory) Export(writable bool) (*os.File, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.users.Freed() {
		return nil, gpubackend.ErrFreed
	}
	if writable || m.dev.writableExports {
		return m.exportLocked(&m.writable, unix.O_RDWR)
	}
	return m.exportLocked(&m.readOnly, unix.O_RDONLY)
}

// exportLocked opens the memfd again, unless it did so before. A duplicate would share the memfd's access mode, and
// heldByOthers could not tell it from the memfd.
func (m *memory) exportLocked(at **os.File, mode int) (*os.File, error) {
	if *at == nil {
		fd, err := reopen(m.file, mode)
		if err != nil {
			return nil, hostError("open a memfd again", err)
		}
		*at, m.exported = os.NewFile(uintptr(fd), "memfd:gaiafs (exported)"), true
	}
	return *at, nil
}

func (m *memory) Held() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.users.Freed() || !m.exported {
		return false
	}
	_ = m.closeExportsLocked() // they were only read from
	held, known := heldByOthers(m.file)
	m.exported = held || !known
	return m.exported
}

func (m *memory) closeExportsLocked() (err error) {
	for _, f := range []**os.File{&m.writable, &m.readOnly} {
		if *f != nil {
			err = errors.Join(err, (*f).Close())
			*f = nil
		}
	}
	return err
}

// reopen opens a memfd once more.
func reopen(file *os.File, mode int) (int, error) {
	return unix.Open(fmt.Sprintf("/proc/self/fd/%d", file.Fd()), mode|unix.O_CLOEXEC, 0)
}

// heldByOthers reports whether any process has a memfd open through a descriptor of reopen, or mapped. The kernel knows
// that: it grants a lease for writing (fcntl(2)) only if nobody else has the file open, and a mapping keeps its file
// open. The kernel does not count the descriptor that memfd_create returned, nor mappings made with it. known is false
// if there are no leases.
func heldByOthers(file *os.File) (held, known bool) {
	fd, err := reopen(file, unix.O_RDONLY)
	if err != nil {
		return false, false
	}
	defer unix.Close(fd) // and give the lease back
	_, err = unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_WRLCK)
	return err != nil, err == nil || errors.Is(err, unix.EAGAIN)
}

func (m *memory) Free() error {
	if err := m.users.Free(); err != nil {
		return err
	}
	m.mu.Lock() // an Export may still go on
	err := m.closeExportsLocked()
	m.mu.Unlock()
	// No call is let in any more, so this call owns everything now.
	if m.dev.poison {
		fill(m.data, poisonFree)
	}
	err = errors.Join(err, unix.Munmap(m.data))
	m.data = nil
	if m.host {
		err = errors.Join(err, m.file.Close())
		m.dev.giveBack(0)
		return err
	}
	if held, known := heldByOthers(m.file); m.exported && held && known {
		m.dev.linger(m)
		return err
	}
	err = errors.Join(err, m.file.Close())
	m.dev.giveBack(m.counted)
	return err
}

// fill stores b into all of p, by copies of doubling size.
func fill(p []byte, b byte) {
	if len(p) == 0 {
		return
	}
	p[0] = b
	for n := 1; n < len(p); n *= 2 {
		copy(p[n:], p[:n])
	}
}
