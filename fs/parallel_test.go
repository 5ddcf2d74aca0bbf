package fs

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

// homeOf returns the home of a file on the mount.
func (s *scene) homeOf(t *testing.T, n *notary, path string) pagecache.ParallelWriter {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	require.NoError(t, askGrant(f, make([]byte, GrantSize)))
	h, err := n.last().OpenHome(true)
	require.NoError(t, err)
	t.Cleanup(func() { _ = h.Close() })
	return h.(pagecache.ParallelWriter)
}

// homeOnTmpfs returns the home of a file of so many zeros on a tmpfs, and its path there.
func homeOnTmpfs(t *testing.T, size int) (h pagecache.ParallelWriter, below string) {
	t.Helper()
	n := &notary{}
	s := mount(t, func(o *Options) { o.Granter = n })
	mountTmpfs(t, filepath.Join(s.source, "d"), 0)
	below = filepath.Join(s.source, "d/f")
	require.NoError(t, os.WriteFile(below, make([]byte, size), 0o644))
	return s.homeOf(t, n, filepath.Join(s.mnt, "d/f")), below
}

// written calls WriteParallel as package pagecache does.
func written(t *testing.T, h pagecache.ParallelWriter, runs [][]byte, off int64) bool {
	t.Helper()
	_, end, err := h.BeginWrites()
	require.NoError(t, err)
	defer end()
	return h.WriteParallel(runs, off)
}

// runsOf cuts b into runs of whole pages.
func runsOf(b []byte, rnd *rand.Rand) (runs [][]byte) {
	for len(b) > 0 {
		n := min(len(b), (1+rnd.IntN(300))*page.Size)
		runs, b = append(runs, b[:n:n]), b[n:]
	}
	return runs
}

// TestWriteParallel: several cores write the same bytes as calls would, with what others notice of a write call.
func TestWriteParallel(t *testing.T) {
	requireRoot(t)
	for _, kind := range []string{"tmpfs", "the tests' own"} {
		t.Run(kind, func(t *testing.T) {
			n := &notary{}
			s := mount(t, func(o *Options) { o.Granter = n })
			if kind == "tmpfs" {
				mountTmpfs(t, filepath.Join(s.source, "d"), 0)
			} else {
				require.NoError(t, os.Mkdir(filepath.Join(s.source, "d"), 0o755))
			}
			const size, off = 9<<20 + 100, 3 * page.Size
			below := filepath.Join(s.source, "d/f")
			want := bytes.Repeat([]byte("before. "), size/8+1)[:size]
			require.NoError(t, os.WriteFile(below, want, 0o755))
			capable := []byte{1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
			require.NoError(t, unix.Setxattr(below, "security.capability", capable, 0))
			h := s.homeOf(t, n, filepath.Join(s.mnt, "d/f"))
			if !h.(*home).mapsWell() {
				t.Skip("the tests' directory is on another filesystem")
			}
			before, err := h.Signature()
			require.NoError(t, err)

			rnd := rand.New(rand.NewPCG(1, 2))
			data := want[off : 8<<20]
			for i := range data {
				data[i] = byte(rnd.Uint32())
			}
			require.True(t, written(t, h, runsOf(data, rnd), off))
			got, err := os.ReadFile(below)
			require.NoError(t, err)
			require.True(t, bytes.Equal(want, got))
			after, err := h.Signature()
			require.NoError(t, err)
			assert.True(t, after.Mtime.After(before.Mtime), "mtime")
			changes, err := h.Look()
			require.NoError(t, err)
			assert.Zero(t, changes, "it was taken for a foreign change")
			_, err = unix.Getxattr(below, "security.capability", nil)
			assert.ErrorIs(t, err, unix.ENODATA)
			require.NoError(t, h.Sync())

			require.False(t, written(t, h, [][]byte{data[:page.Size]}, 0), "too little")
			require.NoError(t, os.Truncate(below, 1<<20))
			require.NoError(t, os.Truncate(below, size))
			require.False(t, written(t, h, runsOf(data, rnd), off), "pages are missing")
		})
	}
}

// TestWriteParallelWakesWatchers: who reads the file in SOURCE after each event has read all of it in the end.
func TestWriteParallelWakesWatchers(t *testing.T) {
	requireRoot(t)
	const size = 8 << 20
	h, below := homeOnTmpfs(t, size)
	seen, err := os.Open(below)
	require.NoError(t, err)
	defer seen.Close()
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	require.NoError(t, err)
	watch := os.NewFile(uintptr(fd), "inotify")
	defer watch.Close()
	_, err = unix.InotifyAddWatch(fd, below, unix.IN_MODIFY)
	require.NoError(t, err)

	for round := byte(1); round <= 20; round++ {
		written := make(chan bool)
		go func() {
			_, end, err := h.BeginWrites()
			ok := err == nil && h.WriteParallel([][]byte{bytes.Repeat([]byte{round}, size)}, 0)
			if err == nil {
				end()
			}
			written <- ok
		}()
		var buf [4096]byte
		got := make([]byte, size)
		for ended := false; ; {
			if _, err := watch.Read(buf[:]); err == nil {
				_, err = seen.ReadAt(got, 0)
				require.NoError(t, err)
			} else {
				require.ErrorIs(t, err, os.ErrDeadlineExceeded)
				if ended {
					break
				}
			}
			select {
			case ok := <-written:
				require.True(t, ok)
				ended = true
			default:
			}
			require.NoError(t, watch.SetReadDeadline(time.Now().Add(time.Millisecond)))
		}
		require.Equal(t, size, bytes.Count(got, []byte{round}), "round %d: what was read after the last event", round)
	}
}

// TestWriteParallelWhileTheFileIsCut: nothing worse happens than that the write says it was not done.
func TestWriteParallelWhileTheFileIsCut(t *testing.T) {
	requireRoot(t)
	const size = 8 << 20
	h, below := homeOnTmpfs(t, size)
	data := bytes.Repeat([]byte("bytes"), size/5+1)[:size]
	stop := make(chan struct{})
	var cutting sync.WaitGroup
	cutting.Go(func() {
		for i := int64(0); ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			_ = os.Truncate(below, i%8<<20)
			_ = os.WriteFile(below, make([]byte, size), 0o644)
		}
	})
	rnd := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		written(t, h, runsOf(data, rnd), 0)
	}
	close(stop)
	cutting.Wait()

	m, err := unix.Mmap(h.(*home).fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(m)) }()
	require.NoError(t, os.Truncate(below, 7<<20))
	require.Error(t, h.(*home).storeAll(m, runsOf(data, rnd)), "the last part fails")
}

// TestWriteParallelTakesNothingFromRoot: several cores get no blocks that are reserved for root, for holes whose pages
// the page cache has, unless they write for root.
func TestWriteParallelTakesNothingFromRoot(t *testing.T) {
	disk := smallDisk(t)
	const size = 8 << 20
	below := filepath.Join(disk, "f")
	f, err := os.Create(below)
	require.NoError(t, err)
	for _, at := range []int64{0, size - page.Size} { // WriteParallel writes these by calls
		_, err = f.WriteAt(make([]byte, page.Size), at)
		require.NoError(t, err)
	}
	require.NoError(t, f.Sync())
	require.NoError(t, f.Close())
	n := &notary{}
	s := mount(t, on(disk), func(o *Options) { o.Granter = n })
	h := s.homeOf(t, n, filepath.Join(s.mnt, "f"))
	fillUp(t, disk)
	_, err = os.ReadFile(below)
	require.NoError(t, err)
	data := [][]byte{bytes.Repeat([]byte{1}, size)}

	h.(*home).ordinary.Store(alice + 1)
	require.False(t, written(t, h, data, 0))
	requireReserve(t, disk)
	h.(*home).ordinary.Store(0)
	require.True(t, written(t, h, data, 0))
}

// TestStoreInto: stores into a mapping whose file is shorter, or has no room, fail as calls do.
func TestStoreInto(t *testing.T) {
	requireRoot(t)
	dir := filepath.Join(t.TempDir(), "d")
	mountTmpfs(t, dir, 0) // of 64 MiB
	f, err := os.Create(filepath.Join(dir, "f"))
	require.NoError(t, err)
	defer f.Close()
	const size = 128 << 20
	require.NoError(t, f.Truncate(size))
	m, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(m)) }()
	from := bytes.Repeat([]byte("x"), size)
	assert.Error(t, storeInto(m, from), "no room")
	require.NoError(t, f.Truncate(1<<20))
	assert.NoError(t, storeInto(m[:1<<20], from[:1<<20]))
	assert.Error(t, storeInto(m[:2<<20], from[:2<<20]), "past the end")
	assert.ErrorIs(t, storeGuarded(m[:2<<20], from[:2<<20]), unix.EFAULT, "cut after the faults")
}
