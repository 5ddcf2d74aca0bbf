package gaiafs

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pageSize is the unit of mapping, on every machine: the page of a gaiafs file.
const pageSize = 4096

// memory is what a mapping has of a device's memory in this process. Extents are placed as they come, in order, each
// beginning where the one before it ended; finish then makes all of them usable. Nobody else uses it before that. drop
// undoes everything, at any time, once.
type memory interface {
	// place takes an extent. It keeps no fd.
	place(p extentPlace, fd int) error
	finish() error
	// move has other memory in the place of an extent of a movable mapping or, with -1 for fd, nothing. It keeps no fd.
	// Where it fails, nothing is there.
	move(p extentPlace, fd int) error
	// quiesce waits for the stores that were begun. drop does, too.
	quiesce() error
	drop() error
	// base returns the address of the mapping's first byte.
	base() uintptr
	// read and write copy between the host and the mapping's bytes from off on, which the caller has checked.
	read(p []byte, off int64) error
	write(p []byte, off int64) error
}

// deviceKind is what this library does for one kind of device. Each has a file with its row.
type deviceKind struct {
	number Kind
	// open returns the GPU that this process counts as ordinal. nil where a device has the mount's number.
	open func(ordinal int) (ownGPU, error)
	// memory returns what places the extents of a mapping whose GPU, if the kind has them, is in a.
	memory func(a *assembly) (memory, error)
}

// ownGPU is a GPU as this process has it.
type ownGPU interface {
	// id is the UUID that the daemon knows it by.
	id() [16]byte
	release()
}

// kindOf returns nil for a kind that this library cannot map.
func kindOf(number Kind) *deviceKind {
	for _, k := range kinds {
		if k.number == number {
			return k
		}
	}
	return nil
}

// emulatedKind is that of devices whose memory the CPU addresses.
var emulatedKind = deviceKind{
	number: KindEmulated,
	memory: func(a *assembly) (memory, error) {
		host, err := reserveHost(a.off, a.size, a.align, a.prot)
		if err != nil {
			return nil, err
		}
		return host, nil
	},
}

// hostMemory is memory that the CPU addresses.
type hostMemory struct {
	off, size int64 // of the mapping in the file; whole pages
	prot      Prot
	start     unsafe.Pointer // of size bytes
}

// reserveHost makes an address range in which nothing can be touched yet. It begins at a multiple of align, a power of
// two.
func reserveHost(off, size, align int64, prot Prot) (*hostMemory, error) {
	spare := max(align-pageSize, 0) // for what has to be left out before the range
	start, err := unix.MmapPtr(-1, 0, nil, uintptr(size+spare), unix.PROT_NONE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, asError(err, "no %d bytes of address space", size)
	}
	if before := -int64(uintptr(start)) & (align - 1); spare > 0 {
		// Nobody else knows of these bytes; they are the kernel's again.
		if before > 0 {
			_ = unix.MunmapPtr(start, uintptr(before))
		}
		start = unsafe.Add(start, before)
		if after := spare - before; after > 0 {
			_ = unix.MunmapPtr(unsafe.Add(start, size), uintptr(after))
		}
	}
	return &hostMemory{off, size, prot, start}, nil
}

// place maps the part of an extent that belongs to the mapping over part of the range, which nobody else knows of yet.
func (h *hostMemory) place(p extentPlace, fd int) error {
	from, to := max(p.off, h.off), min(p.off+p.size, h.off+h.size)
	if from >= to {
		return nil
	}
	bits := unix.PROT_READ
	if h.prot&ProtWrite != 0 {
		bits |= unix.PROT_WRITE
	}
	_, err := unix.MmapPtr(fd, from-p.off, unsafe.Add(h.start, from-h.off), uintptr(to-from), bits,
		unix.MAP_SHARED|unix.MAP_FIXED)
	if err != nil {
		return asError(err, "an extent could not be mapped")
	}
	return nil
}

func (h *hostMemory) finish() error { return nil }

// move replaces what is mapped in one step, so nobody else can come to have the addresses.
func (h *hostMemory) move(p extentPlace, fd int) error {
	from, to := max(p.off, h.off), min(p.off+p.size, h.off+h.size)
	if from >= to {
		return failed(syscall.ERANGE, "an extent is outside of its mapping")
	}
	var first error
	if fd >= 0 {
		if first = h.place(p, fd); first == nil {
			return nil
		}
	}
	_, err := unix.MmapPtr(-1, 0, unsafe.Add(h.start, from-h.off), uintptr(to-from), unix.PROT_NONE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE|unix.MAP_FIXED)
	if err != nil && first == nil {
		first = asError(err, "an extent could not be given back")
	}
	return first
}

func (h *hostMemory) quiesce() error { return nil } // no store outlasts its instruction

func (h *hostMemory) drop() error { return unix.MunmapPtr(h.start, uintptr(h.size)) }

func (h *hostMemory) base() uintptr { return uintptr(h.start) }

// bytes is the memory as a slice. It belongs to the mapping until drop.
func (h *hostMemory) bytes() []byte { return unsafe.Slice((*byte)(h.start), h.size) }

func (h *hostMemory) read(p []byte, off int64) error {
	copy(p, h.bytes()[off:])
	return nil
}

func (h *hostMemory) write(p []byte, off int64) error {
	copy(h.bytes()[off:], p)
	return nil
}

// assembly is a mapping while its reply arrives. It is used by one goroutine at a time.
type assembly struct {
	off, size int64 // of the mapping in the file; whole pages
	align     int64 // of its address; less than a page means a page
	prot      Prot
	version   uint16      // of the connection
	gpu       ownGPU      // that the memory is asked for of; nil: a device with the mount's number
	kind      *deviceKind // of gpu

	reply  mapped
	known  bool   // reply is valid: the daemon has a mapping
	memory memory // nil: nothing can be placed
	next   int64  // file offset at which the next extent begins, once one has come
	got    uint32 // extents so far
}

// take takes one frame of the reply.
func (a *assembly) take(h header, body []byte, fds []int) error {
	switch h.typ {
	case typeResult:
		_, err := resultOf(body)
		if err == nil {
			err = failed(syscall.EPROTO, "the daemon answered a MAP with no mapping")
		}
		return err
	case typeMapped:
		return a.begin(body)
	case typeExtents:
		if !a.known {
			return failed(syscall.EPROTO, "extents came before their mapping")
		}
		if a.memory == nil {
			return nil // an earlier frame failed
		}
		return a.add(body, fds)
	}
	return failed(syscall.EPROTO, "the daemon answered a MAP with type %#x", uint16(h.typ))
}

func (a *assembly) begin(body []byte) error {
	m, err := decodeMapped(a.version, body)
	if err != nil {
		return failed(syscall.EPROTO, "%v", err)
	}
	if a.known {
		return failed(syscall.EPROTO, "the daemon answered a MAP twice")
	}
	a.reply, a.known = m, true
	kind := kindOf(Kind(m.kind))
	switch {
	case kind == nil:
		return failed(syscall.ENOTSUP, "device %d has memory of kind %d, which this library cannot map", m.device,
			m.kind)
	case kind.open != nil && (a.gpu == nil || a.kind != kind || a.gpu.id() != m.uuid):
		return failed(syscall.EPROTO, "the daemon answered with memory of a GPU that was not asked for")
	}
	a.memory, err = kind.memory(a)
	return err
}

func (a *assembly) add(body []byte, fds []int) error {
	e, err := decodeExtents(a.version, body)
	if err != nil {
		return failed(syscall.EPROTO, "%v", err)
	}
	if e.first != a.got {
		return failed(syscall.EPROTO, "extents from %d on came after %d", e.first, a.got)
	}
	a.got += uint32(len(e.places))
	for i, p := range e.places {
		if i >= len(fds) {
			return failed(syscall.EMFILE, "an extent came without its descriptor")
		}
		if err := a.place(p, fds[i], e.first == 0 && i == 0); err != nil {
			return err
		}
	}
	return nil
}

func (a *assembly) place(p extentPlace, fd int, first bool) error {
	bad := p.off < 0 || p.size <= 0 || p.off%pageSize != 0 || p.size%pageSize != 0 || p.off+p.size < 0
	if bad || first && p.off > a.off || !first && p.off != a.next {
		return failed(syscall.EPROTO, "an extent of %d bytes at %d does not fit the mapping", p.size, p.off)
	}
	if p.kind != 0 && p.kind != Kind(a.reply.kind) {
		return failed(syscall.ENOTSUP, "an extent has memory of kind %d, which this library cannot map beside kind %d",
			p.kind, a.reply.kind)
	}
	a.next = p.off + p.size
	return a.memory.place(p, fd)
}

// finish makes the memory usable once the reply is complete.
func (a *assembly) finish() error {
	if a.memory == nil || a.got != a.reply.extents || !a.reply.movable && a.next < a.off+a.size {
		return failed(syscall.EPROTO, "the extents do not cover the mapping")
	}
	return a.memory.finish()
}

// drop gives back what was taken.
func (a *assembly) drop() (err error) {
	if a.memory != nil {
		err = a.memory.drop()
		a.memory = nil
	}
	if a.gpu != nil {
		a.gpu.release()
		a.gpu = nil
	}
	return err
}
