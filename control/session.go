package control

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

// session is one connection of a client. Its reader goroutine owns it. Requests run in their own goroutines. The reader
// waits for them before it unmaps what is left.
type session struct {
	server *Server       // immutable
	conn   *net.UnixConn // immutable
	who    unix.Ucred    // the process at the other end; immutable
	// cgroup and command are the process's when they are first asked for. If one fails, a later call tries again.
	cgroup  func() (string, error)
	command func() (string, error)
	asked   atomic.Int64 // requests so far
	user    *user        // immutable, as are the next three: set before run
	// ordinary means that the user has limits. statusOnly means that there are too many sessions for this one to map
	// anything.
	ordinary, statusOnly bool
	log                  *slog.Logger // immutable
	ctx                  context.Context
	cancel               context.CancelFunc
	ended                chan struct{} // closed when all mappings are unmapped
	// The handshake sets version and key before any request runs. They are immutable afterwards.
	version version
	key     sessionKey
	greeted atomic.Bool // the client has said HELLO
	// chosen is the features that the client uses. The reader sets it before any request that needs a feature runs.
	// main is the session that this service connection serves; nil for others. Only the reader uses main.
	chosen features
	main   *session
	// tenant is the tenant's name that came with the features, "" for none. It is immutable once a request runs.
	tenant string
	// body is the bytes of the large request that the reader has. Only the reader uses it.
	body int64

	requests sync.WaitGroup
	// slots has an element for each running request goroutine. A request frees its id just before it sends the answer,
	// so that the client may use the id again. It frees its slot only after that. So slots bounds the goroutines of a
	// client that does not read.
	slots chan struct{}

	writeMu sync.Mutex // held while a frame is sent

	mu          sync.Mutex
	running     map[requestID]int64    // the bytes that each running request keeps; guarded by mu
	mappings    map[mappingID]*openMap // guarded by mu
	lastMapping mappingID              // guarded by mu
	reserved    int                    // mappings being made; guarded by mu
	groups      map[groupID]Group      // open groups; guarded by mu
	lastGroup   groupID                // guarded by mu
	inStatus    bool                   // a STATUS is being answered; guarded by mu
	// recording is what a RECORD began, recorder that request's id. Guarded by mu.
	recording *pagecache.Recording
	recorder  requestID
	// service is the client's service connection. serviceable means that it may open one. Guarded by mu.
	service     *service
	serviceable bool
	serviced    chan struct{} // closed when there is a service connection; nil if nobody waits for it. Guarded by mu
	// brackets has the open and expected brackets. Guarded by mu.
	brackets map[bracketID]*openBracket
	// doneWith is closed when all brackets have ended for which a DONE has come so far. nil: none came, or nobody waits
	// for them because a file hangs. Guarded by mu.
	doneWith chan struct{}
}

// openMap is a mapping of a session. users counts the requests and replies that use it; Unmap waits for them.
type openMap struct {
	Mapping
	files    []pagecache.FileID // immutable
	length   int64              // immutable
	writable bool               // immutable
	client   *movingClient      // of a movable mapping; immutable
	// users is added to under session.mu while the mapping is in the table, so nobody joins after it is removed.
	users sync.WaitGroup
}

// clip checks that the n bytes at off lie within the pages of the mapping, and cuts them to its length. A range after
// the length, in the last page, becomes the last byte, which stands for that page.
func (m *openMap) clip(off, n int64) (int64, int64, bool) {
	pages := page.Range{End: page.Count(m.length)}.Bytes()
	if n == 0 || !rangeWithin(off, n, pages) {
		return 0, 0, false
	}
	off = min(off, m.length-1)
	return off, min(n, m.length-off), true
}

func newSession(s *Server, conn *net.UnixConn, who unix.Ucred) *session {
	ses := &session{
		server:   s,
		conn:     conn,
		who:      who,
		cgroup:   untilKnown(func() (string, error) { return cgroupOf(conn, who.Pid) }),
		command:  untilKnown(func() (string, error) { return commandOf(conn, who.Pid) }),
		log:      s.opts.Log.With("pid", who.Pid, "uid", who.Uid),
		slots:    make(chan struct{}, s.opts.MaxRequests),
		running:  make(map[requestID]int64),
		mappings: make(map[mappingID]*openMap),
		brackets: make(map[bracketID]*openBracket),
		ended:    make(chan struct{}),
	}
	ses.ctx, ses.cancel = context.WithCancel(s.ctx)
	return ses
}

// refuse tells a connection that gets no session the reason, without waiting, and closes it.
func (s *session) refuse(errno syscall.Errno, why string) {
	s.cancel()
	s.conn.SetWriteDeadline(time.Now().Add(time.Second)) // an empty socket takes the frame at once
	s.conn.Write(errorFrame(0, errno, why))
	s.conn.Close()
}

func errorFrame(id requestID, errno syscall.Errno, why string) []byte {
	return appendFrame(nil, typeError, 0, id, result{errno: uint32(errno), text: why}.append)
}

// protocolError is a breach of the protocol. It ends the connection.
type protocolError struct {
	id    requestID
	errno syscall.Errno
	why   string
}

func (e *protocolError) Error() string { return e.why }

func breach(id requestID, format string, args ...any) error {
	return &protocolError{id, syscall.EPROTO, fmt.Sprintf(format, args...)}
}

// run serves the connection until it ends, and then unmaps what the client left mapped.
func (s *session) run() {
	defer s.server.ended(s)
	s.log.Debug("control: client connected")
	err := s.serve()
	var bad *protocolError
	switch {
	case errors.As(err, &bad):
		s.log.Warn("control: client dropped", "error", bad.why)
		s.send(errorFrame(bad.id, bad.errno, bad.why), nil)
	case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed), errors.Is(err, syscall.ECONNRESET),
		errors.Is(err, syscall.EPIPE):
		s.log.Debug("control: client went")
	case errors.Is(err, os.ErrDeadlineExceeded): // send has logged it
	default:
		s.log.Warn("control: client dropped", "error", err)
	}
	s.conn.Close()
	s.cancel()
	s.endService()
	s.requests.Wait()
	s.doneLarge()
	s.endBrackets()
	s.unmapAll()
}

// serve reads requests until an error, which it returns.
func (s *session) serve() error {
	buf := make([]byte, maxRequest)
	if err := s.handshake(buf); err != nil {
		return err
	}
	for s.main == nil {
		h, body, err := s.read(buf)
		var no *refusal
		switch {
		case errors.As(err, &no):
			err = s.reply(no.id, no.err)
		case err == nil:
			err = s.begin(h, body)
		}
		s.doneLarge()
		if err != nil {
			return err
		}
	}
	return s.serveAnswers(buf)
}

// handshake reads the HELLO and answers it.
func (s *session) handshake(buf []byte) error {
	s.conn.SetReadDeadline(time.Now().Add(s.server.opts.HandshakeTimeout))
	h, body, err := s.read(buf)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return &protocolError{0, syscall.ETIMEDOUT, "no HELLO in time"}
	}
	if err != nil {
		return err
	}
	if h.typ != typeHello {
		return breach(h.id, "the first frame has type %d, not HELLO", h.typ)
	}
	hi, err := decodeHello(body)
	if err != nil {
		return breach(h.id, "HELLO: %v", err)
	}
	if hi.max < minVersion || hi.min > maxVersion {
		return &protocolError{h.id, syscall.EPROTONOSUPPORT, fmt.Sprintf(
			"client speaks versions %d to %d of the protocol, this gaiafs %d to %d",
			hi.min, hi.max, minVersion, maxVersion)}
	}
	s.conn.SetReadDeadline(time.Time{})
	s.version = min(hi.max, maxVersion)
	rand.Read(s.key[:])
	s.greeted.Store(true)
	w := welcome{version: s.version, maxRequests: uint32(s.server.opts.MaxRequests), kinds: s.server.opts.Cache.Kinds(),
		offered: offeredFeatures, required: requiredFeatures, key: s.key}
	return s.send(appendFrame(nil, typeWelcome, 0, h.id, w.append), nil)
}

// read returns the next frame. The body aliases buf, unless it came in a descriptor.
func (s *session) read(buf []byte) (header, []byte, error) {
	rights := s.roomForRights()
	n, rn, flags, _, err := s.conn.ReadMsgUnix(buf, rights)
	if err != nil {
		return header{}, nil, err
	}
	files := s.received(rights[:rn])
	defer files.close()
	if flags&unix.MSG_TRUNC != 0 {
		return header{}, nil, breach(0, "frame is larger than %d bytes", maxRequest)
	}
	h, body, err := decodeHeader(buf[:n])
	if err != nil {
		return header{}, nil, breach(0, "%v", err)
	}
	if flags&unix.MSG_CTRUNC != 0 { // the kernel has closed them
		if rights != nil && rn == 0 && h.flags&flagLarge != 0 && h.id != 0 {
			return h, nil, &refusal{h.id, failure(syscall.EMFILE, "the daemon has no descriptor left for the request")}
		}
		return header{}, nil, breach(0, "descriptors came with a request")
	}
	return s.openLarge(h, body, files)
}

// send writes one frame, with descriptors that the caller keeps open until it returns. It waits at most for the write
// timeout. After a failure it closes the connection, because part of the protocol is lost.
func (s *session) send(frame []byte, files []*os.File) error {
	return s.sendBy(time.Now().Add(s.server.opts.WriteTimeout), frame, files)
}

// sendBy is send with another deadline; the zero Time means none.
func (s *session) sendBy(deadline time.Time, frame []byte, files []*os.File) error {
	s.writeMu.Lock()
	defer s.writeMu.Unlock()
	s.conn.SetWriteDeadline(deadline)
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	var err error
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		_, _, err = s.conn.WriteMsgUnix(frame, rights, nil)
		// ETOOMANYREFS: this user has too many descriptors in flight. They land as clients read.
		if !errors.Is(err, syscall.ETOOMANYREFS) || !deadline.IsZero() && !time.Now().Add(wait).Before(deadline) {
			break
		}
		select {
		case <-time.After(wait):
		case <-s.ctx.Done():
		}
		if s.ctx.Err() != nil {
			break
		}
	}
	runtime.KeepAlive(files)
	if err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) {
			s.log.Warn("control: client does not read, dropped")
		}
		s.conn.Close()
	}
	return err
}

// openLocked counts what Options.MaxMappings limits: mappings, mappings being made, and brackets. s.mu is held.
func (s *session) openLocked() int { return len(s.mappings) + s.reserved + len(s.brackets) }

func (s *session) mappingCount() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.mappings)
}

// use returns a mapping of the session, and holds it until its users.Done.
func (s *session) use(id mappingID) (*openMap, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m, ok := s.mappings[id]
	if ok {
		m.users.Add(1)
	}
	return m, ok
}

// take removes a mapping from the session; the caller unmaps it.
func (s *session) take(id mappingID) (*openMap, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m, ok := s.mappings[id]
	delete(s.mappings, id)
	return m, ok
}

// unmap ends a mapping that was removed from the table. The end of the server does not stop it, because it is the
// implicit release.
func (s *session) unmap(m *openMap) error {
	m.users.Wait()
	defer s.dropMapping()
	return m.Unmap(context.WithoutCancel(s.ctx))
}

// unmapAll ends the mappings that the client left.
func (s *session) unmapAll() {
	s.mu.Lock()
	left := s.mappings
	s.mappings = nil
	s.mu.Unlock()
	for _, m := range left {
		m.Abandon()
		if err := s.unmap(m); err != nil {
			s.log.Error("control: implicit release failed", "error", err)
		}
	}
}
