package gaiafs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/control/controltest"
	"github.com/gaiafs/gaiafs/pagecache"
)

// grantsVariable tells this process where to get grants, instead of from the ioctl.
const grantsVariable = "GAIAFS_TEST_GRANTS"

func TestMain(m *testing.M) {
	if path := os.Getenv(grantsVariable); path != "" {
		useGrants(path)
		childMain()
		return
	}
	if os.Getenv(fakeVariable) != "" {
		exitThroughC(m.Run())
	}
	goleak.VerifyTestMain(m)
}

func useGrants(path string) {
	requestGrant = func(fd int) (grant, error) {
		b, err := controltest.AskGrant(path, fd)
		if err != nil {
			return grant{}, asError(err, "grant")
		}
		return decodeGrant(b)
	}
}

// daemon is a live server over a small page cache.
type daemon struct {
	cache  *controltest.Cache
	server *control.Server
	grants string
	dir    string
	socket string
}

func startDaemon(t *testing.T, cache *controltest.Cache, options ...func(*control.Options)) *daemon {
	t.Helper()
	dir := t.TempDir()
	if cache.Devices == 0 {
		cache.Devices = 2
	}
	d := &daemon{cache: cache, dir: dir, grants: filepath.Join(dir, "grants"), socket: filepath.Join(dir, "run", "s")}
	t.Cleanup(func() { require.NoError(t, cache.Close()) })
	d.start(t, options...)
	old := requestGrant
	useGrants(d.grants)
	t.Cleanup(func() { requestGrant = old })
	return d
}

func (d *daemon) start(t *testing.T, options ...func(*control.Options)) (stop func()) {
	t.Helper()
	o := control.Options{Socket: d.socket, Cache: d.cache,
		Status: func(control.Viewer) any { return map[string]string{"hello": "world"} }}
	for _, opt := range options {
		opt(&o)
	}
	server, err := control.Listen(o)
	require.NoError(t, err)
	d.server = server
	g, err := controltest.ListenGrants(server, d.grants)
	require.NoError(t, err)
	stop = sync.OnceFunc(func() {
		require.NoError(t, server.Close())
		g.Close() // closes files that the server was using
	})
	t.Cleanup(stop)
	return stop
}

func (d *daemon) file(t *testing.T, size int) *os.File {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(d.dir, "file"), os.O_RDWR|os.O_CREATE, 0o600)
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	content := make([]byte, size)
	for i := range content {
		content[i] = byte(i / 7)
	}
	_, err = f.WriteAt(content, 0)
	require.NoError(t, err)
	return f
}

func (d *daemon) waitMapped(t *testing.T, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	require.NoError(t, d.cache.WaitMapped(ctx, n))
}

func TestMapReadsWritesAndMerges(t *testing.T) {
	d := startDaemon(t, &controltest.Cache{})
	const size = 5 << 20
	f := d.file(t, size)
	want, err := os.ReadFile(f.Name())
	require.NoError(t, err)

	const off, length = 4096, 4<<20 + 5 // three extents, the first and the last in part
	m, err := Map(f, off, length, ProtWrite, 1)
	require.NoError(t, err)
	require.Equal(t, int64(length), m.Len())
	require.Equal(t, 1, m.Device())
	require.True(t, bytes.Equal(want[off:off+length], m.Bytes()), "the device has the file's bytes")

	copy(m.Bytes()[10:], "device")
	copy(m.Bytes()[2<<20:], "second page")
	_, err = f.WriteAt([]byte("host"), off+100)
	require.NoError(t, err)
	pages, err := m.Release(0, length)
	require.NoError(t, err)
	require.Equal(t, int64(2), pages)
	got := make([]byte, 6)
	_, err = f.ReadAt(got, off+10)
	require.NoError(t, err)
	require.Equal(t, "device", string(got))

	pages, err = m.Acquire(0, 1)
	require.NoError(t, err)
	require.Equal(t, int64(1), pages)
	require.Equal(t, "host", string(m.Bytes()[100:104]))
	require.NoError(t, m.Sync(0, length))
	require.NoError(t, m.Flush(0, length))

	copy(m.Bytes()[20:], "left for close")
	require.NoError(t, m.Close())
	got = make([]byte, 14)
	_, err = f.ReadAt(got, off+20)
	require.NoError(t, err)
	require.Equal(t, "left for close", string(got))

	require.Nil(t, m.Bytes())
	_, err = m.Acquire(0, 1)
	require.ErrorIs(t, err, syscall.EBADF)
	require.ErrorIs(t, m.Close(), syscall.EBADF)
	d.waitMapped(t, 0)
}

func TestTwoMappingsOfADeviceShareItsMemory(t *testing.T) {
	d := startDaemon(t, &controltest.Cache{})
	f := d.file(t, 8192)
	a, err := Map(f, 0, 8192, ProtWrite, 0)
	require.NoError(t, err)
	b, err := Map(f, 4096, 4096, ProtRead, 0)
	require.NoError(t, err)
	copy(a.Bytes()[4096:], "shared")
	require.Equal(t, "shared", string(b.Bytes()[:6]))
	pages, err := b.Release(0, 4096)
	require.NoError(t, err)
	require.Zero(t, pages, "a read-only mapping has nothing to release")
	require.NoError(t, a.Close())
	require.NoError(t, b.Close())
}

func TestLazyMappingFetchesAtAcquire(t *testing.T) {
	d := startDaemon(t, &controltest.Cache{})
	f := d.file(t, 8192)
	m, err := Map(f, 0, 8192, ProtRead, 0, Lazy())
	require.NoError(t, err)
	require.Zero(t, m.Bytes()[700])
	_, err = m.Acquire(0, 4096)
	require.NoError(t, err)
	require.Equal(t, byte(100), m.Bytes()[700])
	require.NoError(t, m.Close())
}

func TestManyExtentsTakeSeveralFrames(t *testing.T) {
	d := startDaemon(t, &controltest.Cache{Extent: 4096})
	const pages = 3*maxExtents + 5
	f := d.file(t, pages*4096)
	want, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	m, err := Map(f, 4096, (pages-1)*4096, ProtRead, 0)
	require.NoError(t, err)
	require.True(t, bytes.Equal(want[4096:], m.Bytes()))
	require.NoError(t, m.Close())
}

func TestAdviceReachesTheCache(t *testing.T) {
	var got []pagecache.Advice
	d := startDaemon(t, &controltest.Cache{Advised: func(_, _ int64, a pagecache.Advice) { got = append(got, a) }})
	m, err := Map(d.file(t, 4096), 0, 4096, ProtRead, 0)
	require.NoError(t, err)
	for _, a := range []Advice{AdviceNormal, AdviceRandom, AdviceSequential, AdviceWillNeed, AdviceDontNeed} {
		require.NoError(t, m.Advise(0, 4096, a))
	}
	require.ErrorIs(t, m.Advise(0, 4096, 99), syscall.EINVAL)
	require.Equal(t, []pagecache.Advice{pagecache.AdviceNormal, pagecache.AdviceRandom, pagecache.AdviceSequential,
		pagecache.AdviceWillNeed, pagecache.AdviceDontNeed}, got)
	require.NoError(t, m.Close())
}

func TestNotesOfStoresPastTheEnd(t *testing.T) {
	cache := &controltest.Cache{}
	d := startDaemon(t, cache)
	var notes []string
	m, err := Map(d.file(t, 4096), 0, 8192, ProtWrite, 0, Notes(func(text string) { notes = append(notes, text) }))
	require.NoError(t, err)
	release := func() error { _, err := m.Release(0, 8192); return err }
	for _, call := range []func() error{release, func() error { return m.Sync(0, 8192) }, m.Close} {
		cache.PastEnd.Store(3)
		notes = nil
		require.NoError(t, call())
		require.Len(t, notes, 1)
		require.Contains(t, notes[0], "stores past the end of the file are not kept (pages: 3)")
	}
	quiet, err := Map(d.file(t, 4096), 0, 8192, ProtWrite, 0)
	require.NoError(t, err)
	cache.PastEnd.Store(3)
	require.NoError(t, quiet.Close())
}

func TestBadArguments(t *testing.T) {
	d := startDaemon(t, &controltest.Cache{})
	f := d.file(t, 8192)
	open := func(flag int) *os.File {
		g, err := os.OpenFile(f.Name(), flag, 0)
		require.NoError(t, err)
		t.Cleanup(func() { g.Close() })
		return g
	}
	dir, err := os.Open(d.dir)
	require.NoError(t, err)
	defer dir.Close()
	closed := open(os.O_RDWR)
	closed.Close()
	for name, c := range map[string]struct {
		f      *os.File
		off, n int64
		prot   Prot
		device int
		want   syscall.Errno
	}{
		"zero length":           {f, 0, 0, ProtRead, 0, syscall.EINVAL},
		"negative length":       {f, 0, -1, ProtRead, 0, syscall.EINVAL},
		"unaligned offset":      {f, 1, 4096, ProtRead, 0, syscall.EINVAL},
		"negative offset":       {f, -4096, 4096, ProtRead, 0, syscall.EINVAL},
		"overflow":              {f, 1<<63 - 4096, 4096, ProtRead, 0, syscall.EOVERFLOW},
		"no protection":         {f, 0, 4096, 0, 0, syscall.EINVAL},
		"unknown protection":    {f, 0, 4096, 4, 0, syscall.EINVAL},
		"no such device":        {f, 0, 4096, ProtRead, 2, syscall.ENODEV},
		"negative device":       {f, 0, 4096, ProtRead, -1, syscall.ENODEV},
		"directory":             {dir, 0, 4096, ProtRead, 0, syscall.EINVAL},
		"closed file":           {closed, 0, 4096, ProtRead, 0, syscall.EBADF},
		"read-only descriptor":  {open(os.O_RDONLY), 0, 4096, ProtWrite, 0, syscall.EACCES},
		"write-only descriptor": {open(os.O_WRONLY), 0, 4096, ProtRead, 0, syscall.EACCES},
		"O_PATH descriptor":     {open(0x200000), 0, 4096, ProtRead, 0, syscall.EBADF},
	} {
		m, err := Map(c.f, c.off, c.n, c.prot, c.device)
		require.ErrorIs(t, err, c.want, name)
		require.Nil(t, m, name)
	}

	m, err := Map(f, 0, 5000, ProtRead, 0)
	require.NoError(t, err)
	for _, r := range [][2]int64{{-1, 2}, {0, 0}, {0, 8193}, {8192, 1}, {1, 1<<63 - 1}, {4096, 4097}} {
		_, err := m.Acquire(r[0], r[1])
		require.ErrorIs(t, err, syscall.EINVAL, "%v", r)
	}
	_, err = m.Acquire(4999, 3193) // to the end of the last page
	require.NoError(t, err)
	_, err = m.Acquire(8191, 1)
	require.NoError(t, err)
	require.NoError(t, m.Close())
}

func TestForeignDescriptorIsNoMapping(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "plain"))
	require.NoError(t, err)
	defer f.Close()
	_, err = Map(f, 0, 4096, ProtRead, 0)
	require.ErrorIs(t, err, syscall.ENOTTY)
	require.Contains(t, err.Error(), "not on a gaiafs mount")
	_, err = Status(t.TempDir())
	require.ErrorIs(t, err, syscall.ENOTTY)
	_, err = Status("/does/not/exist")
	require.ErrorIs(t, err, syscall.ENOENT)
}

func TestErrorsCarryTheDaemonsText(t *testing.T) {
	d := startDaemon(t, &controltest.Cache{
		MapError: fmt.Errorf("no room: the budget of device 0 (1 GiB) is spent: %w", syscall.ENOMEM)})
	_, err := Map(d.file(t, 4096), 0, 4096, ProtRead, 0)
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.ErrorContains(t, err, "the budget of device 0 (1 GiB) is spent")
	var e *Error
	require.True(t, errors.As(err, &e))
	require.Equal(t, "map", e.Op)
}

func TestUnknownKindIsRefusedAndUnmapped(t *testing.T) {
	d := startDaemon(t, &controltest.Cache{Kind: 77})
	_, err := Map(d.file(t, 4096), 0, 4096, ProtRead, 0)
	require.ErrorIs(t, err, syscall.ENOTSUP)
	d.waitMapped(t, 0)
}

func TestStatus(t *testing.T) {
	long := strings.Repeat("x", 3*maxFrame)
	d := startDaemon(t, &controltest.Cache{}, func(o *control.Options) {
		o.Status = func(control.Viewer) any { return map[string]string{"long": long} }
	})
	doc, err := Status(d.dir)
	require.NoError(t, err)
	require.Equal(t, `{"long":"`+long+`"}`, string(doc))
}

func TestDaemonGone(t *testing.T) {
	d := startDaemon(t, &controltest.Cache{})
	f := d.file(t, 4096)
	m, err := Map(f, 0, 4096, ProtWrite, 0)
	require.NoError(t, err)
	require.NoError(t, d.server.Close())
	_, err = m.Acquire(0, 1)
	require.ErrorIs(t, err, syscall.ENOTCONN)
	m.Bytes()[0] = 1 // the memory is still there
	require.ErrorIs(t, m.Close(), syscall.ENOTCONN)
	require.Nil(t, m.Bytes())

	d.server.Close()
	_, err = openConn(d.socket)
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
}

func TestMapAfterTheDaemonWasRestarted(t *testing.T) {
	d := startDaemon(t, &controltest.Cache{})
	stop := d.start2(t)
	f := d.file(t, 4096)
	old, err := Map(f, 0, 4096, ProtWrite, 0)
	require.NoError(t, err)
	stop()
	d.start(t)
	m, err := Map(f, 0, 4096, ProtWrite, 0)
	require.NoError(t, err)
	require.NoError(t, m.Close())
	require.ErrorIs(t, old.Close(), syscall.ENOTCONN)
}

// start2 replaces the running server by one that the test stops itself.
func (d *daemon) start2(t *testing.T) (stop func()) {
	d.socket += "2"
	d.grants += "2"
	useGrants(d.grants)
	return d.start(t)
}

func TestGoroutinesShareOneConnection(t *testing.T) {
	d := startDaemon(t, &controltest.Cache{}, func(o *control.Options) { o.MaxRequests = 4 })
	const workers = 32
	f := d.file(t, workers*4096)
	first, err := Map(f, 0, workers*4096, ProtWrite, 0)
	require.NoError(t, err)
	var wg sync.WaitGroup
	errs := make(chan error, workers)
	for w := range workers {
		wg.Go(func() {
			errs <- func() error {
				m, err := Map(f, int64(w)*4096, 4096, ProtWrite, w%2)
				if err != nil {
					return err
				}
				for i := range 20 {
					m.Bytes()[0] = byte(i)
					if _, err := m.Release(0, 4096); err != nil {
						return err
					}
					if _, err := m.Acquire(0, 4096); err != nil {
						return err
					}
				}
				return m.Close()
			}()
		})
	}
	wg.Wait()
	for range workers {
		require.NoError(t, <-errs)
	}
	// A connection counts as a session until the daemon knows that it is a service connection.
	require.Eventually(t, func() bool { return d.server.Stats().Attentive == 1 }, 10*time.Second, time.Millisecond)
	require.Equal(t, 1, d.server.Stats().Sessions)
	require.NoError(t, first.Close())
}

func TestCloseWaitsForACallThatRuns(t *testing.T) {
	entered, open := make(chan struct{}), make(chan struct{})
	d := startDaemon(t, &controltest.Cache{Gate: func(ctx context.Context) error {
		close(entered)
		<-open
		return nil
	}})
	m, err := Map(d.file(t, 4096), 0, 4096, ProtRead, 0)
	require.NoError(t, err)
	acquired, closed := make(chan error, 1), make(chan error, 1)
	go func() { _, err := m.Acquire(0, 1); acquired <- err }()
	<-entered
	go func() { closed <- m.Close() }()
	live, _ := d.cache.Mapped()
	require.Equal(t, 1, live)
	close(open)
	require.NoError(t, <-acquired)
	require.NoError(t, <-closed)
}

// childMain is a separate client process: it maps the file that it is given, stores a line in it, reports that, and
// waits to be killed.
func childMain() {
	f, err := os.OpenFile(os.Args[1], os.O_RDWR, 0)
	if err == nil {
		var m *Mapping
		if m, err = Map(f, 0, 4096, ProtWrite, 0); err == nil {
			copy(m.Bytes(), os.Args[2])
			fmt.Println("mapped")
			var b [1]byte
			os.Stdin.Read(b[:])
		}
	}
	fmt.Println(err)
}

func TestKilledClientIsReleased(t *testing.T) {
	d := startDaemon(t, &controltest.Cache{})
	f := d.file(t, 4096)
	before := openDescriptors(t)
	for i := range 3 {
		text := fmt.Sprintf("last words %d", i)
		cmd := exec.Command("/proc/self/exe", f.Name(), text)
		cmd.Env = append(os.Environ(), grantsVariable+"="+d.grants)
		in, err := cmd.StdinPipe()
		require.NoError(t, err)
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		line := make([]byte, 7)
		_, err = out.Read(line)
		require.NoError(t, err)
		require.Equal(t, "mapped\n", string(line))
		d.waitMapped(t, 1)
		require.NoError(t, cmd.Process.Kill())
		_ = cmd.Wait() // "signal: killed"
		in.Close()
		d.waitMapped(t, 0)
		got := make([]byte, len(text))
		_, err = f.ReadAt(got, 0)
		require.NoError(t, err)
		require.Equal(t, text, string(got))
	}
	require.Eventually(t, func() bool { return d.server.Stats().Sessions == 0 }, 10*time.Second, time.Millisecond)
	// The cache keeps its memfds and its home, and the grants keep the three files that they were shown. Service
	// connections are not sessions, and may close a moment later.
	require.Eventually(t, func() bool { return openDescriptors(t) <= before+3+3 }, 10*time.Second, time.Millisecond)
}

func openDescriptors(t *testing.T) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(names)
}

// failingWriter takes some bytes, and then fails.
type failingWriter struct{ left int }

func (w *failingWriter) Write(p []byte) (int, error) {
	if w.left -= len(p); w.left < 0 {
		return 0, syscall.ENOSPC
	}
	return len(p), nil
}

// TestRecord: a recording ends when its context ends, when its writer fails, and when the daemon goes.
func TestRecord(t *testing.T) {
	cache, err := pagecache.New(pagecache.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, cache.Close(context.Background())) })
	d := startDaemon(t, &controltest.Cache{}, func(o *control.Options) { o.Record = cache.Record })

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var b bytes.Buffer
	require.NoError(t, Record(ctx, d.dir, &b))
	require.Equal(t, "gaiatrac", string(b.Bytes()[:8]))
	require.Nil(t, cache.Recording())

	for _, left := range []int{0, 40} {
		failed := make(chan error, 1)
		go func() { failed <- Record(t.Context(), d.dir, &failingWriter{left}) }()
		if left > 0 { // there is room for the header, but not for what follows
			require.Eventually(t, func() bool { return cache.Recording() != nil }, 20*time.Second, time.Millisecond)
			cache.Recording().Access(pagecache.Access{
				Describe: func() (string, int64) { return strings.Repeat("x", 100), 1 },
				Device:   pagecache.OnCPU, Len: 1, Size: -1, Began: time.Now(),
			})
		}
		require.ErrorIs(t, <-failed, syscall.ENOSPC)
		require.Nil(t, cache.Recording())
	}

	other, err := cache.Record()
	require.NoError(t, err)
	require.ErrorIs(t, Record(t.Context(), d.dir, &b), syscall.EBUSY)
	other.Stop()

	ended := make(chan error, 1)
	go func() { ended <- Record(t.Context(), d.dir, io.Discard) }()
	require.Eventually(t, func() bool { return cache.Recording() != nil }, 20*time.Second, time.Millisecond)
	require.NoError(t, d.server.Close())
	require.ErrorIs(t, <-ended, syscall.ENOTCONN)
}
