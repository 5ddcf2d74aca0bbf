package control_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/control/controltest"
)

// A client that sends and never reads is dropped after the write timeout. It holds no more goroutines than requests,
// and nobody else notices.
func TestClientThatNeverReads(t *testing.T) {
	s := start(t, &controltest.Cache{}, func(o *control.Options) {
		o.WriteTimeout = 300 * time.Millisecond
		o.MaxRequests = 8
	})
	good := s.connect()
	bad := s.connect()
	bad.mapOne(s)
	before := runtime.NumGoroutine()

	gone := make(chan error, 1)
	go func() {
		for id := uint64(2); ; id++ {
			if _, err := bad.conn.Write(frame(ping, id)); err != nil {
				gone <- err
				return
			}
		}
	}()
	most := 0
	for id := uint64(1); ; id++ {
		require.Zero(t, good.call(frame(ping, id)).errno())
		most = max(most, runtime.NumGoroutine())
		select {
		case err := <-gone:
			require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
			require.LessOrEqual(t, most, before+1+8+2)
			s.waitMapped(0)
			s.waitSessions(1)
			return
		default:
		}
	}
}

// The same for a client that asks for mappings with many frames, and reads none.
func TestClientThatNeverReadsItsExtents(t *testing.T) {
	s := start(t, &controltest.Cache{Extent: 4096},
		func(o *control.Options) { o.WriteTimeout = 100 * time.Millisecond })
	bad := s.connect()
	for id := uint64(1); id <= 100; id++ {
		_, err := bad.conn.Write(mapFrame(id, s.token(), 1, 0, 8<<20))
		if err != nil {
			break
		}
	}
	s.waitSessions(0)
	s.waitMapped(0)
	require.Zero(t, s.connect().call(frame(ping, 1)).errno())
}

func TestThousandClients(t *testing.T) {
	s := start(t, &controltest.Cache{})
	const n = 1000
	clients := make([]*client, n)
	var wg sync.WaitGroup
	errs := make(chan error, n)
	for i := range clients {
		clients[i] = s.dial()
	}
	for _, c := range clients {
		g, err := s.Grant(s.file, 0)
		require.NoError(t, err)
		wg.Go(func() {
			errs <- func() error {
				for _, b := range [][]byte{helloFrame(), mapFrame(1, g.Token, 3, 0, 16*4096),
					rangeFrame(acquire, 2, 1, 0, 4096, 0),
					rangeFrame(release, 3, 1, 0, 4096, 0)} {
					if _, err := c.conn.Write(b); err != nil {
						return err
					}
					for {
						r, err := c.next()
						if err != nil {
							return err
						}
						if r.typ == failure || r.typ == result && r.errno() != 0 {
							return fmt.Errorf("%v: %s", r.errno(), r.text())
						}
						if r.flags == 0 {
							break
						}
					}
				}
				return nil
			}()
		})
	}
	wg.Wait()
	for range n {
		require.NoError(t, <-errs)
	}
	require.Equal(t, control.Stats{Sessions: n, Mappings: n}, s.Stats())
	for _, c := range clients {
		c.close()
	}
	s.waitMapped(0)
	s.waitSessions(0)
}

func TestOutOfDescriptors(t *testing.T) {
	s := start(t, &controltest.Cache{})
	early := s.connect()
	// The late client gets its socket before the descriptors run out.
	late, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(late)

	var old unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	restore := sync.OnceFunc(func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old)) })
	defer restore()
	low := old
	low.Cur = 200
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &low))
	var filler []int
	for {
		fd, err := unix.FcntlInt(uintptr(late), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			require.ErrorIs(t, err, syscall.EMFILE)
			break
		}
		filler = append(filler, fd)
	}
	free := func() {
		for _, fd := range filler {
			unix.Close(fd)
		}
		filler = nil
	}
	defer free()

	require.NoError(t, unix.Connect(late, &unix.SockaddrUnix{Name: s.Socket()}))
	require.Contains(t, <-s.logs.seen, "cannot accept connections")
	for id := uint64(1); id < 100; id++ { // existing sessions go on
		require.Zero(t, early.call(frame(ping, id)).errno())
	}
	restore()
	free()
	_, err = unix.Write(late, helloFrame())
	require.NoError(t, err)
	b := make([]byte, 100)
	n, err := unix.Read(late, b)
	require.NoError(t, err)
	require.Equal(t, uint16(welcome), binary.LittleEndian.Uint16(b[4:n]))
	require.Contains(t, <-s.logs.seen, "accepting connections again", "and no other message in between")
}

// seedFrames returns every frame of the test vectors.
func seedFrames(t testing.TB) (all [][]byte) {
	text, err := os.ReadFile("testdata/frames.txt")
	require.NoError(t, err)
	more, err := os.ReadFile("testdata/frames2.txt")
	require.NoError(t, err)
	for line := range strings.Lines(string(text) + string(more)) {
		var digits []byte
		if _, after, ok := strings.Cut(strings.TrimSpace(line), " "); ok && line[0] != '#' {
			_, err := fmt.Sscanf(after, "%x", &digits)
			require.NoError(t, err)
			all = append(all, digits)
		}
	}
	return all
}

// play sends data to the server as frames: a byte of options, then records with two bytes of length. The options decide
// whether the client shakes hands first and in which version, whether lengths in headers are corrected, whether tokens
// of MAPs are replaced by valid ones, and whether the client reads.
func play(s *server, data []byte) {
	conn := s.dial()
	defer conn.close()
	if len(data) == 0 {
		return
	}
	options := data[0]
	data = data[1:]
	if options&1 == 0 {
		conn.conn.Write(helloFrame())
	} else if options&16 == 0 {
		conn.conn.Write(frame(hello, 0, uint32(0x41494147), uint16(1), uint16(2)))
		conn.conn.Write(frame(choose, 1, uint64(3), uint64(0)))
	}
	var reader sync.WaitGroup
	defer reader.Wait() // ends when the server has seen the CloseWrite below
	if options&8 == 0 {
		reader.Go(func() {
			for {
				if _, err := conn.next(); err != nil {
					return
				}
			}
		})
	}
	for len(data) >= 2 {
		n := min(int(binary.LittleEndian.Uint16(data)), len(data)-2)
		b := append([]byte(nil), data[2:2+n]...)
		data = data[2+n:]
		if n >= 16 && options&2 == 0 {
			binary.LittleEndian.PutUint32(b, uint32(n))
		}
		if n >= 32 && options&4 == 0 && b[4] == mapFile {
			token := s.token()
			copy(b[16:], token[:])
		}
		if n == 0 {
			continue // the end of a connection, to a reader of records
		}
		if _, err := conn.conn.Write(b); err != nil {
			break
		}
	}
	conn.conn.CloseWrite()
}

// session encodes records for play.
func session(options byte, records ...[]byte) []byte {
	data := []byte{options}
	for _, r := range records {
		data = binary.LittleEndian.AppendUint16(data, uint16(len(r)))
		data = append(data, r...)
	}
	return data
}

// FuzzSession sends fuzzed frames to a live server, and then checks that it still serves another client.
func FuzzSession(f *testing.F) {
	frames := seedFrames(f)
	for options := range byte(32) {
		f.Add(session(options, frames...))
	}
	f.Add(session(0, mapFrame(1, [16]byte{}, 3, 0, 3*4096), rangeFrame(acquire, 2, 1, 0, 4096, 0),
		rangeFrame(release, 3, 1, 0, 4096, 0),
		rangeFrame(syncTo, 4, 1, 0, 1, 1), rangeFrame(advise, 5, 1, 0, 1, 3), frame(unmap, 6, uint64(1)), frame(ping,
			7)))
	s := start(f, &controltest.Cache{}, func(o *control.Options) { o.WriteTimeout = 200 * time.Millisecond })
	witness := s.connect()
	f.Fuzz(func(t *testing.T, data []byte) {
		here, w := *s, client{t: t, conn: witness.conn}
		here.t = t
		play(&here, data)
		require.NoError(t, witness.conn.SetDeadline(time.Now().Add(30*time.Second)))
		require.Zero(t, w.call(frame(ping, 1)).errno())
	})
}

// TestRandomSessions does the same with many random sessions at once, and checks the memory afterwards.
func TestRandomSessions(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if v := os.Getenv("GAIAFS_TEST_SEED"); v != "" {
		_, err := fmt.Sscan(v, &seed)
		require.NoError(t, err)
	}
	t.Logf("to repeat: GAIAFS_TEST_SEED=%d go test ./control -run TestRandomSessions", seed)
	frames := append(seedFrames(t), rangeFrame(acquire, 2, 1, 0, 4096, 0), rangeFrame(release, 3, 1, 0, 4096, 0),
		mapFrame(1, [16]byte{}, 3, 0, 3*4096), frame(unmap, 6, uint64(1)))
	s := start(t, &controltest.Cache{}, func(o *control.Options) {
		o.WriteTimeout = 200 * time.Millisecond
		o.HandshakeTimeout = 200 * time.Millisecond
	})
	witness := s.connect()
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapInuse
	}
	before := heap()
	const workers, rounds = 4, 150
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(w)))
			for range rounds {
				var records [][]byte
				for range 1 + r.IntN(30) {
					b := append([]byte(nil), frames[r.IntN(len(frames))]...)
					for range r.IntN(4) {
						b[r.IntN(len(b))] = byte(r.Uint32())
					}
					if r.IntN(8) == 0 {
						b = b[:r.IntN(len(b)+1)]
					}
					records = append(records, b)
				}
				play(s, session(byte(r.Uint32()), records...))
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for id := uint64(1); ; id++ {
		require.Zero(t, witness.call(frame(ping, id)).errno())
		select {
		case <-done:
			s.waitSessions(1)
			s.waitMapped(0)
			require.Less(t, heap(), before+32<<20)
			return
		default:
		}
	}
}
