package fs

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
)

type span = page.Bytes

var toTheEnd = page.From(0)

func TestHazard(t *testing.T) {
	const page = 4096
	again := func(h *hazard, off, n int64, only bool) []span {
		spans, _ := h.overlap(off, n, 1)
		if only {
			h.written()
		}
		return spans
	}
	t.Run("nothing is remembered without an invalidation", func(t *testing.T) {
		var h hazard
		h.read(0, page, 1)
		assert.Empty(t, again(&h, 0, page, true))
	})
	t.Run("a read before the first write after", func(t *testing.T) {
		var h hazard
		n := h.invalidationBegins()
		h.read(100, 10, 1)
		h.invalidationEnded(n, toTheEnd)
		assert.Equal(t, []span{{Off: 0, End: page}}, again(&h, page-1, 2, true))
		assert.Empty(t, again(&h, 0, page, true), "a second write was not in flight")
		h.read(0, page, 1)
		assert.Empty(t, again(&h, 0, page, true))
	})
	t.Run("every write while an invalidation runs", func(t *testing.T) {
		var h hazard
		n := h.invalidationBegins()
		h.read(0, 2*page, 1)
		for range 3 {
			assert.Equal(t, []span{{Off: page, End: 2 * page}}, again(&h, page, page, true))
		}
		h.invalidationEnded(n, toTheEnd)
		assert.Equal(t, []span{{Off: page, End: 2 * page}}, again(&h, page, 3*page, true))
		assert.False(t, h.on.Load())
	})
	t.Run("writes that need not be alone end nothing", func(t *testing.T) {
		var h hazard
		h.invalidationEnded(h.invalidationBegins(), toTheEnd)
		h.read(0, page, 1)
		assert.Len(t, again(&h, 0, 1, false), 1)
		assert.Len(t, again(&h, 0, 1, true), 1)
		assert.Empty(t, again(&h, 0, 1, true))
	})
	t.Run("a later invalidation forgets what it drops", func(t *testing.T) {
		var h hazard
		first := h.invalidationBegins()
		h.read(0, page, 1)
		h.read(5*page, page, 1)
		second := h.invalidationBegins()
		h.read(9*page, page, 1)
		h.invalidationEnded(second, span{End: page})
		assert.Empty(t, again(&h, 0, page, true))
		assert.Len(t, again(&h, 5*page, page, true), 1)
		assert.Len(t, again(&h, 9*page, page, true), 1)
		h.invalidationEnded(first, toTheEnd)
		assert.Len(t, again(&h, 5*page, 5*page, true), 2)
	})
	t.Run("many reads", func(t *testing.T) {
		var h hazard
		h.invalidationBegins()
		for i := range int64(10 * maxRemembered) {
			h.read(i*2*page, page, 1)
		}
		assert.LessOrEqual(t, len(h.reads), maxRemembered)
		assert.Equal(t, []span{{Off: page, End: 2 * page}}, again(&h, page, page, true))
	})
	t.Run("readers that may not have run", func(t *testing.T) {
		for name, c := range map[string]struct {
			reads func(h *hazard)
			want  []uint32
		}{
			"nobody":                   {func(h *hazard) {}, nil},
			"the writer itself":        {func(h *hazard) { h.read(0, page, 7) }, nil},
			"somebody else":            {func(h *hazard) { h.read(0, page, 8) }, []uint32{8}},
			"somebody else, elsewhere": {func(h *hazard) { h.read(page, page, 8) }, nil},
			"somebody else, before":    {func(h *hazard) { h.read(0, page, 8); h.read(page, page, 8) }, nil},
			"one of another namespace": {func(h *hazard) { h.read(0, page, 0); h.read(page, page, 0) }, []uint32{0}},
			"one of more than are known": {func(h *hazard) {
				h.read(0, page, 8)
				for i := range uint32(2 * maxRemembered) {
					h.read(page, page, 100+i)
				}
			}, []uint32{0}},
		} {
			var h hazard
			h.invalidationBegins()
			c.reads(&h)
			_, by := h.overlap(10, 20, 7)
			assert.Equal(t, c.want, slices.Collect(maps.Keys(by.waiting)), name)
			assert.LessOrEqual(t, len(h.reading), maxRemembered, name)
		}
	})
	t.Run("neighbours are joined", func(t *testing.T) {
		var h hazard
		h.invalidationBegins()
		for i := range int64(1000) {
			h.read(i*page, page, 1)
		}
		assert.Len(t, h.reads, 1)
		assert.Equal(t, []span{{Off: 0, End: 1000 * page}}, again(&h, 0, 2000*page, true))
	})
}

// TestSuspectPagesAreMerged: a page that was filled before a write came home, and dirtied later, must not undo the
// write.
func TestSuspectPagesAreMerged(t *testing.T) {
	const page = 4096
	f, err := os.Create(filepath.Join(t.TempDir(), "home"))
	require.NoError(t, err)
	defer f.Close()
	stale := make([]byte, page) // the bytes with which the kernel filled its page
	_, err = f.WriteAt(stale, page)
	require.NoError(t, err)

	var h hazard
	n := h.invalidationBegins()
	h.read(page, page, 1)
	h.invalidationEnded(n, toTheEnd)
	again, _ := h.overlap(page+10, 2, 1)
	fd := int(f.Fd())
	h.suspectPages(again, fd, 0)
	_, err = f.WriteAt([]byte("ww"), page+10) // the write
	require.NoError(t, err)
	h.written()
	require.True(t, h.lasts(), "until the pages are dropped")

	back := func() {
		merged, err := h.mergeSuspects(stale, page, fd)
		require.NoError(t, err)
		_, err = f.WriteAt(merged, page)
		require.NoError(t, err)
	}
	stale[100] = 'm' // a program stores through a mapping
	back()
	stale[100], stale[11] = 'n', 'x' // it stores again, once over the written bytes
	back()
	got := make([]byte, page)
	_, err = f.ReadAt(got, page)
	require.NoError(t, err)
	assert.Equal(t, "wx", string(got[10:12]))
	assert.Equal(t, byte('n'), got[100])

	h.trustPages(again)
	assert.False(t, h.lasts())
	merged, err := h.mergeSuspects(stale, page, fd)
	require.NoError(t, err)
	assert.Equal(t, stale, merged)
}

// TestSuspectPageThatCannotBeRead: the end of a write whose page home did not give leaves the suspects of others.
func TestSuspectPageThatCannotBeRead(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "home"))
	require.NoError(t, err)
	defer f.Close()
	var h hazard
	again := []page.Bytes{pageSpan(0, 1)}
	h.suspectPages(again, -1, 0) // no home
	merged, err := h.mergeSuspects([]byte{1}, 0, -1)
	require.NoError(t, err)
	require.Equal(t, []byte{1}, merged)
	h.suspectPages(again, int(f.Fd()), 0)
	h.trustPages(again) // the first one
	merged, err = h.mergeSuspects([]byte{0}, 0, int(f.Fd()))
	require.NoError(t, err)
	require.Equal(t, []byte{0}, merged)
	require.False(t, h.suspects[0].unread)
	h.trustPages(again)
	require.Empty(t, h.suspects)
	require.False(t, h.lasts())
}

// TestSuspectPageThatTheKernelReadsAgain: the kernel filled a page too early. Before the correction drops it, it is
// dropped for another reason, and the kernel reads it again, with the written bytes. Then a program stores the bytes
// from before the write.
func TestSuspectPageThatTheKernelReadsAgain(t *testing.T) {
	s := mount(t)
	path := filepath.Join(s.mnt, "file")
	require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte{1}, page.Size), 0o600))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	home, err := os.OpenFile(filepath.Join(s.source, "file"), os.O_RDWR, 0)
	require.NoError(t, err)
	defer home.Close()
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(int(home.Fd()), &st))
	n := s.fs.table.byInode(inodeKey{st.Dev, st.Ino})
	c, again := n.content(), []span{{Off: 0, End: page.Size}}
	suspect := func(then ...byte) { // a write that comes home after an early READ
		c.gate.Lock()
		defer c.gate.Unlock()
		c.hazard.suspectPages(again, int(home.Fd()), page.Size)
		_, err = home.WriteAt(then, 0)
		require.NoError(t, err)
	}
	suspect(2)
	require.NoError(t, s.fs.dropPages(n, 0, page.Size)) // a release, say
	m, err := unix.Mmap(int(f.Fd()), 0, page.Size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(m)) }()
	// A system call faults the page in: a thread that faults by itself holds up Go's collector, and so the filesystem.
	require.NoError(t, unix.Madvise(m, unix.MADV_POPULATE_WRITE))
	require.EqualValues(t, 2, m[0])
	m[0] = 1
	require.NoError(t, unix.Msync(m, unix.MS_SYNC))
	got := make([]byte, 2)
	_, err = home.ReadAt(got, 0)
	require.NoError(t, err)
	require.EqualValues(t, 1, got[0])

	suspect(1, 5) // the page that the kernel has read again, without this write
	require.NoError(t, unix.Madvise(m, unix.MADV_POPULATE_WRITE))
	m[2] = 9
	require.NoError(t, unix.Msync(m, unix.MS_SYNC))
	_, err = home.ReadAt(got, 0)
	require.NoError(t, err)
	require.Equal(t, []byte{1, 5}, got, "the page is suspect once more")
	c.gate.Lock()
	c.hazard.trustPages(again)
	c.hazard.trustPages(again)
	c.gate.Unlock()
	require.False(t, c.hazard.lasts())
	require.Empty(t, c.hazard.suspects)
}

// TestReadDuringDirectWrite makes a READ come between the kernel's own invalidation and the WRITE of an asynchronous
// direct write. The test itself hands the WRITE to the filesystem.
func TestReadDuringDirectWrite(t *testing.T) {
	bothModes(t, func(t *testing.T, s *scene) {
		old := bytes.Repeat([]byte{1}, 4*page.Size)
		require.NoError(t, os.WriteFile(filepath.Join(s.source, "f"), old, 0600))
		f, err := os.OpenFile(filepath.Join(s.mnt, "f"), os.O_RDWR, 0)
		require.NoError(t, err)
		defer f.Close()
		got := make([]byte, len(old))
		_, err = f.ReadAt(got, 0)
		require.NoError(t, err)
		require.Equal(t, old, got)

		fresh := bytes.Repeat([]byte{2}, 2*page.Size)
		in := fuse.WriteIn{Fh: s.fs.files.all()[0].handle, Offset: page.Size, Size: uint32(len(fresh)),
			WriteFlags: fuse.WRITE_LOCKOWNER}
		n, status := s.fs.Write(nil, &in, fresh)
		require.Equal(t, fuse.OK, status)
		require.EqualValues(t, len(fresh), n)

		_, err = f.ReadAt(got, 0)
		require.NoError(t, err)
		copy(old[page.Size:], fresh)
		assert.Equal(t, old, got)
	})
}

// TestDirectWriteThroughThePages: if the kernel cannot drop a page before a write with O_DIRECT, it writes to the page.
// It may have that page locked until WRITE is answered, so nothing may make it drop the page before.
func TestDirectWriteThroughThePages(t *testing.T) {
	bothModes(t, func(t *testing.T, s *scene) {
		path := filepath.Join(s.mnt, "f")
		require.NoError(t, os.WriteFile(filepath.Join(s.source, "f"), make([]byte, page.Size), 0600))
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		require.NoError(t, err)
		defer f.Close()
		_, err = f.ReadAt(make([]byte, page.Size), 0)
		require.NoError(t, err)
		s.fs.notify = &hookedKernel{notifier: s.fs.notify, hook: func() { t.Error("the kernel is to drop the page") }}
		in := fuse.WriteIn{Fh: s.fs.files.all()[0].handle, Size: 10, Flags: unix.O_DIRECT}
		_, status := s.fs.Write(nil, &in, []byte("0123456789"))
		require.Equal(t, fuse.OK, status)
	})
}

// slowKernel drops pages of one inode only when the test says so.
type slowKernel struct {
	notifier
	of     uint64
	asked  chan struct{}
	finish chan struct{}
}

func (k *slowKernel) InodeNotify(node uint64, off, n int64) fuse.Status {
	if node == k.of && n > 0 {
		close(k.asked)
		<-k.finish
	}
	return k.notifier.InodeNotify(node, off, n)
}

// TestCorrectionBehindItsWrite makes the kernel drop pages for a WRITE only after the WRITE was answered. The next
// write may then be in flight when its page is dropped. What is read in that time is dropped again.
func TestCorrectionBehindItsWrite(t *testing.T) {
	s := mount(t)
	path := filepath.Join(s.mnt, "file")
	require.NoError(t, os.WriteFile(path, make([]byte, 3*page.Size), 0o600))
	open, err := os.Open(path)
	require.NoError(t, err)
	defer open.Close()
	home, err := os.Open(filepath.Join(s.source, "file"))
	require.NoError(t, err)
	defer home.Close()
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(int(home.Fd()), &st))
	n := s.fs.table.byInode(inodeKey{st.Dev, st.Ino})
	kernel := &slowKernel{s.fs.notify, uint64(n.id), make(chan struct{}), make(chan struct{})}
	s.fs.notify = kernel
	finish := sync.OnceFunc(func() { close(kernel.finish) })
	defer finish()
	h := &n.content().hazard
	again := []span{{Off: 0, End: page.Size}}
	n.content().gate.Lock()
	h.suspectPages(again, int(home.Fd()), 0)
	n.content().gate.Unlock()
	s.fs.correct(n, again, readers{})
	<-kernel.asked
	require.EqualValues(t, 1, s.fs.impatient.Load())

	h.read(0, 10, 1)
	spans, _ := h.overlap(5, 1, 1)
	require.Equal(t, again, spans, "a page that was read while it may be dropped")
	h.written()
	require.True(t, h.lasts(), "it may still be dropped")
	finish()
	require.Eventually(t, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.running == 0
	}, 10*time.Second, time.Millisecond)
	h.read(page.Size, 10, 1)
	spans, _ = h.overlap(0, 3*page.Size, 1)
	require.Equal(t, []span{{Off: 0, End: 2 * page.Size}}, joinSpans(spans), "a write that began before it was dropped")
	h.written()
	require.Eventually(t, func() bool { return !h.lasts() }, 10*time.Second, time.Millisecond)
}

// joinSpans joins spans that touch.
func joinSpans(spans []span) (all []span) {
	for _, s := range spans {
		if n := len(all); n > 0 && all[n-1].End >= s.Off {
			all[n-1].End = max(all[n-1].End, s.End)
		} else {
			all = append(all, s)
		}
	}
	return all
}
