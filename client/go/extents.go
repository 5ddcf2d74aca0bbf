package gaiafs

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pageSize is the unit of mapping, on every machine: the page of a gaiafs file.
const pageSize = 4096

// memoryKind maps the memory of one kind of device into this process.
type memoryKind struct {
	// reserve makes an address range of n bytes in which nothing can be touched.
	reserve func(n int64) (unsafe.Pointer, error)
	// place puts n bytes of an extent, from its byte from on, at an address of a reserved range. It keeps no fd.
	place func(at unsafe.Pointer, n int64, prot Prot, fd int, from int64) error
	// drop gives the whole range back.
	drop func(at unsafe.Pointer, n int64) error
}

var memoryKinds = map[uint32]memoryKind{
	kindEmulated: {reserve: reserveHost, place: placeHost, drop: dropHost},
}

func reserveHost(n int64) (unsafe.Pointer, error) {
	return unix.MmapPtr(-1, 0, nil, uintptr(n), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
}

// placeHost replaces part of a range that reserveHost made and nobody else knows of yet.
func placeHost(at unsafe.Pointer, n int64, prot Prot, fd int, from int64) error {
	bits := unix.PROT_READ
	if prot&ProtWrite != 0 {
		bits |= unix.PROT_WRITE
	}
	_, err := unix.MmapPtr(fd, from, at, uintptr(n), bits, unix.MAP_SHARED|unix.MAP_FIXED)
	return err
}

func dropHost(at unsafe.Pointer, n int64) error { return unix.MunmapPtr(at, uintptr(n)) }

// assembly is a mapping while its reply arrives: extents are put side by side into one address range. It is used by
// one goroutine at a time.
type assembly struct {
	off, size int64 // of the mapping in the file; whole pages
	prot      Prot

	reply mapped
	known bool // reply is valid: the daemon has a mapping
	kind  memoryKind
	base  unsafe.Pointer // nil: nothing is reserved
	next  int64          // file offset at which the next extent begins, once one has come
	got   uint32         // extents so far
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
		if a.base == nil {
			return nil // an earlier frame failed
		}
		return a.add(body, fds)
	}
	return failed(syscall.EPROTO, "the daemon answered a MAP with type %#x", uint16(h.typ))
}

func (a *assembly) begin(body []byte) error {
	m, err := decodeMapped(body)
	if err != nil {
		return failed(syscall.EPROTO, "%v", err)
	}
	if a.known {
		return failed(syscall.EPROTO, "the daemon answered a MAP twice")
	}
	a.reply, a.known = m, true
	kind, ok := memoryKinds[m.kind]
	if !ok {
		return failed(syscall.ENOTSUP, "device %d has memory of kind %d, which this library cannot map", m.device, m.kind)
	}
	a.kind = kind
	if a.base, err = kind.reserve(a.size); err != nil {
		a.base = nil
		return asError(err, "no %d bytes of address space", a.size)
	}
	return nil
}

func (a *assembly) add(body []byte, fds []int) error {
	e, err := decodeExtents(body)
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

// place maps the part of an extent that belongs to the mapping.
func (a *assembly) place(p extentPlace, fd int, first bool) error {
	bad := p.off < 0 || p.size <= 0 || p.off%pageSize != 0 || p.size%pageSize != 0 || p.off+p.size < 0
	if bad || first && p.off > a.off || !first && p.off != a.next {
		return failed(syscall.EPROTO, "an extent of %d bytes at %d does not fit the mapping", p.size, p.off)
	}
	a.next = p.off + p.size
	from, to := max(p.off, a.off), min(p.off+p.size, a.off+a.size)
	if from >= to {
		return nil
	}
	if err := a.kind.place(unsafe.Add(a.base, from-a.off), to-from, a.prot, fd, from-p.off); err != nil {
		return asError(err, "an extent could not be mapped")
	}
	return nil
}

// complete reports whether extents cover the whole mapping.
func (a *assembly) complete() bool {
	return a.base != nil && a.got == a.reply.extents && a.next >= a.off+a.size
}

// drop gives the address range back.
func (a *assembly) drop() error {
	if a.base == nil {
		return nil
	}
	base := a.base
	a.base = nil
	return a.kind.drop(base, a.size)
}
