package gaiafs

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// maxBracketRanges is the most ranges of a bracket.
const maxBracketRanges = 1 << 16

// useNested says that the caller already has a bracket: the daemon must refuse rather than wait.
const useNested uint32 = 1

// Bracket keeps ranges of mappings in memory until Done. Its methods may be called from any goroutine.
type Bracket struct {
	id   uint64
	conn *conn  // nil if none of the ranges moves
	mem  memory // of one of the mappings that move
	done atomic.Bool
}

var lastBracket atomic.Uint64

// Use makes sure that the ranges have their memory, with its bytes, until Done: the device's memory or, if the device
// is full, pinned host memory, which is slower. It grants all ranges or none, so put everything that a launch uses into
// one bracket. Ranges of mappings that do not move are allowed and have no effect. Use does not bring the device's
// bytes up to date: call Acquire for that, and Release to publish stores. ReadAt and WriteAt need no bracket.
//
// Use waits while other brackets hold the memory, for a minute at most or until ctx ends. A goroutine that has a
// bracket must open the next one with that bracket's Use: otherwise two goroutines could wait for each other's memory
// until both time out.
//
// Errors: those of Acquire, EINVAL (no ranges, too many, or ranges on several devices), EXDEV (several mounts), ENOMEM
// (the ranges can never fit), ETIMEDOUT (the text says who holds what), ECANCELED (ctx ended).
func Use(ctx context.Context, ranges ...Range) (*Bracket, error) {
	b, err := use(ctx, 0, ranges)
	return b, during("use", err)
}

// Use is like the package's Use, for a caller that has b already. It never waits: EDEADLK if the memory is not free.
func (b *Bracket) Use(ctx context.Context, ranges ...Range) (*Bracket, error) {
	inner, err := use(ctx, useNested, ranges)
	return inner, during("use", err)
}

// Use is the package's Use for n bytes at off.
func (m *Mapping) Use(ctx context.Context, off, n int64) (*Bracket, error) {
	return Use(ctx, Range{m, off, n})
}

// Done ends the bracket: its memory may move from now on. On a GPU, Done first waits for all work that was started in
// the primary context. If that wait fails, the bracket stays open. A second Done does nothing.
func (b *Bracket) Done() error {
	if b.conn == nil || b.done.Load() {
		return nil
	}
	if err := b.mem.quiesce(); err != nil {
		return during("done", err)
	}
	if !b.done.Swap(true) {
		b.conn.endBracket(b.id)
	}
	return nil
}

func use(ctx context.Context, flags uint32, ranges []Range) (*Bracket, error) {
	if len(ranges) == 0 || len(ranges) > maxBracketRanges {
		return nil, failed(syscall.EINVAL, "a bracket of %d ranges; it has 1 to %d", len(ranges), maxBracketRanges)
	}
	b := &Bracket{id: lastBracket.Add(1)}
	err := withOpen(ranges, func(c *conn) error {
		moving := slices.DeleteFunc(slices.Clone(ranges), func(r Range) bool { return !r.Of.assembly.reply.movable })
		if len(moving) == 0 {
			return nil
		}
		if err := c.useRanges(ctx, b.id, flags, moving); err != nil {
			return err
		}
		b.conn, b.mem = c, moving[0].Of.assembly.memory
		return nil
	})
	if err != nil {
		return nil, err
	}
	return b, nil
}

// useRanges opens a bracket. If ctx ends first, it gives the bracket up: when useRanges returns, the daemon knows. It
// sends the DONE only after the USE, because the daemon ignores a DONE of a bracket that it does not know.
func (c *conn) useRanges(ctx context.Context, id uint64, flags uint32, ranges []Range) error {
	for _, slots := range []chan struct{}{c.uses, c.slots} {
		if ctx.Err() == nil {
			select {
			case slots <- struct{}{}:
				defer func() { <-slots }()
				continue
			case <-ctx.Done():
			}
		}
		return failed(syscall.ECANCELED, "%v", context.Cause(ctx))
	}
	var patience uint32
	if deadline, ok := ctx.Deadline(); ok {
		patience = uint32(min(max(time.Until(deadline).Milliseconds(), 1), 1<<31))
	}
	var r result
	k, err := c.send(typeUse, useBody(id, flags, patience, ranges), r.take, nil)
	if err != nil {
		return err
	}
	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(ended)
		c.endBracket(id)
	})
	<-k.done
	if !stop() {
		<-ended
		if k.err == nil { // the grant came first
			return failed(syscall.ECANCELED, "%v", context.Cause(ctx))
		}
	}
	return k.err
}

// endBracket tells the daemon that a bracket is over, and waits for the answer. It takes no request slot, because
// brackets that wait may hold all slots.
func (c *conn) endBracket(id uint64) {
	_ = c.ask(typeDone, doneBody(id), func(header, []byte, []int) error { return nil }, nil)
}

// within copies len(p) bytes at off. If the mapping moves, it does so in brackets. The caller holds m.mu for reading.
func (m *Mapping) within(p []byte, off int64, do func(p []byte, off int64) error) error {
	const piece = 4 << 20
	if !m.assembly.reply.movable {
		return do(p, off)
	}
	for part := range slices.Chunk(p, piece) {
		id := lastBracket.Add(1)
		if err := m.conn.useRanges(context.Background(), id, 0, []Range{{m, off, int64(len(part))}}); err != nil {
			return err
		}
		err := do(part, off)
		m.conn.endBracket(id)
		if err != nil {
			return err
		}
		off += int64(len(part))
	}
	return nil
}

// Movable reports whether the mapping's memory moves, and is there only in brackets.
func (m *Mapping) Movable() bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.assembly.reply.movable
}

// withOpen calls do with the connection of the ranges' mappings, which stay open until do returns. EXDEV if they are of
// several mounts.
func withOpen(ranges []Range, do func(c *conn) error) error {
	mappings := make([]*Mapping, len(ranges))
	for i, r := range ranges {
		mappings[i] = r.Of
	}
	// Lock in one order, so that concurrent calls and closes cannot deadlock.
	slices.SortFunc(mappings, func(a, b *Mapping) int {
		return cmp.Compare(a.assembly.reply.mapping,
			b.assembly.reply.mapping)
	})
	for _, m := range slices.Compact(mappings) {
		m.mu.RLock()
		defer m.mu.RUnlock()
	}
	var c *conn
	for _, r := range ranges {
		m := r.Of
		if err := m.checkRange(r.Off, r.Len); err != nil {
			return err
		}
		if c == nil {
			c = m.conn
		}
		if m.conn != c {
			return failed(syscall.EXDEV, "the mappings are of several mounts")
		}
	}
	return do(c)
}

// movers has the mappings of a connection by the daemon's mapping number.
type movers struct {
	mu sync.Mutex // held while memory is moved or unmapped
	of map[mappingID]*assembly
}

func (v *movers) add(a *assembly) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.of == nil {
		v.of = make(map[mappingID]*assembly)
	}
	v.of[a.reply.mapping] = a
}

// drop unmaps a mapping's memory. The mapping moves no more.
func (v *movers) drop(a *assembly) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.of, a.reply.mapping)
	return a.drop()
}

// move carries out a MOVE. fd is the descriptor of the new memory, or -1; the caller keeps it. move returns the errno
// and the generation for the answer.
func (v *movers) move(m move, fd int) (syscall.Errno, uint64) {
	x := m.extent
	switch {
	case x.off < 0 || x.size <= 0 || x.off%pageSize != 0 || x.size%pageSize != 0 || x.off+x.size < 0:
		return syscall.EPROTO, 0
	case x.tier == tierNone:
		fd = -1
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	a := v.of[m.mapping]
	switch {
	case a == nil:
		return syscall.ENOENT, 0 // no such mapping, so nothing to move
	case !a.reply.movable:
		return syscall.EPERM, m.previousGeneration // this mapping was promised never to move
	case x.tier != tierNone && fd < 0:
		return syscall.EMFILE, 0
	case fd >= 0 && x.kind != Kind(a.reply.kind):
		return syscall.ENOTSUP, 0
	}
	if err := a.memory.move(x, fd); err != nil {
		return asError(err, "a MOVE").Errno, 0
	}
	return 0, x.generation
}
