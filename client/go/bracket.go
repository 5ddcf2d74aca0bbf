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

// useNested says that who asks has a bracket, and must not wait.
const useNested uint32 = 1

// Bracket is ranges of mappings that have their memory until Done. Its methods may be called from any goroutine.
type Bracket struct {
	id   uint64
	conn *conn  // nil where nothing of it moves
	mem  memory // of one of the mappings that move
	done atomic.Bool
}

var lastBracket atomic.Uint64

// Use has the memory of movable mappings be there, with its bytes, until Done: the device's or, where that is full,
// pinned memory of the host, which is slower. It is all or nothing, so what a launch uses belongs into one bracket.
// Ranges of mappings that do not move need nothing and do no harm. What the device has is not brought up to date:
// Acquire does that, and Release publishes stores. ReadAt and WriteAt need no bracket.
//
// It waits only while brackets of others have the memory, for a minute or until ctx ends. A goroutine that has a
// bracket opens another one with the bracket's own Use: two that wait for each other's memory would wait in vain.
//
// Errors: those of Acquire, EINVAL (no ranges, or too many, or of several devices), EXDEV (of several mounts), ENOMEM
// (they can never fit), ETIMEDOUT (the text says who holds what), ECANCELED (ctx ended).
func Use(ctx context.Context, ranges ...Range) (*Bracket, error) {
	b, err := use(ctx, 0, ranges)
	return b, during("use", err)
}

// Use is the package's Use for who has b already: it is granted at once, or refused with EDEADLK.
func (b *Bracket) Use(ctx context.Context, ranges ...Range) (*Bracket, error) {
	inner, err := use(ctx, useNested, ranges)
	return inner, during("use", err)
}

// Use is the package's Use for the n bytes at off.
func (m *Mapping) Use(ctx context.Context, off, n int64) (*Bracket, error) {
	return Use(ctx, Range{m, off, n})
}

// Done ends the bracket: the memory may move from now on. On a GPU it first waits for all work that was begun in the
// primary context, and where that fails the bracket stays. A second Done does nothing.
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

// useRanges begins a bracket, which the end of ctx gives up.
func (c *conn) useRanges(ctx context.Context, id uint64, flags uint32, ranges []Range) error {
	var patience uint32
	if deadline, ok := ctx.Deadline(); ok {
		patience = uint32(min(max(time.Until(deadline).Milliseconds(), 1), 1<<31))
	}
	stop := context.AfterFunc(ctx, func() { c.endBracket(id) })
	_, err := c.simple(typeUse, useBody(id, flags, patience, ranges))
	if !stop() && err == nil {
		return failed(syscall.ECANCELED, "%v", context.Cause(ctx)) // it had been granted, and was ended
	}
	return err
}

// endBracket tells the daemon that a bracket is over. It waits for the answer, and for no room among the requests that
// run: brackets that wait may have all of it.
func (c *conn) endBracket(id uint64) {
	_ = c.ask(typeDone, doneBody(id), func(header, []byte, []int) error { return nil }, nil)
}

// within copies len(p) bytes at off in brackets where the mapping moves. The caller holds m.mu for reading.
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

// Movable reports whether the mapping's memory moves, and is there in brackets only.
func (m *Mapping) Movable() bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.assembly.reply.movable
}

// withOpen does something with ranges of mappings of one mount, which stay open meanwhile.
func withOpen(ranges []Range, do func(c *conn) error) error {
	mappings := make([]*Mapping, len(ranges))
	for i, r := range ranges {
		mappings[i] = r.Of
	}
	// In one order, so that calls and closes do not wait for each other.
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

// movers are the mappings of a connection, by the daemon's number.
type movers struct {
	mu sync.Mutex // held while memory moves, and while it goes for good
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

// drop takes a mapping's memory away, which moves no more.
func (v *movers) drop(a *assembly) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.of, a.reply.mapping)
	return a.drop()
}

// move carries a MOVE out, with the memory's descriptor or -1, which stays the caller's. It returns the errno of the
// answer and the generation in it.
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
		return syscall.ENOENT, 0 // it has nothing to move
	case !a.reply.movable:
		return syscall.EPERM, m.previousGeneration // it keeps its promise never to move
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
