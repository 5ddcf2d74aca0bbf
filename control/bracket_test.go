package control_test

import (
	"encoding/binary"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/control/controltest"
	"github.com/gaiafs/gaiafs/pagecache"
	"github.com/gaiafs/gaiafs/pagecache/live"
)

// Types of frames about memory that moves.
const (
	useRanges = 40
	doneWith  = 41
	checked   = 0x4001
	moved     = 0x4002
	recall    = 0x4005
)

// What clients with memory that moves choose: the features SERVICE, LARGE and MOVE; KEEP; and USES.
const (
	moves  = uint64(7)
	keeps  = uint64(1) << 8
	counts = uint64(1) << 9
)

// block is the size of the extents of these tests.
const block = controltest.MovingExtent

// movingServer is a server over a page cache that has one device of two extents, and a file of four extents.
type movingServer struct {
	*server
	cache *pagecache.Cache
}

func startMoving(t *testing.T) *movingServer { return startMovingWith(t, control.Options{}) }

func startMovingWith(t *testing.T, o control.Options) *movingServer {
	t.Helper()
	cache := controltest.NewMovingCache(t, 2, 0)
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, make([]byte, 4*block), 0o600))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	src, err := controltest.NewFile(f)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, src.Close()) })
	o.Socket, o.Cache = filepath.Join(t.TempDir(), "s"), control.ForCache(cache)
	s, err := control.Listen(o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return &movingServer{&server{Server: s, t: t, file: src}, cache}
}

// movingPeer is a client with a movable mapping of the file.
type movingPeer struct {
	*client
	service *client
	mapping uint64
	key     [16]byte
}

func (s *movingServer) peer() *movingPeer { return s.peerThat(moves) }

func (s *movingServer) peerThat(chooses uint64) *movingPeer {
	s.t.Helper()
	c, key := s.connect2()
	require.Zero(s.t, c.call(frame(choose, 1, chooses, uint64(0))).errno())
	service, _ := s.connect2()
	require.Zero(s.t, service.call(frame(attach, 1, key)).errno())
	service.answerCheck()
	c.send(frame(mapFile, 1, s.token(), uint32(0), uint32(3), uint32(4), uint32(0), int64(0), int64(4*block),
		[16]byte{}))
	r := c.read()
	require.Equal(s.t, uint16(mapped), r.typ)
	require.Zero(s.t, r.flags, "no extents follow")
	require.Equal(s.t, []byte{0, 0, 0, 0, 1, 0, 0, 0}, r.body[24:32], "no extents, and movable")
	return &movingPeer{c, service, r.mapping(), key}
}

func (p *movingPeer) asks(id, bracket uint64, patience uint32, from, n int64) {
	p.send(frame(useRanges, id, bracket, uint32(0), patience, uint32(1), uint32(24), p.mapping, from*block, n*block))
}

// notice returns the next notice. On a busy machine a CHECK may come in between; notice answers it.
func (p *movingPeer) notice() reply {
	p.t.Helper()
	r := p.service.read()
	for r.typ == checked {
		p.service.send(frame(answer, r.id, uint32(0), uint32(0), uint64(0)))
		r = p.service.read()
	}
	return r
}

// moves answers n MOVEs, and returns which of them brought memory.
func (p *movingPeer) moves(n int) (memory []bool) {
	p.t.Helper()
	for len(memory) < n {
		r := p.notice()
		require.Equal(p.t, uint16(moved), r.typ)
		require.Equal(p.t, p.mapping, binary.LittleEndian.Uint64(r.body))
		tier := binary.LittleEndian.Uint32(r.body[44:])
		require.Equal(p.t, tier != 3, r.fds == 1)
		memory = append(memory, r.fds == 1)
		p.service.send(frame(answer, r.id, uint32(0), uint32(0), binary.LittleEndian.Uint64(r.body[32:])))
	}
	return memory
}

func (p *movingPeer) result(id uint64) reply {
	p.t.Helper()
	r := p.read()
	require.Equal(p.t, uint16(result), r.typ)
	require.Equal(p.t, id, r.id)
	return r
}

// TestBrackets: two clients take turns with a device, which each of them fills.
func TestBrackets(t *testing.T) {
	s := startMoving(t)
	a, b := s.peer(), s.peer()
	a.asks(2, 1, 0, 0, 2)
	require.Equal(t, []bool{true, true}, a.moves(2))
	require.Zero(t, a.result(2).errno())
	b.asks(2, 1, 1, 2, 2)
	r := b.result(2)
	require.Equal(t, syscall.ETIMEDOUT, r.errno())
	require.Contains(t, r.text(), "holds 128 KiB")
	b.asks(3, 1, 0, 2, 2)
	require.Zero(t, a.call(frame(doneWith, 3, uint64(1))).errno())
	require.Equal(t, []bool{false, false}, a.moves(2))
	require.Equal(t, []bool{true, true}, b.moves(2))
	require.Zero(t, b.result(3).errno())
	b.asks(4, 2, 0, 2, 1)
	require.Zero(t, b.result(4).errno(), "it has the memory, so no MOVE comes")
	require.Zero(t, b.call(frame(doneWith, 5, uint64(2))).errno())
	require.Equal(t, syscall.EINVAL, b.call(frame(doneWith, 6, uint64(2))).errno(), "twice")
	b.asks(7, 1, 0, 2, 1)
	require.Equal(t, syscall.EINVAL, b.result(7).errno(), "the bracket is open")
	b.asks(8, 3, 0, 3, 2)
	require.Equal(t, syscall.EINVAL, b.result(8).errno(), "past the mapping")
	b.asks(9, 3, 0, 0, 4)
	r = b.result(9)
	require.Equal(t, syscall.ENOMEM, r.errno())
	require.Contains(t, r.text(), "needs 256 KiB on device 0, whose budget is 128 KiB")
}

// TestKilledInBracket kills a client in a bracket, and one that is asked to give memory back.
func TestKilledInBracket(t *testing.T) {
	s := startMoving(t)
	a, b := s.peer(), s.peer()
	a.asks(2, 1, 0, 0, 2)
	a.moves(2)
	require.Zero(t, a.result(2).errno())
	b.asks(2, 1, 0, 2, 2)
	a.close()
	a.service.close()
	require.Equal(t, []bool{true, true}, b.moves(2))
	require.Zero(t, b.result(2).errno())
	require.Zero(t, b.call(frame(doneWith, 3, uint64(1))).errno())
	c := s.peer()
	c.asks(2, 1, 0, 0, 2)
	require.Equal(t, uint16(moved), b.service.read().typ) // and it does not answer
	b.close()
	b.service.close()
	require.Equal(t, []bool{true, true}, c.moves(2))
	require.Zero(t, c.result(2).errno())
	c.close()
	s.waitSessions(0)
	require.Eventually(t, func() bool { return s.cache.Status().Devices[0].Brackets == 0 }, time.Minute,
		time.Millisecond)
}

// keeps begins a bracket over a block that its client wants to keep, and reports whether it may.
func (p *movingPeer) keeps(id, bracket uint64, at int64) bool {
	p.t.Helper()
	p.send(frame(useRanges, id, bracket, uint32(2), uint32(0), uint32(1), uint32(24), p.mapping, at*block,
		int64(block)))
	p.moves(1)
	r := p.read()
	require.Equal(p.t, uint16(numbered), r.typ)
	return binary.LittleEndian.Uint64(r.body) == 1
}

// recalled answers a RECALL with a number of brackets and what follows it.
func (p *movingPeer) recalled(says uint64, rest ...any) {
	p.t.Helper()
	r := p.notice()
	require.Equal(p.t, uint16(recall), r.typ)
	p.service.send(frame(answer, r.id, append([]any{uint32(0), uint32(0), says}, rest...)...))
}

// TestUsesCount: under the rule lfu, an extent that a kept bracket used more often stays, whether its client says so in
// its answer to a RECALL or in a DONE. What a client says without having chosen to is ignored.
func TestUsesCount(t *testing.T) {
	const others = uint32(3)
	for _, c := range []struct {
		name    string
		chooses uint64
		answers []any // to the RECALL, after the number of brackets; nil: DONE came before
		done    []any
		leaves  int64 // which block
	}{
		{"answer", moves | keeps | counts, []any{uint64(1), others}, nil, 1},
		{"answer without uses", moves | keeps | counts, []any{uint64(1)}, nil, 0},
		{"answer with a part of the uses", moves | keeps | counts, []any{uint64(1), uint16(3)}, nil, 0},
		{"answer that was not chosen", moves | keeps, []any{uint64(1), others}, nil, 0},
		{"done", moves | keeps | counts, nil, []any{uint64(1), others, uint32(0)}, 1},
		{"done without uses", moves | keeps | counts, nil, []any{uint64(1)}, 0},
		{"done that was not chosen", moves | keeps, nil, []any{uint64(1), others, uint32(0)}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := startMoving(t)
			a, b := s.peerThat(c.chooses), s.peer()
			require.True(t, a.keeps(2, 1, 0), "allowed by the default rule")
			require.NoError(t, s.cache.SetEviction("lfu")) // forgets that use
			a.asks(3, 2, 0, 1, 1)
			a.moves(1)
			require.Zero(t, a.result(3).errno())
			require.Zero(t, a.call(frame(doneWith, 4, uint64(2))).errno())
			if c.done != nil {
				require.Zero(t, a.call(frame(doneWith, 5, c.done...)).errno())
			}
			b.asks(2, 1, 0, 2, 1)
			if c.answers != nil {
				a.recalled(1, c.answers...)
			}
			r := a.notice()
			require.Equal(t, uint16(moved), r.typ)
			require.EqualValues(t, c.leaves*block, binary.LittleEndian.Uint64(r.body[8:]), "the extent that leaves")
			a.service.send(frame(answer, r.id, uint32(0), uint32(0), binary.LittleEndian.Uint64(r.body[32:])))
			b.moves(1)
			require.Zero(t, b.result(2).errno())
		})
	}
}

// TestWhoMayKeep: under the rule lfu, only a client that chose to count its uses may keep a bracket.
func TestWhoMayKeep(t *testing.T) {
	s := startMoving(t)
	require.NoError(t, s.cache.SetEviction("lfu"))
	require.False(t, s.peerThat(moves|keeps).keeps(2, 1, 0))
	require.True(t, s.peerThat(moves|keeps|counts).keeps(2, 1, 0))
}

// TestDoneBeforeGrant ends a bracket that waits.
func TestDoneBeforeGrant(t *testing.T) {
	s := startMoving(t)
	a, b := s.peer(), s.peer()
	a.asks(2, 1, 0, 0, 2)
	a.moves(2)
	require.Zero(t, a.result(2).errno())
	b.asks(2, 1, 0, 2, 2)
	require.Eventually(t, func() bool { return s.cache.Status().Devices[0].BracketsWaiting == 1 }, time.Minute,
		time.Millisecond)
	b.send(frame(doneWith, 3, uint64(1)))
	got := map[uint64]syscall.Errno{}
	for range 2 {
		r := b.read()
		got[r.id] = r.errno()
	}
	require.Equal(t, map[uint64]syscall.Errno{2: syscall.ECANCELED, 3: 0}, got)
	require.Zero(t, s.cache.Status().Devices[0].BracketsWaiting)
}

// TestDoneRightBehind ends brackets before the daemon has begun them. Nothing stays pinned.
func TestDoneRightBehind(t *testing.T) {
	s := startMoving(t)
	a, b := s.peer(), s.peer()
	a.asks(2, 1, 0, 0, 2)
	a.moves(2)
	require.Zero(t, a.result(2).errno())
	a.send(frame(doneWith, 3, uint64(1)))
	require.Zero(t, a.result(3).errno())
	for i := range uint64(200) {
		a.asks(10, 100+i, 0, 0, 1) // which it has already
		a.send(frame(doneWith, 11, 100+i))
		for range 2 {
			r := a.read()
			require.Contains(t, []syscall.Errno{0, syscall.ECANCELED}, syscall.Errno(r.errno()), "of request %d", r.id)
			require.False(t, r.id == 11 && r.errno() != 0)
		}
	}
	b.asks(2, 1, 0, 2, 2)
	a.moves(2)
	b.moves(2)
	require.Zero(t, b.result(2).errno())
}

// TestUsesRightBehind: a DONE says how often its client used a bracket, and comes while the bracket is being granted.
// The race detector notices if its uses are counted while its memory is given back.
func TestUsesRightBehind(t *testing.T) {
	const within = 200 * time.Microsecond // more than the daemon needs to grant memory that is there
	s := startMoving(t)
	a := s.peerThat(moves | keeps | counts)
	require.True(t, a.keeps(2, 1, 0))
	for i := range uint64(5000) {
		a.send(frame(useRanges, 10, 100+i, uint32(2), uint32(0), uint32(1), uint32(24), a.mapping, int64(0),
			int64(block)))
		for end := time.Now().Add(rand.N(within)); time.Now().Before(end); {
			continue
		}
		a.send(frame(doneWith, 11, 100+i, uint32(1), uint32(0)))
		a.read()
		a.read()
	}
}

// TestUseBehindDone: the next USE can use what a DONE has freed, without waiting for the DONE's answer.
func TestUseBehindDone(t *testing.T) {
	var o control.Options
	o.SetEndPatience(time.Minute) // no file hangs, however busy the machine is
	s := startMovingWith(t, o)
	a := s.peer()
	for i := range uint64(300) {
		part := int64(i%2) * 2
		a.send(frame(useRanges, 10, i, uint32(1), uint32(0), uint32(1), uint32(24), a.mapping, part*block,
			int64(2*block))) // nested, so it does not wait for memory
		if i > 0 {
			require.Zero(t, a.result(11).errno())
			require.Equal(t, []bool{false, false}, a.moves(2))
		}
		require.Equal(t, []bool{true, true}, a.moves(2))
		require.Zero(t, a.result(10).errno())
		a.send(frame(doneWith, 11, i))
	}
}

// TestUsesBehindOneThatHangs: if the end of a bracket hangs with its file, later brackets do not wait for it again and
// again.
func TestUsesBehindOneThatHangs(t *testing.T) {
	const uses = 200
	hangs := make(chan struct{})
	var ends atomic.Int64
	s := start(t, &controltest.Cache{DoneGate: func() {
		if ends.Add(1) == 1 {
			<-hangs
		}
	}})
	defer close(hangs)
	c, _ := s.connect2()
	require.Zero(t, c.call(frame(choose, 1, uint64(7), uint64(0))).errno())
	m := c.mapOne(s)
	began := time.Now()
	for id := range uint64(uses) {
		c.send(frame(useRanges, 10, id, uint32(0), uint32(0), uint32(1), uint32(24), m, int64(0), int64(4096)))
		r := c.read()
		require.Zero(t, r.errno())
		require.Zero(t, c.call(frame(doneWith, 11, id)).errno())
	}
	require.Less(t, time.Since(began), 10*time.Second, "each waited a tenth of a second")
}

// TestMovesAreShown: watchers see MOVEs.
func TestMovesAreShown(t *testing.T) {
	var feed live.Feed
	s := startMovingWith(t, control.Options{Live: &feed})
	w := feed.Watch(live.Filter{Kinds: []string{"move"}})
	defer w.Stop()
	a := s.peer()
	a.asks(2, 1, 0, 1, 1)
	a.moves(1)
	require.Zero(t, a.result(2).errno())
	e := w.Next(t.Context())
	require.Len(t, e, 1)
	require.EqualValues(t, block, e[0].Offset)
	require.EqualValues(t, block, e[0].Bytes)
	require.Equal(t, "to the device", e[0].Detail)
	require.EqualValues(t, os.Getpid(), e[0].Process)
}

// TestClosedServiceConnectionIsCharged: memory of ended brackets cannot be taken back from a client without a service
// connection. It stays on its user's account until the client has a service connection again and answers there.
func TestClosedServiceConnectionIsCharged(t *testing.T) {
	s := startMoving(t)
	p, q := s.peer(), s.peer()
	for at := range int64(2) {
		id := uint64(10 + 2*at)
		p.asks(id, uint64(at+1), 0, at, 1)
		p.moves(1)
		require.Zero(t, p.result(id).errno())
		require.Zero(t, p.call(frame(doneWith, id+1, uint64(at+1))).errno())
	}
	charged := func() (bytes int64) {
		for _, u := range s.cache.Status().Devices[0].Users {
			bytes += u.Bytes
		}
		return bytes
	}
	require.Eventually(t, func() bool { return charged() == 0 }, time.Minute, time.Millisecond)
	p.service.close()
	require.Eventually(t, func() bool { return s.Stats().Attentive == 1 }, time.Minute, time.Millisecond)

	q.asks(10, 1, 1, 2, 1)
	require.Equal(t, syscall.ETIMEDOUT, q.result(10).errno())
	require.EqualValues(t, 2*block, charged())

	p.service, _ = s.connect2()
	require.Zero(t, p.service.call(frame(attach, 1, p.key)).errno())
	p.service.answerCheck()
	require.Eventually(t, func() bool { return charged() == 0 }, time.Minute, time.Millisecond)
	q.asks(11, 2, 60000, 2, 1)
	require.Equal(t, []bool{false}, p.moves(1), "the memory is taken back")
	require.Equal(t, []bool{true}, q.moves(1))
	require.Zero(t, q.result(11).errno())
}

// TestUnmapCrossesMove unmaps while the client is asked to give memory back. The missing mapping counts as the answer.
func TestUnmapCrossesMove(t *testing.T) {
	s := startMoving(t)
	a, b := s.peer(), s.peer()
	a.asks(2, 1, 0, 0, 1)
	a.moves(1)
	require.Zero(t, a.result(2).errno())
	require.Zero(t, a.call(frame(doneWith, 3, uint64(1))).errno())
	b.asks(2, 1, 0, 2, 2)
	r := a.service.read()
	require.Equal(t, uint16(moved), r.typ)
	a.send(frame(unmap, 4, a.mapping))
	a.service.send(frame(answer, r.id, uint32(syscall.ENOENT), uint32(0), uint64(0)))
	require.Zero(t, a.result(4).errno())
	require.Equal(t, []bool{true, true}, b.moves(2))
	require.Zero(t, b.result(2).errno())
}

// TestMoveIsChosen: a client that did not choose memory that moves is refused.
func TestMoveIsChosen(t *testing.T) {
	s := startMoving(t)
	c, _ := s.connectAll()
	movable := frame(mapFile, 2, s.token(), uint32(0), uint32(3), uint32(4), uint32(0), int64(0), int64(block),
		[16]byte{})
	require.Equal(t, syscall.EOPNOTSUPP, c.call(movable).errno())
	require.Equal(t, syscall.EOPNOTSUPP, c.call(frame(useRanges, 3, uint64(1), uint64(0), uint64(0))).errno())
}

// TestBracketsAreCounted: a client that opens brackets and closes none is refused before it exhausts the daemon's
// memory.
func TestBracketsAreCounted(t *testing.T) {
	s := startMovingWith(t, control.Options{MaxMappings: 8})
	a := s.peer()
	a.asks(2, 1, 0, 0, 1)
	a.moves(1)
	require.Zero(t, a.result(2).errno())
	for id := range uint64(6) {
		a.asks(3, 2+id, 0, 0, 1)
		require.Zero(t, a.result(3).errno())
	}
	a.asks(4, 9, 0, 0, 1)
	r := a.result(4)
	require.Equal(t, syscall.ENOMEM, r.errno())
	require.Contains(t, r.text(), "already has 8 mappings and open brackets")
	a.asks(4, 1, 0, 0, 1)
	require.Equal(t, syscall.EINVAL, a.result(4).errno(), "the bracket is open")
	require.Zero(t, a.call(frame(doneWith, 5, uint64(1))).errno())
	a.asks(6, 9, 0, 0, 5)
	require.Equal(t, syscall.EINVAL, a.result(6).errno(), "past the mapping")
	a.asks(6, 9, 0, 0, 1)
	require.Zero(t, a.result(6).errno(), "a failed bracket does not count")
}

// TestUsesThatAreRefused: a USE that is refused leaves nothing behind. It ends no bracket whose USE had the same id.
func TestUsesThatAreRefused(t *testing.T) {
	o := control.Options{MaxMappings: 4}
	ordinary(&o)
	s := startMovingWith(t, o)
	a := s.peer()
	a.asks(2, 1, 0, 0, 1)
	a.moves(1)
	require.Zero(t, a.result(2).errno())
	for i := range 2 * o.MaxMappings {
		id := uint64(2 + i%2) // that of the open bracket, and another
		a.send(frame(useRanges, id, uint64(2), uint32(1<<20), uint32(0), uint32(1), uint32(24), a.mapping, int64(0),
			int64(block)))
		require.Equal(t, syscall.EINVAL, a.result(id).errno(), "an unknown flag")
		a.asks(2, 2, 0, 3, 2)
		require.Equal(t, syscall.EINVAL, a.result(2).errno(), "past the mapping")
	}
	a.asks(2, 2, 0, 0, 1)
	require.Zero(t, a.result(2).errno())
	for bracket := range uint64(2) {
		require.Zero(t, a.call(frame(doneWith, 3, bracket+1)).errno())
	}
}

// TestUseBeyondTheLimitOfRequests: a USE that finds too many requests can be sent again.
func TestUseBeyondTheLimitOfRequests(t *testing.T) {
	s := startMovingWith(t, control.Options{MaxRequests: 1})
	a, b := s.peer(), s.peer()
	a.asks(2, 1, 0, 0, 2)
	a.moves(2)
	require.Zero(t, a.result(2).errno())
	b.asks(2, 1, 0, 2, 1) // waits
	b.asks(3, 2, 0, 3, 1)
	require.Equal(t, syscall.EAGAIN, b.result(3).errno())
	require.Zero(t, a.call(frame(doneWith, 3, uint64(1))).errno())
	a.moves(1)
	b.moves(1)
	require.Zero(t, b.result(2).errno())
	b.asks(4, 2, 0, 2, 1)
	require.Zero(t, b.result(4).errno())
}

// TestUseBehindSeveralDones: a bracket follows all brackets that its client was done with, not only the last one.
func TestUseBehindSeveralDones(t *testing.T) {
	hangs := make(chan struct{})
	var ends atomic.Int64
	s := start(t, &controltest.Cache{DoneGate: func() {
		if ends.Add(1) == 1 {
			<-hangs
		}
	}}, func(o *control.Options) { o.SetEndPatience(time.Minute) })
	c, _ := s.connect2()
	require.Zero(t, c.call(frame(choose, 1, uint64(7), uint64(0))).errno())
	m := c.mapOne(s)
	use := func(id uint64) {
		c.send(frame(useRanges, 10, id, uint32(0), uint32(0), uint32(1), uint32(24), m, int64(0), int64(4096)))
	}
	for id := range uint64(2) {
		use(id)
		require.Zero(t, c.read().errno())
	}
	require.Zero(t, c.call(frame(doneWith, 11, uint64(0))).errno())
	require.Eventually(t, func() bool { return ends.Load() == 1 }, time.Minute, time.Millisecond)
	require.Zero(t, c.call(frame(doneWith, 11, uint64(1))).errno())
	use(2)
	for id := range uint64(100) {
		require.Zero(t, c.call(frame(ping, 20+id)).errno(), "the answer to the USE would come in between")
	}
	close(hangs)
	r := c.read()
	require.EqualValues(t, 10, r.id)
	require.Zero(t, r.errno())
}

// TestKeepsLeaveRoom: a client keeps brackets while it has less than half of the mappings and brackets that it may
// have.
func TestKeepsLeaveRoom(t *testing.T) {
	s := startMovingWith(t, control.Options{MaxMappings: 8})
	a := s.peerThat(moves | keeps)
	require.True(t, a.keeps(2, 1, 0))
	for id := uint64(2); id < 6; id++ {
		a.send(frame(useRanges, 2, id, uint32(2), uint32(0), uint32(1), uint32(24), a.mapping, int64(0), int64(block)))
		r := a.read()
		require.Equal(t, uint16(numbered), r.typ)
		require.Equal(t, id < 3, binary.LittleEndian.Uint64(r.body) == 1, "bracket %d", id) // and a mapping
	}
}

// TestRecallOfManyBrackets: a client that ended more brackets than fit into an answer is asked for the rest at once.
func TestRecallOfManyBrackets(t *testing.T) {
	const most = 256 // in one answer
	s := startMovingWith(t, control.Options{MaxMappings: 4 * most})
	a, b := s.peerThat(moves|keeps), s.peer()
	require.True(t, a.keeps(2, 0, 0))
	require.True(t, a.keeps(2, most, 1))
	first := []any{uint64(0)}
	for id := uint64(1); id < most; id++ {
		first = append(first, id)
		a.send(frame(useRanges, 2, id, uint32(2), uint32(0), uint32(1), uint32(24), a.mapping, int64(0), int64(block)))
		r := a.read()
		require.Equal(t, uint16(numbered), r.typ)
		require.EqualValues(t, 1, binary.LittleEndian.Uint64(r.body), "kept")
	}
	b.send(frame(useRanges, 2, uint64(1), uint32(1), uint32(0), uint32(1), uint32(24), b.mapping, int64(2*block),
		int64(2*block))) // nested, so it asks only once
	a.recalled(most, first...)
	a.recalled(1, uint64(most))
	require.Equal(t, []bool{false, false}, a.moves(2))
	require.Equal(t, []bool{true, true}, b.moves(2))
	require.Zero(t, b.result(2).errno())
}

// TestKilledInEveryState kills 200 clients in every state of brackets, MOVEs and groups; some wait for others. Nothing
// of them is left.
func TestKilledInEveryState(t *testing.T) {
	s := startMoving(t)
	rnd := rand.New(rand.NewPCG(13, 200))
	for range 25 {
		var all []*movingPeer
		for range 8 {
			all = append(all, s.peer())
		}
		for _, p := range all {
			p.getsInto(rnd)
		}
		rnd.Shuffle(len(all), func(i, k int) { all[i], all[k] = all[k], all[i] })
		for _, p := range all {
			if rnd.IntN(2) == 0 {
				p.service.close()
			}
			p.close()
			p.service.close()
		}
		s.waitSessions(0)
	}
	d := s.cache.Status().Devices[0]
	require.Zero(t, d.Brackets+d.BracketsWaiting)
	require.Zero(t, d.MappedBytes)
	a := s.peer()
	a.asks(2, 1, 0, 0, 2)
	require.Equal(t, []bool{true, true}, a.moves(2), "the whole device is available")
	require.Zero(t, a.result(2).errno())
}

// getsInto puts the client into a state, without waiting for anything that others may hold up.
func (p *movingPeer) getsInto(rnd *rand.Rand) {
	p.asks(2, 1, 0, int64(rnd.IntN(3)), 1+int64(rnd.IntN(2)))
	switch rnd.IntN(6) {
	case 0: // it asks, and reads nothing
	case 1: // it reads a MOVE, and does not answer
		p.hears()
	case 2: // it answers a MOVE, and then says nothing more
		p.follows()
	case 3: // it ends its bracket before it learns that the bracket was granted
		p.send(frame(doneWith, 3, uint64(1)))
	case 4: // it asks for a second bracket while it waits for the first
		p.follows()
		p.send(frame(useRanges, 4, uint64(2), uint32(1), uint32(0), uint32(1), uint32(24), p.mapping, int64(0),
			int64(block)))
	case 5: // it unmaps the mapping of a MOVE
		p.hears()
		p.send(frame(unmap, 5, p.mapping))
	}
}

// hears waits for a MOVE, but not for long, because others may have the memory.
func (p *movingPeer) hears() (r reply, ok bool) {
	_ = p.service.conn.SetReadDeadline(time.Now().Add(5 * time.Millisecond))
	r, err := p.service.next()
	return r, err == nil && r.typ == moved
}

func (p *movingPeer) follows() {
	if r, ok := p.hears(); ok {
		p.service.send(frame(answer, r.id, uint32(0), uint32(0), binary.LittleEndian.Uint64(r.body[32:])))
	}
}
