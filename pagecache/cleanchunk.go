package pagecache

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/prefetch"
)

// What devices gave besides what programs on the CPU asked for waits for its use in chunks of host memory. They are copies of
// pages that home has, nobody else's only copies, so any of them may go at any time. A chunk can be used for as long as the
// epoch of its pages is the one from when they were known to be home's: whatever changes home's pages changes the epoch first, as
// far as any later read can tell, because a read looks at File.mu before it looks at a chunk.
//
// Each File has a table of its chunks: what is in it can be used. Which chunks are worth their memory, ristretto says by how often
// they were expected and read; what it throws out leaves the table. So does what waited for long while others needed the room. A
// chunk that was read ahead goes as soon as programs have read all of it, for then the kernel has the pages.
const (
	chunkShift = 5
	// chunkPages is the pages of a chunk, 128 KiB: those of one read request.
	chunkPages = 1 << chunkShift
	chunkSize  = chunkPages * page.Size
	// chunkPatience is how long a read waits for a chunk.
	chunkPatience = 100 * time.Millisecond
)

// cleanChunk is some pages of a file, here or on their way.
type cleanChunk struct {
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
	// enlisted is what touched was when the chunk got its place in the order; protected by cleanStore.orderMu.
	enlisted int64
	// copy is what brings them; nil before it is planned.
	copy atomic.Pointer[mover.Read]
	// users are the table, whoever fills buf, and those who copy from it.
	users atomic.Int32
	reads int    // protected by cleanPages.mu
	read  uint32 // the pages of the chunk that were read, a bit each; protected by cleanPages.mu
}

func (k *cleanChunk) done() {
	if k.users.Add(-1) > 0 {
		return
	}
	k.f.c.countChunks(-1)
	if k.buf != nil {
		k.f.c.chunks.give(k.buf)
		k.buf = nil // the order may still have k
	}
}

// countChunks counts n more chunks.
func (c *Cache) countChunks(n int64) {
	c.cleanBytes.Add(n * chunkSize)
	c.memory.charge(memoryClean, n*chunkSize)
}

// fullOfChunks reports whether there is no room for more.
func (c *Cache) fullOfChunks() bool { return c.cleanBytes.Load() > c.cleanLimit || !c.memory.fits(0) }

// bitsOf returns the bits of the pages of rg, which are in the chunk.
func (k *cleanChunk) bitsOf(rg page.Range) uint32 {
	return uint32((uint64(1)<<rg.Len() - 1) << (rg.Start & (chunkPages - 1)))
}

// cleanPages are the chunks of a file, and what is known of how it is read.
type cleanPages struct {
	mu      sync.Mutex
	chunks  map[int64]*cleanChunk // protected by mu
	streams *prefetch.Streams     // protected by mu
	end     page.Index            // protected by mu; what streams knows of the size
	closed  bool                  // protected by mu; set when the File is detached
	// debt is how many chunks that came with others' pages were not read again, less the reads of those that were.
	// skipped counts the reads for which none was fetched on its account. Protected by mu.
	debt, skipped int
}

// prepareLocked is called before the first chunk of a file of so many bytes is made, and at any time later.
func (p *cleanPages) prepareLocked(size int64) {
	if p.streams == nil {
		p.streams = prefetch.NewStreams(prefetch.CPUStreams)
		p.chunks = make(map[int64]*cleanChunk)
	}
	if end := page.Count(size); end != p.end {
		p.end = end
		p.streams.Resize(end)
	}
}

// addChunkLocked makes chunk i of pages, of which the table has none, with two users.
func (f *File) addChunkLocked(i int64, pages page.Range) *cleanChunk {
	k := &cleanChunk{f: f, index: i, key: f.serial<<32 ^ uint64(i), pages: pages, ready: make(chan struct{})}
	k.users.Store(2)
	f.c.countChunks(1)
	f.clean.chunks[i] = k
	return k
}

// dropChunk takes k out of the table, if it is there, and out of the store.
func (f *File) dropChunk(k *cleanChunk, stored bool) {
	f.clean.mu.Lock()
	there := f.clean.chunks[k.index] == k
	if there {
		delete(f.clean.chunks, k.index)
		f.chunkLeavesLocked(k)
	}
	f.clean.mu.Unlock()
	if !there {
		return
	}
	if stored {
		f.c.clean.drop(k)
	}
	k.done()
}

// chunkLeavesLocked notes what a chunk was good for that goes.
func (f *File) chunkLeavesLocked(k *cleanChunk) {
	unread := k.bitsOf(k.pages) &^ k.read
	f.count(func(c *Counters) { c.AheadUnusedBytes.Add(page.Index(bits.OnesCount32(unread)).Offset()) })
	switch {
	case k.around:
		f.clean.noteReads(k.reads)
	case unread != 0:
		first := k.pages.Start &^ (chunkPages - 1)
		f.clean.streams.Unused(page.Range{
			Start: first + page.Index(bits.TrailingZeros32(unread)),
			End:   first + page.Index(bits.Len32(unread)),
		})
	}
}

// dropChunks empties the table for good.
func (f *File) dropChunks() {
	f.clean.mu.Lock()
	f.clean.closed = true
	all := make([]*cleanChunk, 0, len(f.clean.chunks))
	for _, k := range f.clean.chunks {
		all = append(all, k)
	}
	f.clean.mu.Unlock()
	for _, k := range all {
		f.dropChunk(k, true)
	}
	f.c.clean.forget(f)
}

// forgetChunk takes a chunk that was not filled out of the table. That is nobody's misprediction.
func (f *File) forgetChunk(k *cleanChunk) {
	f.clean.mu.Lock()
	there := f.clean.chunks[k.index] == k
	if there {
		delete(f.clean.chunks, k.index)
	}
	f.clean.mu.Unlock()
	if there {
		k.done()
	}
}

// hasChunk reports whether k is in the table.
func (f *File) hasChunk(k *cleanChunk) bool {
	f.clean.mu.Lock()
	defer f.clean.mu.Unlock()
	return f.clean.chunks[k.index] == k
}

// takeChunk returns the chunk of page i with one more user, nil if there is none.
func (f *File) takeChunk(i page.Index) *cleanChunk {
	f.clean.mu.Lock()
	defer f.clean.mu.Unlock()
	k := f.clean.chunks[int64(i>>chunkShift)]
	if k != nil {
		k.users.Add(1)
	}
	return k
}

// readClean copies what chunks have of len(p) bytes at off, from the first byte on, and returns how much that is. It waits for
// what is on its way; late says that it did not come in time.
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
		f.count(func(c *Counters) { c.CleanReads.Add(1); c.CleanReadBytes.Add(int64(n)) })
	}
	return n, late
}

// wait returns once k is ready. If that takes too long it returns false, and nobody else is kept waiting.
func (k *cleanChunk) wait() bool {
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
	k.f.count(func(c *Counters) { c.DeviceReadFallbacks.Add(1) })
	return false
}

// fill gives k the bytes of its pages, and lets go of it. With nil, or where there is no memory, it is given up.
func (k *cleanChunk) fill(bytes []byte) {
	f := k.f
	defer k.done()
	if bytes != nil {
		k.buf = f.c.chunks.take()
	}
	if k.buf == nil {
		f.forgetChunk(k) // before those who wait drop it
		close(k.ready)
		return
	}
	copy(k.buf[:k.pages.Bytes()], bytes)
	k.touched.Store(time.Now().UnixNano())
	close(k.ready)
	if f.hasChunk(k) && !f.c.clean.keep(k) {
		f.dropChunk(k, false)
	}
}

// copyTo copies the bytes at off that k has to p.
func (k *cleanChunk) copyTo(p []byte, off int64) (n int) {
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
	f.c.clean.noteUse(k)
	if all := k.note(off, n); all && !k.around {
		f.dropChunk(k, true)
	}
	return n
}

// note counts a read of n bytes at off and reports whether all of the chunk was read.
func (k *cleanChunk) note(off int64, n int) (all bool) {
	k.f.clean.mu.Lock()
	defer k.f.clean.mu.Unlock()
	k.reads++
	k.read |= k.bitsOf(page.Covering(off, int64(n)))
	return k.read == k.bitsOf(k.pages)
}
