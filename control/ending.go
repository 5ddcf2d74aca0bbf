package control

import (
	"errors"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// endingPatience is how long a request that finds no memory waits for the sessions of clients that are gone. By then
// their mappings are released and unmapped, unless a backing file or a device hangs.
const endingPatience = 10 * time.Second

// patiently calls do. If do finds no memory while the memory of ended clients is still being given back, patiently
// tries again: when a process has died, others may expect its memory to be free.
func (s *session) patiently(do func() error) error {
	patience := time.After(endingPatience)
	for {
		ended := s.server.endings.Load()
		err := do()
		if !errors.Is(err, syscall.ENOMEM) {
			return err
		}
		ending := s.server.endingBeside(s)
		if ending == nil && s.server.endings.Load() == ended {
			return err
		}
		if ending == nil {
			continue // the session ended after do had looked
		}
		select {
		case <-ending:
		case <-patience:
			return err
		case <-s.ctx.Done():
			return err
		}
	}
}

// endingBeside returns a channel that is closed when the mappings of another session, whose client is gone, are
// unmapped. nil if there is no such session.
func (s *Server) endingBeside(mine *session) (ended <-chan struct{}) {
	for _, ses := range s.snapshot() {
		if ses != mine && ses.clientGone() {
			return ses.ended
		}
	}
	return nil
}

// clientGone reports whether the client has closed its connection, or the session has ended for another reason.
func (s *session) clientGone() bool {
	if s.ctx.Err() != nil {
		return true
	}
	raw, err := s.conn.SyscallConn()
	if err != nil {
		return true
	}
	gone := false
	err = raw.Control(func(fd uintptr) {
		asked := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		_, err := unix.Poll(asked, 0)
		gone = err == nil && asked[0].Revents&(unix.POLLHUP|unix.POLLRDHUP) != 0
	})
	return gone || err != nil
}
