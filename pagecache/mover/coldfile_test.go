package mover

import (
	"bytes"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// aheadDisk is a home on a disk whose page cache reads ahead.
type aheadDisk struct {
	*bytesHome
	mu       sync.Mutex
	cached   map[page.Index]bool // protected by mu
	buffered []page.Index        // where reads of the disk through the page cache began; protected by mu
	direct   []page.Index        // where reads past it began; protected by mu
	brought  int                 // pages that the disk gave to the page cache; protected by mu
	holds    sync.WaitGroup
}

// readAhead is how many pages come into the page cache after those that were asked for.
const readAhead = 5 << 20 >> page.Shift

func newAheadDisk(home *bytesHome) *aheadDisk {
	return &aheadDisk{bytesHome: home, cached: make(map[page.Index]bool)}
}

func (d *aheadDisk) ReadAt(p []byte, off int64) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	first, all := page.Index(off>>page.Shift), page.Index(len(d.data)>>page.Shift)
	d.buffered = append(d.buffered, first)
	for i := first; i < min(first+page.Index(page.Count(int64(len(p))))+readAhead, all); i++ {
		if !d.cached[i] {
			d.cached[i] = true
			d.brought++
		}
	}
	return d.bytesHome.ReadAt(p, off)
}

func (d *aheadDisk) ReadDirect(p []byte, off int64) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.direct = append(d.direct, page.Index(off>>page.Shift))
	return d.bytesHome.ReadAt(p, off)
}

func (d *aheadDisk) ReadCached(p []byte, off int64) (int, error) {
	n, err := d.Cached(off, int64(len(p)))
	if err != nil || n < int64(len(p)) {
		return 0, err
	}
	return d.bytesHome.ReadAt(p, off)
}

func (d *aheadDisk) WillNeed(int64, int64) {}

func (d *aheadDisk) Cached(off, n int64) (cached int64, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := off >> page.Shift; i < (off+n)>>page.Shift; i++ {
		if d.cached[page.Index(i)] {
			cached += page.Size
		}
	}
	return cached, nil
}

func (d *aheadDisk) Drop(off, n int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := off >> page.Shift; i < (off+n)>>page.Shift; i++ {
		delete(d.cached, page.Index(i))
	}
}

// source returns the disk as a Source that is read through the page cache, or past it.
func (d *aheadDisk) source(through bool) *Source {
	way := &ColdWay{speeds: [2]float64{1e15, 1}}
	if through {
		way.speeds = [2]float64{1, 1e15}
	}
	return &Source{Home: d, Direct: d, Cold: NewColdFile(way), Size: int64(len(d.data)), Hold: func() func() {
		d.holds.Add(1)
		return d.holds.Done
	}}
}

// TestThroughThePageCache: whatever the kernel reads ahead, a fill leaves what the page cache had, and nothing else,
// except near that. The disk is read once.
func TestThroughThePageCache(t *testing.T) {
	const size = 200 << 20
	f := newFiller(t, size)
	d := newAheadDisk(f.home)
	kept := page.Range{Start: 70 << 20 >> page.Shift, End: 71 << 20 >> page.Shift}
	for i := kept.Start; i < kept.End; i++ {
		d.cached[i] = true
	}
	p := f.fill()
	p.From, p.Reads = d.source(true), new(Reads)
	p.Reads.Enter()
	require.NoError(t, p.Run(t.Context(), nil))
	p.Reads.Leave()
	d.holds.Wait()
	f.requireFilled(t)
	near := page.Range{Start: kept.Start / blockPages * blockPages}
	near.End = near.Start + blockPages + readAhead
	for i := range d.cached {
		require.True(t, near.Contains(i), "page %d stays in the page cache", i)
	}
	for i := kept.Start; i < kept.End; i++ {
		require.True(t, d.cached[i], i)
	}
	require.Less(t, d.brought, (size+7*readAhead<<page.Shift+16<<20)>>page.Shift)
	ways := Ways{}
	for i := range p.Pieces {
		ways.Add(p.Pieces[i].Ways)
	}
	require.GreaterOrEqual(t, ways.Cached, kept.Len())
	require.GreaterOrEqual(t, ways.Buffered, int64(size-32<<20)>>page.Shift, "what was read ahead is from the disk")
}

// TestReadsPastDropReadAhead: reads past the page cache do not use what the kernel has read ahead for reads through it.
func TestReadsPastDropReadAhead(t *testing.T) {
	const size = 64 << 20
	f := newFiller(t, size)
	d := newAheadDisk(f.home)
	p := f.fill()
	p.From, p.Reads = d.source(false), new(Reads)
	home := newHold(p.From)
	p.From.Cold.join(home)
	ours, _ := p.From.Cold.enter(p.From, page.Range{End: size >> page.Shift})
	require.True(t, ours)
	for i := range page.Index(10 << 20 >> page.Shift) {
		d.cached[i+5<<20>>page.Shift] = true
	}
	p.Cold = true
	p.Reads.Enter()
	require.NoError(t, p.Run(t.Context(), nil))
	p.Reads.Leave()
	p.From.Cold.leave()
	home.drop()
	d.holds.Wait()
	f.requireFilled(t)
	require.Len(t, d.direct, size/PieceBytes)
	require.Empty(t, d.cached)
}

// TestRanksReadADiskOnce: ranks that read a cold file together read each piece once.
func TestRanksReadADiskOnce(t *testing.T) {
	const size = 64 << 20
	f := newRankFills(t, size)
	d := newAheadDisk(f.home)
	cold := d.source(true).Cold
	var group sync.WaitGroup
	for i, r := range f.targets {
		r.fill.From, r.fill.Reads = d.source(true), new(Reads)
		r.fill.From.Cold = cold
		group.Go(func() {
			r.fill.Reads.Enter()
			assert.NoError(t, f.run(i))
			r.fill.Reads.Leave()
		})
	}
	group.Wait()
	d.holds.Wait()
	for _, r := range f.targets {
		require.Len(t, r.arrived, size>>page.Shift)
	}
	require.Len(t, d.direct, 0)
	slices.Sort(d.buffered)
	require.Len(t, slices.Compact(slices.Clone(d.buffered)), len(d.buffered), "no piece is read twice")
}

// requireFilled expects the device to have home's bytes.
func (f *filler) requireFilled(t *testing.T) {
	t.Helper()
	got := make([]byte, len(f.home.data))
	require.NoError(t, f.moves.Out(t.Context(), CPURead, []gpubackend.Copy{{Mem: f.into.mem, Host: got}}))
	require.True(t, bytes.Equal(f.home.data, got))
}

// TestPagesFarBehindAreDropped: of a large file, only what is near the reads stays until the last user leaves.
func TestPagesFarBehindAreDropped(t *testing.T) {
	const step = PieceBytes >> page.Shift
	d := newAheadDisk(&bytesHome{})
	from := d.source(true)
	d.cached[3*blockPages+1] = true
	home := newHold(from)
	from.Cold.join(home)
	defer home.drop()
	defer from.Cold.leave()
	var dropped []page.Range
	for at := page.Index(0); at < 3*blocksKept*blockPages; at += step {
		ours, behind := from.Cold.enter(from, page.Range{Start: at, End: at + step})
		require.Equal(t, at/blockPages != 3, ours)
		if !behind.Empty() {
			require.LessOrEqual(t, behind.End, max(at-(blocksKept-1)*blockPages, 0))
			dropped = append(dropped, behind)
		}
	}
	require.Len(t, dropped, 2*blocksKept-1, "each block once, except that of others")
	for i, rg := range dropped {
		require.EqualValues(t, blockPages, rg.Len())
		require.False(t, rg.Contains(3*blockPages+1), i)
	}
}
