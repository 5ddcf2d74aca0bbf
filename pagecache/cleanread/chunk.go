package cleanread

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/prefetch"
)

// Pages that devices gave in addition to what CPU programs asked for wait in chunks of host memory. They are copies of
// pages that home has, never the only copies, so any chunk may go at any time. A chunk may be used while the epoch of
// its pages is the one at which they were known to match home. Every change of home's pages first changes the epoch, as
// far as any later read can tell, because a read asks for a snapshot, or the executor, before it looks at a chunk.
//
// Each File has a table of its chunks, and those in it may be used. ristretto decides which chunks are worth their
// memory, by how often they were expected and read; chunks that it evicts leave the table. So do chunks that waited for
// long while others needed the room. A chunk that was read ahead goes as soon as programs have read all of it, because
// then the kernel has the pages.
const (
	chunkShift = 5
	// ChunkPages is the number of pages of a chunk, 128 KiB: those of one read request.
	ChunkPages = 1 << chunkShift
	ChunkSize  = ChunkPages * page.Size
	// chunkPatience is Cache.ChunkPatience by default.
	chunkPatience = 100 * time.Millisecond
)

// chunk is a set of adjacent pages of a file, in host memory or on their way there.
type chunk struct {
	f     *File
	index int64 // of the first page, in units of chunks
	key   uint64
	epoch uint64
	// pages are the pages of the chunk.
	pages page.Range
	// around says that the chunk came along with a read of some of its pages. share is how many reads are expected to
	// share the time for that.
	around bool
	share  int64

	// ready is closed when buf has the pages. buf stays nil if they could not be fetched.
	ready chan struct{}
	buf   *chunkBytes
	// touched is when the chunk came or was last read, as time.Now().UnixNano. It is set before ready is closed.
	touched atomic.Int64
	// enlisted is touched at the time when the chunk got its place in the order; protected by chunkStore.orderMu.
	enlisted int64
	// copy is the copy that brings the pages; nil before it is planned.
	copy atomic.Pointer[mover.Read]
	// users counts the table, the goroutine that fills buf, and the readers that copy from it.
	users atomic.Int32
	reads int    // protected by chunkTable.mu
	read  uint32 // the pages of the chunk that were read, a bit each; protected by chunkTable.mu
	// buffered is how many of the reads brought pages into the kernel's page cache, and pushAt how many there must be
	// before the chunk is pushed into that. Protected by chunkTable.mu.
	buffered, pushAt int
}

func (k *chunk) done() {
	if k.users.Add(-1) > 0 {
		return
	}
	k.f.c.countChunks(-1)
	if k.buf != nil {
		k.f.c.memory.give(k.buf)
		k.buf = nil // the order may still list k
	}
}

// changed reports whether something about the pages of k has changed since its copy was planned.
func (k *chunk) changed() bool { return k.f.epoch(k.pages) != k.epoch }

// countChunks counts n more chunks.
func (c *Cache) countChunks(n int64) {
	c.bytes.Add(n * ChunkSize)
	c.Charge(n * ChunkSize)
}

// fullOfChunks reports whether there is no room for more chunks.
func (c *Cache) fullOfChunks() bool { return c.bytes.Load() > c.Limit || !c.Fits() }

// bitsOf returns the bits of the pages of rg, which are in the chunk.
func (k *chunk) bitsOf(rg page.Range) uint32 {
	return uint32((uint64(1)<<rg.Len() - 1) << (rg.Start & (ChunkPages - 1)))
}

// chunkTable has the chunks of a file, and what is known of how programs read it.
type chunkTable struct {
	mu      sync.Mutex
	chunks  map[int64]*chunk  // protected by mu
	streams *prefetch.Streams // protected by mu
	end     page.Index        // protected by mu; the size that streams knows
	closed  bool              // protected by mu; set when the File is detached
	// lone counts the chunks that came with a read and were not read again, less the reads of those that were. debt
	// leaves out those whose pages changed. skipped counts the reads for which either was at its limit. Protected by
	// mu.
	lone, debt, skipped int
}

// prepareLocked must be called before the first chunk is made of a file of so many bytes. It may be called again.
func (p *chunkTable) prepareLocked(size int64) {
	if p.streams == nil {
		p.streams = prefetch.NewStreams(prefetch.CPUStreams)
		p.chunks = make(map[int64]*chunk)
	}
	if end := page.Count(size); end != p.end {
		p.end = end
		p.streams.Resize(end)
	}
}

// addChunkLocked makes chunk i, of pages, with two users. The table has no chunk i.
func (f *File) addChunkLocked(i int64, pages page.Range) *chunk {
	k := &chunk{f: f, index: i, key: f.serial<<32 ^ uint64(i), pages: pages, ready: make(chan struct{}),
		pushAt: pushReads}
	k.users.Store(2)
	f.c.countChunks(1)
	f.table.chunks[i] = k
	return k
}

// dropChunk takes k out of the table, if it is there, and then out of the store if stored.
func (f *File) dropChunk(k *chunk, stored bool) {
	f.table.mu.Lock()
	there := f.table.chunks[k.index] == k
	if there {
		delete(f.table.chunks, k.index)
		f.chunkLeavesLocked(k)
	}
	f.table.mu.Unlock()
	if !there {
		return
	}
	if stored {
		f.c.store.drop(k)
	}
	k.done()
}

// chunkLeavesLocked notes how useful an outgoing chunk was.
func (f *File) chunkLeavesLocked(k *chunk) {
	unread := k.bitsOf(k.pages) &^ k.read
	f.ex.Count(func(c *Counters) { c.AheadUnusedBytes.Add(page.Index(bits.OnesCount32(unread)).Offset()) })
	switch {
	case k.around:
		f.table.noteReads(k.reads, k.changed())
	case unread != 0:
		first := k.pages.Start &^ (ChunkPages - 1)
		f.table.streams.Unused(page.Range{
			Start: first + page.Index(bits.TrailingZeros32(unread)),
			End:   first + page.Index(bits.Len32(unread)),
		})
	}
}

// dropChunks empties the table for good.
func (f *File) dropChunks() {
	f.table.mu.Lock()
	f.table.closed = true
	all := make([]*chunk, 0, len(f.table.chunks))
	for _, k := range f.table.chunks {
		all = append(all, k)
	}
	f.table.mu.Unlock()
	for _, k := range all {
		f.dropChunk(k, true)
	}
	f.c.store.forget(f)
}

// forgetChunk takes a chunk that was not filled out of the table. It does not count as a misprediction.
func (f *File) forgetChunk(k *chunk) {
	f.table.mu.Lock()
	there := f.table.chunks[k.index] == k
	if there {
		delete(f.table.chunks, k.index)
	}
	f.table.mu.Unlock()
	if there {
		k.done()
	}
}

// hasChunk reports whether k is in the table.
func (f *File) hasChunk(k *chunk) bool {
	f.table.mu.Lock()
	defer f.table.mu.Unlock()
	return f.table.chunks[k.index] == k
}

// takeChunk returns the chunk of page i with one more user, or nil.
func (f *File) takeChunk(i page.Index) *chunk {
	f.table.mu.Lock()
	defer f.table.mu.Unlock()
	k := f.table.chunks[int64(i>>chunkShift)]
	if k != nil {
		k.users.Add(1)
	}
	return k
}

// readClean copies the bytes at off that chunks have, from the first byte on, and returns how many. It waits for chunks
// that are on their way; late says that one did not come in time. direct is as for Serve.
func (f *File) readClean(p []byte, off int64, direct bool) (n int, late bool) {
	for n < len(p) && !late {
		at := off + int64(n)
		k := f.takeChunk(page.Index(at >> page.Shift))
		if k == nil {
			break
		}
		m := 0
		if late = !k.wait(); !late {
			m = k.copyTo(p[n:], at, direct)
		}
		k.done()
		n += m
		if m == 0 {
			break
		}
	}
	if n > 0 {
		f.ex.Count(func(c *Counters) { c.CleanReads.Add(1); c.CleanReadBytes.Add(int64(n)) })
	}
	return n, late
}

// wait waits until k is ready. If that takes too long it drops k, so that no other read waits for it, and returns
// false.
func (k *chunk) wait() bool {
	select {
	case <-k.ready:
		return true
	default:
	}
	if j := k.copy.Load(); j == nil || !j.Stuck() {
		if j != nil {
			j.Hurry()
		}
		timer := time.NewTimer(k.f.c.ChunkPatience)
		defer timer.Stop()
		select {
		case <-k.ready:
			return true
		case <-timer.C:
		}
		if j = k.copy.Load(); j != nil {
			j.Late()
		}
	}
	k.f.forgetChunk(k)
	k.f.ex.Count(func(c *Counters) { c.DeviceReadFallbacks.Add(1) })
	return false
}

// fill gives k the bytes of its pages and drops a user. If bytes is nil or there is no memory, k is given up.
func (k *chunk) fill(bytes []byte) {
	f := k.f
	defer k.done()
	if bytes != nil {
		k.buf = f.c.memory.take()
	}
	if k.buf == nil {
		f.forgetChunk(k) // before its readers drop it
		close(k.ready)
		return
	}
	copy(k.buf[:k.pages.Bytes()], bytes)
	k.touched.Store(time.Now().UnixNano())
	close(k.ready)
	if f.hasChunk(k) && !f.c.store.keep(k) {
		f.dropChunk(k, false)
	}
}

// copyTo copies the chunk's bytes at off to p. direct is as for Serve.
func (k *chunk) copyTo(p []byte, off int64, direct bool) (n int) {
	f := k.f
	if k.buf == nil || k.changed() {
		f.dropChunk(k, true)
		return 0
	}
	if at := off - k.pages.Offset(); at >= 0 && off < k.pages.End.Offset() {
		n = copy(p, k.buf[at:k.pages.Bytes()])
	}
	if n == 0 {
		return 0
	}
	k.touched.Store(time.Now().UnixNano())
	f.c.store.noteUse(k)
	switch all, again := k.note(off, n, direct); {
	case all && !k.around:
		f.dropChunk(k, true)
	case again:
		k.push()
	}
	return n
}

// note counts a read of n bytes at off. all says that all of the chunk was read by now, again that it is to be pushed.
func (k *chunk) note(off int64, n int, direct bool) (all, again bool) {
	k.f.table.mu.Lock()
	defer k.f.table.mu.Unlock()
	k.reads++
	if !direct {
		k.buffered++
	}
	k.read |= k.bitsOf(page.Covering(off, int64(n)))
	return k.read == k.bitsOf(k.pages), k.around && !direct && k.buffered >= k.pushAt
}
