package control

import (
	"encoding/binary"
	"fmt"
	"syscall"

	"github.com/gaiafs/gaiafs/pagecache"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

// mapViewRequest asks for a mapping of a view.
type mapViewRequest struct {
	device, kind uint32
	// uuid names the device; if it is zero, device does.
	uuid      [uuidSize]byte
	flags     uint32
	alignment int64
	tokens    [][tokenSize]byte // of the files
	// count is the number of segments in the request. If there are too many, they are not decoded.
	count    uint32
	segments []view.Segment
}

const (
	mapViewSize = 48 // without tokens and segments
	// segmentSize is the least size of a segment. The request states its size, so that later versions can add fields.
	segmentSize = 40
)

func (v version) decodeMapView(body []byte) (r mapViewRequest, err error) {
	if err := v.wantBody(body[:min(len(body), mapViewSize)], mapViewSize); err != nil {
		return r, err
	}
	le := binary.LittleEndian
	r.device, r.kind, r.flags = le.Uint32(body), le.Uint32(body[4:]), le.Uint32(body[24:])
	copy(r.uuid[:], body[8:])
	files := le.Uint32(body[28:])
	r.alignment = int64(le.Uint64(body[32:])) // a number above MaxInt64 becomes negative, and is refused as such
	r.count = le.Uint32(body[40:])
	size := uint64(le.Uint32(body[44:]))
	if r.count > view.MaxSegments || files > view.MaxFiles { // the page cache refuses it
		r.tokens = make([][tokenSize]byte, min(files, view.MaxFiles+1))
		return r, nil
	}
	want := mapViewSize + uint64(files)*tokenSize + uint64(r.count)*size
	if size < segmentSize || uint64(len(body)) < want {
		return r, fmt.Errorf("body has %d bytes for %d files and %d segments of %d bytes", len(body), files, r.count,
			size)
	}
	body = body[mapViewSize:]
	for range files {
		r.tokens = append(r.tokens, [tokenSize]byte(body))
		body = body[tokenSize:]
	}
	r.segments = make([]view.Segment, r.count)
	for i := range r.segments {
		b := body[uint64(i)*size:]
		r.segments[i] = view.Segment{
			Offset: int64(le.Uint64(b)),
			Length: int64(le.Uint64(b[8:])),
			Stride: int64(le.Uint64(b[16:])),
			Count:  int64(le.Uint64(b[24:])),
			File:   int(le.Uint32(b[32:])),
		}
	}
	return r, nil
}

// serveMapView makes a mapping of a view, and sends it with its descriptors. The client imports the memory while the
// bytes come. After the last bytes it gets a frame without extents, or the error.
func (s *session) serveMapView(id requestID, r *mapViewRequest) {
	m, reply, err := s.openView(*r)
	if err != nil {
		s.finish(id, err)
		return
	}
	defer m.users.Done()
	r.tokens, r.segments = nil, nil // the fill may take long, and the page cache counts what the view keeps
	_ = s.server.allowance.keep(s, id, 0)
	lazy := r.flags&mapLazy != 0
	if !s.sendMapping(id, m, reply, lazy) || lazy {
		return
	}
	err = s.patiently(func() error { return m.Mapping.(ViewMapping).Fill(s.ctx) })
	if err != nil {
		s.finish(id, err) // the client gives the mapping back
		return
	}
	s.sendExtents(id, extents{first: uint32(len(m.Extents()))}, nil, true)
}

// openView redeems all tokens, even if one is invalid, and adds a mapping of a view to the session. The caller holds
// the mapping.
func (s *session) openView(r mapViewRequest) (*openMap, mapped, error) {
	var sources []pagecache.Source
	var wrong error
	m := &openMap{}
	for _, token := range r.tokens {
		src, err := s.redeem(token)
		if err != nil {
			wrong = err
			continue
		}
		sources, m.files = append(sources, src), append(m.files, src.ID())
	}
	if err := checkMapView(r); err != nil {
		return nil, mapped{}, err
	}
	if wrong != nil {
		return nil, mapped{}, wrong
	}
	_, reply, err := s.addMapping(m, func() (Mapping, error) {
		cm, err := s.server.opts.Cache.OpenView(s.ctx, sources, pagecache.ViewRequest{
			Device:    int(r.device),
			UUID:      r.uuid,
			Kind:      uint8(r.kind),
			Segments:  r.segments,
			Alignment: r.alignment,
			Lazy:      r.flags&mapLazy != 0,
			Launder:   r.flags&mapLaunder != 0,
			Process:   uint32(s.who.Pid),
			User:      s.who.Uid,
			Limited:   s.ordinary,
			Cgroup:    s.cgroup,
			Tenant:    s.tenant,
		})
		if err == nil {
			m.length = cm.Size()
		}
		return cm, err
	})
	reply.size = m.length
	return m, reply, err
}

// checkMapView refuses arguments that the page cache must not see.
func checkMapView(r mapViewRequest) error {
	switch {
	case r.count > view.MaxSegments:
		return failure(syscall.EINVAL, "a view of %d segments; it has 1 to %d", r.count, view.MaxSegments)
	case len(r.tokens) > view.MaxFiles:
		return failure(syscall.EINVAL, "a view of more than %d files", view.MaxFiles)
	}
	if r.flags&(mapMovable|mapLargeMovable) != 0 {
		return failure(syscall.EINVAL, "the memory of views does not move")
	}
	return checkPlace(r.flags, r.device, r.kind, r.uuid)
}
