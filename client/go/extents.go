package gaiafs

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pageSize is the page of a gaiafs file, on every machine. Mappings consist of whole pages.
const pageSize = 4096

// memory is a mapping's share of a device's memory in this process. Extents are placed in order as they come, each
// beginning where the one before it ended. finish then makes all of them usable; nobody uses the memory before that.
// drop undoes everything. It may be called at any time, once.
type memory interface {
	// place takes an extent. It does not keep fd.
	place(p extentPlace, fd int) error
	finish() error
	// move puts other memory in the place of an extent of a movable mapping or, if fd is -1, nothing. It does not keep
	// fd. If it fails, the place is left without memory.
	move(p extentPlace, fd int) error
	// quiesce waits for stores in progress. So does drop.
	quiesce() error
	drop() error
	// base returns the address of the mapping's first byte.
	base() uintptr
	// read and write copy between the host and the mapping's bytes from off on. The caller has checked the range.
	read(p []byte, off int64) error
	write(p []byte, off int64) error
}

// deviceKind is how this library handles one kind of device. Each kind has a file that defines one.
type deviceKind struct {
	number Kind
	// open returns the GPU that this process numbers ordinal. nil if devices of the kind go by the mount's numbers.
	open func(ordinal int) (ownGPU, error)
	// memory returns the memory for a mapping's extents. a.gpu is set if the kind has an open function.
	memory func(a *assembly) (memory, error)
}

// ownGPU is a GPU opened by this process.
type ownGPU interface {
	// id is the UUID by which the daemon knows it.
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

// emulatedKind is the kind of devices whose memory the CPU addresses.
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
	off, size int64 // of the mapping in the file; both are multiples of a page
	prot      Prot
	start     unsafe.Pointer // of the range, which has size bytes
}

// reserveHost reserves an inaccessible address range that begins at a multiple of align, a power of two.
func reserveHost(off, size, align int64, prot Prot) (*hostMemory, error) {
	spare := max(align-pageSize, 0) // room to align the start
	start, err := unix.MmapPtr(-1, 0, nil, uintptr(size+spare), unix.PROT_NONE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, asError(err, "no %d bytes of address space", size)
	}
	if before := -int64(uintptr(start)) & (align - 1); spare > 0 {
		// Return the surplus on both sides to the kernel; nobody else knows these addresses.
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

// place maps an extent's part of the mapping into the range. Nobody else knows the range yet.
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

// move replaces what is mapped in one step, so nobody else can take the addresses in between.
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

func (h *hostMemory) quiesce() error { return nil } // stores are complete when their instruction is

func (h *hostMemory) drop() error { return unix.MunmapPtr(h.start, uintptr(h.size)) }

func (h *hostMemory) base() uintptr { return uintptr(h.start) }

// bytes returns the memory as a slice, valid until drop.
func (h *hostMemory) bytes() []byte { return unsafe.Slice((*byte)(h.start), h.size) }

func (h *hostMemory) read(p []byte, off int64) error {
	copy(p, h.bytes()[off:])
	return nil
}

func (h *hostMemory) write(p []byte, off int64) error {
	copy(h.bytes()[off:], p)
	return nil
}

// assembly builds a mapping while its reply arrives. One goroutine at a time uses it.
type assembly struct {
	off, size int64 // of the mapping in the file; both are multiples of a page
	align     int64 // of its address; less than a page means a page
	prot      Prot
	version   uint16      // of the connection
	gpu       ownGPU      // whose memory is asked for; nil: the request names a device by the mount's number
	kind      *deviceKind // of gpu

	reply  mapped
	known  bool   // reply is valid: the daemon has made the mapping
	memory memory // nil: extents cannot be placed
	next   int64  // file offset at which the next extent must begin; valid after the first
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

// finish makes the memory usable. The reply is complete.
func (a *assembly) finish() error {
	if a.memory == nil || a.got != a.reply.extents || !a.reply.movable && a.next < a.off+a.size {
		return failed(syscall.EPROTO, "the extents do not cover the mapping")
	}
	return a.memory.finish()
}

// drop gives back the memory and the GPU.
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
