package control

import (
	"encoding/binary"
	"fmt"
)

// The wire format, versions 1 and 2, described in docs/dev/protocol.md. The clients have their own copies of these
// numbers; testdata/frames.txt and testdata/frames2.txt keep them equal.
const (
	// helloMagic opens the first frame of a connection: the bytes "GAIA".
	helloMagic = 0x41494147

	minVersion version = 1
	maxVersion version = 2

	headerSize = 16
	// maxFrame bounds every frame, maxRequest the frames from the client to the daemon.
	maxFrame   = 64 << 10
	maxRequest = 4 << 10
	// maxExtents bounds the descriptors in one EXTENTS frame. The kernel's own bound is 253.
	maxExtents = 128
	// maxText bounds the text of a RESULT or ERROR.
	maxText = 1024
	// uuidSize is the size of a GPU's UUID.
	uuidSize = 16
)

// version is a version of the protocol. The handshake chooses it for a connection.
type version uint16

// frameType says what a frame's body is. Replies have replyBit set.
type frameType uint16

const replyBit frameType = 0x8000

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
	typeFile    frameType = 32
	typeProfile frameType = 33
	typeWatch   frameType = 34
	typeSet     frameType = 35

	typeWelcome  = replyBit | 1
	typeMapped   = replyBit | 2
	typeExtents  = replyBit | 3
	typeResult   = replyBit | 4
	typeDocument = replyBit | 5
	typeError    = replyBit | 6
)

const (
	// flagMore in a header means that another frame of the same reply follows.
	flagMore uint16 = 1
	// flagLarge in a request's header means that the body is in a descriptor sent with the frame; see large.go.
	flagLarge uint16 = 2
)

// Bits of the prot and flags of a MAP.
const (
	protRead  uint32 = 1
	protWrite uint32 = 2

	mapLazy    uint32 = 1
	mapLaunder uint32 = 2
	// mapMovable asks for a mapping whose memory moves. mapLargeMovable asks for that only if the mapping is larger
	// than the device's budget.
	mapMovable      uint32 = 4
	mapLargeMovable uint32 = 8
)

// The argument of an ACQUIRE and of a SYNC.
const (
	acquireLaunder uint32 = 1
	syncDurable    uint32 = 1
)

// The flags of an END.
const endForce uint32 = 1

// The argument of an ADVISE has the numbers of Linux's MADV_ constants.
const (
	adviceNormal     uint32 = 0
	adviceRandom     uint32 = 1
	adviceSequential uint32 = 2
	adviceWillNeed   uint32 = 3
	adviceDontNeed   uint32 = 4
)

// requestID names a request. The client chooses it, and every frame of the reply has it.
type requestID uint64

// mappingID names a mapping within one session.
type mappingID uint64

// header begins every frame.
type header struct {
	length uint32
	typ    frameType
	flags  uint16
	id     requestID
}

// appendFrame appends a frame. The function body appends the frame's body.
func appendFrame(b []byte, typ frameType, flags uint16, id requestID, body func([]byte) []byte) []byte {
	start := len(b)
	b = append(b, 0, 0, 0, 0)
	b = binary.LittleEndian.AppendUint16(b, uint16(typ))
	b = binary.LittleEndian.AppendUint16(b, flags)
	b = binary.LittleEndian.AppendUint64(b, uint64(id))
	if body != nil {
		b = body(b)
	}
	binary.LittleEndian.PutUint32(b[start:], uint32(len(b)-start))
	return b
}

// decodeHeader splits a record of the socket into header and body. The body aliases record.
func decodeHeader(record []byte) (header, []byte, error) {
	if len(record) < headerSize {
		return header{}, nil, fmt.Errorf("frame of %d bytes is shorter than its header", len(record))
	}
	h := header{
		length: binary.LittleEndian.Uint32(record),
		typ:    frameType(binary.LittleEndian.Uint16(record[4:])),
		flags:  binary.LittleEndian.Uint16(record[6:]),
		id:     requestID(binary.LittleEndian.Uint64(record[8:])),
	}
	if int64(h.length) != int64(len(record)) {
		return header{}, nil, fmt.Errorf("frame says %d bytes and has %d", h.length, len(record))
	}
	return h, record[headerSize:], nil
}

// wantBody checks the size of a body. From version 2 on, a newer client may append fields, which the daemon ignores.
func (v version) wantBody(body []byte, n int) error {
	if len(body) < n || v < 2 && len(body) > n {
		return fmt.Errorf("body has %d bytes, not %d", len(body), n)
	}
	return nil
}

// hello opens a connection with the versions that the client speaks.
type hello struct{ min, max version }

func decodeHello(body []byte) (hello, error) {
	if err := minVersion.wantBody(body, 8); err != nil {
		return hello{}, err
	}
	if m := binary.LittleEndian.Uint32(body); m != helloMagic {
		return hello{}, fmt.Errorf("magic %#x is not gaiafs's", m)
	}
	h := hello{version(binary.LittleEndian.Uint16(body[4:])), version(binary.LittleEndian.Uint16(body[6:]))}
	if h.min > h.max {
		return hello{}, fmt.Errorf("version range %d to %d is empty", h.min, h.max)
	}
	return h, nil
}

// welcome answers a hello with the version chosen and the limits of the session.
type welcome struct {
	version     version
	maxRequests uint32
	kinds       uint32 // see Cache.Kinds
	// From version 2 on:
	offered, required features
	key               sessionKey
}

func (w welcome) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint16(b, uint16(w.version))
	b = binary.LittleEndian.AppendUint16(b, 0)
	b = binary.LittleEndian.AppendUint32(b, w.maxRequests)
	b = binary.LittleEndian.AppendUint32(b, maxRequest)
	b = binary.LittleEndian.AppendUint32(b, maxExtents)
	b = binary.LittleEndian.AppendUint32(b, w.kinds)
	b = binary.LittleEndian.AppendUint32(b, 0)
	if w.version < 2 {
		return b
	}
	b = binary.LittleEndian.AppendUint64(b, uint64(w.offered))
	b = binary.LittleEndian.AppendUint64(b, uint64(w.required))
	return append(b, w.key[:]...)
}

// mapRequest asks for a mapping.
type mapRequest struct {
	token    [tokenSize]byte
	device   uint32
	prot     uint32
	flags    uint32
	kind     uint32 // of the device; 0: of any kind
	off, len int64
	// uuid names the device; if it is zero, device does.
	uuid [uuidSize]byte
}

func (v version) decodeMap(body []byte) (mapRequest, error) {
	if err := v.wantBody(body, 64); err != nil {
		return mapRequest{}, err
	}
	var r mapRequest
	copy(r.token[:], body)
	r.device = binary.LittleEndian.Uint32(body[16:])
	r.prot = binary.LittleEndian.Uint32(body[20:])
	r.flags = binary.LittleEndian.Uint32(body[24:])
	if v >= 2 {
		r.kind = binary.LittleEndian.Uint32(body[28:])
	}
	// Numbers above MaxInt64 become negative; checkMap refuses those.
	r.off = int64(binary.LittleEndian.Uint64(body[32:]))
	r.len = int64(binary.LittleEndian.Uint64(body[40:]))
	copy(r.uuid[:], body[48:])
	return r, nil
}

// mapped answers a mapRequest. Frames with the extents follow.
type mapped struct {
	mapping mappingID
	kind    uint32
	device  uint32
	// size is the size of the file at home in bytes, or negative if it is not known.
	size    int64
	extents uint32
	// uuid is the GPU's; zero if the kind has no UUIDs.
	uuid [uuidSize]byte
	// movable means that the mapping's memory comes with brackets, and moves.
	movable bool
}

func (m mapped) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, uint64(m.mapping))
	b = binary.LittleEndian.AppendUint32(b, m.kind)
	b = binary.LittleEndian.AppendUint32(b, m.device)
	b = binary.LittleEndian.AppendUint64(b, uint64(m.size))
	b = binary.LittleEndian.AppendUint32(b, m.extents)
	flags := uint32(0)
	if m.movable {
		flags = mappedMovable
	}
	b = binary.LittleEndian.AppendUint32(b, flags)
	return append(b, m.uuid[:]...)
}

// mappedMovable is the flag for mapped.movable.
const mappedMovable uint32 = 1

// extentPlace describes an extent: its offset in the file and its size, in bytes, and its memory.
type extentPlace struct {
	off, size int64
	// From version 2 on: the kind and tier of its memory, and a number that grows each time the extent moves.
	kind       uint32
	tier       tier
	generation uint64
}

// extents has places whose descriptors are sent with the frame, in the same order.
type extents struct {
	first  uint32
	places []extentPlace
}

// extentStride is the size of an extent in version 2. The frame states it, so that later versions can add fields.
const extentStride = 32

func (e extents) append(b []byte, v version) []byte {
	b = binary.LittleEndian.AppendUint32(b, e.first)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(e.places)))
	if v >= 2 {
		b = binary.LittleEndian.AppendUint32(b, extentStride)
		b = binary.LittleEndian.AppendUint32(b, 0)
	}
	for _, p := range e.places {
		b = binary.LittleEndian.AppendUint64(b, uint64(p.off))
		b = binary.LittleEndian.AppendUint64(b, uint64(p.size))
		if v >= 2 {
			b = binary.LittleEndian.AppendUint32(b, p.kind)
			b = binary.LittleEndian.AppendUint32(b, uint32(p.tier))
			b = binary.LittleEndian.AppendUint64(b, p.generation)
		}
	}
	return b
}

// rangeRequest is the body of ACQUIRE, RELEASE, SYNC and ADVISE. off counts bytes from the start of the mapping.
type rangeRequest struct {
	mapping  mappingID
	off, len int64
	arg      uint32
}

func (v version) decodeRange(body []byte) (rangeRequest, error) {
	if err := v.wantBody(body, 32); err != nil {
		return rangeRequest{}, err
	}
	return rangeRequest{
		mapping: mappingID(binary.LittleEndian.Uint64(body)),
		off:     int64(binary.LittleEndian.Uint64(body[8:])),
		len:     int64(binary.LittleEndian.Uint64(body[16:])),
		arg:     binary.LittleEndian.Uint32(body[24:]),
	}, nil
}

func (v version) decodeUnmap(body []byte) (mappingID, error) {
	if err := v.wantBody(body, 8); err != nil {
		return 0, err
	}
	return mappingID(binary.LittleEndian.Uint64(body)), nil
}

// decodeStatus decodes the body of STATUS and of RECORD.
func (v version) decodeStatus(body []byte) (token [tokenSize]byte, err error) {
	if err := v.wantBody(body, tokenSize); err != nil {
		return token, err
	}
	copy(token[:], body)
	return token, nil
}

// endRequest asks for the end of the mount.
type endRequest struct {
	token [tokenSize]byte
	flags uint32
}

func (v version) decodeEnd(body []byte) (r endRequest, err error) {
	if err := v.wantBody(body, tokenSize+8); err != nil {
		return r, err
	}
	copy(r.token[:], body)
	r.flags = binary.LittleEndian.Uint32(body[tokenSize:])
	return r, nil
}

func (v version) decodeStop(body []byte) (requestID, error) {
	if err := v.wantBody(body, 8); err != nil {
		return 0, err
	}
	return requestID(binary.LittleEndian.Uint64(body)), nil
}

// result is the body of RESULT and of ERROR.
type result struct {
	errno uint32
	pages int64
	text  string
}

func (r result) append(b []byte) []byte {
	text := cutText(r.text)
	b = binary.LittleEndian.AppendUint32(b, r.errno)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(text)))
	b = binary.LittleEndian.AppendUint64(b, uint64(max(r.pages, 0)))
	return append(b, text...)
}

// cutText makes s fit into a result: valid UTF-8 of at most maxText bytes, without zero bytes.
func cutText(s string) string {
	out := make([]byte, 0, min(len(s), maxText))
	for _, r := range s { // an invalid byte becomes U+FFFD
		if r == 0 {
			r = ' '
		}
		c := string(r)
		if len(out)+len(c) > maxText {
			break
		}
		out = append(out, c...)
	}
	return string(out)
}

// rangeWithin reports whether the n bytes at off lie within size bytes. It does not overflow.
func rangeWithin(off, n, size int64) bool {
	return off >= 0 && n >= 0 && off <= size && n <= size-off
}

// mapEnd is the largest end of a mapping in a file. No file is that large, and an end rounded up to whole extents still
// fits into an int64.
const mapEnd = 1 << 62
