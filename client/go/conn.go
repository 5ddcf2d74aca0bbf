package gaiafs

import (
	"errors"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// conn is the process's connection to one daemon. Many goroutines may have requests on it at once.
type conn struct {
	socket string // immutable
	refs   int    // guarded by pool.mu

	dialOnce sync.Once
	uc       *net.UnixConn // immutable after dialOnce; until then guarded by mu
	slots    chan struct{} // one element for each request in progress; immutable after dialOnce
	// uses has one element for each USE in progress. USEs take only half of the slots: what they wait for may be in a
	// bracket whose goroutine first has something else to ask. Immutable after dialOnce.
	uses    chan struct{}
	welcome welcome // the daemon's WELCOME; immutable after dialOnce
	reader  sync.WaitGroup

	writeMu sync.Mutex // held while a frame is sent

	mu     sync.Mutex
	calls  map[requestID]*call // guarded by mu
	lastID requestID           // guarded by mu
	err    *Error              // why the connection is unusable; guarded by mu

	moving movers // the mappings that MOVE requests are about

	serviceOnce sync.Once
	service     *net.UnixConn // the service connection; see service.go. Guarded by mu
}

// call is a request that waits for its reply. The connection's reader calls take for each frame of the reply, and
// closes the frame's descriptors when take returns. It closes done after the last frame, or when the connection is
// lost.
type call struct {
	take func(h header, body []byte, fds []int) error
	err  error // set before done is closed
	done chan struct{}
}

// pool has the connections in use, by socket path.
var pool = struct {
	mu    sync.Mutex
	conns map[string]*conn // guarded by mu
}{conns: make(map[string]*conn)}

// openConn returns the process's connection to the socket, and dials if there is none. The caller must call release.
func openConn(socket string) (*conn, error) {
	pool.mu.Lock()
	c := pool.conns[socket]
	if c == nil || c.lost() != nil {
		c = &conn{socket: socket, calls: make(map[requestID]*call)}
		pool.conns[socket] = c
	}
	c.refs++
	pool.mu.Unlock()

	c.dialOnce.Do(c.dial)
	if err := c.lost(); err != nil {
		c.release()
		return nil, err
	}
	return c, nil
}

// release gives up one reference. The last one closes the connection and waits for its reader.
func (c *conn) release() {
	pool.mu.Lock()
	c.refs--
	last := c.refs == 0
	if last && pool.conns[c.socket] == c {
		delete(pool.conns, c.socket)
	}
	pool.mu.Unlock()
	if last && c.uc != nil {
		c.shut(failed(syscall.ENOTCONN, "the connection was closed"))
		c.reader.Wait()
	}
}

func (c *conn) lost() *Error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// dial connects and shakes hands. If it fails, it sets c.err.
func (c *conn) dial() {
	if err := c.connect(); err != nil {
		c.shut(asError(err, "gaiafs at %s", c.socket))
	}
}

// connectPatience bounds the wait for a daemon whose connection queue is full, or that does not answer HELLO.
const connectPatience = 30 * time.Second

func (c *conn) connect() error {
	deadline := time.Now().Add(connectPatience)
	uc, err := dialSocket(c.socket, deadline)
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.uc = uc
	c.mu.Unlock()
	r := newReceiver(uc)
	w, err := greet(uc, r, deadline)
	if missing := w.required &^ (usedFeatures | featureTenant); err == nil && missing != 0 {
		err = failed(syscall.EPROTONOSUPPORT, "the daemon requires features %#x, which this library does not have",
			missing)
	}
	if err != nil {
		return err
	}
	c.welcome = w
	c.slots = make(chan struct{}, min(w.maxRequests, 1<<16))
	c.uses = make(chan struct{}, (cap(c.slots)+1)/2)
	c.reader.Go(func() { c.receive(r) })
	return c.choose()
}

// dialSocket connects. If the daemon's queue of connections is full, it retries until deadline.
func dialSocket(socket string, deadline time.Time) (*net.UnixConn, error) {
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		uc, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: socket, Net: "unixpacket"})
		switch {
		case err == nil:
			return uc, nil
		case errors.Is(err, syscall.EAGAIN) && time.Now().Before(deadline):
			time.Sleep(wait) // the kernel does not tell when the queue has room again
			continue
		case errors.Is(err, syscall.ENOENT):
			return nil, failed(syscall.ECONNREFUSED, "there is no socket %s here: gaiafs has ended, or this is a "+
				"container that lacks the folder", socket)
		}
		return nil, asError(err, "gaiafs does not listen on %s", socket)
	}
}

// greet shakes hands. It leaves its deadline set on the connection.
func greet(uc *net.UnixConn, r *receiver, deadline time.Time) (welcome, error) {
	uc.SetDeadline(deadline)
	if _, err := uc.Write(frame(typeHello, 0, helloBody(minVersion, maxVersion))); err != nil &&
		!errors.Is(err, syscall.EPIPE) { // after EPIPE the refusal can still be read
		return welcome{}, gone(err)
	}
	h, body, fds, _, err := r.next()
	if err != nil {
		return welcome{}, gone(err)
	}
	closeAll(fds)
	if h.typ == typeError {
		return welcome{}, errorOf(body)
	}
	if h.typ != typeWelcome {
		return welcome{}, failed(syscall.EPROTO, "the daemon answered HELLO with type %#x", uint16(h.typ))
	}
	w, err := decodeWelcome(body)
	if err != nil {
		return welcome{}, failed(syscall.EPROTO, "%v", err)
	}
	return w, nil
}

// tenantVariable names the tenant that the process belongs to. The daemon decides whether it may.
const tenantVariable = "GAIAFS_TENANT"

// mostTenant is the longest name of a tenant, in bytes.
const mostTenant = 255

// choose tells the daemon which of its features this package uses. It is the first request of a connection, and does
// not wait for the answer: if the daemon refuses, it shuts the connection, so the requests that follow fail with the
// reason.
func (c *conn) choose() error {
	w := c.welcome
	features, tenant := w.chosen(), os.Getenv(tenantVariable)
	switch {
	case len(tenant) > mostTenant:
		return failed(syscall.EINVAL, "%s has %d bytes: the name of a tenant has %d at most", tenantVariable,
			len(tenant), mostTenant)
	case tenant != "" && w.offered&featureTenant == 0:
		tenant = "" // requests that map nothing may go on; doMap refuses the others
	case tenant != "":
		features |= featureTenant
	}
	if features == 0 {
		c.uc.SetDeadline(time.Time{})
		return nil
	}
	_, err := c.send(typeFeatures, featuresBody(features, tenant), func(h header, body []byte, fds []int) error {
		var r result
		if err := r.take(h, body, fds); err != nil {
			c.shut(asError(err, "%v", err))
		}
		c.uc.SetDeadline(time.Time{})
		return nil
	}, nil)
	return err
}

// doMap is do for a request that maps, and so is charged to a tenant. EOPNOTSUPP if the daemon cannot charge the named
// one.
func (c *conn) doMap(typ frameType, body []byte, take func(header, []byte, []int) error) error {
	if os.Getenv(tenantVariable) != "" && c.welcome.offered&featureTenant == 0 {
		return failed(syscall.EOPNOTSUPP, "%s is set, but the daemon is too old for named tenants", tenantVariable)
	}
	return c.do(typ, body, take)
}

// gone returns the error of a connection that ended.
func gone(err error) *Error {
	return failed(syscall.ENOTCONN, "the connection to gaiafs is lost: %v", err)
}

// errorOf decodes the body of an ERROR, which ends the connection.
func errorOf(body []byte) *Error {
	r, err := decodeResult(body)
	if err != nil || r.errno == 0 {
		return failed(syscall.EPROTO, "the daemon sent a malformed error")
	}
	return failed(syscall.Errno(r.errno), "%s", r.text)
}

// shut makes the connection unusable. Later calls fail with err. Calls in progress end when the reader notices, because
// only the reader ends calls. The first err wins.
func (c *conn) shut(err *Error) {
	c.mu.Lock()
	if c.err == nil {
		c.err = err
	}
	service := c.service
	c.mu.Unlock()
	if c.uc != nil {
		c.uc.Close()
	}
	if service != nil {
		service.Close()
	}
}

// end is shut for the reader. The reader uses no call after it.
func (c *conn) end(err *Error) {
	c.shut(err)
	c.mu.Lock()
	err = c.err
	calls := c.calls
	c.calls = nil
	c.mu.Unlock()
	for _, k := range calls {
		k.err = err
		close(k.done)
	}
}

// do sends a request and waits for the reply. take gets each frame of the reply. do returns the connection's error, or
// take's once the reply is complete.
func (c *conn) do(typ frameType, body []byte, take func(header, []byte, []int) error) error {
	return c.doAs(typ, body, take, nil)
}

// doAs is do. It calls begun with the id of the request before it sends the request.
func (c *conn) doAs(typ frameType, body []byte, take func(header, []byte, []int) error, begun func(requestID)) error {
	c.slots <- struct{}{}
	defer func() { <-c.slots }()
	return c.ask(typ, body, take, begun)
}

// ask is doAs for requests that take no slot, or have one.
func (c *conn) ask(typ frameType, body []byte, take func(header, []byte, []int) error, begun func(requestID)) error {
	k, err := c.send(typ, body, take, begun)
	if err != nil {
		return err
	}
	defer c.watch().Stop()
	<-k.done
	return k.err
}

// send is ask without the wait for the reply.
func (c *conn) send(typ frameType, body []byte, take func(header, []byte, []int) error,
	begun func(requestID)) (*call, error) {
	k := &call{take: take, done: make(chan struct{})}
	c.mu.Lock()
	if c.err != nil {
		defer c.mu.Unlock()
		return nil, c.err
	}
	c.lastID++
	id := c.lastID
	c.calls[id] = k
	c.mu.Unlock()
	if begun != nil {
		begun(id)
	}

	message, memory, err := c.message(typ, id, body)
	if err == nil {
		err = c.write(message, memory)
	}
	if memory >= 0 {
		unix.Close(memory)
	}
	var local *Error
	switch {
	case errors.As(err, &local): // nothing was sent
		c.mu.Lock()
		delete(c.calls, id)
		c.mu.Unlock()
		return nil, local
	case err != nil && !errors.Is(err, syscall.EPIPE):
		c.shut(gone(err))
	}
	// After EPIPE the reader ends every call, with the daemon's last ERROR if there is one.
	return k, nil
}

// message returns a request's frame, and a descriptor to send with it, or -1. A body that is too long for a frame goes
// into the descriptor.
func (c *conn) message(typ frameType, id requestID, body []byte) (message []byte, memory int, err error) {
	if headerSize+len(body) <= maxRequest {
		return frame(typ, id, body), -1, nil
	}
	if c.welcome.chosen()&featureLarge == 0 {
		return nil, -1, failed(syscall.E2BIG, "the daemon of the mount takes no request of %d bytes", len(body))
	}
	memory, err = sealed(body)
	return largeFrame(typ, id, len(body)), memory, err
}

// sealed returns a memfd that holds the body and cannot change. On failure it returns -1 and an Error.
func sealed(body []byte) (int, error) {
	const seals = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	fd, err := unix.MemfdCreate("gaiafs request", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return -1, asError(err, "no memory for %d bytes of a request", len(body))
	}
	for done := 0; done < len(body) && err == nil; {
		var n int
		n, err = unix.Write(fd, body[done:])
		if errors.Is(err, syscall.EINTR) {
			err = nil
		}
		done += max(n, 0)
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		unix.Close(fd)
		return -1, asError(err, "no memory for %d bytes of a request", len(body))
	}
	return fd, nil
}

// write sends a frame, with a descriptor unless memory is -1. An *Error means that the frame was not sent and that the
// connection is still good.
func (c *conn) write(message []byte, memory int) error {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	if memory < 0 {
		_, err := c.uc.Write(message)
		return err
	}
	_, _, err := c.uc.WriteMsgUnix(message, unix.UnixRights(memory), nil)
	if errors.Is(err, syscall.ETOOMANYREFS) {
		return asError(err, "this user has too many descriptors in flight in sockets")
	}
	return err
}

// simple is do for requests that one RESULT answers.
func (c *conn) simple(typ frameType, body []byte) (pages int64, err error) {
	return c.noted(typ, body, nil)
}

// noted is simple. If a request succeeds and the daemon has a warning, it calls note, which may be nil.
func (c *conn) noted(typ frameType, body []byte, note func(string)) (pages int64, err error) {
	var r result
	err = c.do(typ, body, r.take)
	if err == nil && r.text != "" && note != nil {
		note(r.text)
	}
	return r.pages, err
}

// take is conn.do's take for a request that one RESULT answers.
func (r *result) take(h header, body []byte, _ []int) (err error) {
	if h.typ != typeResult {
		return failed(syscall.EPROTO, "the daemon answered with type %#x", uint16(h.typ))
	}
	*r, err = resultOf(body)
	return err
}

// resultOf decodes the body of a RESULT.
func resultOf(body []byte) (r result, err error) {
	if r, err = decodeResult(body); err != nil {
		return result{}, failed(syscall.EPROTO, "%v", err)
	}
	if r.errno != 0 {
		return r, failed(syscall.Errno(r.errno), "%s", r.text)
	}
	return r, nil
}

// receive reads until the connection ends.
func (c *conn) receive(r *receiver) {
	for {
		h, body, fds, truncated, err := r.next()
		if err != nil {
			c.end(gone(err))
			return
		}
		if h.typ == typeError {
			closeAll(fds)
			c.end(errorOf(body))
			return
		}
		if c.welcome.version >= 2 && h.flags&^flagMore != 0 {
			closeAll(fds)
			c.end(failed(syscall.EPROTO, "the daemon sent a frame with flags %#x, which this library does not know",
				h.flags))
			return
		}
		c.mu.Lock()
		k := c.calls[h.id]
		if h.flags&flagMore == 0 {
			delete(c.calls, h.id)
		}
		c.mu.Unlock()
		if k == nil {
			closeAll(fds)
			c.end(failed(syscall.EPROTO, "the daemon answered a request that is not in progress"))
			return
		}
		err = k.take(h, body, fds)
		closeAll(fds)
		if truncated && err == nil {
			err = failed(syscall.EMFILE, "this process has no descriptors left for the extents: see ulimit -n")
		}
		if err != nil && k.err == nil {
			k.err = err
		}
		if h.flags&flagMore == 0 {
			close(k.done)
		}
	}
}

// receiver reads frames and the descriptors that come with them.
type receiver struct {
	uc     *net.UnixConn
	record []byte
	rights []byte
}

func newReceiver(uc *net.UnixConn) *receiver {
	return &receiver{uc, make([]byte, maxFrame), make([]byte, unix.CmsgSpace(4*maxExtents))}
}

// next returns the next frame. The body is valid until the next call. The caller owns the descriptors; they close on
// exec. truncated means that some descriptors were lost because the process has too many open.
func (r *receiver) next() (h header, body []byte, fds []int, truncated bool, err error) {
	n, rn, flags, _, err := r.uc.ReadMsgUnix(r.record, r.rights)
	if errors.Is(err, syscall.ECONNRESET) {
		// The daemon closed before it read everything. Its last frames come after this error.
		n, rn, flags, _, err = r.uc.ReadMsgUnix(r.record, r.rights)
	}
	if err != nil {
		return header{}, nil, nil, false, err
	}
	fds = parseRights(r.rights[:rn])
	if flags&unix.MSG_TRUNC != 0 {
		closeAll(fds)
		return header{}, nil, nil, false, syscall.EMSGSIZE
	}
	h, body, err = decodeHeader(r.record[:n])
	if err != nil {
		closeAll(fds)
		return header{}, nil, nil, false, err
	}
	return h, body, fds, flags&unix.MSG_CTRUNC != 0, nil
}

func parseRights(oob []byte) (fds []int) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for i := range messages {
		if got, err := unix.ParseUnixRights(&messages[i]); err == nil {
			fds = append(fds, got...)
		}
	}
	return fds
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}
