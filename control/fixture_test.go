package control_test

import (
	"context"
	"encoding/binary"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/control/controltest"
)

func TestMain(m *testing.M) {
	if path := os.Getenv("GAIAFS_TEST_CONNECT"); path != "" { // see connectElsewhere
		if err := unix.Connect(3, &unix.SockaddrUnix{Name: path}); err != nil {
			panic(err)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// Types of frames, see docs/dev/protocol.md.
const (
	hello   = 1
	mapFile = 2
	acquire = 3
	release = 4
	syncTo  = 5
	advise  = 6
	unmap   = 7
	status  = 8
	ping    = 9
	record  = 10
	stop    = 11
	end     = 12
	choose  = 13
	attach  = 14
	answer  = 15
	mapView = 16

	check = 0x4001

	welcome  = 0x8001
	mapped   = 0x8002
	extents  = 0x8003
	result   = 0x8004
	document = 0x8005
	failure  = 0x8006
)

// frame encodes a frame.
func frame(typ uint16, id uint64, body ...any) []byte {
	b := make([]byte, 16)
	binary.LittleEndian.PutUint16(b[4:], typ)
	binary.LittleEndian.PutUint64(b[8:], id)
	for _, v := range body {
		var err error
		if b, err = binary.Append(b, binary.LittleEndian, v); err != nil {
			panic(err)
		}
	}
	binary.LittleEndian.PutUint32(b, uint32(len(b)))
	return b
}

func helloFrame() []byte {
	return frame(hello, 0, uint32(0x41494147), uint16(1), uint16(1))
}

func mapFrame(id uint64, token [16]byte, prot uint32, off, n int64) []byte {
	return mapFrameOn(id, token, 0, [16]byte{}, prot, off, n)
}

func mapFrameOn(id uint64, token [16]byte, device uint32, uuid [16]byte, prot uint32, off, n int64) []byte {
	return frame(mapFile, id, token, device, prot, uint32(0), uint32(0), off, n, uuid)
}

func rangeFrame(typ uint16, id, mapping uint64, off, n int64, arg uint32) []byte {
	return frame(typ, id, mapping, off, n, arg, uint32(0))
}

// server is a live server over a small page cache, with one file of 16 pages.
type server struct {
	*control.Server
	t     testing.TB
	cache *controltest.Cache
	file  *controltest.File
	logs  *logs
}

func start(t testing.TB, cache *controltest.Cache, change ...func(*control.Options)) *server {
	t.Helper()
	dir := t.TempDir()
	if cache.Devices == 0 {
		cache.Devices = 1
	}
	s := &server{t: t, cache: cache, logs: &logs{seen: make(chan string, 1000)}}
	o := control.Options{
		Socket: filepath.Join(dir, "s"),
		Cache:  cache,
		Status: func(control.Viewer) any { return map[string]int{"answer": 42} },
		Log:    slog.New(s.logs),
		// On a busy machine a client of a test may be silent for long.
		HandshakeTimeout: time.Minute, WriteTimeout: time.Minute,
	}
	for _, f := range change {
		f(&o)
	}
	f, err := os.OpenFile(filepath.Join(dir, "file"), os.O_RDWR|os.O_CREATE, 0o600)
	require.NoError(t, err)
	require.NoError(t, f.Truncate(16*4096))
	s.file, err = controltest.NewFile(f)
	require.NoError(t, err)
	s.Server, err = control.Listen(o)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, s.Close())
		require.Equal(t, control.Stats{}, s.Stats())
		live, _ := cache.Mapped()
		require.Zero(t, live, "mappings left by Close")
		require.NoError(t, cache.Close())
		s.file.Close()
	})
	return s
}

func (s *server) token() [16]byte {
	s.t.Helper()
	g, err := s.Grant(s.file, 0)
	require.NoError(s.t, err)
	require.Equal(s.t, s.Socket(), g.Socket)
	return g.Token
}

func (s *server) waitMapped(n int) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	require.NoError(s.t, s.cache.WaitMapped(ctx, n))
}

// waitSessions waits until n sessions are left.
func (s *server) waitSessions(n int) {
	s.t.Helper()
	require.Eventually(s.t, func() bool { return s.Connections() == n }, 30*time.Second, time.Millisecond)
}

// logs keeps what is logged at warning level and above.
type logs struct{ seen chan string }

func (l *logs) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelInfo }
func (l *logs) WithAttrs([]slog.Attr) slog.Handler               { return l }
func (l *logs) WithGroup(string) slog.Handler                    { return l }
func (l *logs) Handle(_ context.Context, r slog.Record) error {
	select {
	case l.seen <- r.Message:
	default:
	}
	return nil
}

// client sends and receives frames without interpreting them.
type client struct {
	t    testing.TB
	conn *net.UnixConn
	once sync.Once
}

// dial connects, and sends nothing.
func (s *server) dial() *client {
	s.t.Helper()
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: s.Socket(), Net: "unixpacket"})
	require.NoError(s.t, err)
	c := &client{t: s.t, conn: conn}
	s.t.Cleanup(c.close)
	require.NoError(s.t, conn.SetDeadline(time.Now().Add(30*time.Second)))
	return c
}

// connect dials and shakes hands.
func (s *server) connect() *client {
	s.t.Helper()
	c := s.dial()
	c.send(helloFrame())
	require.Equal(s.t, uint16(welcome), c.read().typ)
	return c
}

func (c *client) close() { c.once.Do(func() { c.conn.Close() }) }

func (c *client) send(b []byte) {
	c.t.Helper()
	_, err := c.conn.Write(b)
	require.NoError(c.t, err)
}

// reply is a frame that came back.
type reply struct {
	typ, flags uint16
	id         uint64
	body       []byte
	fds        int
}

func (r reply) errno() syscall.Errno { return syscall.Errno(binary.LittleEndian.Uint32(r.body)) }
func (r reply) text() string         { return string(r.body[16:]) }
func (r reply) mapping() uint64      { return binary.LittleEndian.Uint64(r.body) }

// next returns the next frame, or the error of the connection.
func (c *client) next() (reply, error) {
	buf, rights := make([]byte, 64<<10), make([]byte, unix.CmsgSpace(4*128))
	n, rn, _, _, err := c.conn.ReadMsgUnix(buf, rights)
	if err != nil {
		return reply{}, err
	}
	r := reply{
		typ:   binary.LittleEndian.Uint16(buf[4:]),
		flags: binary.LittleEndian.Uint16(buf[6:]),
		id:    binary.LittleEndian.Uint64(buf[8:]),
		body:  buf[16:n],
	}
	messages, err := unix.ParseSocketControlMessage(rights[:rn])
	if err != nil {
		return r, err
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return r, err
		}
		for _, fd := range fds {
			unix.Close(fd)
		}
		r.fds += len(fds)
	}
	return r, nil
}

func (c *client) read() reply {
	c.t.Helper()
	r, err := c.next()
	require.NoError(c.t, err)
	return r
}

// call sends a request and returns its RESULT.
func (c *client) call(b []byte) reply {
	c.t.Helper()
	c.send(b)
	r := c.read()
	require.Equal(c.t, uint16(result), r.typ)
	require.Equal(c.t, binary.LittleEndian.Uint64(b[8:]), r.id)
	return r
}

// mapOne maps the file's 16 pages and returns the mapping's number.
func (c *client) mapOne(s *server) uint64 {
	c.t.Helper()
	c.send(mapFrame(1, s.token(), 3, 0, 16*4096))
	r := c.read()
	require.Equal(c.t, uint16(mapped), r.typ)
	require.Equal(c.t, uint16(1), r.flags, "MORE")
	e := c.read()
	require.Equal(c.t, uint16(extents), e.typ)
	require.Equal(c.t, 1, e.fds)
	require.Zero(c.t, e.flags)
	return r.mapping()
}

// ended reads until the connection ends, and returns its last frame.
func (c *client) ended() (last reply) {
	c.t.Helper()
	resets := 0
	for {
		r, err := c.next()
		if err == nil {
			last = r
			continue
		}
		require.NotErrorIs(c.t, err, os.ErrDeadlineExceeded, "the connection was not closed")
		// The daemon closed before it read all our frames: its last frames come after this error.
		if resets++; resets > 1 {
			return last
		}
	}
}
