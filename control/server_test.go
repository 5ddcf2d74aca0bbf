package control_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/control/controltest"
	"github.com/gaiafs/gaiafs/gpubackend"
)

func TestHandshake(t *testing.T) {
	s := start(t, &controltest.Cache{})
	c := s.dial()
	c.send(frame(hello, 9, uint32(0x41494147), uint16(0), uint16(1)))
	r := c.read()
	require.Equal(t, uint16(welcome), r.typ)
	require.Equal(t, uint64(9), r.id)
	require.Equal(t, []byte{1, 0, 0, 0, 128, 0, 0, 0, 0, 16, 0, 0, 128, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0}, r.body)
	require.Zero(t, c.call(frame(ping, 1)).errno())

	c = s.dial()
	c.send(frame(hello, 9, uint32(0x41494147), uint16(1), uint16(7)))
	r = c.read()
	require.Equal(t, uint16(welcome), r.typ)
	require.Equal(t, []byte{2, 0, 0, 0, 128, 0, 0, 0, 0, 16, 0, 0, 128, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0,
		63, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, r.body[:40])
	require.Len(t, r.body, 56)
	require.NotEqual(t, make([]byte, 16), r.body[40:], "a key")
	require.Zero(t, c.call(frame(ping, 1)).errno())
}

func TestHandshakesThatAreRefused(t *testing.T) {
	s := start(t, &controltest.Cache{})
	for name, c := range map[string]struct {
		first []byte
		want  syscall.Errno
	}{
		"future versions": {frame(hello, 1, uint32(0x41494147), uint16(3), uint16(9)), syscall.EPROTONOSUPPORT},
		"past versions":   {frame(hello, 1, uint32(0x41494147), uint16(0), uint16(0)), syscall.EPROTONOSUPPORT},
		"empty range":     {frame(hello, 1, uint32(0x41494147), uint16(2), uint16(1)), syscall.EPROTO},
		"other magic":     {frame(hello, 1, uint32(1), uint16(1), uint16(1)), syscall.EPROTO},
		"short":           {frame(hello, 1, uint32(0x41494147)), syscall.EPROTO},
		"not hello":       {frame(ping, 1), syscall.EPROTO},
		"garbage":         {[]byte("GET / HTTP/1.1\r\n\r\n"), syscall.EPROTO},
		"one byte":        {[]byte{1}, syscall.EPROTO},
	} {
		cl := s.dial()
		cl.send(c.first)
		last := cl.ended()
		require.Equal(t, uint16(failure), last.typ, name)
		require.Equal(t, c.want, last.errno(), name)
		require.NotEmpty(t, last.text(), name)
	}
	s.waitSessions(0)
}

func TestSilentClientIsDropped(t *testing.T) {
	s := start(t, &controltest.Cache{}, func(o *control.Options) { o.HandshakeTimeout = 20 * time.Millisecond })
	c := s.dial()
	last := c.ended()
	require.Equal(t, syscall.ETIMEDOUT, last.errno())
	s.waitSessions(0)
}

// TestSilentClientIsNotCounted: who only looks which process listens is no client.
func TestSilentClientIsNotCounted(t *testing.T) {
	s := start(t, &controltest.Cache{})
	c := s.dial()
	s.waitSessions(1)
	require.Zero(t, s.Stats().Sessions)
	c.send(helloFrame())
	c.read()
	require.Equal(t, 1, s.Stats().Sessions)
	c.close()
}

// A client that goes, killed or not, is not worth a warning, wherever its end is noticed.
func TestClientThatGoesAtOnce(t *testing.T) {
	s := start(t, &controltest.Cache{})
	for i := range 100 {
		c := s.dial()
		if i%2 == 0 {
			c.send(helloFrame())
			c.send(frame(ping, 1))
		}
		c.close()
	}
	s.connect().close() // accepted after them
	s.waitSessions(0)
	select {
	case said := <-s.logs.seen:
		t.Fatal(said)
	default:
	}
}

func TestMalformedFramesEndTheConnection(t *testing.T) {
	s := start(t, &controltest.Cache{})
	wrongLength := frame(ping, 1)
	wrongLength[0]++
	for name, b := range map[string][]byte{
		"short header":     make([]byte, 15),
		"wrong length":     wrongLength,
		"length 0":         make([]byte, 16),
		"too large":        frame(ping, 1, make([]byte, 4096)),
		"request id 0":     frame(ping, 0),
		"a reply":          frame(result, 1, make([]byte, 16)),
		"a second hello":   helloFrame(),
		"ping with a body": frame(ping, 1, byte(1)),
		"short map":        frame(mapFile, 1, make([]byte, 63)),
		"long map":         frame(mapFile, 1, make([]byte, 65)),
		"short range":      frame(acquire, 1, make([]byte, 31)),
		"short unmap":      frame(unmap, 1, make([]byte, 7)),
		"short status":     frame(status, 1, make([]byte, 15)),
		"short record":     frame(record, 1, make([]byte, 15)),
		"short stop":       frame(stop, 1, make([]byte, 7)),
	} {
		c := s.connect()
		c.send(b)
		last := c.ended()
		require.Equal(t, uint16(failure), last.typ, name)
		require.Equal(t, syscall.EPROTO, last.errno(), name)
	}
	s.waitSessions(0)
}

func TestDescriptorsInARequestEndTheConnection(t *testing.T) {
	s := start(t, &controltest.Cache{})
	c := s.connect()
	_, _, err := c.conn.WriteMsgUnix(frame(ping, 1), unix.UnixRights(0), nil)
	require.NoError(t, err)
	require.Equal(t, syscall.EPROTO, c.ended().errno())
}

func TestUnknownRequestIsAnswered(t *testing.T) {
	s := start(t, &controltest.Cache{})
	c := s.connect()
	require.Equal(t, syscall.ENOSYS, c.call(frame(77, 5, []byte("whatever"))).errno())
	require.Zero(t, c.call(frame(ping, 6)).errno())
}

// A UUID takes precedence over the device's number, and the reply has the number.
func TestDeviceByUUID(t *testing.T) {
	s := start(t, &controltest.Cache{Devices: 2, Kind: 2, UUIDs: []gpubackend.UUID{{1}, {15: 9}}})
	c := s.dial()
	c.send(helloFrame())
	require.Equal(t, byte(2), c.read().body[16], "the kinds of memory")
	for _, x := range []struct {
		number uint32
		uuid   [16]byte
		want   uint32
	}{{0, [16]byte{15: 9}, 1}, {1 << 20, [16]byte{1}, 0}, {1, [16]byte{}, 1}} {
		c.send(mapFrameOn(1, s.token(), x.number, x.uuid, 3, 0, 4096))
		r := c.read()
		require.Equal(t, uint16(mapped), r.typ)
		require.Equal(t, uint32(2), binary.LittleEndian.Uint32(r.body[8:]), "kind")
		require.Equal(t, x.want, binary.LittleEndian.Uint32(r.body[12:]))
		require.Equal(t, []gpubackend.UUID{{1}, {15: 9}}[x.want], gpubackend.UUID(r.body[32:]))
		c.read()
	}
	require.Equal(t, syscall.ENODEV, c.call(mapFrameOn(2, s.token(), 0, [16]byte{7}, 3, 0, 4096)).errno())
	require.Equal(t, syscall.ENODEV, c.call(mapFrameOn(3, s.token(), 1<<20, [16]byte{}, 3, 0, 4096)).errno())
}

func TestLifeOfAMapping(t *testing.T) {
	s := start(t, &controltest.Cache{})
	c := s.connect()
	c.send(mapFrame(7, s.token(), 3, 4096, 2*4096+1))
	r := c.read()
	require.Equal(t, uint16(mapped), r.typ)
	require.Equal(t, uint64(7), r.id)
	// mapping, kind 1, device 0, 16 pages of file, 1 extent
	require.Equal(t, []byte{1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0,
		0,
		0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, r.body)
	e := c.read()
	require.Equal(t, 1, e.fds)
	require.Equal(t, control.Stats{Sessions: 1, Mappings: 1}, s.Stats())
	for _, typ := range []uint16{acquire, release, syncTo, advise} {
		require.Zero(t, c.call(rangeFrame(typ, 8, 1, 0, 3*4096, 0)).errno(), "type %d", typ)
		for _, bad := range []struct {
			mapping uint64
			off, n  int64
			arg     uint32
		}{{2, 0, 1, 0}, {1, 0, 3*4096 + 1, 0}, {1, -1, 1, 0}, {1, 0, 0, 0}, {1, 0, -1, 0}, {1, 1 << 62, 1 << 62, 0}, {1,
			0, 1, 99}} {
			require.Equal(t, syscall.EINVAL, c.call(rangeFrame(typ, 9, bad.mapping, bad.off, bad.n, bad.arg)).errno(),
				"type %d, %+v", typ, bad)
		}
	}
	require.Zero(t, c.call(frame(unmap, 10, uint64(1))).errno())
	require.Equal(t, syscall.EINVAL, c.call(frame(unmap, 10, uint64(1))).errno())
	require.Equal(t, syscall.EINVAL, c.call(rangeFrame(acquire, 10, 1, 0, 1, 0)).errno())
	live, ended := s.cache.Mapped()
	require.Equal(t, [2]int{0, 1}, [2]int{live, ended})
}

func TestMapsThatAreRefused(t *testing.T) {
	s := start(t, &controltest.Cache{})
	c := s.connect()
	readOnly, writeOnly := reopened(t, s, os.O_RDONLY), reopened(t, s, os.O_WRONLY)
	token := func(f *controltest.File) [16]byte {
		g, err := s.Grant(f, 0)
		require.NoError(t, err)
		return g.Token
	}
	raw := func(device, prot, flags uint32, off, n int64) []byte {
		return frame(mapFile, 1, s.token(), device, prot, flags, uint32(0), off, n, [16]byte{})
	}
	for name, b := range map[string]struct {
		frame []byte
		want  syscall.Errno
	}{
		"unaligned":             {raw(0, 1, 0, 1, 1), syscall.EINVAL},
		"negative offset":       {raw(0, 1, 0, -4096, 1), syscall.EINVAL},
		"no length":             {raw(0, 1, 0, 0, 0), syscall.EINVAL},
		"negative length":       {raw(0, 1, 0, 0, -1), syscall.EINVAL},
		"past the largest file": {raw(0, 1, 0, 1<<63-4096, 1), syscall.EOVERFLOW},
		"overflow":              {raw(0, 1, 0, 4096, 1<<63-1), syscall.EOVERFLOW},
		"no protection":         {raw(0, 0, 0, 0, 1), syscall.EINVAL},
		"write alone":           {raw(0, 2, 0, 0, 1), syscall.EINVAL},
		"unknown protection":    {raw(0, 5, 0, 0, 1), syscall.EINVAL},
		"unknown flags":         {raw(0, 1, 16, 0, 1), syscall.EINVAL},
		"no such device":        {raw(1, 1, 0, 0, 1), syscall.ENODEV},
		"huge device":           {raw(1<<32-1, 1, 0, 0, 1), syscall.ENODEV},
		"read-only descriptor":  {mapFrame(1, token(readOnly), 3, 0, 1), syscall.EACCES},
		"write-only descriptor": {mapFrame(1, token(writeOnly), 1, 0, 1), syscall.EACCES},
	} {
		r := c.call(b.frame)
		require.Equal(t, b.want, r.errno(), name)
		require.NotEmpty(t, r.text(), name)
	}
	require.Equal(t, control.Stats{Sessions: 1}, s.Stats(), "a refused request has used its token up")
}

func reopened(t *testing.T, s *server, mode int) *controltest.File {
	f, err := os.OpenFile(s.file.Name(), mode, 0)
	require.NoError(t, err)
	file, err := controltest.NewFile(f)
	require.NoError(t, err)
	t.Cleanup(func() { file.Close() })
	return file
}

func TestTokensThatAreRefused(t *testing.T) {
	s := start(t, &controltest.Cache{}, func(o *control.Options) { o.TokenLife = time.Hour })
	c := s.connect()
	other := s.connect()
	forged, used := s.token(), s.token()
	forged[0] ^= 0x80
	closing := reopened(t, s, os.O_RDWR)
	closed, err := s.Grant(closing, 0)
	require.NoError(t, err)
	require.NoError(t, closing.Close())
	forStatus, err := s.GrantStatus(0)
	require.NoError(t, err)

	c.send(mapFrame(1, used, 1, 0, 1))
	require.Equal(t, uint16(mapped), c.read().typ)
	c.read()
	require.Equal(t, syscall.EACCES, c.call(mapFrame(2, used, 1, 0, 1)).errno(), "replayed")
	require.Equal(t, syscall.EACCES, other.call(mapFrame(2, used, 1, 0, 1)).errno(), "replayed elsewhere")
	require.Equal(t, syscall.EACCES, c.call(mapFrame(2, forged, 1, 0, 1)).errno(), "forged")
	require.Equal(t, syscall.EACCES, c.call(mapFrame(2, [16]byte{}, 1, 0, 1)).errno(), "made up")
	require.Equal(t, syscall.EACCES, c.call(mapFrame(2, closed.Token, 1, 0, 1)).errno(), "descriptor closed")
	require.Equal(t, syscall.EACCES, c.call(mapFrame(2, forStatus.Token, 1, 0, 1)).errno(),
		"a status token is for the status")
	require.Equal(t, syscall.EACCES, c.call(frame(status, 2, s.token())).errno(), "a file's token is not valid for the status")
	require.Equal(t, syscall.EACCES, c.call(frame(status, 2, forStatus.Token)).errno(), "and it was used up")
}

func TestTokenOfTwoRivals(t *testing.T) {
	s := start(t, &controltest.Cache{})
	a, b := s.connect(), s.connect()
	for range 50 {
		token := s.token()
		var wg sync.WaitGroup
		var types [2]uint16
		for i, c := range []*client{a, b} {
			wg.Go(func() {
				c.send(mapFrame(1, token, 1, 0, 1))
				r := c.read()
				types[i] = r.typ
				if r.typ == mapped {
					c.read()
				}
			})
		}
		wg.Wait()
		require.ElementsMatch(t, []uint16{mapped, result}, types[:])
	}
}

func TestStatusComesInChunks(t *testing.T) {
	long := make([]byte, 300_000)
	for i := range long {
		long[i] = 'a' + byte(i%26)
	}
	s := start(t, &controltest.Cache{},
		func(o *control.Options) { o.Status = func(control.Viewer) any { return string(long) } })
	c := s.connect()
	g, err := s.GrantStatus(0)
	require.NoError(t, err)
	c.send(frame(status, 3, g.Token))
	var doc []byte
	for {
		r := c.read()
		require.Equal(t, uint16(document), r.typ)
		require.Equal(t, uint64(3), r.id)
		doc = append(doc, r.body...)
		if r.flags == 0 {
			break
		}
	}
	require.Equal(t, `"`+string(long)+`"`, string(doc))
}

// A client that has a status may ask for the next one at once.
func TestStatusAfterStatus(t *testing.T) {
	s := start(t, &controltest.Cache{})
	c := s.connect()
	for i := range 3000 {
		g, err := s.GrantStatus(0)
		require.NoError(t, err)
		c.send(frame(status, uint64(i+1), g.Token))
		r := c.read()
		require.Equal(t, uint16(document), r.typ, "status %d: %q", i, r.body)
	}
}

func TestNoStatus(t *testing.T) {
	s := start(t, &controltest.Cache{}, func(o *control.Options) { o.Status = nil })
	g, err := s.GrantStatus(0)
	require.NoError(t, err)
	require.Equal(t, syscall.ENOTSUP, s.connect().call(frame(status, 1, g.Token)).errno())
}

func TestErrorsKeepTheirText(t *testing.T) {
	for _, c := range []struct {
		err  error
		want syscall.Errno
	}{
		{fmt.Errorf("budget of device 0 is spent: %w", syscall.ENOMEM), syscall.ENOMEM},
		{fmt.Errorf("something else"), syscall.EIO},
		{context.Canceled, syscall.ECANCELED},
	} {
		s := start(t, &controltest.Cache{MapError: c.err})
		r := s.connect().call(mapFrame(1, s.token(), 1, 0, 1))
		require.Equal(t, c.want, r.errno())
		require.Equal(t, c.err.Error(), r.text())
	}
}

func TestAnswersComeInAnyOrder(t *testing.T) {
	open := make(chan struct{})
	s := start(t, &controltest.Cache{Gate: func(ctx context.Context) error { <-open; return nil }})
	c := s.connect()
	m := c.mapOne(s)
	c.send(rangeFrame(acquire, 20, m, 0, 1, 0))
	require.Zero(t, c.call(frame(ping, 21)).errno(), "while the acquire waits")
	close(open)
	require.Equal(t, uint64(20), c.read().id)
}

func TestRequestIDThatRunsEndsTheConnection(t *testing.T) {
	s := start(t, &controltest.Cache{Gate: waitForEnd})
	c := s.connect()
	m := c.mapOne(s)
	c.send(rangeFrame(acquire, 20, m, 0, 1, 0))
	c.send(rangeFrame(acquire, 20, m, 0, 1, 0))
	require.Equal(t, syscall.EPROTO, c.ended().errno())
	s.waitMapped(0)
}

// waitForEnd is a gate that opens when the request is cancelled.
func waitForEnd(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

func TestTooManyRequests(t *testing.T) {
	entered := make(chan struct{}, 10)
	s := start(t, &controltest.Cache{Gate: func(ctx context.Context) error {
		entered <- struct{}{}
		return waitForEnd(ctx)
	}}, func(o *control.Options) { o.MaxRequests = 4 })
	c := s.connect()
	m := c.mapOne(s)
	for id := range uint64(4) {
		c.send(rangeFrame(acquire, 20+id, m, 0, 1, 0))
		<-entered
	}
	require.Equal(t, syscall.EAGAIN, c.call(frame(ping, 30)).errno())
	c.close() // ends the four, and the mapping
	s.waitMapped(0)
	s.waitSessions(0)
}

func TestTooManyMappings(t *testing.T) {
	s := start(t, &controltest.Cache{}, func(o *control.Options) { o.MaxMappings = 1 })
	c := s.connect()
	c.mapOne(s)
	require.Equal(t, syscall.ENOMEM, c.call(mapFrame(2, s.token(), 1, 0, 1)).errno())
	require.Zero(t, c.call(frame(unmap, 3, uint64(1))).errno())
	c.mapOne(s)
}

func TestUnmapWaitsForAnAcquire(t *testing.T) {
	entered, open := make(chan struct{}), make(chan struct{})
	s := start(t, &controltest.Cache{Gate: func(ctx context.Context) error {
		close(entered)
		<-open
		return nil
	}})
	c := s.connect()
	m := c.mapOne(s)
	c.send(rangeFrame(acquire, 2, m, 0, 1, 0))
	<-entered
	c.send(frame(unmap, 3, m))
	require.Zero(t, c.call(frame(ping, 4)).errno())
	live, _ := s.cache.Mapped()
	require.Equal(t, 1, live)
	close(open)
	require.Equal(t, []uint64{2, 3}, []uint64{c.read().id, c.read().id})
}

func TestCloseEndsEverything(t *testing.T) {
	s := start(t, &controltest.Cache{Gate: waitForEnd})
	c := s.connect()
	m := c.mapOne(s)
	c.send(rangeFrame(acquire, 2, m, 0, 1, 0))
	require.NoError(t, s.Close())
	live, ended := s.cache.Mapped()
	require.Equal(t, [2]int{0, 1}, [2]int{live, ended})
	c.ended()
	_, err := s.Grant(s.file, 0)
	require.ErrorIs(t, err, syscall.ESHUTDOWN)
	_, err = os.Stat(s.Socket())
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, s.Close(), "again")
}

func TestListenRefusesWhatItCannotServe(t *testing.T) {
	_, err := control.Listen(control.Options{Socket: t.TempDir() + "/s"})
	require.ErrorContains(t, err, "no page cache")
	s := start(t, &controltest.Cache{})
	_, err = control.Listen(control.Options{Socket: s.Socket(), Cache: s.cache})
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	_, err = s.Grant(nil, 0)
	require.ErrorIs(t, err, syscall.EINVAL)
	var _ net.Conn = s.connect().conn // the server still serves
}

// TestPrograms: a process is listed once, with the mappings and requests of all its connections.
func TestPrograms(t *testing.T) {
	s := start(t, &controltest.Cache{})
	require.Empty(t, s.Programs())
	first, second := s.connect(), s.connect()
	first.mapOne(s)
	m := second.mapOne(s)
	require.Zero(t, second.call(frame(ping, 2)).errno())
	comm, err := os.ReadFile("/proc/self/comm")
	require.NoError(t, err)
	require.Equal(t, []control.Program{{Process: uint32(os.Getpid()), User: uint32(os.Getuid()),
		Name: strings.TrimSpace(string(comm)), Mappings: 2, Bytes: 2 * 16 * 4096, Requests: 3}}, s.Programs())
	require.Zero(t, second.call(frame(unmap, 3, m)).errno())
	first.close()
	s.waitSessions(1)
	require.Empty(t, s.Programs(), "processes that map nothing are left out")
}

// TestWhatIsLeftIsAbandoned: mappings that a client left are abandoned; those that it unmapped are not.
func TestWhatIsLeftIsAbandoned(t *testing.T) {
	s := start(t, &controltest.Cache{})
	c := s.connect()
	c.mapOne(s)
	require.Zero(t, c.call(frame(unmap, 2, c.mapOne(s))).errno())
	c.close()
	s.waitSessions(0)
	require.EqualValues(t, 1, s.cache.Abandoned.Load())
}
