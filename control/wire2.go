package control

import (
	"encoding/binary"
	"fmt"
	"slices"
)

// What version 2 of the protocol adds.

const (
	typeFeatures frameType = 13
	typeAttach   frameType = 14
	typeAnswer   frameType = 15
	typeMapView  frameType = 16

	typeBeginGroup   frameType = 20
	typeReleaseGroup frameType = 21
	typeAbortGroup   frameType = 22
	typeAcquireAll   frameType = 23

	typeUse  frameType = 40
	typeDone frameType = 41

	typeNumbered = replyBit | 7
)

// noticeBit is set in the types of frames that the daemon sends without being asked. They are sent only on service
// connections.
const noticeBit frameType = 0x4000

const (
	typeCheck       = noticeBit | 1
	typeMove        = noticeBit | 2
	typeInvalidated = noticeBit | 3
	typeBudget      = noticeBit | 4
	typeRecall      = noticeBit | 5
)

// features has a bit for each feature that a daemon offers or requires, or a client chooses.
type features uint64

const (
	// featureService: the client makes a service connection and answers there.
	featureService features = 1 << 0
	// featureLarge: requests may have their body in a sealed memfd.
	featureLarge features = 1 << 1
	// featureMove: the client may make movable mappings and brackets, and answers MOVE. It requires featureService.
	featureMove features = 1 << 2
	// featureView: the client may ask for views.
	featureView features = 1 << 3
	// featureGroup: the client may release groups, and acquire at a version.
	featureGroup features = 1 << 4
	// featureKeep: the client may keep brackets, and answers RECALL. It requires featureMove.
	featureKeep features = 1 << 8
	// featureUses: the client says how often it used a bracket that it kept. It requires featureKeep.
	featureUses features = 1 << 9
	// featureTenant: FEATURES names the client's tenant.
	featureTenant features = 1 << 5

	offeredFeatures = featureService | featureLarge | featureMove | featureView | featureGroup |
		featureTenant | featureKeep | featureUses
	requiredFeatures = features(0)
)

// sessionKey tells to which session a service connection belongs.
type sessionKey [16]byte

// tier says where an extent's memory is.
type tier uint32

const (
	tierDevice tier = 1 // in the device's own memory
	tierHost   tier = 2 // in pinned host memory
	tierNone   tier = 3 // nowhere: the addresses are reserved, and home has the bytes
)

// mostTenant is the longest name of a tenant, in bytes.
const mostTenant = 255

// decodeFeatures returns the features, and the tenant's name if featureTenant is among them.
func (v version) decodeFeatures(body []byte) (f features, tenant string, err error) {
	if err := v.wantBody(body, featuresHead); err != nil {
		return 0, "", err
	}
	if f = features(binary.LittleEndian.Uint64(body)); f&featureTenant == 0 {
		return f, "", nil
	}
	n := binary.LittleEndian.Uint32(body[8:])
	if n == 0 || n > mostTenant {
		return 0, "", fmt.Errorf("the name of a tenant has 1 to %d bytes, not %d", mostTenant, n)
	}
	if err := v.wantBody(body, featuresHead+int(n)); err != nil {
		return 0, "", err
	}
	return f, string(body[featuresHead : featuresHead+n]), nil
}

// featuresHead is the size of a FEATURES without the name.
const featuresHead = 16

func (v version) decodeAttach(body []byte) (key sessionKey, err error) {
	if err := v.wantBody(body, len(key)); err != nil {
		return key, err
	}
	copy(key[:], body)
	return key, nil
}

// answer is a client's answer to a notice. For a MOVE, that is MOVED.
type answer struct {
	errno      uint32
	generation uint64
	rest       []byte // the rest of the frame
}

func (v version) decodeAnswer(body []byte) (answer, error) {
	if err := v.wantBody(body, 16); err != nil {
		return answer{}, err
	}
	return answer{binary.LittleEndian.Uint32(body), binary.LittleEndian.Uint64(body[8:]), slices.Clone(body[16:])}, nil
}

// endedBracket is a bracket that its client has ended. uses is how often the client used it without asking.
type endedBracket struct {
	id   bracketID
	uses uint32
}

// ended returns the brackets that the answer to a RECALL lists. Their uses come after the list. more means that the
// client has others, which did not fit.
func (a answer) ended() (list []endedBracket, more bool) {
	const mostEnded = 256
	n := min(a.generation, mostEnded, uint64(len(a.rest)/8))
	uses := a.rest[8*n:]
	for i := range n {
		b := endedBracket{id: bracketID(binary.LittleEndian.Uint64(a.rest[8*i:]))}
		if uint64(len(uses)) >= 4*n {
			b.uses = binary.LittleEndian.Uint32(uses[4*i:])
		}
		list = append(list, b)
	}
	return list, n == mostEnded
}

// move asks a client to map other memory for an extent of a mapping, at the same addresses. Except for tierNone, the
// descriptor of the memory is sent with the frame.
type move struct {
	mapping  mappingID
	extent   extentPlace // with the new kind, tier and generation
	previous uint64      // the generation that the client has
}

func (m move) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, uint64(m.mapping))
	b = binary.LittleEndian.AppendUint64(b, uint64(m.extent.off))
	b = binary.LittleEndian.AppendUint64(b, uint64(m.extent.size))
	b = binary.LittleEndian.AppendUint64(b, m.previous)
	b = binary.LittleEndian.AppendUint64(b, m.extent.generation)
	b = binary.LittleEndian.AppendUint32(b, m.extent.kind)
	return binary.LittleEndian.AppendUint32(b, uint32(m.extent.tier))
}

// invalidated tells a client that an acquire of the range would bring changes. off counts from the start of the
// mapping.
type invalidated struct {
	mapping  mappingID
	off, len int64
}

func (i invalidated) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, uint64(i.mapping))
	b = binary.LittleEndian.AppendUint64(b, uint64(i.off))
	return binary.LittleEndian.AppendUint64(b, uint64(i.len))
}

// budget tells a client how much of a device's memory it may use, and how much it uses.
type budget struct {
	device, kind uint32
	uuid         [uuidSize]byte
	bytes, used  int64
}

func (m budget) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, m.device)
	b = binary.LittleEndian.AppendUint32(b, m.kind)
	b = append(b, m.uuid[:]...)
	b = binary.LittleEndian.AppendUint64(b, uint64(m.bytes))
	return binary.LittleEndian.AppendUint64(b, uint64(m.used))
}

// useRequest begins a bracket.
type useRequest struct {
	bracket  bracketID
	flags    uint32
	patience uint32 // in milliseconds; 0: the daemon's default
	count    uint32 // number of ranges in the request. If there are too many, they are not decoded
	ranges   []rangeRequest
}

// bracketID names a bracket of a session. The client chooses it.
type bracketID uint64

// useNested in a USE's flags means that the requesting thread has a bracket, so the new one must not wait.
const useNested uint32 = 1

// useKeep means that the client wants to keep the bracket, and to be told whether it may.
const useKeep uint32 = 2

const (
	useHead = 24
	// useRange is the least size of a range. The request states its size, so that later versions can add fields.
	useRange = 24
	// maxRanges is the largest number of ranges in a bracket.
	maxRanges = 1 << 16
)

func (v version) decodeUse(body []byte) (r useRequest, err error) {
	if err := v.wantBody(body[:min(len(body), useHead)], useHead); err != nil {
		return r, err
	}
	le := binary.LittleEndian
	r.bracket, r.flags, r.patience = bracketID(le.Uint64(body)), le.Uint32(body[8:]), le.Uint32(body[12:])
	r.count = le.Uint32(body[16:])
	size := uint64(le.Uint32(body[20:]))
	if r.count > maxRanges {
		return r, nil
	}
	if size < useRange || uint64(len(body)) < useHead+uint64(r.count)*size {
		return r, fmt.Errorf("body has %d bytes for %d ranges of %d bytes", len(body), r.count, size)
	}
	r.ranges = make([]rangeRequest, r.count)
	for i := range r.ranges {
		b := body[useHead+uint64(i)*size:]
		r.ranges[i] = rangeRequest{mapping: mappingID(le.Uint64(b)), off: int64(le.Uint64(b[8:])),
			len: int64(le.Uint64(b[16:]))}
	}
	return r, nil
}

// decodeDone decodes a DONE. The uses are 0 if it has none.
func (v version) decodeDone(body []byte) (b endedBracket, err error) {
	if err := v.wantBody(body, 8); err != nil {
		return b, err
	}
	b.id = bracketID(binary.LittleEndian.Uint64(body))
	if len(body) >= 16 {
		b.uses = binary.LittleEndian.Uint32(body[8:])
	}
	return b, nil
}

// decodeLarge decodes the body of a frame with flagLarge: the size of the body in the descriptor.
func (v version) decodeLarge(body []byte) (int64, error) {
	if err := v.wantBody(body, 8); err != nil {
		return 0, err
	}
	return int64(binary.LittleEndian.Uint64(body)), nil
}
