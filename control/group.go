package control

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/pagecache"
)

const (
	// groupRangeSize is the least size of a range of a group. The request states its size, so that later versions can
	// add fields.
	groupRangeSize = 24
	// maxGroups bounds the open groups of a session, maxWaiting the requests of a user that wait for a version.
	maxGroups  = 64
	maxWaiting = 256
	// longestWait is how long one request waits for a version. To wait longer, a client asks again.
	longestWait = time.Second
)

// groupID names a group within one session.
type groupID uint64

// groupRange is a range of a mapping. off counts from the mapping's start.
type groupRange struct {
	mapping  mappingID
	off, len int64
}

// acquireAllRequest is the body of ACQUIREALL.
type acquireAllRequest struct {
	least   uint64 // version; 0: any
	timeout time.Duration
	flags   uint32
	ranges  []groupRange
}

// decodeGroupRanges decodes a list of ranges: their number, the bytes of each, and the ranges.
func decodeGroupRanges(body []byte) (list []groupRange, err error) {
	le := binary.LittleEndian
	if len(body) < 8 {
		return nil, fmt.Errorf("body has %d bytes before its ranges", len(body))
	}
	n, size := uint64(le.Uint32(body)), uint64(le.Uint32(body[4:]))
	if n > pagecache.MaxGroupRanges { // the page cache refuses it
		return make([]groupRange, pagecache.MaxGroupRanges+1), nil
	}
	if body = body[8:]; size < groupRangeSize || uint64(len(body)) < n*size {
		return nil, fmt.Errorf("body has %d bytes for %d ranges of %d bytes", len(body), n, size)
	}
	list = make([]groupRange, n)
	for i := range list {
		b := body[uint64(i)*size:]
		list[i] = groupRange{mappingID(le.Uint64(b)), int64(le.Uint64(b[8:])), int64(le.Uint64(b[16:]))}
	}
	return list, nil
}

func decodeAcquireAll(body []byte) (r acquireAllRequest, err error) {
	if len(body) < 16 {
		return r, fmt.Errorf("body has %d bytes", len(body))
	}
	le := binary.LittleEndian
	r.least, r.flags = le.Uint64(body), le.Uint32(body[12:])
	r.timeout = min(time.Duration(le.Uint32(body[8:]))*time.Millisecond, longestWait)
	r.ranges, err = decodeGroupRanges(body[16:])
	return r, err
}

func (v version) decodeGroup(body []byte) (groupID, error) {
	if err := v.wantBody(body, 8); err != nil {
		return 0, err
	}
	return groupID(binary.LittleEndian.Uint64(body)), nil
}

// numbered is the body of NUMBERED: the number of a group or a version, and pages.
type numbered struct {
	number uint64
	pages  int64
}

func (n numbered) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, n.number)
	return binary.LittleEndian.AppendUint64(b, uint64(max(n.pages, 0)))
}

// parseGroup is parse for the requests of featureGroup.
func (s *session) parseGroup(h header, body []byte) (work func(requestID), err error) {
	if s.chosen&featureGroup == 0 {
		return func(id requestID) {
			s.finish(id, failure(syscall.EOPNOTSUPP, "groups were not chosen among the features"))
		}, nil
	}
	switch h.typ {
	case typeBeginGroup:
		ranges, err := decodeGroupRanges(body)
		return func(id requestID) { s.finishNumbered(id)(s.serveBeginGroup(ranges)) }, err
	case typeAcquireAll:
		r, err := decodeAcquireAll(body)
		return func(id requestID) { s.finishNumbered(id)(s.serveAcquireAll(r)) }, err
	case typeReleaseGroup:
		g, err := s.version.decodeGroup(body)
		return func(id requestID) { s.finishNumbered(id)(s.serveReleaseGroup(g)) }, err
	}
	g, err := s.version.decodeGroup(body)
	return func(id requestID) { s.finish(id, s.serveAbortGroup(g)) }, err
}

// finishNumbered is finish for a request that NUMBERED answers.
func (s *session) finishNumbered(id requestID) func(n numbered, err error) {
	return func(n numbered, err error) {
		if err != nil {
			s.finish(id, err)
			return
		}
		s.forget(id)
		_ = s.send(appendFrame(nil, typeNumbered, 0, id, n.append), nil)
	}
}

// useAll holds the mappings of ranges until done is called, and returns the ranges as the page cache knows them.
func (s *session) useAll(list []groupRange) (ranges []Range, done func(), err error) {
	if len(list) == 0 || len(list) > pagecache.MaxGroupRanges {
		return nil, nil, failure(syscall.EINVAL, "a request of %d ranges; it has 1 to %d", len(list),
			pagecache.MaxGroupRanges)
	}
	used := make(map[mappingID]*openMap)
	ranges = make([]Range, 0, len(list))
	done = func() {
		for _, m := range used {
			m.users.Done()
		}
	}
	for _, r := range list {
		m := used[r.mapping]
		if m == nil {
			var ok bool
			if m, ok = s.use(r.mapping); !ok {
				done()
				return nil, nil, failure(syscall.EINVAL, "mapping %d does not exist", r.mapping)
			}
			used[r.mapping] = m
		}
		off, n, ok := m.clip(r.off, r.len)
		if !ok {
			done()
			return nil, nil, failure(syscall.EINVAL, "%d bytes at %d are not within the %d of mapping %d",
				uint64(r.len), uint64(r.off),
				m.length, r.mapping)
		}
		ranges = append(ranges, Range{m.Mapping, off, n})
	}
	return ranges, done, nil
}

func (s *session) serveBeginGroup(list []groupRange) (numbered, error) {
	ranges, done, err := s.useAll(list)
	if err != nil {
		return numbered{}, err
	}
	defer done()
	s.mu.Lock()
	full := len(s.groups) >= maxGroups
	s.mu.Unlock()
	if full {
		return numbered{}, failure(syscall.ENOMEM, "this process already has %d open groups", maxGroups)
	}
	g, err := s.server.opts.Cache.BeginGroup(s.ctx, ranges)
	if err != nil {
		return numbered{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.groups == nil {
		s.groups = make(map[groupID]Group)
	}
	s.lastGroup++
	s.groups[s.lastGroup] = g
	return numbered{number: uint64(s.lastGroup)}, nil
}

// group returns a group of the session.
func (s *session) group(id groupID) (Group, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.groups[id]
	if g == nil {
		return nil, failure(syscall.EINVAL, "group %d is not open", id)
	}
	return g, nil
}

func (s *session) dropGroup(id groupID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.groups, id)
}

func (s *session) serveReleaseGroup(id groupID) (numbered, error) {
	g, err := s.group(id)
	if err != nil {
		return numbered{}, err
	}
	version, pages, err := g.Release(s.ctx)
	if version != 0 || errors.Is(err, syscall.ECANCELED) {
		s.dropGroup(id)
	}
	return numbered{version, pages}, err
}

func (s *session) serveAbortGroup(id groupID) error {
	g, err := s.group(id)
	if err == nil {
		g.Abort(context.WithoutCancel(s.ctx))
		s.dropGroup(id)
	}
	return err
}

func (s *session) serveAcquireAll(r acquireAllRequest) (numbered, error) {
	if r.flags&^acquireLaunder != 0 {
		return numbered{}, failure(syscall.EINVAL, "flags %#x of an acquire are not known", r.flags)
	}
	ranges, done, err := s.useAll(r.ranges)
	if err != nil {
		return numbered{}, err
	}
	defer done()
	if r.least > 0 {
		if err := s.awaitVersion(onePerMapping(ranges), r.least, r.timeout); err != nil {
			return numbered{}, err
		}
	}
	version, pages, err := s.server.opts.Cache.AcquireAll(s.ctx, ranges, r.flags&acquireLaunder != 0)
	return numbered{version, pages}, err
}

// onePerMapping returns the first range of each mapping. A long wait keeps no more of a request.
func onePerMapping(ranges []Range) (first []Range) {
	seen := make(map[Mapping]bool)
	for _, r := range ranges {
		if !seen[r.Of] {
			seen[r.Of] = true
			first = append(first, r)
		}
	}
	return first
}

// awaitVersion waits until the files of ranges have a version. It counts as one of the user's maxWaiting requests.
func (s *session) awaitVersion(ranges []Range, least uint64, timeout time.Duration) error {
	s.server.mu.Lock()
	full := s.user.waiting >= maxWaiting
	if !full {
		s.user.waiting++
	}
	s.server.mu.Unlock()
	if full {
		return failure(syscall.EAGAIN, "%d requests of this user already wait for a version", maxWaiting)
	}
	defer func() {
		s.server.mu.Lock()
		defer s.server.mu.Unlock()
		s.user.waiting--
	}()
	ctx, end := context.WithTimeout(s.ctx, timeout)
	defer end()
	err := s.server.opts.Cache.AwaitVersion(ctx, ranges, least)
	if errors.Is(err, context.DeadlineExceeded) {
		return failure(syscall.ETIMEDOUT, "version %d was not released in time", least)
	}
	return err
}
