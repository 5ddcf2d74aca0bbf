package control

import (
	"context"
	"errors"
	"os"
	"sync"
	"syscall"
	"time"
)

// The daemon speaks first on a client's second connection, the service connection, because a client that waits for
// nothing does not read its first one. A service connection counts toward no limit of its user, since each session has
// at most one. Nothing here waits for a client: notices wait in a short queue. If the queue is full, the client counts
// as inattentive until it reads again. It is never disconnected for that.

// mostNotices bounds the notices that wait for a client to read them.
const mostNotices = 64

// errInattentive means that a client does not read its notices at the moment.
var errInattentive = errors.New("the client does not read")

// errServiceEnded means that a client has no service connection any more.
var errServiceEnded = errors.New("the service connection ended")

// notice is a frame that the daemon sends without being asked.
type notice struct {
	typ  frameType
	id   requestID // 0: no answer is wanted
	body func([]byte) []byte
	file *os.File // sent with the frame; closed after that, or if it is never sent. nil: none
}

// service is the daemon's end of a service connection. Its methods may be called from any goroutine.
type service struct {
	ses  *session      // the connection
	wake chan struct{} // has an element if the queue may have something; capacity 1
	over chan struct{} // closed when the connection ends

	mu     sync.Mutex
	queue  []notice                    // guarded by mu
	asked  map[requestID]chan<- answer // the requests that wait; each channel has room for its answer. Guarded by mu
	lastID requestID                   // guarded by mu
	// attentive means that the client has answered, and reads its notices. checking means that a CHECK is finding that
	// out. Guarded by mu.
	attentive, checking bool
	ended               bool // nothing is sent any more; guarded by mu
}

// negotiate serves FEATURES and ATTACH, which change how the reader goes on. Only the reader calls it.
func (s *session) negotiate(h header, body []byte) error {
	s.mu.Lock()
	_, twice := s.running[h.id]
	busy := len(s.running) > 0 || s.lastMapping > 0
	s.mu.Unlock()
	if twice {
		return breach(h.id, "request id %d is still running", h.id)
	}
	if h.typ == typeFeatures {
		f, tenant, err := s.version.decodeFeatures(body)
		if err != nil {
			return breach(h.id, "%v", err)
		}
		if busy && tenant != "" {
			return s.reply(h.id, failure(syscall.EINVAL, "the tenant must be named before any other request"))
		}
		if err = s.choose(f); err == nil {
			s.tenant = tenant
		}
		return s.reply(h.id, err)
	}
	key, err := s.version.decodeAttach(body)
	if err != nil {
		return breach(h.id, "%v", err)
	}
	if busy || s.chosen != 0 {
		return s.reply(h.id, failure(syscall.EINVAL, "ATTACH is not the first request of its connection"))
	}
	return s.attach(h.id, key)
}

// choose sets the features that the client uses.
func (s *session) choose(f features) error {
	switch {
	case s.chosen != 0:
		return failure(syscall.EINVAL, "features were chosen already")
	case f&^offeredFeatures != 0:
		return failure(syscall.EOPNOTSUPP, "this gaiafs does not offer the features %#x", uint64(f&^offeredFeatures))
	case requiredFeatures&^f != 0:
		return failure(syscall.EPROTONOSUPPORT, "this gaiafs requires the features %#x", uint64(requiredFeatures&^f))
	}
	s.chosen = f
	s.mu.Lock()
	s.serviceable = f&featureService != 0
	s.mu.Unlock()
	return nil
}

// attach makes this connection the service connection of the session with the key, which must belong to the same
// process.
func (s *session) attach(id requestID, key sessionKey) error {
	var main *session
	for _, other := range s.server.snapshot() {
		if other != s && other.key == key && other.version >= 2 && other.who == s.who {
			main = other
		}
	}
	if main == nil {
		return s.reply(id, failure(syscall.EACCES, "no connection of this process has that key"))
	}
	v := &service{ses: s, wake: make(chan struct{}, 1), over: make(chan struct{}),
		asked: make(map[requestID]chan<- answer)}
	main.mu.Lock()
	var err error
	switch {
	case !main.serviceable:
		err = failure(syscall.EINVAL, "the connection did not choose a service connection, or has ended")
	case main.service != nil:
		err = failure(syscall.EBUSY, "the connection has a service connection already")
	default:
		main.service = v
		if main.serviced != nil {
			close(main.serviced)
			main.serviced = nil
		}
	}
	main.mu.Unlock()
	if err != nil {
		return s.reply(id, err)
	}
	s.server.mu.Lock()
	s.server.discountLocked(s)
	s.server.mu.Unlock()
	s.main = main
	if err := s.reply(id, nil); err != nil {
		return err
	}
	s.requests.Go(v.write)
	return nil
}

// endService ends the session's service connection. If the session is a service connection itself, it detaches it.
func (s *session) endService() {
	if s.main != nil {
		s.main.mu.Lock()
		v := s.main.service
		s.main.service = nil
		s.main.mu.Unlock()
		if v != nil {
			close(v.over)
		}
		return
	}
	s.mu.Lock()
	v := s.service
	s.serviceable = false
	s.mu.Unlock()
	if v != nil {
		v.ses.conn.Close()
	}
}

// serveAnswers reads the client's answers on its service connection. It never returns nil.
func (s *session) serveAnswers(buf []byte) error {
	s.main.mu.Lock()
	v := s.main.service
	s.main.mu.Unlock()
	for {
		h, body, err := s.read(buf)
		if err != nil {
			return err
		}
		if h.typ != typeAnswer || h.flags != 0 {
			return breach(h.id, "frame type %#x with flags %#x is no answer", uint16(h.typ), h.flags)
		}
		a, err := s.version.decodeAnswer(body)
		if err != nil {
			return breach(h.id, "%v", err)
		}
		if err := v.answered(h.id, a); err != nil {
			return err
		}
	}
}

func (v *service) answered(id requestID, a answer) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if id == 0 || id > v.lastID {
		return breach(id, "answer to a notice that was never sent")
	}
	v.attentive = v.attentive || len(v.queue) == 0
	if to := v.asked[id]; to != nil {
		delete(v.asked, id)
		to <- a
	}
	return nil // an answer that nobody waits for any more is late, but no breach
}

// tell queues a notice. It does not wait.
func (v *service) tell(n notice) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.tellLocked(n)
}

// tellLocked is tell with v.mu held.
func (v *service) tellLocked(n notice) error {
	var err error
	switch {
	case v.ended:
		err = errServiceEnded
	case len(v.queue) >= mostNotices:
		v.attentive = false
		err = errInattentive
	}
	if err != nil {
		n.close()
		return err
	}
	v.queue = append(v.queue, n)
	v.rouse()
	return nil
}

func (n notice) close() {
	if n.file != nil {
		_ = n.file.Close()
	}
}

// ask queues a notice. wait waits for the answer until its ctx ends; it may then be called again.
func (v *service) ask(n notice) (wait func(ctx context.Context) (answer, error), err error) {
	got := make(chan answer, 1)
	v.mu.Lock()
	v.lastID++
	n.id = v.lastID
	if err = v.tellLocked(n); err == nil {
		v.asked[n.id] = got
	}
	v.mu.Unlock()
	return func(ctx context.Context) (answer, error) {
		select {
		case a := <-got:
			return a, nil
		case <-v.over:
			return answer{}, errServiceEnded
		case <-ctx.Done():
			v.late()
			return answer{}, ctx.Err()
		}
	}, err
}

// late notes that an answer did not come in time. The client is inattentive until it answers after all.
func (v *service) late() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.attentive = false
}

// begin runs work in a goroutine that the end of the connection waits for. It reports false if the connection is
// ending.
func (v *service) begin(work func()) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.ended {
		return false
	}
	v.ses.requests.Go(work) // write is one of these goroutines, and has not ended
	return true
}

// end closes the notices that will not be sent any more.
func (v *service) end() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.ended = true
	for _, n := range v.queue {
		n.close()
	}
	v.queue = nil
}

// write sends queued notices, for as long as the client accepts them.
func (v *service) write() {
	defer v.end()
	for {
		v.mu.Lock()
		var n notice
		more := len(v.queue) > 0
		if more {
			n = v.queue[0]
			v.queue = v.queue[1:]
		}
		lapsed := !more && !v.attentive && !v.checking
		v.checking = v.checking || lapsed
		v.mu.Unlock()
		if lapsed { // the client has read everything: does it answer, too?
			v.ses.requests.Go(v.check)
		}
		if !more {
			select {
			case <-v.wake:
				continue
			case <-v.over:
				return
			}
		}
		var files []*os.File
		if n.file != nil {
			files = []*os.File{n.file}
		}
		err := v.ses.sendBy(time.Time{}, appendFrame(nil, n.typ, 0, n.id, n.body), files)
		n.close()
		if err != nil {
			return
		}
	}
}

// check asks the client whether it reads. An answer makes it attentive.
func (v *service) check() {
	if wait, err := v.ask(notice{typ: typeCheck}); err == nil {
		_, _ = wait(v.ses.ctx)
	}
	v.mu.Lock()
	v.checking = false
	v.mu.Unlock()
	v.rouse() // if more was queued since, write has to check again
}

// rouse makes write look at the queue.
func (v *service) rouse() {
	select {
	case v.wake <- struct{}{}:
	default:
	}
}

// attends reports whether the session's client reads what the daemon sends first.
func (s *session) attends() bool {
	s.mu.Lock()
	v := s.service
	s.mu.Unlock()
	if v == nil {
		return false
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.attentive
}
