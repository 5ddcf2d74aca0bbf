package control

import (
	"encoding/binary"
	"fmt"
	"strings"
	"syscall"
)

// SetRequest is a client's request to change settings of the mount or, without settings, to read them.
type SetRequest struct {
	// Settings has NAME=VALUE strings.
	Settings []string
	Viewer   Viewer
}

// setRequest is the body of SET.
type setRequest struct {
	token    [tokenSize]byte
	settings []string
}

const setHead = tokenSize + 8

func (v version) decodeSet(body []byte) (r setRequest, err error) {
	if len(body) < setHead {
		return r, fmt.Errorf("body has %d bytes, not %d", len(body), setHead)
	}
	n := binary.LittleEndian.Uint32(body[tokenSize:])
	if err := v.wantBody(body, int(min(int64(n), 1<<30))+setHead); err != nil {
		return r, err
	}
	copy(r.token[:], body)
	for text := range strings.SplitSeq(string(body[setHead:setHead+n]), "\x00") {
		if text != "" {
			r.settings = append(r.settings, text)
		}
	}
	return r, nil
}

// serveSet answers a SET. Only root and the user who mounted may change settings.
func (s *session) serveSet(id requestID, r setRequest) {
	doc, err := s.askSet(r)
	s.finishDocument(id, doc, err)
}

func (s *session) askSet(r setRequest) ([]byte, error) {
	switch {
	case !s.redeemMount(r.token):
		return nil, errToken
	case s.server.opts.Set == nil:
		return nil, failure(syscall.ENOTSUP, "this server has no settings")
	case s.ordinary && len(r.settings) > 0:
		return nil, failure(syscall.EPERM, "only root and the user who mounted may change settings of the mount")
	}
	return s.server.opts.Set(s.ctx, SetRequest{Settings: r.settings, Viewer: s.viewer()})
}
