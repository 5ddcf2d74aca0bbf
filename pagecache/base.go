package pagecache

import (
	"bytes"
	"slices"
	"sync"
	"unsafe"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/home"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// keeping holds home's bytes for the runs whose bases a plan wants kept before home changes there.
type keeping struct {
	parts  []lrc.PageBase
	agreed [][]agreement  // per part: the agreements of the replicas whose base it becomes
	pages  [][]*pageBytes // per part, once it was read
	others [][]page.Range // per part: pages where home differs from what was agreed on
	// seen is how far home is known to reach, set after a single page was read.
	seen int64
}

// agreement is what one replica of some pages last agreed on with home.
type agreement struct {
	key   *gpubackend.DigestKey
	pages page.Range
	sums  []gpubackend.Digest
}

// changedBeside is the error for pages that were changed directly in SOURCE since the last look.
type changedBeside = home.Changed

// newKeepingLocked returns the keeping for a plan. Nothing has been read yet.
func (f *File) newKeepingLocked(keep []lrc.PageBase) (k keeping) {
	for _, b := range keep {
		for part := range cut(b.Range, bufferPages) {
			k.parts = append(k.parts, lrc.PageBase{Range: part, Base: b.Base})
			k.agreed = append(k.agreed, f.agreementsLocked(part, b.Base))
		}
	}
	k.pages, k.others = make([][]*pageBytes, len(k.parts)), make([][]page.Range, len(k.parts))
	return k
}

// agreementsLocked returns the agreements of the replicas of rg whose base becomes b, or whose base is home: such a
// replica is being collected.
func (f *File) agreementsLocked(rg page.Range, b lrc.Base) (all []agreement) {
	for o, h := range f.holdings {
		for _, run := range f.lrc.TrackedBy(rg, o, func(of lrc.Base) bool { return of == b || of == lrc.BaseHome }) {
			h.each(run, func(x *extent, part page.Range) {
				x.eachAgreed(part, func(part page.Range, agreed []gpubackend.Digest) {
					all = append(all, agreement{h.dev.Key(), part, slices.Clone(agreed)})
				})
			})
		}
	}
	return all
}

// compare records the pages of part i where bytes, read from home, differ from what was agreed on.
func (k *keeping) compare(i int, bytes []byte) {
	var sums []gpubackend.Digest
	var key *gpubackend.DigestKey
	for _, a := range k.agreed[i] {
		if key != a.key {
			key, sums = a.key, make([]gpubackend.Digest, len(bytes)>>page.Shift)
			key.SumPages(bytes, sums)
		}
		for n, sum := range a.sums {
			if p := a.pages.Start + page.Index(n); sum != sums[p-k.parts[i].Range.Start] {
				k.others[i] = union(k.others[i], []page.Range{{Start: p, End: p + 1}})
			}
		}
	}
}

// read reads the parts from home. It fails with changedBeside if home differs from what replicas agreed on. File.mu is
// held, possibly by a caller that waits for this goroutine; or the pages belong to a concurrent write.
func (k *keeping) read(f *File) error {
	if err := k.readParts(f); err != nil {
		return err
	}
	var others []page.Range
	for _, o := range k.others {
		others = append(others, o...)
	}
	if len(others) > 0 {
		return &changedBeside{Pages: others}
	}
	return nil
}

func (k *keeping) readParts(f *File) error {
	if len(k.parts) == 1 && k.parts[0].Range.Len() == 1 {
		pages, off := make([]*pageBytes, 1), k.parts[0].Range.Offset()
		f.c.pages.take(pages)
		n, err := f.homeLocked().ReadAt(pages[0][:], off)
		if err != nil {
			f.c.pages.give(pages[0])
			return err
		}
		clear(pages[0][n:])
		k.compare(0, pages[0][:])
		if *pages[0] == *zeroPage {
			f.c.pages.give(pages[0])
			pages[0] = zeroPage
		}
		k.pages[0], k.seen = pages, off+int64(n)
		return nil
	}
	return mover.InParallel(len(k.parts), mover.MaxReaders, func(i int) error {
		buf := takeBuffer()
		defer giveBuffer(buf)
		b := buf[:k.parts[i].Range.Bytes()]
		if err := f.readHomeLocked(k.parts[i].Range, b); err != nil {
			return err
		}
		k.compare(i, b)
		k.pages[i] = f.c.pages.copies(b)
		return nil
	})
}

// keepLocked stores all parts that were read as bases.
func (f *File) keepLocked(k keeping) {
	for i, p := range k.parts {
		f.putBasesLocked(p.Range, p.Base, k.pages[i])
	}
}

// free gives back the memory of parts that are not kept.
func (k *keeping) free(f *File) {
	for _, pages := range k.pages {
		for _, content := range pages {
			if copies(content) > 0 {
				f.c.pages.give(content)
			}
		}
	}
}

// pageBytes holds the bytes of one page.
type pageBytes [page.Size]byte

// zeroPage stands for every copy of a zero page: new files are full of them, and many programs write into new files. It
// is never written.
var zeroPage = new(pageBytes)

// freeBuffers recycles buffers. Fresh memory costs more than the work done in it.
var freeBuffers = sync.Pool{New: func() any { return new(buffer) }}

// bufferPages is the number of pages in a buffer. It is small so that several processors can share one collect.
const bufferPages = 32

// buffer has room for bufferPages pages.
type buffer [bufferPages * page.Size]byte

// takeBuffer returns a buffer with arbitrary contents. giveBuffer takes it back.
func takeBuffer() *buffer  { return freeBuffers.Get().(*buffer) }
func giveBuffer(b *buffer) { freeBuffers.Put(b) }

// copies returns copies of the pages of buf. All zero pages share zeroPage, which must not be written.
func (m *pageMemory) copies(buf []byte) []*pageBytes {
	pages := make([]*pageBytes, len(buf)/page.Size)
	var own []int
	for i := range pages {
		if bytes.Equal(buf[i*page.Size:][:page.Size], zeroPage[:]) {
			pages[i] = zeroPage
		} else {
			own = append(own, i)
		}
	}
	memory := make([]*pageBytes, len(own))
	m.take(memory)
	for k, i := range own {
		copy(memory[k][:], buf[i*page.Size:])
		pages[i] = memory[k]
	}
	return pages
}

// basePages is the number of pages that share one block of bases. Bases of scattered pages are then found and removed
// with few map lookups and many steps along a block.
const basePages = 512

// bases are the base copies of a file. Protected by File.mu.
type bases struct {
	memory *pageMemory
	blocks map[baseKey]*baseBlock
	n      int // pages of memory in use, including those that vacate freed since the last sweep
	// vacated is the number of pages that vacate freed and n still counts. empty lists blocks that vacate may have
	// emptied.
	vacated int
	empty   []baseKey
	// counted and charged were last reported: counted to the counters, charged, in bytes, to the account.
	counted, charged int64
	// last is the block that put or take used last. Pages come in order.
	last    *baseBlock
	lastKey baseKey
}

// baseKey names a block: its first page divided by basePages, and which base its copies are.
type baseKey struct {
	block int64
	base  lrc.Base
}

// baseBlock has the base copies of up to basePages pages; n are set.
type baseBlock struct {
	n     int
	pages [basePages]*pageBytes
}

// freeBlocks recycles empty blocks.
var freeBlocks = sync.Pool{New: func() any { return new(baseBlock) }}

// at returns base b of page p, or nil. Calls may run concurrently while the bases do not change.
func (s *bases) at(p page.Index, b lrc.Base) *pageBytes {
	if b == lrc.BaseZero {
		return zeroPage
	}
	if x := s.blocks[baseKey{int64(p) / basePages, b}]; x != nil {
		return x.pages[p%basePages]
	}
	return nil
}

// find returns the block with base b of page p, or nil.
func (s *bases) find(p page.Index, b lrc.Base) *baseBlock {
	if key := (baseKey{int64(p) / basePages, b}); s.last == nil || key != s.lastKey {
		s.last, s.lastKey = s.blocks[key], key
	}
	return s.last
}

// put sets base b of page p to content, and frees the previous copy.
func (s *bases) put(p page.Index, b lrc.Base, content *pageBytes) {
	x := s.find(p, b)
	if x == nil {
		x = freeBlocks.Get().(*baseBlock)
		if s.blocks == nil {
			s.blocks = make(map[baseKey]*baseBlock)
		}
		s.blocks[s.lastKey], s.last = x, x
	}
	at := &x.pages[p%basePages]
	if *at == nil {
		x.n++
	} else if copies(*at) > 0 {
		s.n--
		s.memory.give(*at)
	}
	s.n += copies(content)
	*at = content
}

// take removes base b of page p and returns it, or nil.
func (s *bases) take(p page.Index, b lrc.Base) (content *pageBytes) {
	x := s.find(p, b)
	if x == nil {
		return nil
	}
	at := &x.pages[p%basePages]
	if content = *at; content == nil {
		return nil
	}
	*at = nil
	s.n -= copies(content)
	if x.n--; x.n == 0 {
		delete(s.blocks, s.lastKey)
		s.last = nil
		freeBlocks.Put(x)
	}
	return content
}

// vacate removes bases while other goroutines may call at for other pages. Call sweep before the next put or take.
func (s *bases) vacate(drop []lrc.PageBase) {
	for _, d := range drop {
		for p := d.Range.Start; p < d.Range.End; p++ {
			x := s.find(p, d.Base)
			if x == nil || x.pages[p%basePages] == nil {
				continue
			}
			if content := x.pages[p%basePages]; copies(content) > 0 {
				s.memory.give(content)
				s.vacated++
			}
			x.pages[p%basePages] = nil
			if x.n--; x.n == 0 {
				s.empty = append(s.empty, s.lastKey)
			}
		}
	}
}

// sweep completes preceding vacates, and returns how many pages of memory they freed.
func (s *bases) sweep() (vacated int) {
	for _, key := range s.empty {
		freeBlocks.Put(s.blocks[key])
		delete(s.blocks, key)
	}
	vacated = s.vacated
	s.last, s.empty, s.vacated = nil, s.empty[:0], 0
	s.n -= vacated
	return vacated
}

// putBasesLocked stores pages as base b of the pages of rg. The file owns their memory from now on.
func (f *File) putBasesLocked(rg page.Range, b lrc.Base, pages []*pageBytes) {
	for i, content := range pages {
		f.bases.put(rg.Start+page.Index(i), b, content)
	}
	f.countBases()
}

// copies returns the number of memory pages that a base occupies: 0 or 1.
func copies(content *pageBytes) int {
	if content == nil || content == zeroPage {
		return 0
	}
	return 1
}

// countBases updates the counters and the account. It asks for relief if little memory is left.
func (f *File) countBases() {
	s := &f.bases
	f.count(func(c *Counters) { c.Bases.Add(int64(s.n) - s.counted) })
	now := int64(s.n)*page.Size + int64(len(s.blocks))*int64(unsafe.Sizeof(baseBlock{}))
	more := now - s.charged
	f.c.memory.charge(memoryBases, more)
	s.counted, s.charged = int64(s.n), now
	if more > 0 && f.c.littleRoom() {
		select {
		case f.c.relieve <- struct{}{}:
		default:
		}
	}
}

// dropBasesLocked removes bases that no replica needs any more.
func (f *File) dropBasesLocked(drop []lrc.PageBase) {
	if len(drop) == 0 {
		return
	}
	for _, d := range drop {
		for p := d.Range.Start; p < d.Range.End; p++ {
			if content := f.bases.take(p, d.Base); copies(content) > 0 {
				f.c.pages.give(content)
			}
		}
	}
	f.countBases()
}

func (f *File) dropAllBasesLocked() {
	for _, x := range f.bases.blocks {
		for _, content := range x.pages {
			if copies(content) > 0 {
				f.c.pages.give(content)
			}
		}
	}
	f.bases.blocks, f.bases.n = nil, 0
	f.countBases()
}
