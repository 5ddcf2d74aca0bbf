package pagecache

import (
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
)

// slabSize is the size of a slab, and its alignment.
const slabSize = 1 << 20

// spareSlabs is how many slabs with free pages are kept: enough for a portion of a collect. Fresh memory costs a page
// fault for each page, which takes as long as the rest of the work on a base.
const spareSlabs = collectPortion * page.Size / slabSize

// pageMemory is memory for copies of pages, outside of Go's heap. In the heap, the garbage collector would let garbage
// of the same size pile up. A slab with no page in use goes back to the system, unless it is spare. The zero value is
// empty.
type pageMemory struct {
	mu    sync.Mutex
	slabs map[uintptr]*slab // protected by mu; by their addresses
	// usable lists the slabs with free pages. Protected by mu.
	usable []*slab
}

// slab holds pages. Protected by pageMemory.mu.
type slab struct {
	memory []byte
	free   []*pageBytes
	at     int // index in usable; -1 while all pages are in use
}

// take gives each of pages memory. The content is arbitrary.
func (m *pageMemory) take(pages []*pageBytes) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range pages {
		if len(m.usable) == 0 && !m.growLocked() {
			pages[i] = new(pageBytes) // the system has no address space left
			continue
		}
		s := m.usable[len(m.usable)-1]
		pages[i] = s.free[len(s.free)-1]
		if s.free = s.free[:len(s.free)-1]; len(s.free) == 0 {
			m.usable, s.at = m.usable[:s.at], -1
		}
	}
}

// growLocked maps another slab.
func (m *pageMemory) growLocked() bool {
	room, err := unix.MmapPtr(-1, 0, nil, 2*slabSize, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return false
	}
	before := -uintptr(room) & (slabSize - 1)
	start := unsafe.Add(room, before)
	if before > 0 {
		_ = unix.MunmapPtr(room, before)
	}
	_ = unix.MunmapPtr(unsafe.Add(start, slabSize), slabSize-before)
	s := &slab{memory: unsafe.Slice((*byte)(start), slabSize), free: make([]*pageBytes, 0, slabSize/page.Size),
		at: len(m.usable)}
	for off := slabSize - page.Size; off >= 0; off -= page.Size {
		s.free = append(s.free, (*pageBytes)(unsafe.Add(start, off)))
	}
	if m.slabs == nil {
		m.slabs = make(map[uintptr]*slab)
	}
	m.slabs[uintptr(start)] = s
	m.usable = append(m.usable, s)
	return true
}

// give takes back a page from take that is no longer in use.
func (m *pageMemory) give(p *pageBytes) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.slabs[uintptr(unsafe.Pointer(p))&^(slabSize-1)]
	if s == nil {
		return
	}
	if s.free = append(s.free, p); s.at < 0 {
		s.at = len(m.usable)
		m.usable = append(m.usable, s)
	}
	if len(s.free) == cap(s.free) && len(m.usable) > spareSlabs {
		m.unmapLocked(s)
	}
}

// unmapLocked gives a slab back to the system.
func (m *pageMemory) unmapLocked(s *slab) {
	last := m.usable[len(m.usable)-1]
	m.usable[s.at], last.at = last, s.at
	m.usable = m.usable[:len(m.usable)-1]
	delete(m.slabs, uintptr(unsafe.Pointer(&s.memory[0])))
	_ = unix.MunmapPtr(unsafe.Pointer(&s.memory[0]), slabSize)
}

// free unmaps slabs with no page in use.
func (m *pageMemory) free() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.slabs {
		if len(s.free) == cap(s.free) {
			m.unmapLocked(s)
		}
	}
}
