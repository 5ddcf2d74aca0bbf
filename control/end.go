package control

import (
	"context"
	"slices"
	"syscall"
)

// EndRequest is a client's request to end the mount. docs/dev/protocol.md describes the exchange.
type EndRequest struct {
	// Force gives up what cannot be written back.
	Force bool
	// PID is the client's process.
	PID int32
	// Say sends the client a part of the answer. last means that no more follow.
	Say func(part []byte, last bool) error
}

// serveEnd lets Options.End answer an END, until it has said everything or the client is gone.
func (s *session) serveEnd(id requestID, r endRequest) {
	var err error
	switch {
	case !s.redeemMount(r.token):
		err = errToken
	case r.flags&^endForce != 0:
		err = failure(syscall.EINVAL, "flags %#x of an END are not known", r.flags)
	case s.ordinary:
		err = failure(syscall.EPERM, "only root and the user who mounted may unmount")
	case s.server.opts.End == nil:
		err = failure(syscall.ENOTSUP, "this server cannot end its mount")
	}
	if err != nil {
		s.finish(id, err)
		return
	}
	said := false
	say := func(part []byte, last bool) error {
		const most = maxFrame - headerSize
		for len(part) > most {
			if err := s.sendDocument(id, flagMore, part[:most]); err != nil {
				return err
			}
			part = part[most:]
		}
		var flags uint16
		if !last {
			flags = flagMore
		} else {
			said = true
			s.forget(id)
		}
		return s.sendDocument(id, flags, part)
	}
	err = s.server.opts.End(s.ctx, EndRequest{Force: r.flags&endForce != 0, PID: s.who.Pid, Say: say})
	if !said {
		s.finish(id, err)
	}
}

// Drain ends the sessions that have mappings, which releases the mappings. From then on it refuses new mappings with
// ESHUTDOWN. It waits for the releases, or until ctx ends. Other sessions go on.
func (s *Server) Drain(ctx context.Context) error {
	s.draining.Store(true)
	sessions := slices.DeleteFunc(s.snapshot(), func(ses *session) bool { return !ses.maps() })
	for _, ses := range sessions {
		ses.conn.Close()
	}
	for _, ses := range sessions {
		select {
		case <-ses.ended:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// maps reports whether the session has mappings, or is making one.
func (s *session) maps() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.mappings)+s.reserved > 0
}
