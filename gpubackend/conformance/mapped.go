package conformance

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// View is an exported Memory in another process.
type View interface {
	// Load reads len(p) bytes at off.
	Load(p []byte, off int64) error
	// Store writes p at off. On a view for reading it fails and stores nothing.
	Store(p []byte, off int64) error
	// Stamp stores value into n bytes, stride apart, the first at off, each by a separate store.
	Stamp(value byte, off, stride int64, n int) error
	// Close unmaps the memory.
	Close() error
}

// Import maps size bytes of a descriptor that Export returned. If writable is true and the descriptor was exported for
// reading, Import or Store must fail, unless the backend is allowed ReadOnlyIsAdvice.
type Import func(f *os.File, size int64, writable bool) (View, error)

// MapShared is the Import for memory that mmap can map.
func MapShared(f *os.File, size int64, writable bool) (View, error) {
	prot := unix.PROT_READ
	if writable {
		prot |= unix.PROT_WRITE
	}
	data, err := unix.Mmap(int(f.Fd()), 0, int(size), prot, unix.MAP_SHARED)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	return &mapped{data, writable}, nil
}

// mapped is shared memory: other processes store into it at any time.
type mapped struct {
	data     []byte
	writable bool
}

var errReadOnlyView = errors.New("view is read-only")

func (v *mapped) Load(p []byte, off int64) error {
	copy(p, v.data[off:][:len(p)])
	return nil
}

func (v *mapped) Store(p []byte, off int64) error {
	if !v.writable {
		// A mapping that was not made writable must not become writable either.
		if err := unix.Mprotect(v.data, unix.PROT_READ|unix.PROT_WRITE); err != nil {
			return errors.Join(errReadOnlyView, err)
		}
		v.writable = true
	}
	copy(v.data[off:][:len(p)], p)
	return nil
}

func (v *mapped) Stamp(value byte, off, stride int64, n int) error {
	if !v.writable {
		return errReadOnlyView
	}
	for ; n > 0; n-- {
		v.data[off] = value
		off += stride
	}
	return nil
}

func (v *mapped) Close() error { return unix.Munmap(v.data) }
