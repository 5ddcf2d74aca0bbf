package control

import (
	"context"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/pagecache"
)

// Brackets: USE asks for the memory of what a launch uses, DONE gives it back. In between it stays where the client was
// told by MOVEs that it is.

// errNoMove says that a client did not choose the feature.
var errNoMove = failure(syscall.EOPNOTSUPP, "memory that moves was not chosen among the features")

// attachPatience is how long a bracket waits for the client's service connection, which the client makes in the
// background.
const attachPatience = 10 * time.Second

// openBracket is one of a session, or is going to be.
type openBracket struct {
	cancel context.CancelFunc
	// bracket is nil while it is asked for, ended says that DONE came meanwhile. Guarded by session.mu.
	bracket Bracket
	ended   bool
}

// serveUse begins a bracket.
func (s *session) serveUse(r useRequest) error {
	switch {
	case r.count == 0 || r.count > maxRanges:
		return failure(syscall.EINVAL, "a bracket of %d ranges; it has 1 to %d", r.count, maxRanges)
	case r.flags&^useNested != 0:
		return failure(syscall.EINVAL, "flags %#x of a bracket are not known", r.flags)
	}
	ctx, cancel := context.WithCancel(s.ctx)
	b := &openBracket{cancel: cancel}
	s.mu.Lock()
	_, twice := s.brackets[r.bracket]
	if !twice {
		s.brackets[r.bracket] = b
	}
	s.mu.Unlock()
	if twice {
		cancel()
		return failure(syscall.EINVAL, "bracket %d is open", r.bracket)
	}
	got, err := s.beginBracket(ctx, r)
	s.mu.Lock()
	ended := b.ended
	b.bracket = got
	if err != nil && s.brackets[r.bracket] == b {
		delete(s.brackets, r.bracket)
	}
	s.mu.Unlock()
	if ended && got != nil {
		got.Done()
	}
	if err != nil {
		cancel()
	}
	return err
}

// beginBracket finds the mappings of a bracket and asks the page cache for it.
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
			return nil, failure(syscall.EINVAL, "%d bytes at %d are not within the mapping's %d", uint64(rg.len), uint64(rg.off), m.length)
		}
		uses[i] = Use{m.Mapping, off, n}
		moves = moves || m.Movable()
	}
	if moves {
		if err := s.waitService(ctx); err != nil {
			return nil, err
		}
	}
	return s.server.opts.Cache.Use(ctx, uses, pagecache.UseOptions{
		Nested: r.flags&useNested != 0, Patience: time.Duration(r.patience) * time.Millisecond, Process: uint32(s.peer.Pid),
	})
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
		return failure(syscall.ENOTCONN, "the process has no service connection, on which it would be told where its memory is")
	}
}

// finishBracket serves DONE. It is the reader's, and counts in no limit.
func (s *session) finishBracket(h header, body []byte) error {
	s.mu.Lock()
	_, twice := s.running[h.id]
	s.mu.Unlock()
	if twice {
		return breach(h.id, "request id %d is still running", h.id)
	}
	id, err := s.version.decodeDone(body)
	if err != nil {
		return breach(h.id, "%v", err)
	}
	s.mu.Lock()
	b := s.brackets[id]
	delete(s.brackets, id)
	if b != nil {
		b.ended = true
	}
	s.mu.Unlock()
	if b == nil {
		return s.reply(h.id, 0, failure(syscall.EINVAL, "there is no bracket %d", id))
	}
	s.requests.Go(func() { s.endBracket(b) })
	return s.reply(h.id, 0, nil)
}

func (s *session) endBracket(b *openBracket) {
	s.mu.Lock()
	b.ended = true
	got := b.bracket
	s.mu.Unlock()
	b.cancel()
	if got != nil {
		got.Done()
	}
}

// endBrackets ends those that the client left.
func (s *session) endBrackets() {
	s.mu.Lock()
	left := s.brackets
	s.brackets = nil
	s.mu.Unlock()
	for _, b := range left {
		s.endBracket(b)
	}
}

// movingClient passes the MOVEs of a mapping on to its client.
type movingClient struct {
	session *session
	mapping atomic.Uint64 // its mappingID, once the client knows it
}

func (c *movingClient) service() *service {
	c.session.mu.Lock()
	defer c.session.mu.Unlock()
	return c.session.service
}

func (c *movingClient) Attends() bool { return c.session.attends() }

// tiers are those of the wire.
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
	answered, err := v.ask(n)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		a, err := answered(ctx)
		if err == nil && a.errno != 0 {
			err = failure(syscall.Errno(a.errno), "the process could not map memory that was granted to it: %v", syscall.Errno(a.errno))
		}
		return err
	}, nil
}
