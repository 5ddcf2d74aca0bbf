package emulated

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

// Host buffers are pooled in classes of powers of two. Smaller buffers are not worth pooling, and larger ones would
// keep too much memory.
const (
	minBufferShift = 12
	maxBufferShift = 24
)

// buffers pools host buffers. The garbage collector frees unused ones.
type buffers struct {
	poison bool // immutable
	pools  [maxBufferShift - minBufferShift + 1]sync.Pool
}

// get returns n bytes with arbitrary contents. They must not be used after giveBack. Only the first call of giveBack
// has an effect.
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

// take returns at least n bytes and the pool that they go back to; nil if they are too many to keep.
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
