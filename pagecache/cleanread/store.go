package cleanread

import (
	"slices"
	"sync"
	"time"

	"github.com/dgraph-io/ristretto/v2"
)

const (
	// chunkAge is how long a chunk waits at least before it makes room for others although nobody read it, and
	// chunkMostAge how long it waits at most.
	chunkAge     = time.Second
	chunkMostAge = 10 * time.Second
)

// chunkStore decides which chunks stay. A nil one keeps nothing.
type chunkStore struct {
	// mu is locked to close the store, which must not happen while it is used.
	mu     sync.RWMutex
	closed bool // protected by mu
	cache  *ristretto.Cache[uint64, *chunk]

	orderMu sync.Mutex
	// order has the chunks that came, the oldest first, and some that are gone: no more of these than of the others,
	// but for orderSlack. Protected by orderMu.
	order []*chunk
}

// orderSlack is how many chunks that are gone may be in the order in any case.
const orderSlack = 64

func newChunkStore(limit int64) (*chunkStore, error) {
	cache, err := ristretto.NewCache(&ristretto.Config[uint64, *chunk]{
		NumCounters:        max(10*limit/ChunkSize, 100),
		MaxCost:            limit,
		BufferItems:        64,
		IgnoreInternalCost: true,
		// It is called for what was thrown out, what was never let in and what was deleted, with nil for what was not
		// there.
		OnExit: func(k *chunk) {
			if k != nil {
				k.f.dropChunk(k, false)
			}
		},
	})
	return &chunkStore{cache: cache}, err
}

// keep asks for k to be kept, unless it is in its table no more. It may be thrown out at any time, before keep returns
// too.
func (s *chunkStore) keep(k *chunk) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return false
	}
	s.cache.Get(k.key) // it was expected once more
	if !s.cache.Set(k.key, k, ChunkSize) {
		return false
	}
	if !s.enlist(k) {
		s.cache.Del(k.key) // whoever took it out of the table may have come too early for that
	}
	return true
}

// enlist puts k into the order, if it is still in its table.
func (s *chunkStore) enlist(k *chunk) bool {
	s.orderMu.Lock()
	defer s.orderMu.Unlock()
	if !k.f.hasChunk(k) {
		return false
	}
	// Those that are not gone have memory.
	if living := int(k.f.c.bytes.Load() / ChunkSize); len(s.order) >= 2*living+orderSlack {
		s.order = slices.DeleteFunc(s.order, func(k *chunk) bool { return k.users.Load() == 0 })
	}
	k.enlisted = k.touched.Load()
	s.order = append(s.order, k)
	return true
}

// forget takes the chunks of a File, none of which is in its table any more, out of the order.
func (s *chunkStore) forget(f *File) {
	if s == nil {
		return
	}
	s.orderMu.Lock()
	defer s.orderMu.Unlock()
	s.order = slices.DeleteFunc(s.order, func(k *chunk) bool { return k.f == f })
}

// ageChunks throws out chunks that nobody read for too long, the oldest first. Frequency would keep them: what the end
// of a stream left was expected as often as what the next one needs.
func (c *Cache) ageChunks() {
	now := time.Now().UnixNano()
	for {
		k := c.store.oldest(func(k *chunk) bool {
			age := time.Duration(now - k.touched.Load())
			return k.users.Load() == 0 || age > chunkMostAge || age >= c.Age && c.bytes.Load() > c.Limit*3/4
		})
		if k == nil {
			return
		}
		k.f.dropChunk(k, true)
	}
}

// oldest takes the oldest chunk out of the order if it is one to go; else it returns nil. A chunk that was read since
// it came into the order is young again.
func (s *chunkStore) oldest(goes func(k *chunk) bool) *chunk {
	s.orderMu.Lock()
	defer s.orderMu.Unlock()
	for range len(s.order) {
		k := s.order[0]
		gone := goes(k)
		again := k.touched.Load()
		if !gone && again == k.enlisted {
			return nil
		}
		s.order[0] = nil
		s.order = s.order[1:]
		if gone {
			return k
		}
		k.enlisted = again
		s.order = append(s.order, k)
	}
	return nil
}

// noteUse counts a read of k.
func (s *chunkStore) noteUse(k *chunk) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if !s.closed {
		s.cache.Get(k.key)
	}
}

// drop gives back what keep asked for.
func (s *chunkStore) drop(k *chunk) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if !s.closed {
		s.cache.Del(k.key)
	}
}

func (s *chunkStore) close() {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.cache.Close()
}
