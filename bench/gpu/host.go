package main

import (
	"fmt"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// hostGPU stands in for a GPU if devices are emulated: its memory belongs to this process.
type hostGPU int

func (g hostGPU) device() int { return int(g) }

func (g hostGPU) String() string { return fmt.Sprintf("emulated device %d", int(g)) }

// hostSizes has the sizes of what alloc made: address to int64.
var hostSizes sync.Map

// bytes returns n bytes of memory at a. a must be an address of memory that alloc or a gaiafs mapping made, outside
// Go's heap. The slice is valid as long as that memory.
func (a address) bytes(n int64) []byte {
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&a)), n)
}

func (g hostGPU) alloc(n int64) (address, error) {
	p, err := unix.MmapPtr(-1, 0, nil, uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return 0, err
	}
	hostSizes.Store(address(uintptr(p)), n)
	return address(uintptr(p)), nil
}

func (g hostGPU) free(a address) error {
	n, ok := hostSizes.LoadAndDelete(a)
	if !ok {
		return fmt.Errorf("nothing was allocated at %#x", uintptr(a))
	}
	return unix.MunmapPtr(unsafe.Pointer(&a.bytes(1)[0]), uintptr(n.(int64)))
}

func (g hostGPU) pinned(n int64) ([]byte, error) { return hostMemory(n) }

func (g hostGPU) copyIn(to address, from []byte) error {
	copy(to.bytes(int64(len(from))), from)
	return nil
}

func (g hostGPU) copyOut(to []byte, from address) error {
	copy(to, from.bytes(int64(len(to))))
	return nil
}

func (g hostGPU) copyWithin(to, from address, n int64) error {
	copy(to.bytes(n), from.bytes(n))
	return nil
}

func (g hostGPU) touch(a address, step, n int64, value byte) error {
	p := a.bytes((n-1)*step + 1)
	for i := int64(0); i < int64(len(p)); i += step {
		p[i] += value
	}
	return nil
}

func (g hostGPU) paint(a address, s stripes, passes int) error {
	for i := range passes {
		s.pass(i, passes).store(0, a.bytes(s.size))
	}
	return nil
}

func (g hostGPU) freeMemory() (int64, error) { return 0, nil }

// hostMemory returns n bytes outside Go's heap, page-aligned and already populated.
func hostMemory(n int64) ([]byte, error) {
	return unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_POPULATE)
}
