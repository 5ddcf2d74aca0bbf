package control

import (
	"syscall"

	"github.com/gaiafs/gaiafs/pagecache"
)

// serveRecord begins a recording, and sends it as it comes until STOP or the end of the session. It refuses users who
// may not know what others read, because a recording names their files.
func (s *session) serveRecord(id requestID, token [tokenSize]byte) {
	r, err := s.beginRecording(id, token)
	if err != nil {
		s.finish(id, err)
		return
	}
	s.log.Info("control: recording accesses")
	defer s.log.Info("control: recording has ended")
	defer s.endRecording(id)
	const most = maxFrame - headerSize
	for {
		b, more := r.Next(s.ctx)
		if s.ctx.Err() != nil {
			s.forget(id)
			return
		}
		for len(b) > most || more && len(b) > 0 {
			part := b[:min(most, len(b))]
			if s.sendDocument(id, flagMore, part) != nil {
				s.forget(id)
				return
			}
			b = b[len(part):]
		}
		if !more {
			s.forget(id)
			_ = s.sendDocument(id, 0, b)
			return
		}
	}
}

func (s *session) beginRecording(id requestID, token [tokenSize]byte) (*pagecache.Recording, error) {
	src, ok := s.server.tokens.redeem(token)
	switch {
	case !ok || src != nil:
		return nil, errToken
	case s.ordinary:
		return nil, failure(syscall.EPERM, "only root and the user who mounted may record what everybody reads")
	case s.server.opts.Record == nil:
		return nil, failure(syscall.ENOTSUP, "this server makes no recordings")
	}
	r, err := s.server.opts.Record()
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recording, s.recorder = r, id
	return r, nil
}

// endRecording ends the recording that a request began. It reports whether there was one.
func (s *session) endRecording(id requestID) bool {
	s.mu.Lock()
	r := s.recording
	if r == nil || s.recorder != id {
		s.mu.Unlock()
		return false
	}
	s.recording = nil
	s.mu.Unlock()
	r.Stop()
	return true
}

func (s *session) serveStop(recorder requestID) error {
	if !s.endRecording(recorder) {
		return failure(syscall.EINVAL, "request %d is not recording", recorder)
	}
	return nil
}
