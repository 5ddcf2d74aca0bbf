package residency

import (
	"context"
	"errors"
	"slices"
	"syscall"

	humanize "github.com/dustin/go-humanize"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
	"github.com/gaiafs/gaiafs/pagecache/residency/shortage"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// Key is what a device holds of a file. Except for Pinned and Preference, its methods are called without any lock of
// this package, and may block on the Key's own locks.
type Key interface {
	// Extents returns the extents that overlap rg, in order.
	Extents(rg page.Range) []*Extent
	// Adopt adds x to the Key's extents. It reports false if one of them overlaps x.
	Adopt(x *Extent) bool
	// Clean writes back what only x has, and makes it Leave. It reports false if x stays: somebody maps x, the bytes
	// cannot be written back, or a client does not answer. With copied, x may leave while somebody copies from it; the
	// copy's end frees the memory. That is the last resort, after all other victims, so Clean also waits for slow
	// clients then.
	Clean(ctx context.Context, x *Extent, copied bool) bool
	// Rehouse Moves x to mem, memory of tier, unless somebody maps x or copies from it. If it reports false, x stays
	// and the caller keeps mem.
	Rehouse(ctx context.Context, x *Extent, tier Tier, mem gpubackend.Memory) bool
	// Pinned reports whether the Key's extents stay when nobody maps them, and on whose account. It takes no lock,
	// because it is called with Device.mu held.
	Pinned() (by Tenant, pinned bool)
	// Preference returns where the Key's extents should be. Like Pinned, it takes no lock.
	Preference() Preference
}

// Preference says where a Key's extents should be, if there is a choice.
type Preference struct {
	// Priority orders the extents of a tenant: lower ones are evicted first, whatever the rule, and come back last.
	Priority int
	// OnHost makes grants take pinned host memory for extents without memory, while there is some.
	OnHost bool
}

// Request describes what Reserve shall pin.
type Request struct {
	// Pages of the file; not empty.
	Pages page.Range
	// Size is the size of new extents, as the function Size chose it.
	Size int64
	// Ends means that the Key will never have pages after these.
	Ends bool
	// Unzeroed means that new extents are not zeroed yet: the caller calls Extent.Zero. All requests of a Key have the
	// same.
	Unzeroed bool
	By       Tenant
}

// errThere means that the Key got memory for the pages while the reservation waited for room.
var errThere = errors.New("somebody else reserved these pages")

// Reserve returns a Pin of extents that cover the pages and have memory. New extents are zeros, unless r.Unzeroed is
// set. If the device is full, others are evicted. Reserve blocks on the Key, on the victims' Keys and on the device.
// After an error nothing is pinned. Errors: ENOMEM with a sentence that says why, EOVERFLOW for the last extent of the
// largest possible file, those of ctx and of the device. The caller must hold no lock that a Key may take.
func (d *Device) Reserve(ctx context.Context, key Key, r Request) (*Pin, error) {
	p := &Pin{dev: d, by: r.By, unzeroed: r.Unzeroed}
	need := Aligned(r.Pages, r.Size).Bytes()
	if r.Ends {
		need = Aligned(r.Pages, d.info.Granularity).Bytes()
	}
	for rest := r.Pages; !rest.Empty(); {
		pieces, bytes := plan(key.Extents(Aligned(rest, r.Size)), rest, r.Size, d.info.Granularity, d.Budget())
		if r.Ends {
			bytes -= cut(pieces, rest, d.info.Granularity)
		}
		err := d.admit(r, rest, pieces, bytes)
		for i := 0; i < len(pieces) && err == nil; i++ {
			var ok bool
			if ok, err = p.afford(ctx, key, pieces[i], d.allocateOwn, d.settle); !ok {
				break // the Key's extents have changed
			}
			rest.Start = pieces[i].pages.End
		}
		if err != nil {
			err = d.explain(err, "the mapping", need, r.By, p)
			p.Free()
			return nil, err
		}
	}
	return p, nil
}

// fitter makes sure that a tenant owns no more than it may, with x counted, which it does not map yet.
type fitter func(ctx context.Context, x *Extent, by Tenant) error

// afford is take. If the tenant would become x's owner and thereby own more than it may, fit must make room first.
func (p *Pin) afford(ctx context.Context, key Key, of piece, allocate allocator, fit fitter) (bool, error) {
	d, owner := p.dev, p.by.id()
	if of.x != nil {
		if end := d.asks(owner, of.x); end != nil {
			err := fit(ctx, of.x, p.by)
			if end(); err != nil {
				return false, err
			}
		}
	}
	return p.take(ctx, key, of, allocate)
}

// asks counts x as a tenant's until end is called, if the tenant has a limit and would own x by mapping it. Otherwise
// end is nil.
func (d *Device) asks(owner tenants.ID, x *Extent) (end func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.gainsLocked(owner, x) {
		return nil
	}
	from := x.owner
	d.ledger.Add(from, -x.size)
	d.ledger.Add(owner, x.size)
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.ledger.Add(owner, -x.size)
		d.ledger.Add(from, x.size)
	}
}

// gainsLocked reports whether a tenant that has a limit would own x by mapping it, in the device's own memory.
// Device.mu is held.
func (d *Device) gainsLocked(id tenants.ID, x *Extent) bool {
	return d.ledger.Limits(id) && x.counted == TierVRAM && x.mapped <= x.kept && x.owner != id
}

// settle is the fitter of memory that does not move: it evicts extents. It fails if too few can leave.
func (d *Device) settle(ctx context.Context, _ *Extent, by Tenant) error {
	if err := d.lessen(ctx, by.id()); err != nil || !d.over(by.id(), 0) {
		return err
	}
	if d.reason(TierVRAM, by.id(), ForMapping) == ForMaximum {
		return shortage.OverMaximum
	}
	return shortage.NoRoom
}

// lessen evicts extents until a tenant owns no more than it may, or no extent can leave.
func (d *Device) lessen(ctx context.Context, owner tenants.ID) error {
	if !d.over(owner, 0) {
		return nil
	}
	mine, _, err := d.turn(ctx)
	if err != nil {
		return err
	}
	defer d.yield(mine)
	for d.over(owner, 0) {
		evicted, err := d.evict(ctx, TierVRAM, owner, ForMaximum, sparing{copied: true}, 0)
		if err == nil && !evicted {
			evicted, err = d.evict(ctx, TierVRAM, owner, ForMaximum, sparing{}, 0)
		}
		if err != nil || !evicted {
			return err
		}
	}
	return nil
}

// admit refuses a request that can never fit. bytes is the size of the pieces.
func (d *Device) admit(r Request, rest page.Range, pieces []piece, bytes int64) error {
	if last := pieces[len(pieces)-1]; last.pages.End >= filePages {
		// The extent would end at 2^63, which is not a valid offset, here or in a client.
		return refuse(syscall.EOVERFLOW, "the last %s that a file can have cannot be mapped",
			humanize.IBytes(uint64(last.bytes())))
	}
	need := max(uint64(bytes), uint64(Aligned(rest, r.Size).Len())<<page.Shift)
	if budget := d.Budget(); bytes > budget {
		return refuse(syscall.ENOMEM, "the mapping needs %s of device %d, whose budget is %s; map less, or raise gpu-memory "+
			"with 'gaiafs set'", humanize.IBytes(need), d.info.Ordinal, humanize.IBytes(uint64(budget)))
	}
	onHost := func(of piece) bool { return of.x != nil && of.x.Placement().Tier == TierHost }
	sizes, more := d.toOwn(r.By.id(), slices.DeleteFunc(slices.Clone(pieces), onHost))
	d.mu.Lock()
	own, most, share := d.ledger.Reach(r.By.id()), d.ledger.Most(r.By.id()), d.shareLocked()
	d.mu.Unlock()
	switch {
	case r.By.Limited && bytes > share:
		return shortage.OverShare
	case more > 0 && most > 0 && sum(sizes) > most:
		return shortage.OverMaximum
	case more > 0 && sum(sizes) > own:
		return refuse(syscall.ENOMEM, "the mapping needs %s of device %d, and what is guaranteed to other tenants leaves %s of "+
			"its %s; map less, or lower the guarantees with 'gaiafs set MOUNTPOINT tenants=FILE'", humanize.IBytes(need),
			d.info.Ordinal, humanize.IBytes(uint64(own)), humanize.IBytes(uint64(d.Budget())))
	}
	return nil
}

// take pins a piece; if the extent does not exist, it makes it. It reports false if the Key's extents have changed.
func (p *Pin) take(ctx context.Context, key Key, of piece, allocate allocator) (bool, error) {
	if of.x != nil {
		p.promote(ctx, of.x)
		return p.pin(of.x)
	}
	d, size := p.dev, of.bytes()
	if err := d.charge(p.by, size); err != nil {
		return false, err
	}
	owner := p.by.id()
	d.mu.Lock()
	d.ledger.Add(owner, size) // now, so that it counts when a victim is chosen
	d.mu.Unlock()
	x, err := p.make(ctx, key, of.pages, allocate)
	d.mu.Lock()
	if err != nil {
		d.ledger.Add(owner, -size)
		d.dischargeLocked(p.by, size)
		d.mu.Unlock()
		if errors.Is(err, errThere) {
			err = nil
		}
		return false, err
	}
	d.ledger.Add(owner, -size)
	d.countLocked(x, x.Placement().Tier)
	if x.counted == TierHost { // it was made there because the device's own memory was full or for others
		d.pinned.own(owner, -size) // what allocateOnHost counted
	}
	d.placeLocked(x, p)
	d.mu.Unlock()
	adopted := key.Adopt(x)
	d.mu.Lock()
	d.making-- // not earlier: a reservation that finds no extent left and none being made gives up
	if adopted {
		d.mu.Unlock()
		d.wake()
		return true, nil
	}
	p.extents = p.extents[:len(p.extents)-1]
	d.unpinLocked(x, p)
	d.leaveLocked(x)
	d.mu.Unlock()
	x.LetGo() // the Pin
	x.LetGo() // the Key
	return false, nil
}

// allocator finds memory for an extent that will be made for a tenant. there is as in Device.allocate.
type allocator func(ctx context.Context, key Key, pages page.Range, by Tenant, there func() bool) (found, error)

// found is memory for an extent. littered means that it may hold old bytes, and that the extent shall be littered, too.
type found struct {
	tier     Tier
	mem      gpubackend.Memory
	littered bool
}

// allocateOwn is the allocator of memory that does not move.
func (d *Device) allocateOwn(ctx context.Context, _ Key, pages page.Range, by Tenant,
	there func() bool) (found, error) {
	mem, err := d.allocate(ctx, piece{pages: pages}.bytes(), by.id(), there)
	return found{TierVRAM, mem, false}, err
}

// make returns a new extent that nobody else knows. Its owner is counted already.
func (p *Pin) make(ctx context.Context, key Key, pages page.Range, allocate allocator) (*Extent, error) {
	d := p.dev
	x := &Extent{dev: d, key: key, pages: pages, size: piece{pages: pages}.bytes(), owner: p.by.id(),
		pins: make(map[uint32]int), zeroing: make(chan struct{}, 1)}
	got, err := allocate(ctx, key, pages, p.by, func() bool { return len(key.Extents(pages)) > 0 })
	if err != nil {
		return nil, err
	}
	x.littered = got.littered
	x.zeroed.Store(got.littered || got.mem.Zeroed())
	x.place(TierNone, nil)
	x.place(got.tier, got.mem)
	if p.unzeroed {
		return x, nil
	}
	if err := x.Zero(ctx); err != nil {
		d.free(x.Placement(), nil)
		d.unmade(got.tier, x.size)
		d.wake()
		return nil, err
	}
	return x, nil
}

// placeLocked adds x to the device's list, with its Key as a user, and pinned by p, whose user is charged. Device.mu is
// held.
func (d *Device) placeLocked(x *Extent, p *Pin) {
	d.named++
	x.id, x.state = d.named, held
	d.extents[x.id] = x
	x.users.Add(1)
	d.rule.Note(policy.Event{Kind: policy.Placed, ID: x.id, Bytes: x.size})
	d.pinLocked(x, p)
}

// alloc asks the device for memory. The extent counts as being made from now on, until its Key was asked to Adopt it.
func (d *Device) alloc(size int64) (gpubackend.Memory, error) {
	d.mu.Lock()
	d.making++
	d.taken += size
	d.mu.Unlock()
	mem, err := d.backend.Alloc(size)
	if err != nil {
		d.unmade(TierVRAM, size)
	}
	return mem, err
}

// unmade undoes what alloc or allocHost counted.
func (d *Device) unmade(t Tier, size int64) {
	d.mu.Lock()
	d.making--
	d.takenLocked(t, -size)
	d.mu.Unlock()
}
