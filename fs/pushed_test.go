package fs

import (
	"bytes"
	"encoding/binary"
	"flag"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

var pushTime = flag.Duration("push-time", time.Second, "how long each test for stale pushed pages takes")

// A device gives a small read the 128 KiB around it. If programs read there again, the kernel gets all of that.
const (
	pushedChunk = 128 << 10
	pushedSize  = 8 * pushedChunk
)

// slowPushes is a kernel that gets pushed pages some time after the daemon sent them.
type slowPushes struct{ notifier }

func (k slowPushes) InodeNotifyStoreCache(node uint64, off int64, p []byte) fuse.Status {
	time.Sleep(time.Duration(rand.Int64N(int64(2 * time.Millisecond))))
	return k.notifier.InodeNotifyStoreCache(node, off, p)
}

// pushScene is a mount with a file that a device has.
type pushScene struct {
	*scene
	cache  *pagecache.Cache
	path   string
	window window
}

func newPushScene(t *testing.T, writable bool, change ...func(*Options)) *pushScene {
	t.Helper()
	s, cache, n := mountReading(t, 1, pagecache.DeviceReadsAlways, change...)
	b := make([]byte, pushedSize)
	_, _ = rand.NewChaCha8([32]byte{}).Read(b)
	require.NoError(t, os.WriteFile(filepath.Join(s.source, "f"), b, 0600))
	p := &pushScene{scene: s, cache: cache, path: filepath.Join(s.mnt, "f")}
	flags := os.O_RDONLY
	if writable {
		flags = os.O_RDWR
	}
	f, err := os.OpenFile(p.path, flags, 0)
	require.NoError(t, err)
	defer f.Close()
	p.window = mapAs(t, cache, n, f, pagecache.MapRequest{Len: pushedSize, Writable: writable, Launder: true})
	t.Cleanup(func() { p.window.close(t) })
	return p
}

// home returns what SOURCE has of the file.
func (p *pushScene) home(t *testing.T) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(p.source, "f"))
	require.NoError(t, err)
	return b
}

// cached returns how many pages of the file the kernel has.
func (p *pushScene) cached(t *testing.T, f *os.File) int64 {
	t.Helper()
	n, err := pagesCached(int(f.Fd()), 0, pushedSize)
	require.NoError(t, err)
	return n
}

func (p *pushScene) pushed() int64 { return p.cache.Status().Counters["pushed_bytes"] }

// reader opens the file so that the kernel does not read ahead.
func (p *pushScene) reader(t *testing.T) *os.File {
	t.Helper()
	f, err := os.Open(p.path)
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	require.NoError(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_RANDOM))
	return f
}

// readSome reads pages of each chunk, with steps between them that read-ahead does not expect.
func (p *pushScene) readSome(t *testing.T, f *os.File, pages ...int64) {
	t.Helper()
	home, b := p.home(t), make([]byte, page.Size)
	for _, i := range pages {
		for chunk := range int64(pushedSize / pushedChunk) {
			at := chunk*pushedChunk + (i+chunk*chunk)*page.Size%pushedChunk
			_, err := f.ReadAt(b, at)
			require.NoError(t, err)
			require.True(t, bytes.Equal(home[at:at+page.Size], b), "offset %d", at)
		}
	}
}

// TestPagesArePushed: two reads in a chunk give the kernel all of it, with the right bytes.
func TestPagesArePushed(t *testing.T) {
	p := newPushScene(t, false)
	f := p.reader(t)
	p.readSome(t, f, 0, 3)
	i := int64(4)
	require.Eventually(t, func() bool {
		p.readSome(t, f, i) // a push that found others under way is made up for
		i++
		return p.cached(t, f) == pushedSize>>page.Shift || i == 32
	}, time.Minute, 10*time.Millisecond)
	require.Less(t, i, int64(32), "the kernel has only pages that were read")
	got, err := os.ReadFile(p.path)
	require.NoError(t, err)
	require.True(t, bytes.Equal(p.home(t), got))
	require.Positive(t, p.pushed())
}

// TestOldPagesAreNotPushed: the kernel gets pages only if they are current when no change of them can be missed.
func TestOldPagesAreNotPushed(t *testing.T) {
	p := newPushScene(t, false)
	f := p.reader(t)
	pages := p.kernelPages(t, "f")
	for _, current := range []bool{false, true} {
		asked := false
		took := pages.Push(0, make([]byte, pushedChunk), func() bool {
			asked = true
			require.False(t, p.fs.table.byInode(pages.key).content().pushing.TryLock(), "a change would be missed")
			return current
		})
		require.True(t, asked)
		require.Equal(t, current, took)
		require.Equal(t, current, p.cached(t, f) > 0)
	}
	require.NoError(t, pages.Invalidate(0, -1)) // these zeros are not what the file has
}

// TestNothingIsPushedBesideWriters: the kernel's pages of a file that a program may change come from reads alone.
func TestNothingIsPushedBesideWriters(t *testing.T) {
	modes := map[string]func(*Options){"seen": func(*Options) {}}
	if os.Geteuid() == 0 {
		modes["unseen"] = unseenOpens
	}
	for name, mode := range modes {
		t.Run(name, func(t *testing.T) {
			p := newPushScene(t, false, mode)
			w, err := os.OpenFile(p.path, os.O_WRONLY, 0)
			require.NoError(t, err)
			defer w.Close()
			f := p.reader(t)
			p.readSome(t, f, 0, 3, 6, 9)
			require.Never(t, func() bool { return p.pushed() > 0 }, 300*time.Millisecond, 10*time.Millisecond)
			require.EqualValues(t, 4*pushedSize/pushedChunk, p.cached(t, f))
		})
	}
}

// TestNothingIsPushedOverStores: a program that has closed a file may still store into it through a mapping.
func TestNothingIsPushedOverStores(t *testing.T) {
	for _, mode := range deviceModes()[:2] {
		t.Run(mode.name, func(t *testing.T) {
			p := newPushScene(t, false, mode.change)
			m, end := p.maps(t, p.path, pushedSize)
			m.do("close", 0, 0)
			f := p.reader(t)
			p.readSome(t, f, 0, 3)
			const at = 20 * page.Size
			m.do("store", at, 'x')
			b := make([]byte, page.Size)
			for i := range int64(8) {
				_, err := f.ReadAt(b, (5+i)*page.Size)
				require.NoError(t, err)
				time.Sleep(10 * time.Millisecond)
			}
			require.Zero(t, p.pushed())
			require.EqualValues(t, 'x', m.do("load", at, 0))
			end()
			require.EqualValues(t, 'x', p.home(t)[at])
		})
	}
}

// TestNoStaleReadsOfPushedPages: while pages are pushed, a device releases into them, programs write them, or cut the
// file. No reader gets bytes that are older than what had ended before it began.
func TestNoStaleReadsOfPushedPages(t *testing.T) {
	const mark = 5 * page.Size // where the number of the round is in each chunk
	number := func(round uint64) []byte { return binary.NativeEndian.AppendUint64(nil, round) }
	write := func(t *testing.T, w *os.File, round uint64) {
		for at := int64(mark); at < pushedSize; at += pushedChunk {
			_, err := w.WriteAt(number(round), at)
			require.NoError(t, err)
		}
	}
	changes := map[string]func(t *testing.T, p *pushScene, round uint64){
		"device": func(t *testing.T, p *pushScene, round uint64) {
			for at := int64(mark); at < pushedSize; at += pushedChunk {
				p.window.store(t, at, number(round))
			}
			p.window.release(t, pushedSize)
		},
		"write": func(t *testing.T, p *pushScene, round uint64) {
			w, err := os.OpenFile(p.path, os.O_WRONLY, 0)
			require.NoError(t, err)
			defer w.Close()
			write(t, w, round)
		},
		"cut": func(t *testing.T, p *pushScene, round uint64) {
			size := int64(round%8*pushedChunk + mark)
			require.NoError(t, os.Truncate(p.path, size))
			for range 3 {
				var st unix.Stat_t
				require.NoError(t, unix.Stat(p.path, &st))
				require.Equal(t, size, st.Size)
			}
			w, err := os.OpenFile(p.path, os.O_WRONLY, 0)
			require.NoError(t, err)
			defer w.Close()
			write(t, w, round)
			require.NoError(t, w.Truncate(pushedSize))
		},
	}
	for name, change := range changes {
		for _, mode := range deviceModes()[:2] {
			t.Run(name+"/"+mode.name, func(t *testing.T) {
				p := newPushScene(t, name == "device", mode.change)
				p.fs.notify = slowPushes{p.fs.notify}
				var done atomic.Uint64
				change(t, p, 1)
				done.Store(1)
				stop := make(chan struct{})
				var readers sync.WaitGroup
				defer readers.Wait()
				defer close(stop)
				for range 4 {
					f := p.reader(t)
					readers.Go(func() {
						b := make([]byte, page.Size)
						for {
							select {
							case <-stop:
								return
							default:
							}
							chunk := rand.Int64N(pushedSize / pushedChunk)
							_, _ = f.ReadAt(b, chunk*pushedChunk+rand.Int64N(pushedChunk>>page.Shift)*page.Size)
							before := done.Load()
							n, err := f.ReadAt(b[:8], chunk*pushedChunk+mark)
							if name == "cut" && n < 8 {
								continue // the file is short now
							}
							got := binary.NativeEndian.Uint64(b)
							if assert.NoError(t, err) && name == "cut" && got == 0 {
								continue // cut off, and not written again yet
							}
							if !assert.GreaterOrEqual(t, got, before, "chunk %d", chunk) {
								return
							}
						}
					})
				}
				until := time.Now().Add(*pushTime)
				for round := uint64(2); time.Now().Before(until) || p.pushed() == 0; round++ {
					require.Less(t, time.Since(until), time.Minute, "nothing is pushed: %v", p.cache.Status().Counters)
					change(t, p, round)
					done.Store(round)
					_, err := p.window.Acquire(t.Context(), 0, pushedSize, true)
					require.NoError(t, err)
					time.Sleep(time.Duration(rand.Int64N(int64(20 * time.Millisecond))))
				}
				t.Logf("%d rounds, %d chunks pushed", done.Load(), p.pushed()/pushedChunk)
			})
		}
	}
}
