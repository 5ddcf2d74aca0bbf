package cleanread

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// order returns the chunks in the order of a store, after all read-ahead and eviction have ended.
func (f *file) order() []*chunk {
	f.quiet()
	s := f.c.store
	s.cache.Wait() // ristretto evicts in a goroutine of its own
	s.orderMu.Lock()
	defer s.orderMu.Unlock()
	return append([]*chunk(nil), s.order...)
}

// arrive waits until all read-ahead has arrived.
func (f *file) arrive() {
	f.t.Helper()
	require.Eventually(f.t, f.ArrivedForTesting, time.Minute, 100*time.Microsecond)
}

// TestChunksThatAreGoneAreForgotten: chunks that were read do not pile up behind an unread chunk that is too young to
// go. They keep no memory, and no File after it was closed.
func TestChunksThatAreGoneAreForgotten(t *testing.T) {
	const size, step = 48 << 20, int64(ChunkSize)
	f := newFile(t, size, nil)
	f.c.Age = time.Hour
	for at := int64(46 << 20); at < 46<<20+4*step; at += step { // a stream that ends
		f.read(at, step, false)
		f.arrive()
	}
	require.NotEmpty(t, f.order())
	living := int64(0)
	for at := int64(0); at < 80<<20; at += step {
		f.read(at%(40<<20), step, false)
		f.arrive()
		living = max(living, f.c.Bytes()/ChunkSize+AheadChunks)
	}
	most := 2*living + orderSlack
	require.Greater(t, f.all.CleanReads.Load(), 2*most, "that many came and went")
	order := f.order()
	require.LessOrEqual(t, int64(len(order)), most)
	for _, k := range order {
		require.True(t, k.users.Load() > 0 || k.buf == nil)
	}
	f.Close()
	require.Empty(t, f.order())
}

// TestChunkThatGoesBeforeItIsKept: a chunk that is dropped just before the store is asked to keep it takes no room
// there.
func TestChunkThatGoesBeforeItIsKept(t *testing.T) {
	f := newFile(t, 4<<20, nil)
	f.expect(page.Range{End: 1}, 4<<20)
	k := f.newChunks(page.Range{Start: ChunkPages, End: 2 * ChunkPages}, 1, f)[0]
	close(k.ready)
	f.dropChunk(k, true)
	require.True(t, f.c.store.keep(k))
	k.done()
	f.c.store.cache.Wait()
	_, kept := f.c.store.cache.Get(k.key)
	require.False(t, kept)
	require.Empty(t, f.order())
}
