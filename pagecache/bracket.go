package pagecache

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/residency"
)

// Use is a range that a bracket uses: Len bytes at Off, counted from the start of the mapping.
type Use struct {
	Mapping  *Mapping
	Off, Len int64
}

// UseOptions are the options of Cache.Use.
type UseOptions struct {
	// Nested means that the caller already has a bracket, and ends none before it gets this one.
	Nested bool
	// Patience is the longest wait for other brackets to end. 0 stands for DefaultPatience.
	Patience time.Duration
	// Keeper keeps the bracket open after its end, if allowed (Bracket.Kept). nil: the bracket is not kept.
	Keeper Keeper
}

// DefaultPatience is the default of UseOptions.Patience.
const DefaultPatience = time.Minute

// mostMoves is how many MOVEs are sent to a client before their answers are waited for.
const mostMoves = 32

// Bracket keeps the memory of its ranges at the client's addresses until Done.
type Bracket struct {
	grant *residency.Grant
	parts []*Mapping
	done  sync.Once
	// kept has the kept brackets of the device, keeper keeps this one. Both nil: it is not kept. Immutable.
	kept   *kept
	keeper Keeper
	used   atomic.Uint32 // what Used was told
}

// Kept reports whether the client may keep the bracket, and use its ranges again without asking. It may do so until its
// Keeper is asked to Recall unused brackets.
func (b *Bracket) Kept() bool { return b.keeper != nil }

// Use returns a bracket. All of its ranges have memory, with their bytes, at their clients' addresses: device memory,
// or pinned host memory if the device is full. Use does not bring pages up to date that the device already has; an
// acquire does that. Ranges of mappings that do not move need nothing. Use blocks on home, on devices, on clients, and
// for at most Patience on other brackets. Errors: EINVAL (a range, or mappings on several devices), ENOMEM (it can
// never fit), ETIMEDOUT, EDEADLK (Nested, and it would have to wait), those of home and of the device, and those of a
// client that could not map the memory.
func (c *Cache) Use(ctx context.Context, uses []Use, o UseOptions) (*Bracket, error) {
	if o.Patience == 0 {
		o.Patience = DefaultPatience
	}
	ranges, dev, err := usedRanges(uses)
	if err != nil || len(ranges) == 0 {
		return new(Bracket), err
	}
	for m := range ranges {
		if err := m.enter(dev); err != nil {
			return nil, err
		}
		defer m.calls.Done()
		if err := m.f.checkHome(ctx); err != nil {
			return nil, err
		}
	}
	for tries := 0; ; tries++ {
		b, err := c.use(ctx, ranges, dev, o)
		if !errors.Is(err, errNotShared) || tries == mostBegins {
			return b, err
		}
		for m, list := range ranges {
			for _, rg := range list {
				m.evictUnshared(ctx, rg)
			}
		}
	}
}

// usedRanges joins the ranges of each movable mapping. It widens them to whole extents of the size of new ones, so that
// everything at the client's addresses has been brought. All mappings must be on one device.
func usedRanges(uses []Use) (ranges map[*Mapping][]page.Range, dev *device, err error) {
	ranges = make(map[*Mapping][]page.Range)
	for _, u := range uses {
		rg, err := u.Mapping.at(u.Off, u.Len)
		if err != nil {
			return nil, nil, err
		}
		if dev == nil {
			dev = u.Mapping.dev
		}
		if u.Mapping.dev != dev {
			return nil, nil, fail(syscall.EINVAL, "a bracket takes mappings on one device, not on both %d and %d",
				dev.info.Ordinal,
				u.Mapping.dev.info.Ordinal)
		}
		if m := u.Mapping; m.client != nil {
			whole := residency.Aligned(rg, movableSize(dev.info, rg))
			ranges[m] = union(ranges[m], []page.Range{whole.Intersect(m.pages)})
		}
	}
	return ranges, dev, nil
}

func (c *Cache) use(ctx context.Context, ranges map[*Mapping][]page.Range, dev *device,
	o UseOptions) (_ *Bracket, err error) {
	var wants []residency.Want
	var of []*Mapping
	var by residency.Tenant
	for m, list := range ranges {
		for _, rg := range list {
			wants, of, by = append(wants, residency.Want{Key: m.h, Pages: rg, Size: movableSize(dev.info, rg)}),
				append(of, m), m.tenant
		}
	}
	b := &Bracket{}
	b.grant, err = dev.room.Grant(ctx, wants, residency.Asking{By: by, Nested: o.Nested, Patience: o.Patience})
	if err != nil {
		c.lose(dev, err)
		if errors.Is(err, syscall.ENOMEM) && slices.ContainsFunc(of, func(m *Mapping) bool { return !m.hears() }) {
			err = fmt.Errorf("%w; what the process used before counts until it answers MOVE on its service connection",
				err)
		}
		return nil, dev.fault(err)
	}
	defer func() {
		if err != nil && ctx.Err() != nil {
			c.lanes.work.Go(b.Done) // this may block if a file hangs
		} else if err != nil {
			b.Done()
		}
	}()
	for i, pin := range b.grant.Pins() {
		part, err := of[i].part(ctx, pin)
		if err != nil {
			return nil, err
		}
		b.parts = append(b.parts, part)
		if err := part.fill(ctx); err != nil {
			return nil, err
		}
	}
	if err := give(ctx, b.parts); err != nil {
		return nil, dev.fault(err)
	}
	for _, part := range b.parts {
		part.pin.Accessed(part.pages)
		part.f.count(func(c *Counters) { c.Brackets.Add(1) })
	}
	if o.Keeper != nil && !by.Limited && dev.mayKeep(b.grant, o.Keeper) {
		b.keeper, b.kept = o.Keeper, &dev.kept
		b.kept.add(b.keeper)
		b.grant.Recallable()
	}
	return b, nil
}

// part returns a Mapping for the pages of m that a bracket uses. It lasts as long as the bracket.
func (m *Mapping) part(ctx context.Context, pin *residency.Pin) (*Mapping, error) {
	p := &Mapping{
		f: m.f, h: m.h, dev: m.dev, writable: m.writable, process: m.process, user: m.user, intruder: m.intruder,
		pin: pin, whole: m,
	}
	p.pages = p.extentsOf().Intersect(m.pages)
	p.off, p.len = p.pages.Offset(), p.pages.Bytes()
	if err := m.f.mu.LockIn(ctx); err != nil {
		return nil, err
	}
	defer m.f.mu.Unlock()
	m.f.mappings[p] = struct{}{}
	return p, nil
}

// thereLocked reports whether the client has mapped all of the memory, and the memory has all of the bytes.
func (p *Mapping) thereLocked() bool {
	for _, x := range p.pin.Extents() {
		own, _ := p.h.at(x.Pages().Start)
		if own == nil {
			return false
		}
		l := own.leaseLocked(p.whole)
		l.mu.Lock()
		has := l.generation == x.Placement().Generation && !l.unsure
		l.mu.Unlock()
		if !has {
			return false
		}
	}
	for _, u := range p.f.lrc.Stale(p.pages, p.h.owner) {
		if u.Mode == lrc.ModeFill {
			return false
		}
	}
	return true
}

// fill fetches missing bytes of the part, and makes its memory safe to give to the client.
func (p *Mapping) fill(ctx context.Context) error {
	f := p.f
	if err := f.mu.LockIn(ctx); err != nil {
		return err
	}
	there := p.thereLocked()
	p.exported = there
	f.mu.Unlock()
	if there {
		return nil
	}
	if _, err := f.acquire(ctx, p.h, p.pages); err != nil {
		return err
	}
	if err := f.refreshExposed(ctx, p); err != nil {
		return err
	}
	if err := f.mu.LockIn(ctx); err != nil {
		return err
	}
	defer f.mu.Unlock()
	return p.revealLocked(ctx)
}

// give makes the client map the extents of parts that it has not mapped. parts belong to the caller.
func give(ctx context.Context, parts []*Mapping) (err error) {
	var waits []func(ctx context.Context) error
	answered := func() {
		for _, wait := range waits {
			if e := wait(ctx); err == nil {
				err = e
			}
		}
		waits = waits[:0]
	}
	for _, p := range parts {
		for _, x := range p.pin.Extents() {
			wait, e := p.give(ctx, x)
			if wait != nil {
				waits = append(waits, wait)
			}
			if err == nil {
				err = e
			}
			if err != nil || len(waits) == mostMoves {
				answered()
			}
			if err != nil {
				return err
			}
		}
	}
	answered()
	return err
}

// give begins to make the client map an extent. wait is nil if the client has it already.
func (p *Mapping) give(ctx context.Context, x *residency.Extent) (wait func(ctx context.Context) error, err error) {
	if err := p.f.mu.LockIn(ctx); err != nil {
		return nil, err
	}
	own, _ := p.h.at(x.Pages().Start)
	var l *lease
	if own != nil && own.Extent == x {
		l = own.leaseLocked(p.whole)
	}
	p.f.mu.Unlock()
	if l == nil { // it was lost with its device
		return nil, p.dev.gone()
	}
	if wait, err = l.give(); err != nil {
		p.f.c.lose(p.dev, err)
	}
	return wait, err
}

// evictUnshared evicts the extents of rg that m's client must not share with their present clients.
func (m *Mapping) evictUnshared(ctx context.Context, rg page.Range) {
	var old []*extent
	if m.f.mu.LockIn(ctx) != nil {
		return
	}
	m.h.each(rg, func(x *extent, _ page.Range) {
		if !m.f.sharesLocked(x, m) {
			old = append(old, x)
		}
	})
	m.f.mu.Unlock()
	for _, x := range old {
		m.f.evictFor(ctx, x, residency.ForOthers)
	}
}

// Used says that the client used a kept bracket n more times without asking. The eviction rule and the threshold count
// these uses when the bracket ends. They are ignored if the bracket has ended, or if the client may not keep it.
func (b *Bracket) Used(n uint32) { b.used.Store(n) }

// Done ends the bracket; repeated calls do nothing. Its memory may move from now on. Done does not wait for clients.
func (b *Bracket) Done() {
	b.done.Do(func() {
		if b.keeper != nil {
			b.kept.drop(b.keeper)
			b.claim(b.used.Load())
		}
		for _, p := range b.parts {
			if !p.whole.hears() { // the remaining lease could not be taken back
				p.whole.chargeLeases(nil)
			}
			p.f.mu.Lock()
			delete(p.f.mappings, p)
			p.f.mu.Unlock()
		}
		if b.grant != nil {
			b.grant.Free()
		}
		for _, p := range b.parts {
			p.f.mu.Lock()
			if p.dev.lost.Load() {
				p.f.letGoLocked(p.dev)
			}
			p.f.dropIdleLocked()
			p.f.mu.Unlock()
		}
	})
}

// claim counts n uses that the client says there were.
func (b *Bracket) claim(n uint32) {
	if n == 0 {
		return
	}
	for _, p := range b.parts {
		p.pin.Claimed(p.pages, n)
	}
}
