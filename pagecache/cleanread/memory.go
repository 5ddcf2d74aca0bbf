package cleanread

import (
	"slices"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// chunkBytes is the memory of a chunk.
type chunkBytes [ChunkSize]byte

const (
	// slabChunks is the number of chunks that are mapped at once, 4 MiB.
	slabChunks = 32
	// spareChunks is the most free chunks that keep their memory.
	spareChunks = 64
)

// chunkMemory is memory for chunks, outside of Go's heap. In the heap, the garbage collector would let garbage of the
// same size pile up. Free memory goes back to the system, except for some spares; the addresses stay mapped. The zero
// value is empty.
type chunkMemory struct {
	mu     sync.Mutex
	spares []*chunkBytes // protected by mu
	bare   []*chunkBytes // protected by mu; mapped, without memory
	slabs  [][]byte      // protected by mu
}

// take returns the memory of a chunk, with arbitrary content; nil if the system has none.
func (m *chunkMemory) take() *chunkBytes {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.spares)+len(m.bare) == 0 {
		slab, err := unix.Mmap(-1, 0, slabChunks*ChunkSize, unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
		if err != nil {
			return nil
		}
		m.slabs = append(m.slabs, slab)
		for part := range slices.Chunk(slab, ChunkSize) {
			m.bare = append(m.bare, (*chunkBytes)(unsafe.Pointer(&part[0])))
		}
	}
	list := &m.spares
	if len(*list) == 0 {
		list = &m.bare
	}
	b := (*list)[len(*list)-1]
	*list = (*list)[:len(*list)-1]
	return b
}

// give takes back memory from take that is no longer in use.
func (m *chunkMemory) give(b *chunkBytes) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.spares) < spareChunks {
		m.spares = append(m.spares, b)
		return
	}
	_ = unix.Madvise(b[:], unix.MADV_DONTNEED)
	m.bare = append(m.bare, b)
}

// free unmaps everything. If some of it is still in use, it does nothing, and the memory stays until the process ends.
func (m *chunkMemory) free() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.spares)+len(m.bare) < len(m.slabs)*slabChunks {
		return
	}
	for _, slab := range m.slabs {
		_ = unix.Munmap(slab)
	}
	m.spares, m.bare, m.slabs = nil, nil, nil
}
