package pagecache

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// order returns the chunks in the order of a store. Nothing is read ahead, or thrown out, any more.
func (m *machine) order() []*cleanChunk {
	m.cache.peerCalls.Wait()
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
	m := newMachine(t, 1, peerReads(PeerReadsAlways), hostMemory(8<<20))
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
	m := newMachine(t, 1, peerReads(PeerReadsAlways))
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

// TestHurriedCopies: a copy that somebody waits for goes first, whether it is in the queue by then or not.
func TestHurriedCopies(t *testing.T) {
	m := newMachine(t, 1, peerReads(PeerReadsAlways))
	src, _ := m.sharedFile(sharedSize)
	m.run(src, 0, 0, sharedSize, false)
	f, c := src.attached, m.cache
	plan := func(i page.Index) *peerCopyPlan {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.planAheadLocked(page.Range{Start: i, End: i + 1})
	}
	all := []*peerCopyPlan{plan(1), plan(2), plan(3)}
	q := &all[0].dev.copies
	q.mu.Lock()
	q.callers = copyCallers // nobody takes anything
	q.mu.Unlock()
	c.hurry(all[2].peerCopy)
	for _, p := range all {
		require.True(t, c.startCopy(p.peerCopy))
	}
	c.hurry(all[1].peerCopy)
	q.mu.Lock()
	require.Equal(t, []*peerCopy{all[2].peerCopy, all[1].peerCopy}, q.urgent)
	require.Equal(t, []*peerCopy{all[0].peerCopy}, q.others)
	q.callers = 1
	q.mu.Unlock()
	c.peerCalls.Add(1)
	c.carryOutCopies(all[0].dev)
	for _, p := range all {
		<-p.done
		require.NoError(t, p.err)
		p.finish()
	}
}
