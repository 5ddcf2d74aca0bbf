package cleanread

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// newPushFile makes a file of so many chunks and a part of a page, whose regions have snapshots.
func newPushFile(t *testing.T, chunks int64) *file {
	f := newFile(t, chunks*ChunkSize+100, nil)
	for range 2 {
		f.publish(page.Covering(0, int64(len(f.home))), false)
	}
	return f
}

// TestChunksThatAreReadAgainArePushed: the kernel gets a chunk once, after its second read through the kernel's cache.
func TestChunksThatAreReadAgainArePushed(t *testing.T) {
	f := newPushFile(t, 3)
	read := func(chunk, at int64, direct bool) {
		f.read(chunk*ChunkSize+at*page.Size, page.Size, direct)
		f.quiet()
	}
	for at := range int64(4) {
		read(0, at, true)
	}
	read(0, 4, false)
	read(1, 7, false)
	require.Empty(t, f.pushed)
	read(1, 9, true)
	require.Empty(t, f.pushed, "that read brought nothing into the kernel's cache")
	read(0, 5, false)
	require.Equal(t, []pushed{{0, f.home[:ChunkSize]}}, f.pushed)
	require.EqualValues(t, ChunkSize, f.all.PushedBytes.Load())
	require.EqualValues(t, ChunkSize, f.c.Bytes(), "a pushed chunk stays")
	require.Zero(t, f.all.AheadUnusedBytes.Load(), "the kernel has these bytes")
	read(1, 8, false)
	require.Equal(t, pushed{ChunkSize, f.home[ChunkSize : 2*ChunkSize]}, f.pushed[1])
	for range 2 { // there is no whole page
		read(3, 0, false)
	}
	require.Len(t, f.pushed, 2)
	require.Zero(t, f.c.pushes.Load())
}

// TestOldChunksAreNotPushed: after a change, the kernel must not get what home had before.
func TestOldChunksAreNotPushed(t *testing.T) {
	f := newPushFile(t, 1)
	f.read(0, page.Size, false)
	f.quiet()
	f.pushing = func() {
		f.write(page.Size, []byte{f.home[page.Size] + 1})
		for range 2 { // others have read again, and know the region as it is now
			f.publish(page.Range{End: 1}, false)
		}
	}
	f.read(2*page.Size, page.Size, false)
	f.quiet()
	require.Empty(t, f.pushed)
	require.Zero(t, f.all.PushedBytes.Load())
}

// TestUncountedPagesAreNotPushed: the kernel gets no pages that it could keep when they change.
func TestUncountedPagesAreNotPushed(t *testing.T) {
	f := newFile(t, ChunkSize, nil)
	for range 2 {
		f.publish(page.Range{End: 1}, true) // so the executor counts none of them among the kernel's pages
	}
	p := make([]byte, page.Size)
	for at := range int64(8) {
		n, err := f.Serve(t.Context(), p, at*page.Size, ChunkSize, f, false)
		require.NoError(t, err)
		require.Equal(t, f.home[at*page.Size:][:page.Size], p[:n])
		f.quiet()
	}
	require.Empty(t, f.pushed)
	f.publish(page.Range{End: 1}, false)
	for at := range int64(8) { // later attempts are rare, but come
		f.read((8+at)*page.Size, page.Size, false)
		f.quiet()
	}
	require.Len(t, f.pushed, 1)
}

// TestFewPushesAtOnce: the chunks of others are pushed at a later read.
func TestFewPushesAtOnce(t *testing.T) {
	chunks := []int64{0, 7, 3, 12, 5, 9} // not what read-ahead expects
	require.Greater(t, len(chunks), mostPushes)
	f := newPushFile(t, 13)
	begun, goOn := make(chan struct{}, 2*len(chunks)), make(chan struct{})
	f.pushing = func() { begun <- struct{}{}; <-goOn }
	read := func(at int64) {
		for _, k := range chunks {
			f.read(k*ChunkSize+at*page.Size, page.Size, false)
		}
	}
	read(0)
	f.quiet()
	read(1)
	for range mostPushes {
		<-begun
	}
	require.EqualValues(t, mostPushes, f.c.pushes.Load())
	close(goOn)
	f.quiet()
	require.Len(t, f.pushed, mostPushes)
	read(2)
	f.quiet()
	require.GreaterOrEqual(t, len(f.pushed), len(chunks))
	for _, x := range f.pushed {
		require.Equal(t, f.home[x.off:x.off+ChunkSize], x.bytes)
	}
}

// TestOnePushOfAChunk: later reads of a chunk that is being pushed push it no second time.
func TestOnePushOfAChunk(t *testing.T) {
	f := newPushFile(t, 1)
	begun, goOn := make(chan struct{}, 8), make(chan struct{})
	f.pushing = func() { begun <- struct{}{}; <-goOn }
	f.read(0, page.Size, false)
	f.quiet()
	f.read(page.Size, page.Size, false)
	<-begun
	for at := int64(2); at < 8; at++ {
		f.read(at*page.Size, page.Size, false)
	}
	close(goOn)
	f.quiet()
	require.Empty(t, begun)
	require.Len(t, f.pushed, 1)
	require.Zero(t, f.c.pushes.Load())
}

// TestTwoReadsShareThePriceOfAChunk: a chunk comes if half of its price is less than that of a read of the disk.
func TestTwoReadsShareThePriceOfAChunk(t *testing.T) {
	const most = 100
	brought := func(perByte float64, before func(p *chunkTable)) (n int) {
		f := newFile(t, most*ChunkSize, func(o *Options) { o.When = Auto })
		before(&f.table)
		f.c.disk = mover.NewPlace(100*time.Microsecond, 1e15)
		f.c.Devices[0].Moves.Cost = mover.NewPlace(90*time.Microsecond, 1/perByte)
		for _, at := range []*mover.Place{f.c.disk, f.c.Devices[0].Moves.Cost} {
			at.Due(time.Now()) // so nobody else measures it
		}
		for i := range int64(most) {
			k := f.newChunkAround(page.Covering(i*ChunkSize, page.Size), most*ChunkSize)
			require.NotNil(t, k)
			if plan, _ := f.planAround(t.Context(), k, page.Size); plan != nil {
				plan.letGo()
				n++
			}
			k.fill(nil)
		}
		return n
	}
	price := func(chunk time.Duration) float64 { return (chunk - 90*time.Microsecond).Seconds() / ChunkSize }
	goes := func(changed bool, reads ...int) func(p *chunkTable) {
		return func(p *chunkTable) {
			for range AroundDebt {
				for _, n := range reads {
					p.noteReads(n, changed)
				}
			}
		}
	}
	require.Greater(t, brought(price(150*time.Microsecond), goes(false)), most*3/4)
	require.Zero(t, brought(price(210*time.Microsecond), goes(false)))
	// If chunks mostly change before they are read again, one read pays the price.
	require.LessOrEqual(t, brought(price(150*time.Microsecond), goes(true, 1)), most/aroundTry+1)
	require.Greater(t, brought(price(95*time.Microsecond), goes(true, 1)), most*3/4)
	require.Greater(t, brought(price(150*time.Microsecond), goes(true, 1, 2)), most*3/4)
}

// TestDebtOfChunks: a chunk that was read once counts as useless when it goes, unless its pages changed.
func TestDebtOfChunks(t *testing.T) {
	for _, changed := range []bool{false, true} {
		f := newPushFile(t, 2)
		f.read(0, page.Size, true)
		f.read(ChunkSize, page.Size, true)
		f.quiet()
		if changed {
			f.write(0, []byte{1})
		}
		f.dropChunks()
		require.Equal(t, map[bool]int{false: 2, true: 0}[changed], f.table.debt)
	}
}
