package residency

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	humanize "github.com/dustin/go-humanize"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// Want is a range of a file that a bracket uses. Pages and Size are as in Request.
type Want struct {
	Key   Key
	Pages page.Range
	Size  int64
}

// Asking says who asks for a grant, and on what terms.
type Asking struct {
	By Tenant
	// Nested means that the caller holds a grant that it keeps until it gets this one. So it must not wait.
	Nested bool
	// Patience is how long the caller waits for others to give their grants back.
	Patience time.Duration

	stay  delayed       // what does not move to the device's own memory yet
	first chan struct{} // closed when this is the first in line
}

// Grant has what a bracket uses, pinned: the device's own memory, and pinned host memory for what did not fit.
type Grant struct {
	dev    *Device
	bytes  int64
	pinned int64 // of bytes, those in pinned host memory
	since  time.Time
	pins   []*Pin
}

// Pins returns a Pin for each Want, in their order.
func (g *Grant) Pins() []*Pin { return g.pins }

// Recallable says that the client gives the grant back when Options.Recall asks, unless it uses it then. It may be
// called once.
func (g *Grant) Recallable() {
	g.dev.mu.Lock()
	defer g.dev.mu.Unlock()
	for _, p := range g.pins {
		p.recalls = true
		for _, x := range p.extents {
			x.recalls++
			x.keptLocked()
		}
	}
}

// Free gives everything back. It may be called once. It blocks as Extent.LetGo does.
func (g *Grant) Free() {
	g.dev.mu.Lock()
	delete(g.dev.grants, g)
	g.dev.overBusLocked(g)
	g.dev.mu.Unlock()
	for _, p := range g.pins {
		p.Free()
	}
}

// errFull means that neither the device nor the host has memory for a grant until others give theirs back.
var errFull = errors.New("no memory until others give theirs back")

// Grant returns memory for all of wants, or nothing. It first evicts extents that no grant and no other Pin has, then
// uses pinned host memory, and then waits. Nobody holds a part while waiting for the rest: a failed attempt gives back
// what it got before it waits. Those who wait are served in order of arrival; nobody else waits. Wants of one Key must
// not overlap. Grant blocks as Reserve does, and for at most Patience while others hold what it needs. Errors: those of
// Reserve; ENOMEM for wants that can never fit; ETIMEDOUT, which says who holds what; EDEADLK if Nested would have to
// wait.
func (d *Device) Grant(ctx context.Context, wants []Want, a Asking) (*Grant, error) {
	if err := d.admitAll(wants, a.By.id()); err != nil {
		return nil, err
	}
	a.stay = d.delay(wants, a.By.id())
	if err := d.moveIn(ctx, wants, &a); err != nil {
		return nil, err
	}
	if d.inLine() == 0 { // a grant that needs no memory does not wait for others' evictions
		if g, err := d.tryGrant(ctx, wants, &a, a.stay.allocateUnasked(d), d.fits); !errors.Is(err, errFull) {
			return g, err
		}
	}
	if !a.Nested {
		if err := d.queue(ctx, &a); err != nil {
			return nil, err
		}
		defer d.unqueue(&a)
	}
	timeout := time.NewTimer(a.Patience)
	defer timeout.Stop()
	for {
		changed := d.pinned.watch()
		s := &stock{dev: d, by: a.By, wants: wants, stay: a.stay}
		g, err := d.tryGrant(ctx, wants, &a, s.allocate, d.house)
		s.drop()
		if !errors.Is(err, errFull) {
			return g, err
		}
		if a.Nested {
			return nil, refuse(syscall.EDEADLK,
				"there is no memory for a bracket within another one, which would wait for others "+
					"while they may wait for it; ask for all ranges in one bracket. %s%s", d.holders(a.By), d.maxima(a.By.id()))
		}
		select {
		case <-changed:
		case <-time.After(keptTick * 16): // clients do not report when they give back unmapped memory
		case <-timeout.C:
			return nil, refuse(syscall.ETIMEDOUT, "the bracket waited %v for %s on device %d. %s%s", a.Patience,
				humanize.IBytes(uint64(need(wants))), d.info.Ordinal, d.holders(a.By), d.maxima(a.By.id()))
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// need returns the bytes of all wants' extents.
func need(wants []Want) (bytes int64) {
	for _, w := range wants {
		bytes += Aligned(w.Pages, w.Size).Bytes()
	}
	return bytes
}

// admitAll refuses wants that can never fit.
func (d *Device) admitAll(wants []Want, by tenants.ID) error {
	budget := d.Budget()
	most := budget + d.pinned.forExtents()
	var sizes, mine []int64
	bytes, made := int64(0), int64(0)
	for _, w := range wants {
		pieces, n := plan(w.Key.Extents(Aligned(w.Pages, w.Size)), w.Pages, w.Size, d.info.Granularity, most)
		if last := pieces[len(pieces)-1]; last.pages.End >= filePages {
			return refuse(syscall.EOVERFLOW, "the last %s that a file can have cannot be used",
				humanize.IBytes(uint64(last.bytes())))
		}
		if bytes += n; bytes > most {
			break
		}
		for _, of := range pieces {
			sizes = append(sizes, of.bytes())
		}
		owned, more := d.toOwn(by, pieces)
		mine, made = append(mine, owned...), made+more
	}
	if bytes > most || !packs(sizes, budget, d.pinned.forExtents()) {
		return refuse(syscall.ENOMEM, "the bracket needs %s on device %d, whose budget is %s, and there are %s of pinned memory; "+
			"use less at once, or raise gpu-memory or pinned-memory with 'gaiafs set'",
			humanize.IBytes(uint64(max(need(wants), bytes))),
			d.info.Ordinal, humanize.IBytes(uint64(budget)), humanize.IBytes(uint64(d.pinned.forExtents())))
	}
	if own, pinned := d.mostOf(by); made > 0 && !packs(mine, own, pinned) {
		return refuse(syscall.ENOMEM, "the bracket needs %s on device %d, but %s may own no more than %s of it and %s of pinned memory "+
			"(the maxima of tenant %s, and the guarantees of others); use less at once, or change the file of tenants with "+
			"'gaiafs set MOUNTPOINT tenants=FILE'",
			humanize.IBytes(uint64(sum(mine))), d.info.Ordinal, by, humanize.IBytes(uint64(own)),
			humanize.IBytes(uint64(pinned)), by)
	}
	return nil
}

// toOwn returns the sizes of the pieces that a tenant owns once a bracket of it uses them, and how many bytes of them
// it does not own yet.
func (d *Device) toOwn(id tenants.ID, pieces []piece) (sizes []int64, more int64) {
	for _, of := range pieces {
		gains := of.x == nil || d.gains(id, of.x) || d.gainsPinned(id, of.x)
		d.mu.Lock()
		owns := of.x != nil && of.x.owner == id
		d.mu.Unlock()
		if gains {
			more += of.bytes()
		}
		if gains || owns {
			sizes = append(sizes, of.bytes())
		}
	}
	return sizes, more
}

// packs reports whether extents of these sizes, which are powers of two, fit into memories of a and b bytes.
func packs(sizes []int64, a, b int64) bool {
	sizes = slices.Clone(sizes)
	slices.Sort(sizes)
	for _, n := range slices.Backward(sizes) { // the largest first: then it does not matter where one goes
		switch {
		case n <= a:
			a -= n
		case n <= b:
			b -= n
		default:
			return false
		}
	}
	return true
}

func sum(sizes []int64) (bytes int64) {
	for _, n := range sizes {
		bytes += n
	}
	return bytes
}

// mostOf returns what a tenant may own of the device, and of pinned memory.
func (d *Device) mostOf(id tenants.ID) (own, pinned int64) {
	d.mu.Lock()
	own = d.ledger.Reach(id)
	d.mu.Unlock()
	return own, d.pinned.most(id)
}

// maxima says which maxima limit a tenant, for the end of an error message; "" if none does.
func (d *Device) maxima(id tenants.ID) string {
	own, pinned := d.mostOf(id)
	if own == d.Budget() && pinned == d.pinned.forExtents() {
		return ""
	}
	return fmt.Sprintf("; %s may own no more than %s of the device and %s of pinned memory (the maxima of tenant %s)",
		id,
		humanize.IBytes(uint64(own)), humanize.IBytes(uint64(pinned)), id)
}

// queue waits until all earlier callers have their grants or have failed. If it succeeds, the caller must call unqueue.
func (d *Device) queue(ctx context.Context, a *Asking) error {
	a.first = make(chan struct{})
	d.mu.Lock()
	d.line = append(d.line, a)
	if len(d.line) == 1 {
		close(a.first)
	}
	d.mu.Unlock()
	timeout := time.NewTimer(a.Patience)
	defer timeout.Stop()
	select {
	case <-a.first:
		return nil
	case <-ctx.Done():
		d.unqueue(a)
		return ctx.Err()
	case <-timeout.C:
		err := refuse(syscall.ETIMEDOUT, "the bracket waited %v behind earlier brackets on device %d. %s",
			a.Patience,
			d.info.Ordinal, d.holders(a.By))
		d.unqueue(a)
		return err
	}
}

func (d *Device) unqueue(a *Asking) {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := slices.Index(d.line, a)
	if d.line = slices.Delete(d.line, i, i+1); i == 0 && len(d.line) > 0 {
		close(d.line[0].first)
	}
}

// tryGrant pins all of wants, or nothing. errFull: others hold what it needs.
func (d *Device) tryGrant(
	ctx context.Context, wants []Want, a *Asking, allocate allocator, fit fitter,
) (_ *Grant, err error) {
	g := &Grant{dev: d, since: time.Now()}
	defer func() {
		if err != nil {
			err = d.explain(err, "the bracket", need(wants), a.By, g.pins...)
			for _, p := range g.pins {
				p.failed = true
				p.Free()
			}
		}
	}()
	// Pin the extents that exist first, so that they are not evicted for the others. Extents that would put the tenant
	// over its maximum come last.
	for _, w := range wants {
		p := &Pin{dev: d, by: a.By, stay: a.stay}
		g.pins = append(g.pins, p)
		for _, x := range w.Key.Extents(w.Pages) {
			if err := p.join(ctx, x); err != nil {
				return nil, err
			}
		}
	}
	for i, w := range wants {
		if err := g.pins[i].complete(ctx, w, allocate, fit); err != nil {
			return nil, err
		}
		for _, x := range g.pins[i].extents {
			g.bytes += x.size
			if x.Placement().Tier == TierHost {
				g.pinned += x.size
			}
		}
	}
	d.mu.Lock()
	d.grants[g] = struct{}{}
	d.delayedLocked(g, a.stay)
	d.mu.Unlock()
	return g, nil
}

// join pins an existing extent, unless its tenant would then own more than it may.
func (p *Pin) join(ctx context.Context, x *Extent) error {
	d, id := p.dev, p.by.id()
	if d.gains(id, x) {
		if end := d.asks(id, x); end != nil {
			defer end()
		}
		if d.over(id, 0) {
			return nil
		}
	}
	p.promote(ctx, x)
	if d.gainsPinned(id, x) {
		d.pinned.own(id, x.size)
		defer d.pinned.own(id, -x.size)
		if d.pinned.overdrawn(id) {
			return nil
		}
	}
	_, err := p.pin(x)
	return err
}

// complete pins the extents of w that p lacks, and makes those that do not exist.
func (p *Pin) complete(ctx context.Context, w Want, allocate allocator, fit fitter) error {
	d := p.dev
	for rest := w.Pages; !rest.Empty(); {
		pieces, _ := plan(w.Key.Extents(Aligned(rest, w.Size)), rest, w.Size, d.info.Granularity,
			d.Budget()+d.pinned.forExtents())
		for _, of := range pieces {
			if of.x == nil || !slices.Contains(p.extents, of.x) {
				ok, err := p.affordAny(ctx, w.Key, of, allocate, fit)
				if err != nil {
					return err
				}
				if !ok {
					break // the Key's extents have changed
				}
			}
			rest.Start = of.pages.End
		}
	}
	slices.SortFunc(p.extents, func(a, b *Extent) int { return cmp.Compare(a.pages.Start, b.pages.Start) })
	return nil
}

// affordAny is afford. It also covers extents in pinned memory that the tenant takes over.
func (p *Pin) affordAny(ctx context.Context, key Key, of piece, allocate allocator, fit fitter) (bool, error) {
	d, id := p.dev, p.by.id()
	if of.x != nil {
		p.promote(ctx, of.x)
		if d.gainsPinned(id, of.x) {
			d.pinned.own(id, of.x.size)
			defer d.pinned.own(id, -of.x.size)
			if err := d.fitsPinned(ctx, id); err != nil {
				return false, err
			}
		}
	}
	return p.afford(ctx, key, of, allocate, fit)
}

// gains is gainsLocked for a bracket. A bracket uses extents of files pinned to the device where they are, whatever the
// maximum.
func (d *Device) gains(id tenants.ID, x *Extent) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.gainsLocked(id, x) && !d.stays()(x)
}

// gainsPinned is gains for pinned host memory.
func (d *Device) gainsPinned(id tenants.ID, x *Extent) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return x.counted == TierHost && x.mapped <= x.kept && x.owner != id && d.pinned.limits(id)
}

// fitsPinned evicts extents of a tenant from pinned memory until it owns no more than its maximum, with x counted.
func (d *Device) fitsPinned(ctx context.Context, id tenants.ID) error {
	if !d.pinned.overdrawn(id) {
		return nil
	}
	mine, _, err := d.turn(ctx)
	if err != nil {
		return err
	}
	defer d.yield(mine)
	for d.pinned.overdrawn(id) {
		evicted, err := d.evict(ctx, TierHost, id, ForPinned, sparing{copied: true}, 0)
		if err != nil {
			return err
		}
		if !evicted {
			return errFull
		}
	}
	return nil
}

// fits is the fitter of a grant that needs no room.
func (d *Device) fits(_ context.Context, _ *Extent, by Tenant) error {
	if d.over(by.id(), 0) {
		return errFull
	}
	return nil
}

// house is the fitter of grants. It evicts idle extents of the tenant; if that is not enough, it moves x to pinned
// memory. It fails with errFull if others use x, or the memory that x needs.
func (d *Device) house(ctx context.Context, x *Extent, by Tenant) error {
	id := by.id()
	if err := d.lessen(ctx, id); err != nil || !d.over(id, 0) {
		return err
	}
	mine, _, err := d.turn(ctx)
	if err != nil {
		return err
	}
	defer d.yield(mine)
	d.pinned.own(id, x.size)
	defer d.pinned.own(id, -x.size) // whoever pins x will own it
	mem, _, err := d.allocatePinned(ctx, x.size, Tenant{User: nobody, Account: id})
	if err != nil {
		return err
	}
	d.unmade(TierHost, x.size) // Move counts it
	if x.key.Rehouse(ctx, x, TierHost, mem) {
		d.departed(x, TierVRAM, ForMaximum, "")
		return nil
	}
	d.pinned.put(d, mem, nil)
	if x.key.Clean(ctx, x, true) {
		d.departed(x, TierVRAM, ForMaximum, "")
		return nil // x left, and is made again
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gainsLocked(id, x) {
		return errFull
	}
	return nil // x left, or somebody else has mapped it
}

func (d *Device) inLine() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.line)
}

// allocateOnHost is stock.allocate for pinned memory only. The caller has the turn.
func (d *Device) allocateOnHost(ctx context.Context, size int64, by Tenant) (found, error) {
	d.pinned.own(by.id(), size) // now, so that it counts when a victim is chosen
	mem, littered, err := d.allocatePinned(ctx, size, by)
	if err != nil {
		d.pinned.own(by.id(), -size)
	}
	return found{TierHost, mem, littered}, err
}

// allocatePinned is allocateOnHost for memory that is counted as the tenant's already. littered: it may hold old bytes.
func (d *Device) allocatePinned(ctx context.Context, size int64,
	by Tenant) (mem gpubackend.Memory, littered bool, err error) {
	var last error // of allocHost
	for evicted := true; evicted; {
		if !d.pinned.overdrawn(by.id()) {
			if mem, littered, err = d.allocHost(size, by.User); !errors.Is(err, gpubackend.ErrNoMemory) {
				return mem, littered, err
			}
			last = err
		}
		if evicted, err = d.evict(ctx, TierHost, by.id(), ForPinned, sparing{copied: true}, size); err != nil {
			return nil, false, err
		}
	}
	return nil, false, lacking(d, errFull, last)
}

// allocHost is alloc for pinned host memory.
func (d *Device) allocHost(size int64, user uint32) (mem gpubackend.Memory, littered bool, err error) {
	d.mu.Lock()
	d.making++
	d.takenHost += size
	d.mu.Unlock()
	if mem, littered, err = d.pinned.take(d, size, user); err != nil {
		d.unmade(TierHost, size)
	}
	return mem, littered, err
}

// Hold pins an extent for a Tenant, who is charged for it without a limit. It returns nil if the extent's Key has let
// go of it, or it is moving.
func (d *Device) Hold(x *Extent, by Tenant) *Pin {
	by.Limited = false
	p := &Pin{dev: d, by: by}
	if ok, _ := p.pin(x); !ok {
		return nil
	}
	return p
}

// Keep pins the extents of key that exist and overlap rg, so that they stay while the caller works with them. It
// charges nobody, and waits only for extents that are moving.
func (d *Device) Keep(key Key, rg page.Range) *Pin {
	p := &Pin{dev: d, keeps: true}
	for moves := true; moves; {
		moves = false
		for _, x := range key.Extents(rg) { // waits, because the Key's lock is held while an extent moves
			d.mu.Lock()
			switch {
			case x.moving:
				moves = true
			case x.state == held && !slices.Contains(p.extents, x):
				d.pinLocked(x, p)
			}
			d.mu.Unlock()
		}
	}
	slices.SortFunc(p.extents, func(a, b *Extent) int { return cmp.Compare(a.pages.Start, b.pages.Start) })
	return p
}
