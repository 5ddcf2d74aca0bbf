package pagecache

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/residency"
)

// Use is a range that a bracket uses: the Len bytes at Off, counted from the start of the mapping.
type Use struct {
	Mapping  *Mapping
	Off, Len int64
}

// UseOptions say how a bracket is asked for.
type UseOptions struct {
	// Nested says that whoever asks has a bracket already, and ends none before he has this one.
	Nested bool
	// Patience is how long he waits for others to end theirs. 0 stands for DefaultPatience.
	Patience time.Duration
	Process  uint32
	// Keeper keeps the bracket after its end, where it may: Bracket.Kept. nil: it is not to be kept.
	Keeper Keeper
}

// DefaultPatience is that of UseOptions.
const DefaultPatience = time.Minute

// mostMoves is how many Moves a client is sent before it has answered some.
const mostMoves = 32

// Bracket keeps the memory of its ranges at the client's addresses until Done.
type Bracket struct {
	grant *residency.Grant
	parts []*Mapping
	done  sync.Once
	// kept are those of the device that keep brackets, keeper is who keeps this one. nil: nobody. Immutable.
	kept   *kept
	keeper Keeper
}

// Kept reports whether the client may keep the bracket, and use its ranges again without asking, until its Keeper is
// asked to Recall what it does not use.
func (b *Bracket) Kept() bool { return b.keeper != nil }

// Use returns a bracket in which all of the ranges have memory, with their bytes, at their clients' addresses: memory
// of the device, or pinned memory of the host where that is full. Pages that the device has are not brought up to date;
// an acquire does that. Ranges of mappings that do not move need nothing. It blocks on home, on devices, on clients,
// and for at most Patience on brackets of others. Errors: EINVAL (a range, or mappings on several devices), ENOMEM (it
// can never fit), ETIMEDOUT, EDEADLK (Nested, and it would have to wait), those of home and of the device, and those of
// a client that could not map the memory.
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

// usedRanges joins the ranges of each movable mapping, in whole extents of new ones, so that a client has nothing at
// its addresses that was not brought. All are of one device.
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
			return nil, nil, fail(syscall.EINVAL, "a bracket has mappings of one device: not of %d and %d",
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
	b.grant, err = dev.room.Grant(ctx, wants, residency.Asking{By: by, Process: o.Process, Nested: o.Nested,
		Patience: o.Patience})
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
			c.lanes.work.Go(b.Done) // a file may hang
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
	if o.Keeper != nil && !by.Limited && dev.mayKeep(b.grant) {
		b.keeper, b.kept = o.Keeper, &dev.kept
		b.kept.add(b.keeper)
	}
	return b, nil
}

// part returns what a bracket uses of m: a mapping of its own, as long as the bracket lasts.
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

// thereLocked reports whether the client has all of the memory, with every page in it.
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

// fill sees to it that every page of the part has its bytes, and that the client may be given the memory.
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

// give has the client map what it does not have of parts, which are its own.
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

// give begins to have the client map an extent. wait is nil where the client has it.
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
	if l == nil { // it went with its device
		return nil, p.dev.gone()
	}
	if wait, err = l.give(); err != nil {
		p.f.c.lose(p.dev, err)
	}
	return wait, err
}

// evictUnshared has extents of rg go that m's client must not share with those who were given them.
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

// Done ends the bracket, once: what it used may move from now on. It does not wait for clients.
func (b *Bracket) Done() {
	b.done.Do(func() {
		if b.keeper != nil {
			b.kept.drop(b.keeper)
		}
		for _, p := range b.parts {
			if !p.whole.hears() { // the lease that stays could not be taken back
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
