package pagecache

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

// disk is a home on a disk behind a page cache. The memoryHome has what buffered I/O sees. Bytes that were written and
// not dropped since are only in the page cache.
type disk struct {
	*memoryHome
	mu     sync.Mutex
	cached map[page.Index]bool // protected by mu
	bytes  []byte              // protected by mu; the disk's bytes
	direct []page.Range        // protected by mu; ranges read past the page cache
	filled int                 // protected by mu; pages that reads brought into the page cache
	never  error               // protected by mu; fails all reads past the page cache
	hidden error               // protected by mu; fails queries of which pages the page cache has
	asked  int                 // protected by mu; number of such queries
	// gate, if not nil, receives a channel for each read past the page cache after its bytes are read. The read waits
	// until that channel is closed.
	gate chan chan struct{}
}

func newDisk(h *memoryHome) *disk {
	return &disk{memoryHome: h, cached: map[page.Index]bool{}, bytes: bytes.Clone(h.data)}
}

// drop writes dirty pages to the disk and drops them from the page cache.
func (d *disk) drop(rg page.Range) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := rg.Start; i < rg.End; i++ {
		if d.cached[i] {
			d.flush(i)
			delete(d.cached, i)
		}
	}
}

func (d *disk) flush(i page.Index) {
	p := make([]byte, page.Size)
	n, _ := d.memoryHome.ReadAt(p, i.Offset())
	if need := int(i.Offset()) + n; need > len(d.bytes) {
		d.bytes = append(d.bytes, make([]byte, need-len(d.bytes))...)
	}
	copy(d.bytes[i.Offset():], p[:n])
}

// keep brings pages into the page cache.
func (d *disk) keep(off, n int64) (fresh int) {
	for i := range page.Covering(off, n).Len() {
		p := page.Index(off>>page.Shift) + page.Index(i)
		if !d.cached[p] {
			d.cached[p] = true
			fresh++
		}
	}
	return fresh
}

func (d *disk) ReadAt(p []byte, off int64) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n, err := d.memoryHome.ReadAt(p, off)
	if n > 0 {
		d.filled += d.keep(off, int64(n))
	}
	return n, err
}

func (d *disk) WriteAt(p []byte, off int64) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(p) > 0 {
		d.keep(off, int64(len(p)))
	}
	return d.memoryHome.WriteAt(p, off)
}

func (d *disk) WriteParallel(runs [][]byte, off int64) bool { return d.writeRuns(d.WriteAt, runs, off) }

func (d *disk) truncate(size int64) error {
	d.drop(page.Range{End: page.Count(max(size, int64(len(d.data))))})
	d.mu.Lock()
	defer d.mu.Unlock()
	d.bytes = append(d.bytes, make([]byte, max(0, size-int64(len(d.bytes))))...)[:size:size]
	return d.memoryHome.truncate(size)
}

func (d *disk) ReadCached(p []byte, off int64) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := 0
	for n < len(p) && d.cached[page.Index((off+int64(n))>>page.Shift)] {
		m, err := d.memoryHome.ReadAt(p[n:min(n+page.Size, len(p))], off+int64(n))
		if n += m; err != nil || m == 0 {
			return n, err
		}
	}
	return n, nil
}

func (d *disk) WillNeed(int64, int64) {}

// Drop drops pages from the page cache, and subtracts them from filled.
func (d *disk) Drop(off, n int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range page.Covering(off, n).Len() {
		p := page.Index(off>>page.Shift) + page.Index(i)
		if d.cached[p] {
			d.flush(p) // a host drops no dirty page
			delete(d.cached, p)
			d.filled--
		}
	}
}

func (d *disk) Cached(off, n int64) (cached int64, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.asked++; d.hidden != nil {
		return 0, d.hidden
	}
	for i := off >> page.Shift; i < (off+n)>>page.Shift; i++ {
		if d.cached[page.Index(i)] {
			cached += page.Size
		}
	}
	return cached, nil
}

func (d *disk) ReadDirect(p []byte, off int64) (n int, err error) {
	d.mu.Lock()
	if err = d.never; err == nil {
		if off < int64(len(d.bytes)) {
			n = copy(p, d.bytes[off:])
		}
		for i := range p[n:] {
			p[n+i] = 0xa5 // a disk reads whole blocks
		}
		d.direct = append(d.direct, page.Covering(off, int64(len(p))))
	}
	d.mu.Unlock()
	if d.gate != nil {
		open := make(chan struct{})
		d.gate <- open
		<-open
	}
	return n, err
}

func (d *disk) directPages() (pages int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, rg := range d.direct {
		pages += rg.Len()
	}
	return pages
}

// coldFile makes a file of random bytes that only the disk has.
func (m *machine) coldFile(size int) *source {
	src := m.noisyFile(size)
	src.disk = newDisk(src.home)
	return src
}

func (m *machine) requireWays(cached, direct, buffered int64) {
	m.t.Helper()
	c := &m.cache.counters
	require.Equal(m.t, [3]int64{cached, direct, buffered}, [3]int64{c.CachedPages.Load(), c.DirectPages.Load(),
		c.BufferedPages.Load()},
		"pages from the page cache, past it, and through it")
}

// TestColdFill: filling from a file that only the disk has leaves the page cache unchanged.
func TestColdFill(t *testing.T) {
	for name, size := range map[string]int{
		"a byte":              1,
		"a page":              page.Size,
		"a few pages":         10*page.Size + 77,
		"more than in flight": 2*mover.DirectReads*mover.PieceBytes + 12345,
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, 1, memory(128<<20))
			src := m.coldFile(size)
			p := m.run(src, 0, 0, int64(size), true)
			require.True(t, bytes.Equal(src.home.data, p.load(0, size)))
			require.Equal(t, make([]byte, p.end()-size), p.load(size, p.end()), "past end of file")
			m.cache.homes.Reads.Wait() // what they brought is dropped in the background
			require.Zero(t, src.disk.filled, "pages brought into the page cache")
			direct := src.disk.directPages() // all of it, except reads through the page cache for comparison
			m.requireWays(0, direct, int64(page.Count(int64(size)))-direct)
			require.True(t, direct > 0 && (size > 32<<20 || direct == int64(page.Count(int64(size)))))
			require.Zero(t, p.release())
		})
	}
}

// TestFillOfWhatThePageCacheHas: pages in the page cache are home, even if the disk has other bytes.
func TestFillOfWhatThePageCacheHas(t *testing.T) {
	const pages = 5000
	m := newMachine(t, 1, memory(64<<20))
	src := m.coldFile(pages * page.Size)
	kept := int64(0)
	for _, rg := range []page.Range{{Start: 7, End: 8}, {Start: 100, End: 600}, {Start: 1024, End: 2048},
		{Start: 4999, End: 5000}} {
		kept += rg.Len()
		p := bytes.Repeat([]byte{byte(rg.Len())}, int(rg.Bytes()))
		_, err := src.disk.WriteAt(p, rg.Offset())
		require.NoError(t, err)
	}
	p := m.run(src, 0, 0, pages*page.Size, false)
	require.True(t, bytes.Equal(src.home.data, p.all()))
	c := &m.cache.counters
	require.EqualValues(t, pages, c.CachedPages.Load()+c.DirectPages.Load()+c.BufferedPages.Load())
	require.Less(t, int64(src.disk.filled), 6*int64(mover.MixedRun>>page.Shift),
		"few pages around the cached ones")
	require.Greater(t, c.CachedPages.Load(), kept*9/10)
	for _, rg := range src.disk.direct {
		for i := rg.Start; i < rg.End; i++ {
			require.False(t, src.disk.cached[i] && src.disk.bytes[i.Offset()] != src.home.data[i.Offset()],
				"page %d is dirty", i)
		}
	}
}

// TestHomeChangesUnderReads: home is written or truncated after bytes were read and before they are used.
func TestHomeChangesUnderReads(t *testing.T) {
	const size = mover.DirectReads * mover.PieceBytes
	for name, change := range map[string]func(src *source){
		"write": func(src *source) {
			src.write(t, 3*mover.PieceBytes+5,
				[]byte{src.home.data[3*mover.PieceBytes+5] + 1})
		},
		"truncate": func(src *source) { src.truncate(t, size-100); src.truncate(t, size) },
		"punch": func(src *source) {
			c := Change{Kind: ChangeZero, Off: mover.PieceBytes, Len: mover.PieceBytes}
			require.NoError(t, src.attached.ChangeHome(context.Background(), c, func(off, _ int64) error {
				_, err := src.disk.WriteAt(make([]byte, mover.PieceBytes), off)
				return err
			}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, 1, memory(128<<20))
			src := m.coldFile(size)
			mp, err := m.cache.Map(t.Context(), src, MapRequest{Len: size, Lazy: true})
			require.NoError(t, err)
			p, f := m.attach(mp, 0, size, false), src.attached
			src.disk.gate = make(chan chan struct{}, 100)
			leave, err := f.enterReads(t.Context(), mp.h)
			require.NoError(t, err)
			f.mu.Lock()
			_, next, err := f.acquireLocked(t.Context(), mp.h, mp.pages, time.Hour)
			f.mu.Unlock()
			require.NoError(t, err)
			require.Equal(t, mp.pages.Start, next, "nothing waits for the disk under the lock")
			var gates []chan struct{}
			for range mover.DirectReads {
				gates = append(gates, <-src.disk.gate)
			}
			for _, g := range gates {
				close(g)
			}
			src.disk.gate = nil
			require.Equal(t, mover.DirectReads, mp.h.reads.Under())
			change(src)
			p.acquire()
			leave()
			require.True(t, bytes.Equal(src.home.data, p.all()))
			require.Zero(t, mp.h.reads.Under())
		})
	}
}

// TestDirectReadsAreRefused: home refuses direct reads for good, which is logged once, or only this time.
func TestDirectReadsAreRefused(t *testing.T) {
	const size = 5 * mover.PieceBytes
	var log bytes.Buffer
	m := newMachine(t, 1, memory(64<<20), func(o *Options,
		_ *int64) {
		o.Log = slog.New(slog.NewTextHandler(&log, nil))
	})
	for round := range 3 {
		src := m.coldFile(size)
		src.disk.never = &NoDirect{Reason: "planned"}
		p := m.run(src, 0, 0, size, false)
		require.True(t, bytes.Equal(src.home.data, p.all()))
		require.True(t, src.attached.home.RefusesDirectForTesting())
		m.requireWays(0, 0, int64(round+1)*size>>page.Shift)
		p.unmap()
	}
	require.Equal(t, 1, strings.Count(log.String(), "planned"))
	require.Equal(t, []string{"planned"}, m.cache.Status().Buffered)

	src := m.coldFile(size)
	src.disk.never = syscall.EIO // buffered I/O may not return this
	p := m.run(src, 0, 0, size, false)
	require.True(t, bytes.Equal(src.home.data, p.all()))
	require.False(t, src.attached.home.RefusesDirectForTesting())
	require.Len(t, m.cache.Status().Buffered, 1)
}

// TestRefusalIsHeardAtOnce: if home cannot tell what the page cache has, as on tmpfs, no piece is read as if it came
// from a disk.
func TestRefusalIsHeardAtOnce(t *testing.T) {
	const size = 3 * mover.DirectReads * mover.PieceBytes
	m := newMachine(t, 1, memory(256<<20))
	for name, run := range map[string]func(src *source){
		"mapping": func(src *source) {
			p := m.run(src, 0, 0, size, false)
			require.True(t, bytes.Equal(src.home.data, p.all()))
		},
		"view": func(src *source) {
			m.view(ViewRequest{Segments: []view.Segment{bytesOf(0, size)}}, src).check()
		},
	} {
		src := m.coldFile(size)
		src.disk.hidden = &NoDirect{Reason: "planned"}
		run(src)
		require.True(t, src.attached.home.RefusesDirectForTesting())
		require.LessOrEqual(t, src.disk.asked, 2, name)
	}
}

// TestBufferedReads: with Options.BufferedReads nothing is read past the page cache.
func TestBufferedReads(t *testing.T) {
	const size = 3 * mover.PieceBytes
	m := newMachine(t, 1, func(o *Options, _ *int64) { o.BufferedReads = true })
	src := m.coldFile(size)
	p := m.run(src, 0, 0, size, false)
	require.True(t, bytes.Equal(src.home.data, p.all()))
	require.Zero(t, src.disk.directPages())
	require.Equal(t, "off", m.cache.Status().DirectReads)
}

var _ DirectReader = (*disk)(nil)

// TestColdFillsLearnTheWay: trial reads through the page cache leave it unchanged.
func TestColdFillsLearnTheWay(t *testing.T) {
	const size = 300 << 20
	m := newMachine(t, 1, memory(512<<20))
	src := m.coldFile(size)
	v := m.view(ViewRequest{Segments: []view.Segment{bytesOf(0, size)}}, src)
	m.cache.homes.Reads.Wait() // what they brought is dropped in the background
	require.Zero(t, src.disk.filled)
	v.check()
	c := &m.cache.counters
	require.Positive(t, c.DirectPages.Load())
	require.Positive(t, c.BufferedPages.Load())
	require.EqualValues(t, size>>page.Shift, c.DirectPages.Load()+c.BufferedPages.Load())
}
