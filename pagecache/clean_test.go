package pagecache

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// order returns the chunks in the order of a store. Nothing is read ahead, or thrown out, any more.
func (m *machine) order() []*cleanChunk {
	m.cache.waitCopies()
	s := m.cache.clean
	s.cache.Wait() // it throws out in a goroutine of its own
	s.orderMu.Lock()
	defer s.orderMu.Unlock()
	return append([]*cleanChunk(nil), s.order...)
}

// TestChunksThatAreGoneAreForgotten: behind a chunk that nobody reads and that is too young to go, chunks that were read do not
// pile up. They keep no memory, and no File after it was detached.
func TestChunksThatAreGoneAreForgotten(t *testing.T) {
	const size, step = 48 << 20, chunkSize
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways), hostMemory(8<<20))
	src, _ := m.sharedFile(size)
	p := m.run(src, 0, 0, size, false)
	m.cache.cleanAge = time.Hour
	for at := 46 << 20; at < 46<<20+4*step; at += step { // a stream that nobody goes on with
		src.read(t, at, step)
		src.settle(t)
	}
	require.NotEmpty(t, m.order())
	living := int64(0)
	for at := 0; at < 80<<20; at += step {
		src.read(t, at%(40<<20), step)
		src.settle(t)
		living = max(living, m.cache.cleanBytes.Load()/chunkSize+aheadChunks)
	}
	most := 2*living + orderSlack
	require.Greater(t, m.counter(cleanReads), 2*most, "that many came and went")
	order := m.order()
	require.LessOrEqual(t, int64(len(order)), most)
	for _, k := range order {
		require.True(t, k.users.Load() > 0 || k.buf == nil)
	}
	p.unmap()
	m.cache.Forget(src.id)
	require.True(t, src.attached.Detached())
	require.Empty(t, m.order())
}

// TestChunkThatGoesBeforeItIsKept: one that is dropped just before the store is asked to keep it takes no room there.
func TestChunkThatGoesBeforeItIsKept(t *testing.T) {
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
	src, home := m.sharedFile(sharedSize)
	m.run(src, 0, 0, sharedSize, false)
	f, s := src.attached, m.cache.clean
	f.expect(page.Range{End: 1}, sharedSize)
	k := f.newCleanChunks(page.Range{Start: chunkPages, End: 2 * chunkPages}, 1, home)[0]
	close(k.ready)
	f.dropChunk(k, true)
	require.True(t, s.keep(k))
	k.done()
	s.cache.Wait()
	_, kept := s.cache.Get(k.key)
	require.False(t, kept)
	require.Empty(t, m.order())
}
