package pagecache

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// noisyFile makes a file whose pages all differ, and whose last page is not full.
func (m *machine) noisyFile(size int) *source {
	src := m.file(size)
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[:], uint64(size))
	_, _ = rand.NewChaCha8(seed).Read(src.home.data) // much faster than byte by byte under the race detector
	return src
}

// cachedHome is a home with its beginning in the host's page cache.
type cachedHome struct {
	*memoryHome
	cached int64 // bytes from the start
	asked  chan page.Range
}

func (h *cachedHome) ReadCached(p []byte, off int64) (int, error) {
	n := max(min(int64(len(p)), h.cached-off), 0)
	return h.ReadAt(p[:n], off)
}

func (h *cachedHome) WillNeed(off, n int64) { h.asked <- page.Covering(off, n) }

type cachedSource struct {
	*source
	home *cachedHome
}

func (s *cachedSource) OpenHome(bool) (Home, error) { return s.home, nil }

// TestFillOfManyPieces fills more pieces than the pipeline has buffers for, from a file that is partly in the host's
// page cache.
func TestFillOfManyPieces(t *testing.T) {
	const size = 40*mover.PieceBytes - 100
	m := newMachine(t, 1, memory(128<<20))
	src := &cachedSource{source: m.noisyFile(size)}
	src.home = &cachedHome{memoryHome: src.source.home, cached: 10*mover.PieceBytes + 12345,
		asked: make(chan page.Range, 1000)}
	mp, err := m.cache.Map(t.Context(), src, MapRequest{Len: size, Writable: true})
	require.NoError(t, err)
	p := m.attach(mp, 0, size, true)
	require.True(t, bytes.Equal(src.home.data, p.load(0, size)))
	require.Equal(t, make([]byte, 100), p.load(size, size+100), "past end of file")
	require.EqualValues(t, 40*mover.PieceBytes/page.Size, m.cache.counters.FilledPages.Load())
	require.Zero(t, p.release(), "the filled bytes are the agreed bytes")
	close(src.home.asked)
	asked := 0
	for rg := range src.home.asked {
		require.GreaterOrEqual(t, rg.End.Offset(), src.home.cached, "cached bytes are not asked for")
		asked++
	}
	require.Greater(t, asked, 0)
}

// TestScatteredAcquires: the CPU writes single pages all over a file that devices map: one for writing, one for
// reading, one lazily.
func TestScatteredAcquires(t *testing.T) { scatteredAcquires(t) }

// TestScatteredAcquiresByMany is the same test with a dozen readers for each acquire.
func TestScatteredAcquiresByMany(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(16))
	scatteredAcquires(t)
}

func scatteredAcquires(t *testing.T) {
	const pages = 5000
	m := newMachine(t, 2, memory(128<<20))
	src := m.noisyFile(pages * page.Size)
	writer := m.run(src, 0, 0, pages*page.Size, true)
	reader := m.run(src, 1, 0, pages*page.Size, false)
	rnd := rand.New(rand.NewPCG(3, 4))
	for range 3 {
		written := map[int]bool{}
		stored := map[int]byte{}
		for range 400 {
			i := rnd.IntN(pages)
			written[i] = true
			src.write(t, i*page.Size+rnd.IntN(page.Size/2), []byte{byte(rnd.Uint32())})
			if rnd.IntN(4) == 0 { // a program's own byte in the same page, not released
				at := i*page.Size + page.Size/2 + rnd.IntN(page.Size/2)
				writer.add(at)
				stored[at] = writer.byteAt(at)
			}
		}
		require.EqualValues(t, len(written), reader.acquire(), "the stale pages, and no others")
		require.EqualValues(t, len(written), writer.acquire())
		require.True(t, bytes.Equal(src.home.data, reader.all()))
		for at, b := range stored {
			require.Equal(t, b, writer.byteAt(at))
		}
		require.Zero(t, reader.acquire())
		writer.release()
		require.True(t, bytes.Equal(writer.all(), src.read(t, 0, pages*page.Size)))
		require.EqualValues(t, 0, writer.acquire())
		reader.acquire()
		require.True(t, bytes.Equal(writer.all(), reader.all()))
		require.Zero(t, m.cache.counters.Bases.Load(), "no base outlives the agreement")
	}
}

// TestAcquireInHolds: an acquire that may hold the lock only briefly gets ahead one piece at a time, and finishes.
func TestAcquireInHolds(t *testing.T) {
	const size = 8 * mover.PieceBytes
	m := newMachine(t, 1)
	src := m.noisyFile(size)
	mp, err := m.cache.Map(t.Context(), src, MapRequest{Len: size, Lazy: true, Writable: true})
	require.NoError(t, err)
	f, holds := src.attached, 0
	all := []lrc.Update{{Range: mp.pages}}
	pieces := len(piecesOf(all, []tracking{{pages: mp.pages}}, nil))
	require.Greater(t, pieces, 1)
	for rest := mp.pages; !rest.Empty(); holds++ {
		f.mu.Lock()
		_, next, err := f.acquireLocked(t.Context(), mp.h, rest, -time.Hour)
		f.mu.Unlock()
		require.NoError(t, err)
		require.Greater(t, next, rest.Start)
		rest.Start = next
	}
	require.GreaterOrEqual(t, holds, pieces, "the fewer pages are left, the smaller the pieces")
	p := m.attach(mp, 0, size, true)
	require.True(t, bytes.Equal(src.home.data, p.all()))
	require.Zero(t, p.acquire())
	require.Zero(t, p.release())
}

// TestFailedFill: a copy to the device fails, or the caller gives up, in the middle. Pages that arrived stay, and the
// next acquire brings the rest.
func TestFailedFill(t *testing.T) {
	const size = 24 * mover.PieceBytes
	m := newMachine(t, 1)
	src := m.noisyFile(size)
	mp, err := m.cache.Map(t.Context(), src, MapRequest{Len: size, Lazy: true})
	require.NoError(t, err)
	p := m.attach(mp, 0, size, false)
	planned := errors.New("planned")
	m.devices[0].Fail(faulty.CopyIn, 2, planned)
	_, err = p.Acquire(t.Context(), 0, size, false)
	require.ErrorIs(t, err, planned)

	ctx, cancel := context.WithCancel(t.Context())
	gate := m.devices[0].Hold(faulty.CopyIn)
	result := make(chan error, 1)
	go func() { _, err := p.Acquire(ctx, 0, size, false); result <- err }()
	<-gate.Arrived()
	cancel()
	require.ErrorIs(t, <-result, context.Canceled)
	gate.Open()

	m.devices[0].Fail(faulty.HostBuffer, 3, planned)
	_, err = p.Acquire(t.Context(), 0, size, false)
	if err != nil { // those pieces may have been the last ones
		require.ErrorIs(t, err, planned)
	}
	p.acquire()
	require.True(t, bytes.Equal(src.home.data, p.all()))
}

// TestFailedScatteredAcquire: a failed patch is repeated, and a byte of home is never taken for the device's.
func TestFailedScatteredAcquire(t *testing.T) {
	const pages = 2000
	m := newMachine(t, 1)
	src := m.noisyFile(pages * page.Size)
	p := m.run(src, 0, 0, pages*page.Size, true)
	for i := 0; i < pages; i += 3 {
		src.write(t, i*page.Size, []byte{src.home.data[i*page.Size] + 1})
	}
	planned := errors.New("planned")
	m.devices[0].Fail(faulty.Patch, 2, planned)
	_, err := p.Acquire(t.Context(), 0, pages*page.Size, false)
	if err != nil { // unless one call was enough
		require.ErrorIs(t, err, planned)
	}
	p.acquire()
	require.True(t, bytes.Equal(src.home.data, p.all()))
	require.Zero(t, p.release())
}

// TestPartOfACollectFails: home takes some of the scattered pages of a release and refuses others. The refused pages
// are kept, and brought home later.
func TestPartOfACollectFails(t *testing.T) {
	const pages = 1000
	m := newMachine(t, 2)
	src := m.file(pages * page.Size)
	p := m.run(src, 0, 0, pages*page.Size, true)
	q := m.run(src, 1, 0, pages*page.Size, true)
	want := make([]byte, pages*page.Size)
	for i := 0; i < pages; i += 5 {
		p.store(i*page.Size, 1)
		q.store(i*page.Size+1, 2)
		want[i*page.Size], want[i*page.Size+1] = 1, 2
	}
	p.release()
	q.release()
	src.home.failFrom(500*page.Size, syscall.ENOSPC)
	require.ErrorIs(t, src.attached.Sync(context.Background(), func() error { return nil }), syscall.ENOSPC)
	require.Equal(t, byte(1), src.home.bytes(0, 1)[0], "the pages that home took are home")
	require.Zero(t, src.home.bytes(900*page.Size, 1)[0])
	require.True(t, bytes.Equal(want[900*page.Size:901*page.Size], src.read(t, 900*page.Size, page.Size)),
		"and the rest is seen")
	src.home.fail(nil)
	require.NoError(t, src.attached.Sync(context.Background(), func() error { return nil }))
	require.True(t, bytes.Equal(want, src.home.bytes(0, len(want))))
	p.acquire()
	q.acquire()
	require.True(t, bytes.Equal(want, p.all()))
	require.True(t, bytes.Equal(want, q.all()))
	require.Zero(t, p.release())
}

// TestScanBesideAgreements: while a release looks for modified pages, some digests change: one page is collected and
// stored into again, another one is brought up to date.
func TestScanBesideAgreements(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(8 * page.Size)
	p := m.run(src, 0, 0, 8*page.Size, true)
	p.add(0)
	p.release()
	p.add(10)
	p.add(7 * page.Size)
	gate := m.devices[0].Hold(faulty.Modified)
	released := make(chan int64, 1)
	go func() { n, _ := p.Release(context.Background(), 0, p.len); released <- n }()
	<-gate.Arrived()
	src.write(t, page.Size, []byte{src.home.data[page.Size] + 1})
	x := p.h.sorted()[0]
	before := x.agreed
	require.EqualValues(t, 1, p.acquire(), "patched during the scan")
	require.NotSame(t, before, x.agreed, "the digests that the scan reads stay the same")
	_ = src.read(t, 0, 1) // collects page 0, with the byte stored since
	gate.Open()
	require.EqualValues(t, 1, <-released, "page 7; page 0 went home whole, page 1 is home's")
	require.True(t, bytes.Equal(p.all(), src.read(t, 0, 8*page.Size)))
	require.Zero(t, x.scans)
	require.Zero(t, p.release())
	require.Zero(t, x.scans)
}

func TestRangeArithmetic(t *testing.T) {
	rnd := rand.New(rand.NewPCG(8, 9))
	random := func() (rs []page.Range, in [64]bool) {
		for p := page.Index(rnd.IntN(4)); p < 60; {
			n := page.Index(1 + rnd.IntN(6))
			rs = append(rs, page.Range{Start: p, End: p + n})
			for i := p; i < p+n && i < 64; i++ {
				in[i] = true
			}
			p += n + page.Index(rnd.IntN(5))
		}
		return rs, in
	}
	members := func(rs []page.Range) (in [64]bool) {
		for _, r := range rs {
			for p := r.Start; p < r.End && p < 64; p++ {
				require.False(t, in[p], "twice")
				in[p] = true
			}
		}
		return in
	}
	for range 500 {
		a, inA := random()
		b, inB := random()
		both, onlyA := members(intersect(a, b)), members(subtract(a, b))
		for p := range inA {
			require.Equal(t, inA[p] && inB[p], both[p], "%v and %v", a, b)
			require.Equal(t, inA[p] && !inB[p], onlyA[p], "%v without %v", a, b)
		}
	}
}

// TestBefore cuts ranges at each page, without allocating.
func TestBefore(t *testing.T) {
	ranges := []page.Range{{Start: 1, End: 3}, {Start: 5, End: 6}, {Start: 8, End: 12}}
	for end := range page.Index(14) {
		want := page.Subtract(ranges, page.Range{Start: end, End: 100})
		own := slices.Clone(ranges)
		require.ElementsMatch(t, want, before(own, end), "page %d", end)
		require.Zero(t, testing.AllocsPerRun(1, func() { before(own, end) }))
	}
}

// writingHome is a home that reports the ranges whose write-back it was told to begin.
type writingHome struct {
	*memoryHome
	begun chan page.Range
}

func (h *writingHome) StartWriteBack(off, n int64) { h.begun <- page.Covering(off, n) }

type writingSource struct {
	*source
	home *writingHome
}

func (s *writingSource) OpenHome(bool) (Home, error) { return s.home, nil }

// TestDiskWritesWhileSyncCollects checks what the disk is told while released pages come home: nothing, unless they
// must be durable.
func TestDiskWritesWhileSyncCollects(t *testing.T) {
	const pages = holdCollect + 10
	m := newMachine(t, 1, memory(128<<20))
	src := &writingSource{source: m.file(pages * page.Size)}
	src.home = &writingHome{src.source.home, make(chan page.Range, 10)}
	mp, err := m.cache.Map(t.Context(), src, MapRequest{Len: pages * page.Size, Writable: true})
	require.NoError(t, err)
	p := m.attach(mp, 0, pages*page.Size, true)
	stored := func(c byte) {
		for i := range pages {
			p.store(i*page.Size, c)
		}
		require.EqualValues(t, pages, p.release())
	}
	stored(1)
	require.NoError(t, mp.f.Sync(context.Background(), nil))
	require.Empty(t, src.home.begun)
	stored(2)
	require.NoError(t, mp.f.Sync(context.Background(), func() error {
		require.EqualValues(t, 2, src.home.data[(pages-1)*page.Size], "home has the released bytes")
		return nil
	}))
	close(src.home.begun)
	missing, parts := []page.Range{{End: pages}}, 0
	for rg := range src.home.begun {
		missing, parts = page.Subtract(missing, rg), parts+1
	}
	require.Empty(t, missing)
	require.Greater(t, parts, 1, "the disk waits for the last page")
}

// TestPieces cuts updates into pieces. The pieces have all pages once, in order. None is larger than allowed, and they
// are smaller if there is little to read, so that every reader has some.
func TestPieces(t *testing.T) {
	run := func(start, n page.Index) lrc.Update {
		return lrc.Update{Range: page.Range{Start: start, End: start + n}}
	}
	var scattered []lrc.Update
	for p := page.Index(0); p < 500_000; p += 100 {
		scattered = append(scattered, run(p, 1))
	}
	for name, stale := range map[string][]lrc.Update{
		"one page":     {run(7, 1)},
		"a little":     {run(0, 100)},
		"a few MiB":    {run(3, 2622)},
		"a GiB":        {run(0, 1<<18)},
		"scattered":    scattered,
		"all in parts": {run(0, 10), run(20, 1<<12), run(1<<13, 3), run(1<<14, 1<<14)},
	} {
		whole := page.Range{End: 1 << 20}
		half := tracking{page.Range{End: 1 << 11}, true}
		pieces := piecesOf(stale, []tracking{half, {page.Range{Start: half.pages.End, End: whole.End}, false}}, nil)
		var got, want []page.Range
		total, largest := int64(0), int64(0)
		for _, x := range pieces {
			bytes := int64(0)
			for _, s := range x.Steps {
				require.Equal(t, s.Storing, s.Pages.End <= half.pages.End, name)
				got = page.AppendRange(got, s.Pages)
				bytes += s.Pages.Bytes()
			}
			require.Equal(t, bytes, x.Bytes(), name)
			require.LessOrEqual(t, bytes, int64(mover.PieceBytes), name)
			require.LessOrEqual(t, len(x.Steps), mover.PieceRuns, name)
			total, largest = total+bytes, max(largest, bytes)
		}
		for _, u := range stale {
			want = page.AppendRange(want, u.Range)
		}
		require.Equal(t, want, got, name)
		require.LessOrEqual(t, largest, max(total/int64(2*mover.Readers()), mover.LeastPiece), name)
	}
}

// TestPatchOfTheSameBytes: the CPU wrote the bytes that were there before, so the device has nothing to patch.
func TestPatchOfTheSameBytes(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(4 * page.Size)
	p := m.run(src, 0, 0, 4*page.Size, true)
	p.add(page.Size + 9)
	src.write(t, page.Size, src.home.bytes(page.Size, page.Size))
	m.devices[0].Fail(faulty.Patch, 1, errors.New("there is nothing to patch"))
	require.EqualValues(t, 1, p.acquire())
	require.EqualValues(t, 1, p.release(), "the program's own byte is still its own")
	require.True(t, bytes.Equal(p.all(), src.read(t, 0, 4*page.Size)))
}

// TestReadsOfReleasedPages reads a file that a device wrote. Reading from the start to the end takes ever larger runs
// from the device; reading here and there does not.
func TestReadsOfReleasedPages(t *testing.T) {
	const pages, request = 16384, 32
	m := newMachine(t, 1, memory(128<<20), readsFrom(DeviceReadsOff)) // everything comes home
	src := m.file(pages * page.Size)
	p := m.run(src, 0, 0, pages*page.Size, true)
	f := m.cache.Lookup(src.id)
	written := byte(0)
	write := func() {
		written++
		for i := range pages {
			p.store(i*page.Size, written)
		}
		require.EqualValues(t, pages, p.release())
	}
	// read returns the number of pages that came home for the request.
	read := func(at int) int64 {
		before := f.counters.CollectedPages.Load()
		buf := make([]byte, request*page.Size)
		_, fromHome, err := f.Read(context.Background(), buf, int64(at)*page.Size, false, nil)
		require.NoError(t, err)
		require.True(t, fromHome)
		for i := at; i < at+request; i++ {
			require.Equal(t, written, src.home.data[i*page.Size], "page %d", i)
		}
		return f.counters.CollectedPages.Load() - before
	}
	write()
	var runs []int64
	for at := 0; at < pages; at += request {
		if n := read(at); n > 0 {
			runs = append(runs, n)
		}
	}
	require.EqualValues(t, collectingReadPages, runs[0])
	require.GreaterOrEqual(t, slices.Max(runs), int64(collectPortion/2))
	require.Less(t, len(runs), pages/collectingReadPages, "%d", runs)

	write()
	rnd := rand.New(rand.NewPCG(5, 6))
	for range 50 { // two of these may look like a stream
		require.LessOrEqual(t, read(rnd.IntN(pages/request)*request), int64(2*collectingReadPages))
	}
}
