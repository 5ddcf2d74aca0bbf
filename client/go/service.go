package gaiafs

import (
	"net"
	"syscall"
	"time"
)

// The service connection, where the daemon speaks first. A process that maps something makes it in the background, and
// goes on without where it cannot be had: the daemon then leaves the process's memory where it is.

// serve begins the service connection, once.
func (c *conn) serve() {
	if c.welcome.offered&featureService != 0 {
		c.serviceOnce.Do(func() { c.reader.Go(c.attend) })
	}
}

// attend makes the connection and answers until it ends.
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
		c.service = uc // shut closes it from here on
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
		closeAll(fds) // before the answer: nobody has the memory by a descriptor then
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

// answer returns what to say to a notice that wants an answer, and came with these descriptors.
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
