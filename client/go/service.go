package gaiafs

import (
	"net"
	"syscall"
	"time"
)

// The daemon speaks first on the service connection. A process that maps something opens it in the background. If that
// fails, the process goes on without it, and the daemon leaves the process's memory where it is.

// serve opens the service connection, once.
func (c *conn) serve() {
	if c.welcome.offered&featureService != 0 {
		c.serviceOnce.Do(func() { c.reader.Go(c.attend) })
	}
}

// attend opens the service connection, and answers notices until it ends.
func (c *conn) attend() {
	deadline := time.Now().Add(connectPatience)
	uc, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: c.socket, Net: "unixpacket"})
	if err != nil {
		return
	}
	defer uc.Close()
	c.mu.Lock()
	over := c.err != nil
	if !over {
		c.service = uc // from here on shut closes it
	}
	c.mu.Unlock()
	if over {
		return
	}
	r := newReceiver(uc)
	if _, err := greet(uc, r, deadline); err != nil {
		return
	}
	if _, err := uc.Write(frame(typeAttach, 1, c.welcome.key[:])); err != nil {
		return
	}
	uc.SetDeadline(time.Time{})
	attached := false
	for {
		h, body, fds, _, err := r.next()
		if err != nil {
			return
		}
		var said []byte
		if attached && h.id != 0 {
			said = c.answer(h, body, fds)
		}
		closeAll(fds) // before the answer, after which no descriptor may keep the memory
		switch {
		case !attached:
			if h.typ != typeResult {
				return
			}
			if _, err := resultOf(body); err != nil {
				return
			}
			attached = true
		case said != nil:
			if _, err := uc.Write(frame(typeAnswer, h.id, said)); err != nil {
				return
			}
		}
	}
}

// answer returns the answer to a notice that came with these descriptors.
func (c *conn) answer(h header, body []byte, fds []int) []byte {
	switch h.typ {
	case typeCheck:
		return answerBody(0, 0)
	case typeMove:
		m, err := decodeMove(body)
		if err != nil {
			return answerBody(uint32(syscall.EPROTO), 0)
		}
		fd := -1
		if len(fds) > 0 {
			fd = fds[0]
		}
		errno, generation := c.moving.move(m, fd)
		return answerBody(uint32(errno), generation)
	}
	return answerBody(uint32(syscall.ENOSYS), 0)
}
