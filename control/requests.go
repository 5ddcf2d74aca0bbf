package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

// begin checks a request, and starts the goroutine that serves it. An error ends the connection.
func (s *session) begin(h header, body []byte) error {
	if h.typ&replyBit != 0 || h.typ == typeHello {
		return breach(h.id, "frame type %#x is not a request", uint16(h.typ))
	}
	if h.id == 0 {
		return breach(h.id, "request id 0")
	}
	s.asked.Add(1)
	if s.version >= 2 && h.flags != 0 {
		return s.reply(h.id, failure(syscall.EINVAL, "flags %#x of a request are not known", h.flags))
	}
	if s.version >= 2 && (h.typ == typeFeatures || h.typ == typeAttach) {
		return s.negotiate(h, body)
	}
	if s.version >= 2 && h.typ == typeDone {
		return s.finishBracket(h, body)
	}
	of := s.about(h.typ, body)
	work, err := s.parse(h, body)
	if err != nil {
		return breach(h.id, "%v", err)
	}
	s.mu.Lock()
	_, twice := s.running[h.id]
	full := len(s.running) >= s.server.opts.MaxRequests
	if !twice && !full {
		s.running[h.id], s.body = s.body, 0
	}
	s.mu.Unlock()
	switch {
	case twice:
		return breach(h.id, "request id %d is still running", h.id)
	case full:
		if h.typ == typeUse {
			s.forgetExpected(h.id)
		}
		return s.reply(h.id, failure(syscall.EAGAIN, "there are %d requests already", s.server.opts.MaxRequests))
	}
	// If an id is free but no slot is, the client has not read its answers. Then the reader waits until it has, or
	// until the write timeout closes the connection.
	s.slots <- struct{}{}
	if s.user.slots != nil {
		select { // users with too many running requests wait here
		case s.user.slots <- struct{}{}:
		case <-s.ctx.Done():
			<-s.slots
			s.forget(h.id)
			return net.ErrClosed
		}
	}
	s.requests.Go(func() {
		defer func() {
			<-s.slots
			if s.user.slots != nil {
				<-s.user.slots
			}
		}()
		began := time.Now()
		work(h.id)
		s.show(h.typ, of, began)
	})
	return nil
}

// parse returns the function that serves the request. The function copies what it needs of body.
func (s *session) parse(h header, body []byte) (work func(requestID), err error) {
	switch h.typ {
	case typeMap:
		r, err := s.version.decodeMap(body)
		if r.flags&(mapMovable|mapLargeMovable) != 0 && s.chosen&featureMove == 0 {
			return func(id requestID) { s.finish(id, errNoMove) }, err
		}
		return func(id requestID) { s.serveMap(id, r) }, err
	case typeUse:
		if s.chosen&featureMove == 0 {
			return func(id requestID) { s.finish(id, errNoMove) }, nil
		}
		r, err := s.version.decodeUse(body)
		if err == nil {
			s.expectBracket(h.id, r.bracket)
		}
		return func(id requestID) { s.serveUse(id, r) }, err
	case typeMapView:
		if s.chosen&featureView == 0 {
			return func(id requestID) {
				s.finish(id, failure(syscall.EOPNOTSUPP, "views were not chosen among the features"))
			}, nil
		}
		r, err := s.version.decodeMapView(body)
		return func(id requestID) { s.serveMapView(id, &r) }, err
	case typeBeginGroup, typeReleaseGroup, typeAbortGroup, typeAcquireAll:
		return s.parseGroup(h, body)
	case typeAcquire, typeRelease, typeSync, typeAdvise:
		r, err := s.version.decodeRange(body)
		return func(id requestID) {
			pages, note, err := s.serveRange(h.typ, r)
			s.answer(id, result{pages: pages, text: note}, err)
		}, err
	case typeUnmap:
		m, err := s.version.decodeUnmap(body)
		return func(id requestID) {
			note, err := s.serveUnmap(m)
			s.answer(id, result{text: note}, err)
		}, err
	case typeStatus:
		token, err := s.version.decodeStatus(body)
		return func(id requestID) { s.serveStatus(id, token) }, err
	case typeRecord:
		token, err := s.version.decodeStatus(body)
		return func(id requestID) { s.serveRecord(id, token) }, err
	case typeStop:
		recorder, err := s.version.decodeStop(body)
		return func(id requestID) { s.finish(id, s.serveStop(recorder)) }, err
	case typeEnd:
		r, err := s.version.decodeEnd(body)
		return func(id requestID) { s.serveEnd(id, r) }, err
	case typeFile:
		r, err := s.version.decodeFile(body)
		return func(id requestID) { s.serveFile(id, r) }, err
	case typeProfile:
		r, err := s.version.decodeProfile(body)
		return func(id requestID) { s.serveProfile(id, r) }, err
	case typeWatch:
		r, err := s.version.decodeWatch(body)
		return func(id requestID) { s.serveWatch(id, r) }, err
	case typeSet:
		r, err := s.version.decodeSet(body)
		return func(id requestID) { s.serveSet(id, r) }, err
	case typePing:
		return func(id requestID) { s.finish(id, nil) }, s.version.wantBody(body, 0)
	}
	return func(id requestID) {
		s.finish(id, failure(syscall.ENOSYS, "this gaiafs does not know requests of type %d", h.typ))
	}, nil
}

// requestError is an error with a text for the client's user.
type requestError struct {
	errno syscall.Errno
	text  string
}

func (e *requestError) Error() string { return e.text }
func (e *requestError) Unwrap() error { return e.errno }

func failure(errno syscall.Errno, format string, args ...any) error {
	return &requestError{errno, fmt.Sprintf(format, args...)}
}

// errnoOf returns the errno that err wraps, or EIO if there is none.
func errnoOf(err error) syscall.Errno {
	var errno syscall.Errno
	switch {
	case err == nil:
		return 0
	case errors.As(err, &errno) && errno != 0:
		return errno
	case errors.Is(err, context.Canceled), errors.Is(err, os.ErrDeadlineExceeded),
		errors.Is(err, context.DeadlineExceeded):
		return syscall.ECANCELED
	}
	return syscall.EIO
}

// finish is answer for a request whose success needs no result.
func (s *session) finish(id requestID, err error) { s.answer(id, result{}, err) }

// answer frees the request id and then answers with done or err, so that a client with the answer may use the id again.
func (s *session) answer(id requestID, done result, err error) {
	s.forget(id)
	if s.ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return // the session ends, as the client learns from the socket
	}
	// A failed write closed the connection, which the reader notices.
	_ = s.sendResult(id, done, err)
}

// forget frees a request id, and gives back what the request keeps.
func (s *session) forget(id requestID) {
	s.mu.Lock()
	n := s.running[id]
	delete(s.running, id)
	s.mu.Unlock()
	s.server.allowance.give(s.user, n)
}

// reply answers a request that the reader serves itself.
func (s *session) reply(id requestID, err error) error { return s.sendResult(id, result{}, err) }

func (s *session) sendResult(id requestID, done result, err error) error {
	if err != nil {
		done = result{errno: uint32(errnoOf(err)), text: err.Error()}
	}
	return s.send(appendFrame(nil, typeResult, 0, id, done.append), nil)
}

// serveMap makes a mapping, and sends it with its descriptors.
func (s *session) serveMap(id requestID, r mapRequest) {
	m, reply, err := s.openMapping(r)
	if err != nil {
		s.finish(id, err)
		return
	}
	defer m.users.Done()
	s.sendMapping(id, m, reply, true)
}

// sendMapping sends a mapping and its descriptors, and reports whether it could. last says that nothing follows.
func (s *session) sendMapping(id requestID, m *openMap, reply mapped, last bool) bool {
	all := m.Extents()
	reply.extents = uint32(len(all))
	if !s.sendPart(id, typeMapped, last && len(all) == 0, reply.append, nil) {
		return false
	}
	for first := 0; first < len(all); first += maxExtents {
		part := all[first:min(first+maxExtents, len(all))]
		e := extents{first: uint32(first), places: make([]extentPlace, len(part))}
		files := make([]*os.File, len(part))
		for i, x := range part {
			e.places[i] = extentPlace{x.Offset, x.Size, reply.kind, tierDevice, 1}
			files[i] = x.Descriptor
		}
		if !s.sendExtents(id, e, files, last && first+len(part) == len(all)) {
			return false
		}
	}
	return true
}

func (s *session) sendExtents(id requestID, e extents, files []*os.File, last bool) bool {
	return s.sendPart(id, typeExtents, last, func(b []byte) []byte { return e.append(b, s.version) }, files)
}

// sendPart sends a frame of a longer answer, and reports whether it could. Like answer, it frees the request id before
// it sends the last frame.
func (s *session) sendPart(id requestID, typ frameType, last bool, body func([]byte) []byte, files []*os.File) bool {
	more := uint16(flagMore)
	if last {
		more = 0
		s.forget(id)
	}
	if s.send(appendFrame(nil, typ, more, id, body), files) != nil {
		s.forget(id)
		return false
	}
	return true
}

// errToken refuses a token, without telling why.
var errToken = failure(syscall.EACCES, "the token is not valid, or has expired")

// redeem returns the file that a token was granted for. The token is used up, even if the request is refused later.
func (s *session) redeem(token [tokenSize]byte) (pagecache.Source, error) {
	src, ok := s.server.tokens.redeem(token)
	if !ok || src == nil {
		return nil, errToken
	}
	return src, nil
}

// openMapping redeems the token, and adds a mapping to the session. The caller holds the mapping.
func (s *session) openMapping(r mapRequest) (*openMap, mapped, error) {
	src, err := s.redeem(r.token)
	if err != nil {
		return nil, mapped{}, err
	}
	writable := r.prot&protWrite != 0
	open := &openMap{files: []pagecache.FileID{src.ID()}, length: r.len, writable: writable}
	var client pagecache.Client
	if r.flags&(mapMovable|mapLargeMovable) != 0 {
		open.client = &movingClient{session: s}
		client = open.client
	}
	m, reply, err := s.addMapping(open, func() (Mapping, error) {
		if err := checkMap(r, src); err != nil {
			return nil, err
		}
		return s.server.opts.Cache.Map(s.ctx, src, pagecache.MapRequest{
			Device:   int(r.device),
			UUID:     r.uuid,
			Kind:     uint8(r.kind),
			Off:      r.off,
			Len:      r.len,
			Writable: writable,
			Lazy:     r.flags&mapLazy != 0,
			Launder:  r.flags&mapLaunder != 0,
			Process:  uint32(s.who.Pid),
			User:     s.who.Uid,
			Limited:  s.ordinary,
			Cgroup:   s.cgroup,
			Tenant:   s.tenant,
			Client:   client,
			IfLarger: r.flags&mapMovable == 0,
		})
	})
	if err == nil {
		reply.size, reply.movable = homeSize(src), m.Movable()
	}
	return m, reply, err
}

// addMapping adds m, with the Mapping that open returns, to the session. The caller holds m. ENOMEM if there are too
// many.
func (s *session) addMapping(m *openMap, open func() (Mapping, error)) (*openMap, mapped, error) {
	if s.statusOnly {
		return nil, mapped{}, failure(syscall.EUSERS,
			"too many clients are connected: this connection can only be used for the status")
	}
	s.mu.Lock()
	full, draining := s.openLocked() >= s.server.opts.MaxMappings, s.server.draining.Load()
	if !full && !draining {
		s.reserved++
	}
	s.mu.Unlock()
	if draining {
		return nil, mapped{}, failure(syscall.ESHUTDOWN, "the file system is being unmounted")
	}
	if full {
		return nil, mapped{}, failure(syscall.ENOMEM, "this process already has %d mappings and open brackets",
			s.server.opts.MaxMappings)
	}
	if err := s.reserveMapping(); err != nil {
		s.mu.Lock()
		s.reserved--
		s.mu.Unlock()
		return nil, mapped{}, err
	}
	var cm Mapping
	err := s.patiently(func() (err error) {
		cm, err = open()
		return err
	})
	s.mu.Lock()
	s.reserved--
	if err != nil {
		s.mu.Unlock()
		s.dropMapping()
		return nil, mapped{}, err
	}
	m.Mapping = cm
	m.users.Add(1)
	s.lastMapping++
	id := s.lastMapping
	s.mappings[id] = m
	s.mu.Unlock()
	if m.client != nil {
		m.client.mapping.Store(uint64(id))
	}
	d := cm.Device()
	return m, mapped{mapping: id, kind: uint32(d.Kind), device: uint32(d.Ordinal), uuid: d.UUID}, nil
}

// checkMap refuses arguments that the page cache must not see, and access that the descriptor does not allow.
func checkMap(r mapRequest, src pagecache.Source) error {
	switch {
	case r.off < 0 || r.off%page.Size != 0:
		return failure(syscall.EINVAL, "offset %d is not a multiple of %d", uint64(r.off), page.Size)
	case r.len <= 0:
		return failure(syscall.EINVAL, "length %d is not positive", r.len)
	case !rangeWithin(r.off, r.len, mapEnd):
		return failure(syscall.EOVERFLOW, "offset and length end past the largest file")
	case r.prot&protRead == 0 || r.prot&^(protRead|protWrite) != 0:
		return failure(syscall.EINVAL, "protection %#x is neither read nor read and write", r.prot)
	}
	if err := checkPlace(r.flags, r.device, r.kind, r.uuid); err != nil {
		return err
	}
	switch {
	case !src.Readable():
		return failure(syscall.EACCES, "%s is not open for reading", src.Name())
	case r.prot&protWrite != 0 && !src.Writable():
		return failure(syscall.EACCES, "%s is not open for writing", src.Name())
	}
	return nil
}

// checkPlace refuses unknown flags and impossible devices, for mappings and views.
func checkPlace(flags, device, kind uint32, uuid [uuidSize]byte) error {
	switch {
	case flags&^(mapLazy|mapLaunder|mapMovable|mapLargeMovable) != 0:
		return failure(syscall.EINVAL, "flags %#x are not known", flags)
	case kind > math.MaxUint8:
		return failure(syscall.ENODEV, "there are no devices of kind %d", kind)
	case device > 1<<16 && uuid == [uuidSize]byte{}:
		return failure(syscall.ENODEV, "there is no device %d", device)
	}
	return nil
}

// homeSize returns the size of the file at home, or -1 if home does not tell.
func homeSize(src pagecache.Source) int64 {
	home, err := src.OpenHome(false)
	if err != nil {
		return -1
	}
	defer home.Close()
	sig, err := home.Signature()
	if err != nil {
		return -1
	}
	return sig.Size
}

// serveRange serves ACQUIRE, RELEASE, SYNC and ADVISE. note is for the client's user, if the request succeeded.
func (s *session) serveRange(typ frameType, r rangeRequest) (pages int64, note string, err error) {
	m, ok := s.use(r.mapping)
	if !ok {
		return 0, "", failure(syscall.EINVAL, "mapping %d does not exist", r.mapping)
	}
	defer m.users.Done()
	if pages, err = s.serveRangeOf(m, typ, r); err != nil || (typ != typeRelease && typ != typeSync) {
		return pages, "", err
	}
	return pages, noteOf(m), nil
}

// noteOf returns what a client's user should know about earlier releases of m.
func noteOf(m *openMap) string {
	past := m.TakePastEnd()
	if past == 0 {
		return ""
	}
	return fmt.Sprintf("stores past the end of the file are not kept (pages: %d): "+
		"first make the file as long as the mapping, with ftruncate", past)
}

func (s *session) serveRangeOf(m *openMap, typ frameType, r rangeRequest) (pages int64, err error) {
	off, n, ok := m.clip(r.off, r.len)
	if !ok {
		return 0, failure(syscall.EINVAL, "%d bytes at %d are not within the mapping's %d", uint64(r.len),
			uint64(r.off), m.length)
	}
	switch typ {
	case typeAcquire:
		if r.arg&^acquireLaunder != 0 {
			return 0, failure(syscall.EINVAL, "flags %#x of an acquire are not known", r.arg)
		}
		return m.Acquire(s.ctx, off, n, r.arg&acquireLaunder != 0)
	case typeRelease:
		if r.arg != 0 {
			return 0, failure(syscall.EINVAL, "flags %#x of a release are not known", r.arg)
		}
		if !m.writable {
			return 0, nil
		}
		return m.Release(s.ctx, off, n)
	case typeSync:
		if r.arg&^syncDurable != 0 {
			return 0, failure(syscall.EINVAL, "flags %#x of a sync are not known", r.arg)
		}
		return 0, m.Sync(s.ctx, off, n, r.arg&syncDurable != 0)
	}
	advice, ok := advices[r.arg]
	if !ok {
		return 0, failure(syscall.EINVAL, "advice %d is not known", r.arg)
	}
	return 0, m.Advise(s.ctx, off, n, advice)
}

var advices = map[uint32]pagecache.Advice{
	adviceNormal:     pagecache.AdviceNormal,
	adviceRandom:     pagecache.AdviceRandom,
	adviceSequential: pagecache.AdviceSequential,
	adviceWillNeed:   pagecache.AdviceWillNeed,
	adviceDontNeed:   pagecache.AdviceDontNeed,
}

func (s *session) serveUnmap(id mappingID) (note string, err error) {
	m, ok := s.take(id)
	if !ok {
		return "", failure(syscall.EINVAL, "mapping %d does not exist", id)
	}
	if err := s.unmap(m); err != nil {
		return "", err
	}
	return noteOf(m), nil
}

// redeemMount reports whether a token is valid for the mount. Root and the user who mounted may use a token of zeros,
// because the mountpoint may be somewhere that they cannot open.
func (s *session) redeemMount(token [tokenSize]byte) bool {
	if !s.ordinary && token == [tokenSize]byte{} {
		return true
	}
	src, ok := s.server.tokens.redeem(token)
	return ok && src == nil
}

// serveStatus sends the status in as many frames as it takes. A session may ask for one status at a time, because it
// may be large. It may ask for the next one as soon as it has read the last frame.
func (s *session) serveStatus(id requestID, token [tokenSize]byte) {
	if !s.redeemMount(token) {
		s.finish(id, errToken)
		return
	}
	s.mu.Lock()
	busy := s.inStatus
	s.inStatus = true
	s.mu.Unlock()
	if busy {
		s.finish(id, failure(syscall.EAGAIN, "another status is being sent"))
		return
	}
	last, err := s.sendStatus(id)
	s.mu.Lock()
	s.inStatus = false
	s.mu.Unlock()
	if err != nil {
		s.finish(id, err)
		return
	}
	s.forget(id)
	_ = s.sendDocument(id, 0, last)
}

// sendStatus sends all frames of the status except the last, which it returns. It stops if the client does not read.
func (s *session) sendStatus(id requestID) (last []byte, err error) {
	if s.server.opts.Status == nil {
		return nil, failure(syscall.ENOTSUP, "this server has no status")
	}
	doc, err := json.Marshal(s.server.opts.Status(s.viewer()))
	if err == nil {
		err = s.server.allowance.keep(s, id, int64(len(doc)))
	}
	if err != nil {
		return nil, err
	}
	const most = maxFrame - headerSize
	for len(doc) > most {
		if err := s.sendDocument(id, flagMore, doc[:most]); err != nil {
			return nil, err
		}
		doc = doc[most:]
	}
	return doc, nil
}

func (s *session) sendDocument(id requestID, flags uint16, part []byte) error {
	return s.send(appendFrame(make([]byte, 0, headerSize+len(part)), typeDocument, flags, id,
		func(b []byte) []byte { return append(b, part...) }), nil)
}
