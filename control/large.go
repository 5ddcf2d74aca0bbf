package control

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// A request whose body is longer than a frame carries it in a sealed memfd. The descriptor comes with the frame, and
// the frame states the body's size.

// maxLarge is the largest size of such a body.
const maxLarge = 32 << 20

// mostStuck bounds a user's descriptors that are slow to close.
const mostStuck = 8

// rights are the descriptors that came with a frame.
type rights struct {
	s     *session
	files []int
}

// roomForRights returns the buffer for descriptors that read gives the kernel. Without a buffer the kernel closes them,
// which costs nothing. So only clients that chose featureLarge get one.
func (s *session) roomForRights() []byte {
	if s.chosen&featureLarge == 0 || s.main != nil {
		return nil
	}
	s.server.mu.Lock()
	defer s.server.mu.Unlock()
	if s.user.stuck >= mostStuck {
		return nil
	}
	return make([]byte, unix.CmsgSpace(4))
}

func (s *session) received(oob []byte) rights {
	r := rights{s: s}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return r
	}
	for i := range messages {
		if fds, err := unix.ParseUnixRights(&messages[i]); err == nil {
			r.files = append(r.files, fds...)
		}
	}
	return r
}

// seals returns the seals of a descriptor, or an error if it is no memfd.
func seals(fd int) (int, error) { return unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0) }

// close closes the descriptors. Closing a file of another FUSE mount may block for as long as that mount's daemon
// likes. So anything but a memfd is closed in a separate goroutine, and counted.
func (r rights) close() {
	server, u := r.s.server, r.s.user
	for _, fd := range r.files {
		if _, err := seals(fd); err == nil {
			unix.Close(fd)
			continue
		}
		server.mu.Lock()
		u.stuck++
		server.mu.Unlock()
		go func() {
			unix.Close(fd)
			server.mu.Lock()
			u.stuck--
			server.mu.Unlock()
		}()
	}
}

// openLarge returns the frame with its body from the descriptor, which counts as kept by the session's user. A refusal
// is answered; other errors end the connection.
func (s *session) openLarge(h header, body []byte, r rights) (header, []byte, error) {
	if h.flags&flagLarge == 0 || s.chosen&featureLarge == 0 {
		if len(r.files) > 0 {
			return h, nil, breach(h.id, "descriptors came with a request")
		}
		return h, body, nil
	}
	n, err := s.version.decodeLarge(body)
	if err == nil && h.id == 0 {
		err = errors.New("request id 0")
	}
	if err != nil {
		return h, nil, breach(h.id, "%v", err)
	}
	if len(r.files) != 1 {
		return h, nil, breach(h.id, "a large request came with %d descriptors", len(r.files))
	}
	h.flags &^= flagLarge
	if n < 0 || n > maxLarge {
		return h, nil, &refusal{h.id, failure(syscall.E2BIG, "the request has %d bytes, but at most %d are allowed",
			uint64(n), maxLarge)}
	}
	const sealed = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	if got, err := seals(r.files[0]); err != nil || got&sealed != sealed {
		return h, nil, &refusal{h.id, failure(syscall.EINVAL, "the body of a large request is not in a sealed memfd")}
	}
	if err := s.server.allowance.take(s.ctx, s.user, n); err != nil {
		return h, nil, &refusal{h.id, err}
	}
	s.body = n
	long := make([]byte, n)
	if err := readFull(r.files[0], long); err != nil {
		return h, nil, &refusal{h.id, failure(syscall.EINVAL, "the body of a large request: %v", err)}
	}
	return h, long, nil
}

// doneLarge ends openLarge, unless a running request keeps the body.
func (s *session) doneLarge() {
	s.server.allowance.give(s.user, s.body)
	s.body = 0
}

// readFull reads a file from its first byte.
func readFull(fd int, into []byte) error {
	for got := 0; got < len(into); {
		n, err := unix.Pread(fd, into[got:], int64(got))
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return os.NewSyscallError("pread", err)
		case n == 0:
			return fmt.Errorf("%w after %d bytes of %d", io.ErrUnexpectedEOF, got, len(into))
		}
		got += max(n, 0)
	}
	return nil
}

// refusal is a request that gets an error for an answer. The connection goes on.
type refusal struct {
	id  requestID
	err error
}

func (r *refusal) Error() string { return r.err.Error() }
