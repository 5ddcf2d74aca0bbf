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

// What devices gave besides what programs on the CPU asked for waits for its use in chunks of host memory. They are
// copies of pages that home has, nobody else's only copies, so any of them may go at any time. A chunk can be used for
// as long as the epoch of its pages is the one from when they were known to be home's: whatever changes home's pages
// changes the epoch first, as far as any later read can tell, because a read asks for a snapshot, or the executor,
// before it looks at a chunk.
//
// Each File has a table of its chunks: what is in it can be used. Which chunks are worth their memory, ristretto says
// by how often they were expected and read; what it throws out leaves the table. So does what waited for long while
// others needed the room. A chunk that was read ahead goes as soon as programs have read all of it, for then the kernel
// has the pages.
const (
	chunkShift = 5
	// ChunkPages is the pages of a chunk, 128 KiB: those of one read request.
	ChunkPages = 1 << chunkShift
	ChunkSize  = ChunkPages * page.Size
	// chunkPatience is how long a read waits for a chunk.
	chunkPatience = 100 * time.Millisecond
)

// chunk is some pages of a file, here or on their way.
type chunk struct {
	f     *File
	index int64 // of the first page, in chunks
	key   uint64
	epoch uint64
	// pages are those that it has.
	pages page.Range
	// around says that they came with others of them that were read.
	around bool

	// ready is closed when buf has the pages. It stays nil if they could not be had.
	ready chan struct{}
	buf   *chunkBytes
	// touched is when the chunk came or was read last, by time.Now().UnixNano. It is set before ready is closed.
	touched atomic.Int64
	// enlisted is what touched was when the chunk got its place in the order; protected by chunkStore.orderMu.
	enlisted int64
	// copy is what brings them; nil before it is planned.
	copy atomic.Pointer[mover.Read]
	// users are the table, whoever fills buf, and those who copy from it.
	users atomic.Int32
	reads int    // protected by chunkTable.mu
	read  uint32 // the pages of the chunk that were read, a bit each; protected by chunkTable.mu
}

func (k *chunk) done() {
	if k.users.Add(-1) > 0 {
		return
	}
	k.f.c.countChunks(-1)
	if k.buf != nil {
		k.f.c.memory.give(k.buf)
		k.buf = nil // the order may still have k
	}
}

// countChunks counts n more chunks.
func (c *Cache) countChunks(n int64) {
	c.bytes.Add(n * ChunkSize)
	c.Charge(n * ChunkSize)
}

// fullOfChunks reports whether there is no room for more.
func (c *Cache) fullOfChunks() bool { return c.bytes.Load() > c.Limit || !c.Fits() }

// bitsOf returns the bits of the pages of rg, which are in the chunk.
func (k *chunk) bitsOf(rg page.Range) uint32 {
	return uint32((uint64(1)<<rg.Len() - 1) << (rg.Start & (ChunkPages - 1)))
}

// chunkTable are the chunks of a file, and what is known of how it is read.
type chunkTable struct {
	mu      sync.Mutex
	chunks  map[int64]*chunk  // protected by mu
	streams *prefetch.Streams // protected by mu
	end     page.Index        // protected by mu; what streams knows of the size
	closed  bool              // protected by mu; set when the File is detached
	// debt is how many chunks that came with others' pages were not read again, less the reads of those that were.
	// skipped counts the reads for which none was fetched on its account. Protected by mu.
	debt, skipped int
}

// prepareLocked is called before the first chunk of a file of so many bytes is made, and at any time later.
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

// addChunkLocked makes chunk i of pages, of which the table has none, with two users.
func (f *File) addChunkLocked(i int64, pages page.Range) *chunk {
	k := &chunk{f: f, index: i, key: f.serial<<32 ^ uint64(i), pages: pages, ready: make(chan struct{})}
	k.users.Store(2)
	f.c.countChunks(1)
	f.table.chunks[i] = k
	return k
}

// dropChunk takes k out of the table, if it is there, and out of the store.
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

// chunkLeavesLocked notes what a chunk was good for that goes.
func (f *File) chunkLeavesLocked(k *chunk) {
	unread := k.bitsOf(k.pages) &^ k.read
	f.ex.Count(func(c *Counters) { c.AheadUnusedBytes.Add(page.Index(bits.OnesCount32(unread)).Offset()) })
	switch {
	case k.around:
		f.table.noteReads(k.reads)
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

// forgetChunk takes a chunk that was not filled out of the table. That is nobody's misprediction.
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

// takeChunk returns the chunk of page i with one more user, nil if there is none.
func (f *File) takeChunk(i page.Index) *chunk {
	f.table.mu.Lock()
	defer f.table.mu.Unlock()
	k := f.table.chunks[int64(i>>chunkShift)]
	if k != nil {
		k.users.Add(1)
	}
	return k
}

// readClean copies what chunks have of len(p) bytes at off, from the first byte on, and returns how much that is. It
// waits for what is on its way; late says that it did not come in time.
func (f *File) readClean(p []byte, off int64) (n int, late bool) {
	for n < len(p) && !late {
		at := off + int64(n)
		k := f.takeChunk(page.Index(at >> page.Shift))
		if k == nil {
			break
		}
		m := 0
		if late = !k.wait(); !late {
			m = k.copyTo(p[n:], at)
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

// wait returns once k is ready. If that takes too long it returns false, and nobody else is kept waiting.
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
		timer := time.NewTimer(chunkPatience)
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

// fill gives k the bytes of its pages, and lets go of it. With nil, or where there is no memory, it is given up.
func (k *chunk) fill(bytes []byte) {
	f := k.f
	defer k.done()
	if bytes != nil {
		k.buf = f.c.memory.take()
	}
	if k.buf == nil {
		f.forgetChunk(k) // before those who wait drop it
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

// copyTo copies the bytes at off that k has to p.
func (k *chunk) copyTo(p []byte, off int64) (n int) {
	f := k.f
	if k.buf == nil || f.epoch(k.pages) != k.epoch {
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
	if all := k.note(off, n); all && !k.around {
		f.dropChunk(k, true)
	}
	return n
}

// note counts a read of n bytes at off and reports whether all of the chunk was read.
func (k *chunk) note(off int64, n int) (all bool) {
	k.f.table.mu.Lock()
	defer k.f.table.mu.Unlock()
	k.reads++
	k.read |= k.bitsOf(page.Covering(off, int64(n)))
	return k.read == k.bitsOf(k.pages)
}
