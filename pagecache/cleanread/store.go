package cleanread

import (
	"slices"
	"sync"
	"time"

	"github.com/dgraph-io/ristretto/v2"
)

const (
	// chunkAge is the least time that an unread chunk stays before it makes room for others, chunkMostAge the longest
	// time that it stays.
	chunkAge     = time.Second
	chunkMostAge = 10 * time.Second
)

// chunkStore decides which chunks stay. A nil one keeps nothing.
type chunkStore struct {
	// mu is locked to close the store, which must not be in use then.
	mu     sync.RWMutex
	closed bool // protected by mu
	cache  *ristretto.Cache[uint64, *chunk]

	orderMu sync.Mutex
	// order lists the chunks from oldest to newest. It may list chunks that are gone: at most as many as there are
	// living ones, plus orderSlack. Protected by orderMu.
	order []*chunk
}

// orderSlack is the number of gone chunks that the order may always list.
const orderSlack = 64

func newChunkStore(limit int64) (*chunkStore, error) {
	cache, err := ristretto.NewCache(&ristretto.Config[uint64, *chunk]{
		NumCounters:        max(10*limit/ChunkSize, 100),
		MaxCost:            limit,
		BufferItems:        64,
		IgnoreInternalCost: true,
		// ristretto calls it for entries that were evicted, rejected or deleted, with nil for entries that did not
		// exist.
		OnExit: func(k *chunk) {
			if k != nil {
				k.f.dropChunk(k, false)
			}
		},
	})
	return &chunkStore{cache: cache}, err
}

// keep asks the cache to keep k. It returns false if the cache is closed or refuses. The cache may evict k at any time,
// even before keep returns.
func (s *chunkStore) keep(k *chunk) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return false
	}
	s.cache.Get(k.key) // counts that k was expected once more
	if !s.cache.Set(k.key, k, ChunkSize) {
		return false
	}
	if !s.enlist(k) {
		s.cache.Del(k.key) // dropChunk may have called Del before Set
	}
	return true
}

// enlist adds k to the order, if it is still in its table.
func (s *chunkStore) enlist(k *chunk) bool {
	s.orderMu.Lock()
	defer s.orderMu.Unlock()
	if !k.f.hasChunk(k) {
		return false
	}
	// Living chunks have memory.
	if living := int(k.f.c.bytes.Load() / ChunkSize); len(s.order) >= 2*living+orderSlack {
		s.order = slices.DeleteFunc(s.order, func(k *chunk) bool { return k.users.Load() == 0 })
	}
	k.enlisted = k.touched.Load()
	s.order = append(s.order, k)
	return true
}

// forget takes the chunks of a File out of the order. None of them is in its table any more.
func (s *chunkStore) forget(f *File) {
	if s == nil {
		return
	}
	s.orderMu.Lock()
	defer s.orderMu.Unlock()
	s.order = slices.DeleteFunc(s.order, func(k *chunk) bool { return k.f == f })
}

// ageChunks drops chunks that were not read for too long, the oldest first. The frequency of use would keep them: the
// leftovers of an old stream were expected as often as the chunks of the next one.
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

// oldest takes the oldest chunk out of the order and returns it if goes says so; otherwise it returns nil. A chunk that
// was read since it got its place is young again.
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

// drop takes k out of the cache.
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
