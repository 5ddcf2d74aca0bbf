package stress

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

// What tests need of the wire format (docs/dev/protocol.md) to do what the library does not let them do.
const (
	wireHello   = 1
	wireMap     = 2
	wireStatus  = 8
	wirePing    = 9
	wireWelcome = 0x8001
	wireMapped  = 0x8002
	wireExtents = 0x8003
	wireResult  = 0x8004
	wireError   = 0x8006
)

// token asks the mount for a token and the path of the socket, as the library does.
func token(t testing.TB, f *os.File) (token []byte, socket string) {
	t.Helper()
	var grant [128]byte
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), 0x80804701, uintptr(unsafe.Pointer(&grant)))
	if errno == unix.EBADFD {
		binary.LittleEndian.PutUint32(grant[:], uint32(f.Fd()))
		_, _, errno = unix.Syscall(unix.SYS_IOCTL, f.Fd(), 0xc0804702, uintptr(unsafe.Pointer(&grant)))
	}
	require.Zero(t, errno)
	return grant[8:24], unix.ByteSliceToString(grant[24:])
}

// wire is a connection to the daemon.
type wire struct {
	t testing.TB
	*net.UnixConn
}

func dial(t testing.TB, socket string) *wire {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: socket, Net: "unixpacket"})
		if errors.Is(err, syscall.EAGAIN) && time.Now().Before(deadline) {
			time.Sleep(time.Millisecond) // the queue of connections is full
			continue
		}
		require.NoError(t, err)
		t.Cleanup(func() { c.Close() })
		require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
		return &wire{t, c}
	}
}

func frame(typ uint16, id uint64, body []byte) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(16+len(body)))
	b = binary.LittleEndian.AppendUint16(b, typ)
	b = binary.LittleEndian.AppendUint16(b, 0)
	b = binary.LittleEndian.AppendUint64(b, id)
	return append(b, body...)
}

// next returns the next frame. Descriptors beside it are closed.
func (w *wire) next() (typ, flags uint16, body []byte) {
	w.t.Helper()
	buf, rights := make([]byte, 64<<10), make([]byte, unix.CmsgSpace(4*128))
	n, rn, _, _, err := w.ReadMsgUnix(buf, rights)
	require.NoError(w.t, err)
	messages, err := unix.ParseSocketControlMessage(rights[:rn])
	require.NoError(w.t, err)
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		require.NoError(w.t, err)
		for _, fd := range fds {
			unix.Close(fd)
		}
	}
	require.GreaterOrEqual(w.t, n, 16)
	return binary.LittleEndian.Uint16(buf[4:]), binary.LittleEndian.Uint16(buf[6:]), buf[16:n]
}

func (w *wire) send(b []byte) {
	w.t.Helper()
	_, err := w.Write(b)
	require.NoError(w.t, err)
}

// hello shakes hands.
func (w *wire) hello() *wire {
	w.t.Helper()
	w.send(frame(wireHello, 1, []byte{'G', 'A', 'I', 'A', 1, 0, 1, 0}))
	typ, _, _ := w.next()
	require.EqualValues(w.t, wireWelcome, typ)
	return w
}

// open asks for a writable mapping of a page and returns the errno that came back.
func (w *wire) open(token []byte, id uint64) syscall.Errno {
	w.t.Helper()
	body := append([]byte(nil), token...)
	body = binary.LittleEndian.AppendUint32(body, 0)
	body = binary.LittleEndian.AppendUint32(body, 3)
	body = binary.LittleEndian.AppendUint64(body, 0)
	body = binary.LittleEndian.AppendUint64(body, 0)
	body = binary.LittleEndian.AppendUint64(body, 4096)
	body = append(body, make([]byte, 16)...) // no UUID
	w.send(frame(wireMap, id, body))
	for {
		typ, flags, reply := w.next()
		switch {
		case typ == wireResult || typ == wireError:
			return syscall.Errno(binary.LittleEndian.Uint32(reply))
		case flags&1 == 0:
			require.EqualValues(w.t, wireExtents, typ)
			return 0
		}
	}
}

// TestTokens shows that a mapping needs a token, that a token works once, and no longer than its descriptor is open.
func TestTokens(t *testing.T) {
	m := testmount.Start(t, testmount.Options{})
	f, err := os.Create(m.Path("file"))
	require.NoError(t, err)
	defer f.Close()
	good, socket := token(t, f)
	w := dial(t, socket).hello()

	assert.Equal(t, unix.EACCES, w.open(make([]byte, 16), 2), "zeros")
	forged := append([]byte(nil), good...)
	forged[15] ^= 1
	assert.Equal(t, unix.EACCES, w.open(forged, 3), "one bit wrong")
	d, err := os.Open(m.Dir)
	require.NoError(t, err)
	defer d.Close()
	ofStatus, _ := token(t, d)
	assert.Equal(t, unix.EACCES, w.open(ofStatus, 4), "a token for the status")

	assert.Zero(t, w.open(good, 5))
	assert.Equal(t, unix.EACCES, w.open(good, 6), "used a second time")
	assert.Equal(t, unix.EACCES, dial(t, socket).hello().open(good, 2), "used again by somebody else")

	other, err := os.OpenFile(m.Path("file"), os.O_RDWR, 0)
	require.NoError(t, err)
	late, _ := token(t, other)
	require.NoError(t, other.Close())
	eventually(t, func() error { // close(2) does not wait for the daemon to hear of it
		other, err := os.OpenFile(m.Path("file"), os.O_RDWR, 0)
		require.NoError(t, err)
		late, _ = token(t, other)
		require.NoError(t, other.Close())
		if errno := w.open(late, 7); errno != unix.EACCES {
			return fmt.Errorf("errno %v for a token whose descriptor was closed", errno)
		}
		return nil
	})

	readOnly, err := os.Open(m.Path("file"))
	require.NoError(t, err)
	defer readOnly.Close()
	weak, _ := token(t, readOnly)
	assert.Equal(t, unix.EACCES, w.open(weak, 8), "a writable mapping of a descriptor that is not")
}

// TestGarbage feeds the daemon what is no frame, or a wrong one, while programs work. They do not notice.
func TestGarbage(t *testing.T) {
	const connections = 300
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 4))
	m := testmount.Start(t, testmount.Options{Devices: 2})
	c := startCrew(t, m.Path("shared"), seed, 0)
	f, err := os.Open(m.Path("shared"))
	require.NoError(t, err)
	defer f.Close()
	_, socket := token(t, f)
	before := measure(t, m)
	for i := range connections {
		w := dial(t, socket)
		if i%2 == 0 {
			w.hello()
		}
		for range 1 + rng.IntN(4) {
			b := make([]byte, 1+rng.IntN(5000))
			for i := range b {
				b[i] = byte(rng.Uint32())
			}
			if len(b) >= 16 && rng.IntN(3) > 0 { // a frame that looks right
				binary.LittleEndian.PutUint32(b, uint32(len(b)))
				binary.LittleEndian.PutUint16(b[4:], uint16(rng.IntN(12)))
				binary.LittleEndian.PutUint16(b[6:], 0)
			}
			if _, err := w.Write(b); err != nil {
				require.True(t, errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET), "%v", err)
				break
			}
		}
		if rng.IntN(2) == 0 {
			w.Close()
		} else { // whatever comes back, it comes to an end
			require.NoError(t, w.CloseWrite())
			for {
				if _, err := w.Read(make([]byte, 64<<10)); err != nil {
					require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
					break
				}
			}
		}
	}
	eventually(t, func() error { // the last connections are still being closed
		if after := measure(t, m); after.heapBytes > before.heapBytes+8<<20 {
			return fmt.Errorf("%d KiB in use, %d before", after.heapBytes>>10, before.heapBytes>>10)
		}
		return nil
	})
	c.stop()
	content := mustRead(t, m.Path("shared"))
	kept, _ := c.verify(t, content, nil)
	require.Positive(t, kept)
	sameEverywhere(t, m, "shared", content)
}

// TestSilentClients has clients that say nothing, or never read. They lose their connections, and nobody waits for
// them.
func TestSilentClients(t *testing.T) {
	m := testmount.Start(t, testmount.Options{})
	f, err := os.Create(m.Path("file"))
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Truncate(4096))
	_, socket := token(t, f)
	silent := dial(t, socket)
	deaf := dial(t, socket).hello()
	var both sync.WaitGroup
	both.Go(func() {
		typ, _, body := silent.next()
		if assert.EqualValues(t, wireError, typ) {
			assert.EqualValues(t, unix.ETIMEDOUT, binary.LittleEndian.Uint32(body))
		}
		_, err := silent.Read(make([]byte, 16))
		assert.Error(t, err)
	})
	both.Go(func() {
		for id := uint64(2); ; id++ {
			if _, err := deaf.Write(frame(wirePing, id, nil)); err != nil {
				assert.NotErrorIs(t, err, os.ErrDeadlineExceeded)
				return
			}
		}
	})
	done := make(chan struct{})
	go func() { both.Wait(); close(done) }()
	for n := byte(1); !isDone(done); n++ {
		started := time.Now()
		g := gpu(t, m.Path("file"), 4096, 0)
		store(t, g, 0, n)
		require.NoError(t, g.Close())
		var b [1]byte
		_, err := f.ReadAt(b[:], 0)
		require.NoError(t, err)
		require.Equal(t, n, b[0])
		require.Less(t, time.Since(started), 4*time.Second)
	}
}

// TestThousandClients connects a thousand clients, each with a mapping, and lets them go at once.
func TestThousandClients(t *testing.T) {
	const clients = 1000
	m := testmount.Start(t, testmount.Options{})
	f, err := os.Create(m.Path("file"))
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Truncate(4096))
	mine := gpu(t, m.Path("file"), 4096, 0)
	before := measure(t, m)
	all := make([]*wire, clients)
	for i := range all {
		good, socket := token(t, f)
		all[i] = dial(t, socket).hello()
		require.Zero(t, all[i].open(good, 2), "client %d", i)
	}
	during := measure(t, m)
	assert.Equal(t, clients+1, status(t, m).Files[0].Mappings)
	assert.Equal(t, before.deviceBytes, during.deviceBytes, "they share one extent")
	t.Logf("%d goroutines, %d descriptors, %d KiB with them; %d, %d, %d without",
		during.goroutines, during.descriptors, during.residentBytes>>10, before.goroutines, before.descriptors,
		before.residentBytes>>10)
	store(t, mine, 0, []byte("still here")...)
	_, err = mine.Release(0, 4096)
	require.NoError(t, err)
	b := make([]byte, 10)
	_, err = f.ReadAt(b, 0)
	require.NoError(t, err)
	assert.Equal(t, "still here", string(b))
	for _, w := range all {
		require.NoError(t, w.Close())
	}
	readers := 16 // goroutines of the FUSE server that wait for requests
	eventually(t, func() error {
		after := measure(t, m)
		if after.descriptors > before.descriptors+1 || after.goroutines > before.goroutines+readers {
			return fmt.Errorf("%d descriptors and %d goroutines, %d and %d before", after.descriptors, after.goroutines,
				before.descriptors, before.goroutines)
		}
		return nil
	})
}

// TestOutOfDescriptors lets the daemon run out of descriptors. Opening fails then, what is open works, and when files
// are closed everything works again.
func TestOutOfDescriptors(t *testing.T) {
	testdevice.Emulated(t, "the driver opens descriptors of its own, and how many is not known")
	m := testmount.Start(t, testmount.Options{Limit: 100})
	for i := range 200 {
		require.NoError(t, os.WriteFile(m.Path(fmt.Sprint("file", i)), []byte("content"), 0o600))
	}
	mine := gpu(t, m.Path("file0"), 4096, 0)
	var files []*os.File
	var full error
	for i := range 200 {
		f, err := os.OpenFile(m.Path(fmt.Sprint("file", i)), os.O_RDWR, 0)
		if err != nil {
			full = err
			break
		}
		defer f.Close()
		files = append(files, f)
	}
	require.ErrorIs(t, full, unix.EMFILE)
	require.Greater(t, len(files), 20)
	t.Logf("%d files were open", len(files))
	for i, f := range files[1:] {
		_, err := f.WriteAt([]byte("CONTENT"), 0)
		require.NoError(t, err, "file %d", i)
	}
	store(t, mine, 0, []byte("changed")...)
	_, err := mine.Release(0, 4096)
	require.NoError(t, err)
	b := make([]byte, 7)
	_, err = files[0].ReadAt(b, 0)
	require.NoError(t, err)
	assert.Equal(t, "changed", string(b))
	_, err = gaiafs.Map(files[1], 0, 4096, gaiafs.ProtRead|gaiafs.ProtWrite, 0)
	require.Error(t, err)
	t.Logf("a mapping: %v", err)
	_, err = os.Stat(m.Path("file150"))
	assert.True(t, err == nil || errors.Is(err, unix.EMFILE), "%v", err)

	for _, f := range files {
		require.NoError(t, f.Close())
	}
	eventually(t, func() error {
		f, err := os.OpenFile(m.Path("file190"), os.O_RDWR, 0)
		if err != nil {
			return err
		}
		return f.Close()
	})
	again := gpu(t, m.Path("file1"), 4096, 0)
	assert.Equal(t, "CONTENT", string(load(t, again)[:7]))
}

// TestUnusedViewsKeepNoDescriptors makes views of more files than the daemon may have open. A view and its files stay
// when its program has closed it. They are given up when descriptors run out.
func TestUnusedViewsKeepNoDescriptors(t *testing.T) {
	testdevice.Emulated(t, "the driver opens descriptors of its own, and how many is not known")
	const views, each = 12, 40
	m := testmount.Start(t, testmount.Options{Limit: 250, Memory: 64 << 20})
	path := func(i int) string { return fmt.Sprint("file", i) }
	content := func(i int) []byte { return bytes.Repeat(fmt.Appendf(nil, "%d;", i), 20) }
	for i := range views * each {
		require.NoError(t, os.WriteFile(filepath.Join(m.Source, path(i)), content(i), 0o600))
	}
	for k := range views {
		var files []*os.File
		var segments []gaiafs.Segment
		for i := range each {
			f, err := os.Open(m.Path(path(k*each + i)))
			require.NoError(t, err, "file %d of view %d", i, k)
			files = append(files, f)
			segments = append(segments, gaiafs.Segment{File: i, Length: int64(len(content(k*each + i)))})
		}
		v, err := gaiafs.MapView(files, segments, 0)
		require.NoError(t, err, "view %d", k)
		for i := range each {
			want := content(k*each + i)
			got := make([]byte, len(want))
			_, err := v.ReadAt(got, v.Offset(i))
			require.NoError(t, err)
			require.Equal(t, string(want), string(got), "file %d of view %d", i, k)
		}
		for _, f := range files {
			require.NoError(t, f.Close())
		}
		require.NoError(t, v.Close())
	}
}

// TestBadArguments makes the calls that must be refused, on a real mount.
func TestBadArguments(t *testing.T) {
	m := testmount.Start(t, testmount.Options{})
	f, err := os.Create(m.Path("file"))
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Truncate(3*4096))
	readOnly, err := os.Open(m.Path("file"))
	require.NoError(t, err)
	defer readOnly.Close()
	writeOnly, err := os.OpenFile(m.Path("file"), os.O_WRONLY, 0)
	require.NoError(t, err)
	defer writeOnly.Close()
	foreign, err := os.Create(filepath.Join(t.TempDir(), "foreign"))
	require.NoError(t, err)
	defer foreign.Close()
	directory, err := os.Open(m.Dir)
	require.NoError(t, err)
	defer directory.Close()
	pipe, other, err := os.Pipe()
	require.NoError(t, err)
	defer pipe.Close()
	defer other.Close()
	closed, err := os.Create(m.Path("closed"))
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	const both = gaiafs.ProtRead | gaiafs.ProtWrite
	for _, c := range []struct {
		what     string
		f        *os.File
		off, len int64
		prot     gaiafs.Prot
		device   int
		want     []error
	}{
		{"no such device", f, 0, 4096, both, 77, []error{unix.ENODEV}},
		{"negative device", f, 0, 4096, both, -1, []error{unix.ENODEV}},
		{"unaligned", f, 100, 4096, both, 0, []error{unix.EINVAL}},
		{"no length", f, 0, 0, both, 0, []error{unix.EINVAL}},
		{"negative length", f, 0, -1, both, 0, []error{unix.EINVAL}},
		{"negative offset", f, -4096, 4096, both, 0, []error{unix.EINVAL}},
		{"too far", f, 1<<62 + 1<<61, 1 << 62, both, 0, []error{unix.EOVERFLOW, unix.EINVAL, unix.ENOMEM}},
		{"larger than the device", f, 0, 1 << 40, both, 0, []error{unix.ENOMEM}},
		{"no protection", f, 0, 4096, 0, 0, []error{unix.EINVAL}},
		{"unknown protection", f, 0, 4096, 8, 0, []error{unix.EINVAL}},
		{"not open for writing", readOnly, 0, 4096, both, 0, []error{unix.EACCES}},
		{"not open for reading", writeOnly, 0, 4096, gaiafs.ProtRead, 0, []error{unix.EACCES}},
		{"a file of another filesystem", foreign, 0, 4096, both, 0, []error{unix.ENOTTY, unix.EINVAL}},
		{"a directory", directory, 0, 4096, gaiafs.ProtRead, 0, []error{unix.EINVAL}},
		{"a pipe", pipe, 0, 4096, gaiafs.ProtRead, 0, []error{unix.EINVAL, unix.ENOTTY, unix.ESPIPE}},
		{"a closed file", closed, 0, 4096, gaiafs.ProtRead, 0, []error{unix.EBADF}},
	} {
		mapping, err := gaiafs.Map(c.f, c.off, c.len, c.prot, c.device, gaiafs.Stays())
		if !assert.Error(t, err, c.what) {
			mapping.Close()
			continue
		}
		right := false
		for _, want := range c.want {
			right = right || errors.Is(err, want)
		}
		assert.True(t, right, "%s: %v", c.what, err)
		assert.NotEmpty(t, err.(*gaiafs.Error).Text, c.what)
	}

	g, err := gaiafs.Map(f, 4096, 4096, both, 0)
	require.NoError(t, err)
	for _, r := range [][2]int64{{0, 4097}, {4096, 1}, {-1, 1}, {0, 0}, {0, -1}, {1 << 62, 1 << 62}} {
		_, err := g.Acquire(r[0], r[1])
		assert.ErrorIs(t, err, unix.EINVAL, "%v", r)
		_, err = g.Release(r[0], r[1])
		assert.ErrorIs(t, err, unix.EINVAL, "%v", r)
		assert.ErrorIs(t, g.Sync(r[0], r[1]), unix.EINVAL, "%v", r)
		assert.ErrorIs(t, g.Advise(r[0], r[1], gaiafs.AdviceWillNeed), unix.EINVAL, "%v", r)
	}
	assert.ErrorIs(t, g.Advise(0, 4096, 77), unix.EINVAL)
	require.NoError(t, g.Close())
	assert.ErrorIs(t, g.Close(), unix.EBADF)
	_, err = g.Acquire(0, 4096)
	assert.ErrorIs(t, err, unix.EBADF)
	assert.Nil(t, g.Bytes())

	none := testmount.Start(t, testmount.Options{Devices: -1})
	nf, err := os.Create(none.Path("file"))
	require.NoError(t, err)
	defer nf.Close()
	_, err = gaiafs.Map(nf, 0, 4096, both, 0)
	assert.ErrorIs(t, err, unix.ENODEV)
}
