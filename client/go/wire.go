package gaiafs

import (
	"encoding/binary"
	"fmt"
)

// The wire format of docs/dev/protocol.md, versions 1 and 2, as the client needs it. The daemon uses the same numbers.
// The frames in control/testdata test both sides.
const (
	helloMagic = 0x41494147 // "GAIA"
	minVersion = 1
	maxVersion = 2

	headerSize = 16
	maxFrame   = 64 << 10
	maxRequest = 4 << 10 // the largest frame that a daemon accepts
	maxExtents = 128

	flagMore  uint16 = 1
	flagLarge uint16 = 2
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

	typeFeatures frameType = 13
	typeAttach   frameType = 14
	typeAnswer   frameType = 15
	typeMapView  frameType = 16

	typeBeginGroup   frameType = 20
	typeReleaseGroup frameType = 21
	typeAbortGroup   frameType = 22
	typeAcquireAll   frameType = 23
	typeFile         frameType = 32
	typeProfile      frameType = 33
	typeWatch        frameType = 34
	typeSet          frameType = 35
	typeUse          frameType = 40
	typeDone         frameType = 41

	// What the daemon sends first, on a service connection.
	typeCheck       frameType = 0x4001
	typeMove        frameType = 0x4002
	typeInvalidated frameType = 0x4003
	typeBudget      frameType = 0x4004

	typeWelcome  frameType = 0x8001
	typeMapped   frameType = 0x8002
	typeExtents  frameType = 0x8003
	typeResult   frameType = 0x8004
	typeDocument frameType = 0x8005
	typeError    frameType = 0x8006
	typeNumbered frameType = 0x8007
)

const (
	mapLazy        uint32 = 1
	mapLaunder     uint32 = 2
	mapMovable     uint32 = 4
	mapIfLarger    uint32 = 8 // movable if the mapping is larger than the device's budget
	acquireLaunder uint32 = 1
	syncDurable    uint32 = 1
	endForce       uint32 = 1
)

// Feature bits, which a daemon offers and may require.
const (
	featureService uint64 = 1 << 0
	featureLarge   uint64 = 1 << 1
	featureMove    uint64 = 1 << 2
	featureView    uint64 = 1 << 3
	featureGroup   uint64 = 1 << 4
	// featureTenant is chosen if GAIAFS_TENANT is set.
	featureTenant uint64 = 1 << 5

	// usedFeatures are the features that this package always chooses if they are offered.
	usedFeatures = featureService | featureLarge | featureMove | featureView | featureGroup
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
func frame(typ frameType, id requestID, body []byte) []byte { return flaggedFrame(typ, 0, id, body) }

// largeFrame builds a request whose body of size bytes is in a descriptor sent with it.
func largeFrame(typ frameType, id requestID, size int) []byte {
	return flaggedFrame(typ, flagLarge, id, binary.LittleEndian.AppendUint64(nil, uint64(size)))
}

func flaggedFrame(typ frameType, flags uint16, id requestID, body []byte) []byte {
	b := make([]byte, 0, headerSize+len(body))
	b = binary.LittleEndian.AppendUint32(b, uint32(headerSize+len(body)))
	b = binary.LittleEndian.AppendUint16(b, uint16(typ))
	b = binary.LittleEndian.AppendUint16(b, flags)
	b = binary.LittleEndian.AppendUint64(b, uint64(id))
	return append(b, body...)
}

func helloBody(minVersion, maxVersion uint16) []byte {
	b := binary.LittleEndian.AppendUint32(nil, helloMagic)
	b = binary.LittleEndian.AppendUint16(b, minVersion)
	return binary.LittleEndian.AppendUint16(b, maxVersion)
}

// mapBody names the device by uuid or, if that is zero, by its number among the devices of the kind. Kind 0 means any;
// version 1 knows no other.
func mapBody(token [16]byte, device uint32, prot Prot, flags uint32, kind Kind, off, length int64,
	uuid [16]byte) []byte {
	b := append([]byte(nil), token[:]...)
	b = binary.LittleEndian.AppendUint32(b, device)
	b = binary.LittleEndian.AppendUint32(b, uint32(prot))
	b = binary.LittleEndian.AppendUint32(b, flags)
	b = binary.LittleEndian.AppendUint32(b, uint32(kind))
	b = binary.LittleEndian.AppendUint64(b, uint64(off))
	b = binary.LittleEndian.AppendUint64(b, uint64(length))
	return append(b, uuid[:]...)
}

// viewBody encodes a MAPVIEW. layout has checked the segments.
func viewBody(device uint32, kind Kind, uuid [16]byte, flags uint32, align int64, tokens [][16]byte,
	segments []Segment) []byte {
	const segmentSize = 40
	b := make([]byte, 0, 48+16*len(tokens)+segmentSize*len(segments))
	b = binary.LittleEndian.AppendUint32(b, device)
	b = binary.LittleEndian.AppendUint32(b, uint32(kind))
	b = append(b, uuid[:]...)
	b = binary.LittleEndian.AppendUint32(b, flags)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(tokens)))
	b = binary.LittleEndian.AppendUint64(b, uint64(align))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(segments)))
	b = binary.LittleEndian.AppendUint32(b, segmentSize)
	for _, t := range tokens {
		b = append(b, t[:]...)
	}
	for _, s := range segments {
		b = binary.LittleEndian.AppendUint64(b, uint64(s.Offset))
		b = binary.LittleEndian.AppendUint64(b, uint64(s.Length))
		b = binary.LittleEndian.AppendUint64(b, uint64(s.stride()))
		b = binary.LittleEndian.AppendUint64(b, uint64(s.rows()))
		b = binary.LittleEndian.AppendUint32(b, uint32(s.File))
		b = binary.LittleEndian.AppendUint32(b, 0)
	}
	return b
}

func rangeBody(m mappingID, off, n int64, arg uint32) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(m))
	b = binary.LittleEndian.AppendUint64(b, uint64(off))
	b = binary.LittleEndian.AppendUint64(b, uint64(n))
	b = binary.LittleEndian.AppendUint32(b, arg)
	return binary.LittleEndian.AppendUint32(b, 0)
}

// useBody encodes a USE for ranges of open mappings.
func useBody(bracket uint64, flags, patience uint32, ranges []Range) []byte {
	b := make([]byte, 0, 24+rangeSize*len(ranges))
	b = binary.LittleEndian.AppendUint64(b, bracket)
	b = binary.LittleEndian.AppendUint32(b, flags)
	b = binary.LittleEndian.AppendUint32(b, patience)
	return append(b, groupRanges(ranges)...)
}

func doneBody(bracket uint64) []byte { return binary.LittleEndian.AppendUint64(nil, bracket) }

func unmapBody(m mappingID) []byte { return binary.LittleEndian.AppendUint64(nil, uint64(m)) }

// featuresBody encodes a FEATURES. tenant is empty unless featureTenant is chosen.
func featuresBody(chosen uint64, tenant string) []byte {
	b := binary.LittleEndian.AppendUint64(nil, chosen)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(tenant)))
	return append(b, tenant...)
}

func answerBody(errno uint32, generation uint64) []byte {
	b := binary.LittleEndian.AppendUint32(nil, errno)
	b = binary.LittleEndian.AppendUint32(b, 0)
	return binary.LittleEndian.AppendUint64(b, generation)
}

func stopBody(recorder requestID) []byte {
	return binary.LittleEndian.AppendUint64(nil, uint64(recorder))
}

func endBody(token [16]byte, flags uint32) []byte {
	b := binary.LittleEndian.AppendUint32(token[:], flags)
	return binary.LittleEndian.AppendUint32(b, 0)
}

// decodeHeader splits a record into header and body. The body aliases record.
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

// bodySize checks the size of a body. From version 2 on, a newer daemon may append fields, which this package ignores.
func bodySize(what string, version uint16, body []byte, n int) error {
	if len(body) < n || version < 2 && len(body) > n {
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
	// From version 2 on:
	offered, required uint64   // features
	key               [16]byte // of the connection, for its service connection
}

// among returns the library's support for a kind of device, or nil if the mount has no device of the kind. For kind 0,
// it returns the first kind that the mount has.
func (w welcome) among(kind Kind) *deviceKind {
	for _, k := range kinds {
		if (kind == 0 || kind == k.number) && w.kinds&(1<<(k.number-1)) != 0 {
			return k
		}
	}
	return nil
}

// chosen returns the features in use, except featureTenant: those that the daemon offers and this package uses.
func (w welcome) chosen() uint64 { return w.offered & usedFeatures }

func decodeWelcome(body []byte) (welcome, error) {
	if len(body) < 24 {
		return welcome{}, fmt.Errorf("WELCOME has a body of %d bytes", len(body))
	}
	version := binary.LittleEndian.Uint16(body)
	size := 24
	if version >= 2 {
		size = 56
	}
	if err := bodySize("WELCOME", version, body, size); err != nil {
		return welcome{}, err
	}
	w := welcome{
		version:     version,
		maxRequests: binary.LittleEndian.Uint32(body[4:]),
		maxRequest:  binary.LittleEndian.Uint32(body[8:]),
		maxExtents:  binary.LittleEndian.Uint32(body[12:]),
		kinds:       binary.LittleEndian.Uint32(body[16:]),
	}
	if w.version < minVersion || w.version > maxVersion || w.maxRequests == 0 {
		return welcome{}, fmt.Errorf("WELCOME chose version %d and %d requests", w.version, w.maxRequests)
	}
	if version >= 2 {
		w.offered = binary.LittleEndian.Uint64(body[24:])
		w.required = binary.LittleEndian.Uint64(body[32:])
		w.key = [16]byte(body[40:])
	}
	return w, nil
}

type mapped struct {
	mapping mappingID
	kind    uint32
	device  uint32
	size    int64
	extents uint32
	uuid    [16]byte // of the GPU; zero if the kind has no UUIDs
	movable bool     // the reply has no extents; brackets bring them
}

func decodeMapped(version uint16, body []byte) (mapped, error) {
	if err := bodySize("MAPPED", version, body, 48); err != nil {
		return mapped{}, err
	}
	return mapped{
		mapping: mappingID(binary.LittleEndian.Uint64(body)),
		kind:    binary.LittleEndian.Uint32(body[8:]),
		device:  binary.LittleEndian.Uint32(body[12:]),
		size:    int64(binary.LittleEndian.Uint64(body[16:])),
		extents: binary.LittleEndian.Uint32(body[24:]),
		movable: version >= 2 && body[28]&1 != 0,
		uuid:    [16]byte(body[32:]),
	}, nil
}

// tierNone is the tier of an extent that has no memory.
const tierNone = 3

// extentPlace describes an extent: its offset in the file and its size, in bytes, and its memory.
type extentPlace struct {
	off, size  int64
	kind       Kind   // 0 in version 1, which means the mapping's kind
	tier       uint32 // where the memory is
	generation uint64 // grows each time the extent moves
}

type extents struct {
	first  uint32
	places []extentPlace
}

func decodeExtents(version uint16, body []byte) (extents, error) {
	head, stride, least := 8, 16, 16
	if version >= 2 {
		head, least = 16, 32
	}
	if len(body) < head {
		return extents{}, fmt.Errorf("EXTENTS has a body of %d bytes", len(body))
	}
	n := binary.LittleEndian.Uint32(body[4:])
	if version >= 2 {
		stride = int(binary.LittleEndian.Uint32(body[8:]))
	}
	if n > maxExtents || stride < least || stride > maxFrame {
		return extents{}, fmt.Errorf("EXTENTS has %d extents of %d bytes", n, stride)
	}
	if err := bodySize("EXTENTS", version, body, head+stride*int(n)); err != nil {
		return extents{}, err
	}
	e := extents{first: binary.LittleEndian.Uint32(body), places: make([]extentPlace, n)}
	for i := range e.places {
		b := body[head+stride*i:]
		e.places[i] = extentPlace{off: int64(binary.LittleEndian.Uint64(b)),
			size: int64(binary.LittleEndian.Uint64(b[8:]))}
		if version >= 2 {
			e.places[i].kind = Kind(binary.LittleEndian.Uint32(b[16:]))
			e.places[i].tier = binary.LittleEndian.Uint32(b[20:])
			e.places[i].generation = binary.LittleEndian.Uint64(b[24:])
		}
	}
	return e, nil
}

// move is the body of MOVE: an extent gets other memory at the same addresses.
type move struct {
	mapping            mappingID
	extent             extentPlace // with the new kind, tier and generation
	previousGeneration uint64
}

func decodeMove(body []byte) (move, error) {
	if err := bodySize("MOVE", maxVersion, body, 48); err != nil {
		return move{}, err
	}
	return move{
		mapping: mappingID(binary.LittleEndian.Uint64(body)),
		extent: extentPlace{
			off:        int64(binary.LittleEndian.Uint64(body[8:])),
			size:       int64(binary.LittleEndian.Uint64(body[16:])),
			generation: binary.LittleEndian.Uint64(body[32:]),
			kind:       Kind(binary.LittleEndian.Uint32(body[40:])),
			tier:       binary.LittleEndian.Uint32(body[44:]),
		},
		previousGeneration: binary.LittleEndian.Uint64(body[24:]),
	}, nil
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
