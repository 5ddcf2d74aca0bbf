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
	// slabChunks is how many chunks are mapped at once, 4 MiB.
	slabChunks = 32
	// spareChunks is how many free chunks keep their memory.
	spareChunks = 64
)

// chunkMemory is memory for chunks, outside of Go's heap: there the garbage collector would let as much garbage pile up
// as they take. What is free goes back to the system but for some spares; addresses stay. The zero value is empty.
type chunkMemory struct {
	mu     sync.Mutex
	spares []*chunkBytes // protected by mu
	bare   []*chunkBytes // protected by mu; without memory
	slabs  [][]byte      // protected by mu
}

// take returns the memory of a chunk, with anything in it; nil if the system has none.
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

// give takes back what take returned. Nobody uses it any more.
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

// free unmaps everything, unless some of it is still in use: then that stays until the process ends.
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
