package emulated

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

// Host buffers are kept for the next caller in classes of powers of two. Smaller ones are not worth it, larger ones
// would keep too much memory.
const (
	minBufferShift = 12
	maxBufferShift = 24
)

// buffers keeps host buffers. The garbage collector empties the pools of what nobody takes.
type buffers struct {
	poison bool // immutable
	pools  [maxBufferShift - minBufferShift + 1]sync.Pool
}

// get returns n bytes with anything in them. They must not be used after giveBack, of which every call but the first
// does nothing.
func (b *buffers) get(n int) (buf []byte, giveBack func()) {
	whole, pool := b.take(n)
	buf = (*whole)[:n:n]
	var released atomic.Bool
	return buf, func() {
		if released.Swap(true) {
			return
		}
		if b.poison {
			fill(buf, poisonBuffer)
		}
		if pool != nil {
			pool.Put(whole)
		}
	}
}

// take returns at least n bytes and the pool that they go to afterwards, nil where they are too many to keep.
func (b *buffers) take(n int) (whole *[]byte, pool *sync.Pool) {
	if n > 1<<maxBufferShift {
		p := make([]byte, n)
		return &p, nil
	}
	class := max(bits.Len(uint(max(n, 1)-1)), minBufferShift) - minBufferShift
	pool = &b.pools[class]
	whole, ok := pool.Get().(*[]byte)
	if !ok {
		p := make([]byte, 1<<(class+minBufferShift))
		whole = &p
	}
	return whole, pool
}
