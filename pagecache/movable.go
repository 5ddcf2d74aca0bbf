package pagecache

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/pagecache/residency"
)

// A movable mapping gets its memory from a bracket (bracket.go) and keeps it until others need it. Between brackets the
// client still has the memory at its addresses: it has a lease. To take memory back, the Cache asks each client with a
// lease to put a hole in its place. The bytes move only after that, so nobody stores into an extent that moves. An
// extent that a bracket uses is pinned and does not move.

const (
	// movePatience is how long the Cache waits for a client that is asked to give memory back. A client that takes
	// longer keeps its memory until it answers, and its user is charged for all of it.
	movePatience = 500 * time.Millisecond
	// attendsTick is the interval at which such a client is checked.
	attendsTick = movePatience / 20
)

// Tier is where an extent's bytes lie.
type Tier = residency.Tier

// The tiers of a Move.
const (
	TierNone   = residency.TierNone
	TierDevice = residency.TierVRAM
	TierHost   = residency.TierHost
)

// Move asks a client to map an extent from other memory at the same addresses, or to put a hole there.
type Move struct {
	// Offset is the file offset of the extent's first byte, Size its length in bytes.
	Offset, Size int64
	Kind         gpubackend.Kind
	Tier         Tier
	// Previous is the generation of the last Move to the client, 0 if none. Generation is 0 with TierNone.
	Previous, Generation uint64
	// Descriptor is nil with TierNone. The receiver of the Move closes it.
	Descriptor *os.File
}

// Client is the process that has a movable mapping, as the mapping sees it. Its methods may be called from any
// goroutine.
type Client interface {
	// Move passes m on and does not wait. The client gets the Moves of one extent in the order of the calls. wait
	// returns the result: nil, an error that wraps the client's errno, or ctx's error. After ctx's error it may be
	// called again.
	Move(m Move) (wait func(ctx context.Context) error, err error)
	// Attends reports whether the client still serves Moves.
	Attends() bool
}

// lease is an extent that the client of a movable mapping may have at its addresses.
type lease struct {
	m *Mapping
	x *extent

	mu sync.Mutex
	// generation is the one in the last Move to the client, 0 if none. unsure says that the client has not answered, so
	// it may have another generation. turn counts the Moves. Protected by mu.
	generation, turn uint64
	unsure           bool
	last             *moved // the last Move; nil if there is no answer to wait for. Protected by mu
	ended            bool   // the client has unmapped it. Protected by mu
}

// movable is the part of a Mapping that only movable mappings use.
type movable struct {
	client  Client
	waiting sync.WaitGroup // waits for a client that does not answer
	deaf    atomic.Int64   // how many goroutines wait for it; changed under File.mu
	// charged has the leases that such a client keeps: their extents are pinned for its user. Protected by File.mu.
	charged map[*lease]*residency.Pin
}

// movableSize returns the size of new extents for a bracket's range of a movable mapping. It is 32 MiB for large
// ranges: moving an extent takes 0.8 ms on an H200, besides the copy, so a range of 32 MiB takes 2.8 ms as one extent
// and 6.8 ms as eight. It is smaller if such extents would stick out of the range by more than an eighth of it. The
// least is 4 MiB, which was good for most programs of GPUswap, or more on a device that would otherwise have more than
// 4096 extents.
func movableSize(info gpubackend.Info, rg page.Range) int64 {
	least := max(info.Granularity, 4<<20)
	for least < info.Memory/4096 {
		least *= 2
	}
	size := max(least, 32<<20)
	for size > least && residency.Aligned(rg, size).Len() > rg.Len()+rg.Len()/8 {
		size /= 2
	}
	for size > info.Granularity && size > info.Memory/8 {
		size /= 2
	}
	return size
}

// leaseLocked returns the lease of m on x, and makes it if necessary. File.mu is held.
func (x *extent) leaseLocked(m *Mapping) *lease {
	for _, l := range x.leases {
		if l.m == m {
			return l
		}
	}
	l := &lease{m: m, x: x}
	x.leases = append(x.leases, l)
	return l
}

// leasedLocked reports whether a client may have x at its addresses. File.mu is held. A bracket that ends leaves its
// lease. So if nobody maps x and this is false, nothing was stored into x since its clients gave it back.
func (x *extent) leasedLocked() bool {
	return slices.ContainsFunc(x.leases, (*lease).has)
}

// has reports whether the client may have the extent at its addresses.
func (l *lease) has() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.generation != 0 || l.unsure
}

// give sends the client the extent, which a bracket pins. wait is nil if the client has it already. If another bracket
// has sent it, give sends nothing: the client would unmap the memory that the other bracket uses as soon as the first
// answer comes.
func (l *lease) give() (wait func(ctx context.Context) error, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	at := l.x.Placement()
	if l.generation == at.Generation && !l.unsure {
		return nil, nil
	}
	if l.generation == at.Generation && l.last != nil {
		return l.waitLocked(), nil
	}
	d, err := at.Memory.Export(l.m.writable)
	if err != nil {
		return nil, err
	}
	// The original descriptor is closed when Memory.Held is called.
	fd, err := unix.FcntlInt(d.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate a descriptor of an extent: %w", err)
	}
	if err := l.moveLocked(Move{Tier: at.Tier, Generation: at.Generation,
		Descriptor: os.NewFile(uintptr(fd), "gaiafs extent")}); err != nil {
		return nil, err
	}
	return l.waitLocked(), nil
}

// moved is a Move that was sent. Several callers may wait for its answer at once.
type moved struct {
	wait func(ctx context.Context) error
	turn chan struct{} // whoever has sent to it calls wait, and guards answered and err
	// answered means that the client has answered, with err.
	answered bool
	err      error
}

// answer waits for the client's answer until ctx ends.
func (m *moved) answer(ctx context.Context) error {
	select {
	case m.turn <- struct{}{}:
		defer func() { <-m.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if !m.answered {
		m.err = m.wait(ctx)
		m.answered = said(m.err)
	}
	return m.err
}

// said reports whether err, the result of a Move, is what the client answered.
func said(err error) bool {
	var errno syscall.Errno
	return err == nil || errors.As(err, &errno)
}

// waitLocked returns a function that waits for the answer to the last Move, and notes it.
func (l *lease) waitLocked() (wait func(ctx context.Context) error) {
	last, turn, generation := l.last, l.turn, l.generation
	return func(ctx context.Context) error {
		err := last.answer(ctx)
		if !said(err) && ctx.Err() == nil { // there will be none: the next bracket sends the extent again
			l.mu.Lock()
			if l.last == last {
				l.last = nil
			}
			l.mu.Unlock()
		}
		return l.answered(turn, generation, err)
	}
}

// moveLocked passes a Move on. The lease is unsure until the answer.
func (l *lease) moveLocked(m Move) error {
	m.Offset, m.Size, m.Previous, m.Kind = l.x.pages().Offset(), l.x.Size(), l.generation, l.m.dev.info.Kind
	wait, err := l.m.client.Move(m)
	if err == nil {
		l.generation, l.unsure, l.last = m.Generation, true, &moved{wait: wait, turn: make(chan struct{}, 1)}
		l.turn++
	}
	return err
}

// answered notes the result of Move number turn, which carried the given generation.
func (l *lease) answered(turn, generation uint64, err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if said(err) && l.turn == turn {
		l.unsure = false
		if err != nil { // nothing is mapped there
			l.generation = 0
		}
	}
	if said(err) && generation == 0 && !errors.Is(err, syscall.EPERM) {
		return nil // a hole, or the mapping is gone
	}
	return err
}

// takeBack asks the client to put a hole in place of the extent. It returns false if the client keeps it: a bracket
// uses it, or the client does not answer.
func (l *lease) takeBack(ctx context.Context) bool {
	l.mu.Lock()
	if l.ended || l.generation == 0 && !l.unsure {
		l.mu.Unlock()
		return true
	}
	if l.x.Mapped() > 0 {
		l.mu.Unlock()
		return false
	}
	if !l.m.hears() {
		l.mu.Unlock()
		l.m.chargeLeases(nil)
		return false
	}
	if err := l.moveLocked(Move{Tier: TierNone}); err != nil {
		l.mu.Unlock()
		return false
	}
	wait := l.waitLocked()
	l.mu.Unlock()
	patience, cancel := context.WithTimeout(ctx, movePatience)
	err := wait(patience)
	cancel()
	if err != nil {
		l.m.chargeLeases(func() { _ = wait(l.m.life) })
	}
	return err == nil
}

// hears reports whether the client answers, as far as is known.
func (m *Mapping) hears() bool { return m.deaf.Load() == 0 && m.client.Attends() }

// chargeLeases charges the client's user for everything that the client has at its addresses. The client does not
// answer, so nobody can take that memory back. The charge ends when late has returned and the client attends, or with
// the mapping. late waits for an answer that did not come in time; it may be nil. Existing charges stay. chargeLeases
// does not wait for the client. The caller holds no lock that a client's request needs.
func (m *Mapping) chargeLeases(late func()) {
	if m.enter(m.dev) != nil { // it is ending
		return
	}
	defer m.calls.Done()
	m.f.mu.Lock()
	defer m.f.mu.Unlock()
	for _, x := range m.h.extents {
		for _, l := range x.leases {
			if l.m != m || m.charged[l] != nil || !l.has() {
				continue
			}
			if pin := m.dev.room.Hold(x.Extent, m.tenant); pin != nil {
				if m.charged == nil {
					m.charged = make(map[*lease]*residency.Pin)
				}
				m.charged[l] = pin
			}
		}
	}
	if late == nil && m.deaf.Load() > 0 {
		return
	}
	m.deaf.Add(1)
	m.waiting.Go(func() { m.awaitClient(late) })
}

// awaitClient waits until the client attends, and ends the charge of chargeLeases.
func (m *Mapping) awaitClient(late func()) {
	if late != nil {
		late()
	}
	tick := time.NewTicker(attendsTick)
	defer tick.Stop()
	for m.life.Err() == nil && !m.client.Attends() {
		select {
		case <-tick.C:
		case <-m.life.Done():
		}
	}
	m.f.mu.Lock()
	defer m.f.mu.Unlock()
	if m.deaf.Add(-1) > 0 {
		return
	}
	for _, pin := range m.charged {
		pin.Free()
	}
	m.charged = nil
}

// takeBack asks all clients to put holes in place of an extent of h. It returns false if one keeps it. The caller holds
// no lock that a client's request needs.
func (h *holding) takeBack(ctx context.Context, of *residency.Extent) bool {
	if h.f.mu.LockIn(ctx) != nil {
		return false
	}
	x, _ := h.at(of.Pages().Start)
	if x == nil || x.Extent != of {
		h.f.mu.Unlock()
		return false
	}
	leases := slices.Clone(x.leases)
	h.f.mu.Unlock()
	for _, l := range leases {
		if !l.takeBack(ctx) {
			return false
		}
	}
	return true
}

// movesLocked reports whether a movable mapping has pages of x, so that stores there may have to be taken back.
func (f *File) movesLocked(x *extent) bool {
	for m := range f.mappings {
		if m.client != nil && m.h == x.h && m.pages.Overlaps(x.pages()) {
			return true
		}
	}
	return false
}

// dirtyLocked reports whether x has bytes that home lacks.
func (f *File) dirtyLocked(ctx context.Context, x *extent) (bool, error) {
	if len(f.lrc.PendingOf(x.pages(), x.h.owner)) > 0 || len(f.lrc.Draining(x.pages())) > 0 {
		return true, nil
	}
	stored, err := x.h.storedLocked(ctx, x.pages())
	return len(stored) > 0, err
}

// demoteLocked moves x to pinned memory of the host. No client has x.
func (f *File) demoteLocked(ctx context.Context, x *extent) bool {
	if x.Placement().Tier != TierDevice {
		return false
	}
	moved := x.Demote(ctx, func(from, to gpubackend.Memory) error {
		return f.copyExtentLocked(ctx, x, from, to, TierHost)
	})
	if moved {
		x.given = nil // nobody was given the new memory
		f.count(func(c *Counters) { c.MovedOut.Add(1) })
	}
	return moved
}

// copyExtentLocked copies all of x to other memory of the same device, of the given tier, and checks by digests that no
// bytes changed during the copy. It computes them in the device's own memory if it can, because that costs little. Over
// the bus it takes as long as the copy.
func (f *File) copyExtentLocked(ctx context.Context, x *extent, from, to gpubackend.Memory, tier Tier) error {
	was, is := make([]gpubackend.Digest, x.Size()>>page.Shift), make([]gpubackend.Digest, x.Size()>>page.Shift)
	err := x.dev.Digests(ctx, from, 0, was)
	if err == nil {
		err = x.dev.moves.Peer(ctx, mover.Eviction, []gpubackend.PeerCopy{{Mem: to, From: from, N: x.Size()}})
	}
	again := from
	if tier == TierDevice {
		again = to
	}
	if err == nil {
		err = x.dev.Digests(ctx, again, 0, is)
	}
	if err != nil {
		f.lostLocked(x.dev, err)
		return x.dev.fault(err)
	}
	if !slices.Equal(was, is) {
		return fail(syscall.EIO, "the bytes of pages %s changed while they moved: a program stores into them outside its brackets",
			x.pages())
	}
	return nil
}

// Rehouse moves an extent of h to other memory.
func (h *holding) Rehouse(ctx context.Context, of *residency.Extent, tier residency.Tier, mem gpubackend.Memory) bool {
	f := h.f
	if !h.takeBack(ctx, of) {
		return false
	}
	if f.mu.LockIn(ctx) != nil {
		return false
	}
	defer f.mu.Unlock()
	x, _ := h.at(of.Pages().Start)
	if x == nil || x.Extent != of || x.leasedLocked() { // a bracket may have come and gone
		return false
	}
	moved, err := x.Move(tier, mem, func(from gpubackend.Memory) error {
		return f.copyExtentLocked(ctx, x, from, mem, tier)
	})
	if err != nil && ctx.Err() == nil {
		f.c.log.Warn("an extent could not be moved", "file", f.Name(), "pages", x.pages().String(), "error", err)
	}
	if moved {
		x.given = nil
		f.count(func(c *Counters) {
			if tier == residency.TierHost {
				c.MovedOut.Add(1)
			} else {
				c.MovedIn.Add(1)
				c.RoundTrips.Add(1)
			}
		})
	}
	return moved
}

// acquire is File.acquire for those pages of rg that have memory. A bracket brings the rest up to date.
func (m *Mapping) acquire(ctx context.Context, rg page.Range) (pages int64, err error) {
	if m.client == nil {
		if pages, err = m.f.acquire(ctx, m.h, rg); err == nil {
			m.pin.Accessed(rg)
		}
		return pages, err
	}
	keep := m.dev.room.Keep(m.h, rg)
	defer keep.Free()
	var runs []page.Range
	for _, x := range keep.Extents() {
		runs = page.AppendRange(runs, x.Pages().Intersect(rg))
	}
	for _, run := range runs {
		n, err := m.f.acquire(ctx, m.h, run)
		if pages += n; err != nil {
			return pages, err
		}
	}
	keep.Accessed(rg)
	return pages, nil
}

// endLeases removes the leases of the client, which has unmapped the mapping or is gone.
func (m *Mapping) endLeases() {
	m.waiting.Wait()
	m.f.mu.Lock()
	defer m.f.mu.Unlock()
	for _, x := range m.h.extents {
		x.leases = slices.DeleteFunc(x.leases, func(l *lease) bool {
			if l.m != m {
				return false
			}
			if m.abandoned.Load() && l.has() {
				x.Abandon()
			}
			l.mu.Lock()
			l.ended = true // tells a takeBack that is about to begin
			l.mu.Unlock()
			return true
		})
	}
}
