package gaiafs

import (
	"encoding/binary"
	"fmt"
)

// The wire format of docs/protocol.md, version 1, from the client's side. These numbers are the daemon's too; the frames
// in control/testdata/frames.txt are what both are tested against.
const (
	helloMagic      = 0x41494147 // "GAIA"
	protocolVersion = 1

	headerSize = 16
	maxFrame   = 64 << 10
	maxExtents = 128

	flagMore uint16 = 1
)

type frameType uint16

const (
	typeHello   frameType = 1
	typeMap     frameType = 2
	typeAcquire frameType = 3
	typeRelease frameType = 4
	typeSync    frameType = 5
	typeAdvise  frameType = 6
	typeUnmap   frameType = 7
	typeStatus  frameType = 8
	typePing    frameType = 9
	typeRecord  frameType = 10
	typeStop    frameType = 11
	typeEnd     frameType = 12

	typeWelcome  frameType = 0x8001
	typeMapped   frameType = 0x8002
	typeExtents  frameType = 0x8003
	typeResult   frameType = 0x8004
	typeDocument frameType = 0x8005
	typeError    frameType = 0x8006
)

const (
	mapLazy        uint32 = 1
	mapLaunder     uint32 = 2
	acquireLaunder uint32 = 1
	syncDurable    uint32 = 1
	endForce       uint32 = 1
)

type (
	requestID uint64
	mappingID uint64
)

type header struct {
	typ   frameType
	flags uint16
	id    requestID
}

// frame builds a request.
func frame(typ frameType, id requestID, body []byte) []byte {
	b := make([]byte, 0, headerSize+len(body))
	b = binary.LittleEndian.AppendUint32(b, uint32(headerSize+len(body)))
	b = binary.LittleEndian.AppendUint16(b, uint16(typ))
	b = binary.LittleEndian.AppendUint16(b, 0)
	b = binary.LittleEndian.AppendUint64(b, uint64(id))
	return append(b, body...)
}

func helloBody(minVersion, maxVersion uint16) []byte {
	b := binary.LittleEndian.AppendUint32(nil, helloMagic)
	b = binary.LittleEndian.AppendUint16(b, minVersion)
	return binary.LittleEndian.AppendUint16(b, maxVersion)
}

// mapBody names the device by uuid where that is not zero.
func mapBody(token [16]byte, device uint32, prot Prot, flags uint32, off, length int64, uuid [16]byte) []byte {
	b := append([]byte(nil), token[:]...)
	b = binary.LittleEndian.AppendUint32(b, device)
	b = binary.LittleEndian.AppendUint32(b, uint32(prot))
	b = binary.LittleEndian.AppendUint32(b, flags)
	b = binary.LittleEndian.AppendUint32(b, 0)
	b = binary.LittleEndian.AppendUint64(b, uint64(off))
	b = binary.LittleEndian.AppendUint64(b, uint64(length))
	return append(b, uuid[:]...)
}

func rangeBody(m mappingID, off, n int64, arg uint32) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(m))
	b = binary.LittleEndian.AppendUint64(b, uint64(off))
	b = binary.LittleEndian.AppendUint64(b, uint64(n))
	b = binary.LittleEndian.AppendUint32(b, arg)
	return binary.LittleEndian.AppendUint32(b, 0)
}

func unmapBody(m mappingID) []byte { return binary.LittleEndian.AppendUint64(nil, uint64(m)) }

func stopBody(recorder requestID) []byte {
	return binary.LittleEndian.AppendUint64(nil, uint64(recorder))
}

func endBody(token [16]byte, flags uint32) []byte {
	b := binary.LittleEndian.AppendUint32(token[:], flags)
	return binary.LittleEndian.AppendUint32(b, 0)
}

// decodeHeader splits one record into header and body. The body aliases record.
func decodeHeader(record []byte) (header, []byte, error) {
	if len(record) < headerSize {
		return header{}, nil, fmt.Errorf("frame of %d bytes is shorter than its header", len(record))
	}
	if n := binary.LittleEndian.Uint32(record); int64(n) != int64(len(record)) {
		return header{}, nil, fmt.Errorf("frame says %d bytes and has %d", n, len(record))
	}
	return header{
		typ:   frameType(binary.LittleEndian.Uint16(record[4:])),
		flags: binary.LittleEndian.Uint16(record[6:]),
		id:    requestID(binary.LittleEndian.Uint64(record[8:])),
	}, record[headerSize:], nil
}

func bodySize(what string, body []byte, n int) error {
	if len(body) != n {
		return fmt.Errorf("%s has a body of %d bytes, not %d", what, len(body), n)
	}
	return nil
}

type welcome struct {
	version     uint16
	maxRequests uint32
	maxRequest  uint32
	maxExtents  uint32
	kinds       uint32 // a bit (1 << (kind-1)) for each kind of memory among the mount's devices
}

// has reports whether some device of the mount has memory of the kind.
func (w welcome) has(kind Kind) bool { return w.kinds&(1<<(kind-1)) != 0 }

func decodeWelcome(body []byte) (welcome, error) {
	if err := bodySize("WELCOME", body, 24); err != nil {
		return welcome{}, err
	}
	w := welcome{
		version:     binary.LittleEndian.Uint16(body),
		maxRequests: binary.LittleEndian.Uint32(body[4:]),
		maxRequest:  binary.LittleEndian.Uint32(body[8:]),
		maxExtents:  binary.LittleEndian.Uint32(body[12:]),
		kinds:       binary.LittleEndian.Uint32(body[16:]),
	}
	if w.version != protocolVersion || w.maxRequests == 0 {
		return welcome{}, fmt.Errorf("WELCOME chose version %d and %d requests", w.version, w.maxRequests)
	}
	return w, nil
}

type mapped struct {
	mapping mappingID
	kind    uint32
	device  uint32
	size    int64
	extents uint32
	uuid    [16]byte // of the GPU; zero where the kind has none
}

func decodeMapped(body []byte) (mapped, error) {
	if err := bodySize("MAPPED", body, 48); err != nil {
		return mapped{}, err
	}
	return mapped{
		mapping: mappingID(binary.LittleEndian.Uint64(body)),
		kind:    binary.LittleEndian.Uint32(body[8:]),
		device:  binary.LittleEndian.Uint32(body[12:]),
		size:    int64(binary.LittleEndian.Uint64(body[16:])),
		extents: binary.LittleEndian.Uint32(body[24:]),
		uuid:    [16]byte(body[32:]),
	}, nil
}

// extentPlace is an extent's offset in the file and its size, in bytes.
type extentPlace struct{ off, size int64 }

type extents struct {
	first  uint32
	places []extentPlace
}

func decodeExtents(body []byte) (extents, error) {
	if len(body) < 8 {
		return extents{}, fmt.Errorf("EXTENTS has a body of %d bytes", len(body))
	}
	n := binary.LittleEndian.Uint32(body[4:])
	if n > maxExtents {
		return extents{}, fmt.Errorf("EXTENTS has %d extents", n)
	}
	if err := bodySize("EXTENTS", body, 8+16*int(n)); err != nil {
		return extents{}, err
	}
	e := extents{first: binary.LittleEndian.Uint32(body), places: make([]extentPlace, n)}
	for i := range e.places {
		e.places[i] = extentPlace{
			off:  int64(binary.LittleEndian.Uint64(body[8+16*i:])),
			size: int64(binary.LittleEndian.Uint64(body[16+16*i:])),
		}
	}
	return e, nil
}

// result is the body of RESULT and of ERROR.
type result struct {
	errno uint32
	pages int64
	text  string
}

func decodeResult(body []byte) (result, error) {
	if len(body) < 16 {
		return result{}, fmt.Errorf("RESULT has a body of %d bytes", len(body))
	}
	n := binary.LittleEndian.Uint32(body[4:])
	if int64(n) != int64(len(body)-16) {
		return result{}, fmt.Errorf("RESULT says %d bytes of text and has %d", n, len(body)-16)
	}
	return result{
		errno: binary.LittleEndian.Uint32(body),
		pages: int64(binary.LittleEndian.Uint64(body[8:])),
		text:  string(body[16:]),
	}, nil
}
