package control

import (
	"context"
	"maps"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/pagecache"
)

// Brackets: USE asks for the memory that a launch uses, DONE gives it back. In between, the memory stays where MOVEs
// have put it.

// errNoMove means that the client did not choose featureMove.
var errNoMove = failure(syscall.EOPNOTSUPP, "memory that moves was not chosen among the features")

// attachPatience is how long a bracket waits for the client's service connection, which the client opens in the
// background.
const attachPatience = 10 * time.Second

// openBracket is a session's bracket, open or expected.
type openBracket struct {
	request requestID     // the request that asks for it; immutable
	before  chan struct{} // session.doneWith when the request came; immutable
	// cancel is nil until the request begins. session.mu guards this and the following fields.
	cancel context.CancelFunc
	// bracket is nil until it is granted. ended means that DONE has come. Guarded by session.mu.
	bracket Bracket
	ended   bool
}

// expectBracket notes that a USE has come. The reader calls it, so that a DONE right behind the USE finds the bracket.
func (s *session) expectBracket(id requestID, bracket bracketID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.brackets != nil && s.brackets[bracket] == nil {
		s.brackets[bracket] = &openBracket{request: id, before: s.doneWith}
	}
}

// forgetExpected undoes expectBracket for a request that does not begin.
func (s *session) forgetExpected(id requestID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.brackets, func(_ bracketID, b *openBracket) bool { return b.request == id && b.cancel == nil })
}

// takeExpected begins a bracket that expectBracket noted. From then on cancel ends it.
func (s *session) takeExpected(id requestID, bracket bracketID, cancel context.CancelFunc) (*openBracket, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.brackets[bracket]
	switch {
	case b == nil:
		return nil, failure(syscall.ECANCELED, "DONE came before the bracket began")
	case b.request != id || b.cancel != nil:
		return nil, failure(syscall.EINVAL, "bracket %d is open", bracket)
	case s.openLocked() > s.server.opts.MaxMappings:
		delete(s.brackets, bracket)
		return nil, failure(syscall.ENOMEM, "this process already has %d mappings and open brackets",
			s.server.opts.MaxMappings)
	}
	b.cancel = cancel
	return b, nil
}

// serveUse answers a USE.
func (s *session) serveUse(id requestID, r useRequest) {
	kept, err := s.useRanges(id, r)
	if err != nil || r.flags&useKeep == 0 {
		s.finish(id, err)
		return
	}
	n := numbered{}
	if kept {
		n.number = 1
	}
	s.finishNumbered(id)(n, nil)
}

// admitUse refuses an invalid bracket, or one too many. dropMapping undoes it.
func (s *session) admitUse(r useRequest) error {
	switch {
	case r.count == 0 || r.count > maxRanges:
		return failure(syscall.EINVAL, "a bracket of %d ranges; it has 1 to %d", r.count, maxRanges)
	case r.flags&^(useNested|useKeep) != 0, r.flags&useKeep != 0 && s.chosen&featureKeep == 0:
		return failure(syscall.EINVAL, "flags %#x of a bracket are not known", r.flags)
	}
	// An open bracket takes as much of the daemon's memory as a mapping, and counts as one.
	return s.reserveMapping()
}

// useRanges begins an expected bracket, and reports whether the client may keep it.
func (s *session) useRanges(id requestID, r useRequest) (kept bool, err error) {
	if err := s.admitUse(r); err != nil {
		s.forgetExpected(id)
		return false, err
	}
	ctx, cancel := context.WithCancel(s.ctx)
	b, err := s.takeExpected(id, r.bracket, cancel)
	if err != nil {
		cancel()
		s.dropMapping()
		return false, err
	}
	s.follow(ctx, b)
	got, err := s.beginBracket(ctx, r)
	s.mu.Lock()
	ended := b.ended
	b.bracket = got
	if err != nil && !ended {
		delete(s.brackets, r.bracket)
	}
	s.mu.Unlock()
	if ended && got != nil {
		got.Done()
	}
	if err != nil && !ended {
		cancel()
		s.dropMapping()
	}
	return got != nil && got.Kept(), err
}

// follow waits for the end of the brackets that the client was done with when it asked, because the client counts on
// their memory. If a file hangs, only one bracket waits for it, and later ones do not.
func (s *session) follow(ctx context.Context, b *openBracket) {
	if b.before == nil {
		return
	}
	select {
	case <-b.before:
	case <-time.After(s.server.opts.endPatience):
		s.mu.Lock()
		s.doneWith = nil
		s.mu.Unlock()
	case <-ctx.Done():
	}
}

// beginBracket finds the mappings of a bracket, and asks the page cache for it.
func (s *session) beginBracket(ctx context.Context, r useRequest) (Bracket, error) {
	uses, moves := make([]Use, len(r.ranges)), false
	for i, rg := range r.ranges {
		m, ok := s.use(rg.mapping)
		if !ok {
			return nil, failure(syscall.EINVAL, "mapping %d does not exist", rg.mapping)
		}
		defer m.users.Done()
		off, n, ok := m.clip(rg.off, rg.len)
		if !ok {
			return nil, failure(syscall.EINVAL, "%d bytes at %d are not within the mapping's %d", uint64(rg.len),
				uint64(rg.off), m.length)
		}
		uses[i] = Use{m.Mapping, off, n}
		moves = moves || m.Movable()
	}
	if moves {
		if err := s.waitService(ctx); err != nil {
			return nil, err
		}
	}
	o := pagecache.UseOptions{
		Nested: r.flags&useNested != 0, Patience: time.Duration(r.patience) * time.Millisecond,
	}
	if r.flags&useKeep != 0 && s.hasRoom() {
		o.Keeper = s
	}
	return s.server.opts.Cache.Use(ctx, uses, o)
}

// hasRoom reports whether the client has less than half of the mappings and brackets that it may have.
func (s *session) hasRoom() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return 2*s.openLocked() < s.server.opts.MaxMappings
}

// Counts reports whether the client says how often it used the brackets that it kept.
func (s *session) Counts() bool { return s.chosen&featureUses != 0 }

// Recall asks the client to end the brackets that it keeps without need.
func (s *session) Recall() (wait func(ctx context.Context) error, err error) {
	s.mu.Lock()
	v := s.service
	s.mu.Unlock()
	if v == nil {
		return nil, errServiceEnded
	}
	if !s.attends() { // its brackets stay open, and nobody waits for it again
		return nil, errInattentive
	}
	answered, err := v.ask(notice{typ: typeRecall})
	if err != nil {
		return nil, err
	}
	over := make(chan error, 1)
	// Runs even if nobody waits any more: the client has ended the brackets that its answer lists.
	if !v.begin(func() { over <- s.recalled(v, answered) }) {
		return nil, errServiceEnded
	}
	return func(ctx context.Context) error {
		select {
		case err := <-over:
			return err
		case <-ctx.Done():
			v.late()
			return ctx.Err()
		}
	}, nil
}

// recalled ends the brackets that the client's answers list.
func (s *session) recalled(v *service, answered func(ctx context.Context) (answer, error)) error {
	for {
		a, err := answered(s.ctx)
		if err != nil {
			return err
		}
		list, more := a.ended()
		for _, ended := range list {
			if b := s.takeBracket(ended.id); b != nil {
				s.endBracket(b, ended.uses)
			}
		}
		if !more {
			return nil
		}
		if answered, err = v.ask(notice{typ: typeRecall}); err != nil {
			return err
		}
	}
}

// waitService waits until there is a service connection.
func (s *session) waitService(ctx context.Context) error {
	s.mu.Lock()
	if s.service != nil {
		s.mu.Unlock()
		return nil
	}
	if s.serviced == nil {
		s.serviced = make(chan struct{})
	}
	serviced := s.serviced
	s.mu.Unlock()
	select {
	case <-serviced:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(attachPatience):
		return failure(syscall.ENOTCONN,
			"the process has no service connection, which it needs to learn where its memory is")
	}
}

// finishBracket serves DONE. The reader calls it, and it counts toward no limit.
func (s *session) finishBracket(h header, body []byte) error {
	s.mu.Lock()
	_, twice := s.running[h.id]
	s.mu.Unlock()
	if twice {
		return breach(h.id, "request id %d is still running", h.id)
	}
	done, err := s.version.decodeDone(body)
	if err != nil {
		return breach(h.id, "%v", err)
	}
	b := s.takeBracket(done.id)
	if b == nil {
		return s.reply(h.id, failure(syscall.EINVAL, "there is no bracket %d", done.id))
	}
	ended := make(chan struct{})
	s.mu.Lock()
	before := s.doneWith
	s.doneWith = ended
	s.mu.Unlock()
	s.requests.Go(func() {
		s.endBracket(b, done.uses)
		if before != nil {
			<-before
		}
		close(ended)
	})
	return s.reply(h.id, nil)
}

// takeBracket marks a bracket as ended and returns it; the caller must end it. nil if there is no such bracket.
func (s *session) takeBracket(id bracketID) *openBracket {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.brackets[id]
	delete(s.brackets, id)
	if b != nil {
		b.ended = true
	}
	return b
}

// endBracket ends a bracket that was taken. uses is how often the client says it used the bracket without asking.
func (s *session) endBracket(b *openBracket, uses uint32) {
	s.mu.Lock()
	b.ended = true
	got, cancel := b.bracket, b.cancel
	s.mu.Unlock()
	if cancel == nil {
		return // the request will find that its bracket is over
	}
	cancel()
	if got != nil {
		if s.Counts() {
			got.Used(uses)
		}
		got.Done()
	}
	s.dropMapping()
}

// endBrackets ends the brackets that the client left open.
func (s *session) endBrackets() {
	s.mu.Lock()
	left := s.brackets
	s.brackets = nil
	s.mu.Unlock()
	for _, b := range left {
		s.endBracket(b, 0)
	}
}

// movingClient sends the MOVEs of a mapping to its client.
type movingClient struct {
	session *session
	mapping atomic.Uint64 // the mappingID, once the client knows it
}

func (c *movingClient) service() *service {
	c.session.mu.Lock()
	defer c.session.mu.Unlock()
	return c.session.service
}

func (c *movingClient) Attends() bool { return c.session.attends() }

// tiers maps the page cache's tiers to the wire's.
var tiers = map[pagecache.Tier]tier{
	pagecache.TierNone: tierNone, pagecache.TierDevice: tierDevice, pagecache.TierHost: tierHost,
}

func (c *movingClient) Move(m pagecache.Move) (wait func(ctx context.Context) error, err error) {
	n := notice{typ: typeMove, file: m.Descriptor, body: move{
		mapping:  mappingID(c.mapping.Load()),
		extent:   extentPlace{m.Offset, m.Size, uint32(m.Kind), tiers[m.Tier], m.Generation},
		previous: m.Previous,
	}.append}
	v := c.service()
	if v == nil {
		n.close()
		return nil, errServiceEnded
	}
	began := time.Now()
	answered, err := v.ask(n)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		a, err := answered(ctx)
		if err == nil {
			c.session.showMove(m.Offset, m.Size, m.Tier, began)
		}
		if err == nil && a.errno != 0 {
			err = failure(syscall.Errno(a.errno), "the process could not map memory that was granted to it: %v",
				syscall.Errno(a.errno))
		}
		return err
	}, nil
}
