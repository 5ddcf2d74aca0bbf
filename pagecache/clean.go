package pagecache

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dgraph-io/ristretto/v2"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/prefetch"
)

// What is read ahead from a device for programs on the CPU waits for its use in chunks of host memory. They are copies of
// pages that home has, nobody else's only copies, so any of them may go at any time. A chunk can be used for as long as the
// epoch of its pages is the one from when they were known to be home's: whatever changes home's pages changes the epoch first, as
// far as any later read can tell, because a read looks at File.mu before it looks at a chunk.
//
// Each File has a table of its chunks: what is in it can be used. Which chunks are worth their memory, ristretto says by how often
// they were expected and read; what it throws out leaves the table. So does what waited for long while others needed the room. A chunk goes as soon as a program has read all of it, for then
// the kernel has the pages.
const (
	chunkShift = 5
	// chunkPages is the pages of a chunk, 128 KiB: those of one read request.
	chunkPages = 1 << chunkShift
	chunkSize  = chunkPages * page.Size
	// aheadChunks is the most chunks that are read ahead by one copy, so that programs that wait are not kept for long.
	aheadChunks = 4
	// chunkPatience is how long a read waits for a chunk.
	chunkPatience = 100 * time.Millisecond
	// cleanAge is how long a chunk waits at least before it makes room for others although nobody read it, and cleanMostAge how
	// long it waits at most.
	cleanAge     = time.Second
	cleanMostAge = 10 * time.Second
	// cleanShare is which part of Options.HostMemory chunks may take, besides the bases, and cleanMost how much at most.
	cleanShare = 4
	cleanMost  = 1 << 30
)

// chunkBytes is the memory of a chunk.
type chunkBytes [chunkSize]byte

var freeChunks = sync.Pool{New: func() any { return new(chunkBytes) }}

// cleanChunk is some pages of a file, read ahead or on their way.
type cleanChunk struct {
	f     *File
	index int64 // of the first page, in chunks
	key   uint64
	epoch uint64
	// pages are those that it has.
	pages page.Range

	// ready is closed when buf has the pages. It stays nil if they could not be had.
	ready chan struct{}
	buf   *chunkBytes
	// arrived is set before ready is closed.
	arrived time.Time
	// copy is what brings them; nil before it is planned.
	copy atomic.Pointer[peerCopy]
	// users are the table, whoever fills buf, and those who copy from it.
	users atomic.Int32
	used  page.Range // pages that were read, from the first one on; protected by cleanPages.mu
}

func (k *cleanChunk) done() {
	if k.users.Add(-1) > 0 {
		return
	}
	k.f.c.cleanBytes.Add(-chunkSize)
	if k.buf != nil {
		freeChunks.Put(k.buf)
		k.buf = nil // the order may still have k
	}
}

// cleanPages are the chunks of a file, and what is known of how it is read.
type cleanPages struct {
	mu      sync.Mutex
	chunks  map[int64]*cleanChunk // protected by mu
	streams *prefetch.Streams     // protected by mu
	end     page.Index            // protected by mu; what streams knows of the size
	closed  bool                  // protected by mu; set when the File is detached
}

// cleanStore decides which chunks stay. A nil one keeps nothing.
type cleanStore struct {
	// mu is locked to close the store, which must not happen while it is used.
	mu     sync.RWMutex
	closed bool // protected by mu
	cache  *ristretto.Cache[uint64, *cleanChunk]

	orderMu sync.Mutex
	// order has the chunks that came, the oldest first, and some that are gone: no more of these than of the others, but for
	// orderSlack. Protected by orderMu.
	order []*cleanChunk
}

// orderSlack is how many chunks that are gone may be in the order in any case.
const orderSlack = 64

func newCleanStore(limit int64) (*cleanStore, error) {
	cache, err := ristretto.NewCache(&ristretto.Config[uint64, *cleanChunk]{
		NumCounters:        max(10*limit/chunkSize, 100),
		MaxCost:            limit,
		BufferItems:        64,
		IgnoreInternalCost: true,
		// It is called for what was thrown out, what was never let in and what was deleted, with nil for what was not there.
		OnExit: func(k *cleanChunk) {
			if k != nil {
				k.f.dropChunk(k, false)
			}
		},
	})
	return &cleanStore{cache: cache}, err
}

// keep asks for k to be kept, unless it is in its table no more. It may be thrown out at any time, before keep returns too.
func (s *cleanStore) keep(k *cleanChunk) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return false
	}
	s.cache.Get(k.key) // it was expected once more
	if !s.cache.Set(k.key, k, chunkSize) {
		return false
	}
	if !s.enlist(k) {
		s.cache.Del(k.key) // whoever took it out of the table may have come too early for that
	}
	return true
}

// enlist puts k into the order, if it is still in its table.
func (s *cleanStore) enlist(k *cleanChunk) bool {
	s.orderMu.Lock()
	defer s.orderMu.Unlock()
	if !k.f.hasChunk(k) {
		return false
	}
	// Those that are not gone have memory.
	if living := int(k.f.c.cleanBytes.Load() / chunkSize); len(s.order) >= 2*living+orderSlack {
		s.order = slices.DeleteFunc(s.order, func(k *cleanChunk) bool { return k.users.Load() == 0 })
	}
	s.order = append(s.order, k)
	return true
}

// forget takes the chunks of a File, none of which is in its table any more, out of the order.
func (s *cleanStore) forget(f *File) {
	if s == nil {
		return
	}
	s.orderMu.Lock()
	defer s.orderMu.Unlock()
	s.order = slices.DeleteFunc(s.order, func(k *cleanChunk) bool { return k.f == f })
}

// ageChunks throws out chunks that waited for too long, the oldest first. Frequency would keep them: what the end of a stream
// left was expected as often as what the next one needs.
func (c *Cache) ageChunks() {
	now := time.Now()
	for {
		k := c.clean.oldest(func(k *cleanChunk) bool {
			age := now.Sub(k.arrived)
			return k.users.Load() == 0 || age > cleanMostAge || age >= c.cleanAge && c.cleanBytes.Load() > c.cleanLimit*3/4
		})
		if k == nil {
			return
		}
		k.f.dropChunk(k, true)
	}
}

// oldest takes the oldest chunk out of the order if it is one to go; else it returns nil.
func (s *cleanStore) oldest(goes func(k *cleanChunk) bool) *cleanChunk {
	s.orderMu.Lock()
	defer s.orderMu.Unlock()
	if len(s.order) == 0 || !goes(s.order[0]) {
		return nil
	}
	k := s.order[0]
	s.order[0] = nil
	s.order = s.order[1:]
	return k
}

// noteUse counts a read of k.
func (s *cleanStore) noteUse(k *cleanChunk) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if !s.closed {
		s.cache.Get(k.key)
	}
}

// drop gives back what keep asked for.
func (s *cleanStore) drop(k *cleanChunk) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if !s.closed {
		s.cache.Del(k.key)
	}
}

func (s *cleanStore) close() {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.cache.Close()
}

// dropChunk takes k out of the table, if it is there, and out of the store.
func (f *File) dropChunk(k *cleanChunk, stored bool) {
	f.clean.mu.Lock()
	there := f.clean.chunks[k.index] == k
	if there {
		delete(f.clean.chunks, k.index)
		if unread := (page.Range{Start: max(k.used.End, k.pages.Start), End: k.pages.End}); !unread.Empty() {
			f.clean.streams.Unused(unread)
			f.count(func(c *Counters) { c.AheadUnusedBytes.Add(unread.Bytes()) })
		}
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
			m = k.read(p[n:], at)
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
	c := k.f.c
	if j := k.copy.Load(); j == nil || !c.costs.estimate(j.dev.cost).Stuck {
		timer := time.NewTimer(chunkPatience)
		defer timer.Stop()
		select {
		case <-k.ready:
			return true
		case <-timer.C:
		}
		if j = k.copy.Load(); j != nil {
			c.isLate(j)
		}
	}
	k.f.forgetChunk(k)
	k.f.count(func(c *Counters) { c.DeviceReadFallbacks.Add(1) })
	return false
}

// read copies the bytes at off that k has to p.
func (k *cleanChunk) read(p []byte, off int64) (n int) {
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
	f.c.clean.noteUse(k)
	f.clean.mu.Lock()
	// Reads of other places than the next ones do not count; then the store finds out.
	if first := page.Index(off >> page.Shift); first <= max(k.used.End, k.pages.Start) {
		k.used = page.Range{Start: k.pages.Start, End: max(k.used.End, page.Count(off+int64(n)))}
	}
	all := k.used.End >= k.pages.End
	f.clean.mu.Unlock()
	if all {
		f.dropChunk(k, true)
	}
	return n
}

// expect tells the predictor of a read and returns what is expected to be read next.
func (f *File) expect(rg page.Range, size int64) []page.Range {
	f.clean.mu.Lock()
	defer f.clean.mu.Unlock()
	if f.clean.streams == nil {
		f.clean.streams = prefetch.NewStreams(prefetch.CPUStreams)
		f.clean.chunks = make(map[int64]*cleanChunk)
	}
	if end := page.Count(size); end != f.clean.end {
		f.clean.end = end
		f.clean.streams.Resize(end)
	}
	return f.clean.streams.Access(rg, prefetch.Unknown, nil)
}

// readAhead brings what is expected to be read after rg from devices, where they are faster than the disk. Nobody waits.
func (f *File) readAhead(ahead []page.Range, home HomeReader) {
	c := f.c
	if len(ahead) > 0 {
		c.ageChunks()
	}
	for _, rg := range ahead {
		if rg.Len() >= chunkPages {
			rg.End = (rg.End + chunkPages - 1) &^ (chunkPages - 1) // the rest of the last one will be next
		}
		first, last := int64(rg.Start>>chunkShift), int64((rg.End-1)>>chunkShift)
		for i := first; i <= last; {
			if c.cleanBytes.Load() > c.cleanLimit {
				return // the store has not made room yet
			}
			chunks := f.newCleanChunks(rg, i, home)
			if len(chunks) == 0 {
				i++
				continue
			}
			i = chunks[len(chunks)-1].index + 1
			f.fetchChunks(chunks)
		}
	}
}

// newCleanChunks makes consecutive chunks of pages of rg, from chunk i on, that are neither there nor in the host's page cache.
func (f *File) newCleanChunks(rg page.Range, i int64, home HomeReader) (chunks []*cleanChunk) {
	f.clean.mu.Lock()
	defer f.clean.mu.Unlock()
	rg.End = min(rg.End, f.clean.end)
	for ; len(chunks) < aheadChunks && !f.clean.closed; i++ {
		first := page.Index(i << chunkShift)
		pages := rg.Intersect(page.Range{Start: first, End: first + chunkPages})
		if f.clean.chunks[i] != nil || pages.Empty() {
			break
		}
		if f.c.peerReads != PeerReadsAlways && home.Cached(pages.Offset(), pages.Bytes()) {
			break
		}
		k := &cleanChunk{f: f, index: i, key: f.serial<<32 ^ uint64(i), pages: pages, ready: make(chan struct{})}
		k.users.Store(2)
		f.c.cleanBytes.Add(chunkSize)
		chunks = append(chunks, k)
		f.clean.chunks[i] = k
	}
	return chunks
}

// fetchChunks brings chunks that follow each other from a device, or gives them up.
func (f *File) fetchChunks(chunks []*cleanChunk) {
	c := f.c
	rg := page.Range{Start: chunks[0].pages.Start, End: chunks[len(chunks)-1].pages.End}
	giveUp := func() {
		for _, k := range chunks {
			close(k.ready)
			f.forgetChunk(k)
			k.done()
		}
	}
	f.mu.Lock()
	plan := f.planAheadLocked(rg)
	if plan != nil {
		for _, k := range chunks {
			k.epoch = f.epoch(k.pages)
			k.copy.Store(plan.peerCopy)
		}
	}
	f.mu.Unlock()
	if plan == nil {
		giveUp()
		return
	}
	if !c.inBackground(func() {
		if !c.startCopy(plan.peerCopy) {
			giveUp()
			return
		}
		<-plan.done
		defer plan.finish()
		if plan.err != nil || !f.verify(plan).Empty() {
			giveUp()
			return
		}
		for _, k := range chunks {
			buf := freeChunks.Get().(*chunkBytes)
			at := (k.pages.Start - plan.pages.Start).Offset()
			copy(buf[:k.pages.Bytes()], plan.buf[at:])
			k.buf, k.arrived = buf, time.Now()
			close(k.ready)
			if f.hasChunk(k) && !c.clean.keep(k) {
				f.dropChunk(k, false)
			}
			k.done()
		}
		f.count(func(c *Counters) { c.AheadBytes.Add(plan.pages.Bytes()) })
	}) {
		plan.unpin()
		giveUp()
	}
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

// planAheadLocked decides from which device the pages of rg are read ahead; nil: from none.
func (f *File) planAheadLocked(rg page.Range) *peerCopyPlan {
	if f.detached.Load() || rg.End > page.Count(f.size) {
		return nil
	}
	c := &f.c.costs
	haves := f.havesLocked(rg)
	c.mu.Lock()
	took := c.disk.Time(rg.Bytes())
	var best *have
	for i := range haves {
		x := &haves[i]
		if x.pages[0] != rg || x.h.dev.cost.Stuck() {
			continue
		}
		if t := x.h.dev.cost.Time(rg.Bytes()); t < took || best == nil && f.c.peerReads == PeerReadsAlways {
			best, took = x, t
		}
	}
	c.mu.Unlock()
	if best == nil {
		f.probeLocked(rg, haves, nil)
		return nil
	}
	f.probeLocked(rg, haves, best.h)
	return f.copyLocked(*best, rg)
}
