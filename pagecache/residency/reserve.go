package residency

import (
	"context"
	"errors"
	"syscall"

	humanize "github.com/dustin/go-humanize"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// Key is what a device holds of a file. But for Pinned, its methods are called without any lock of this package, and
// may block on a lock of the Key's.
type Key interface {
	// Extents returns the extents that overlap rg, in order.
	Extents(rg page.Range) []*Extent
	// Adopt makes x one of the Key's. It reports false where the Key has one that overlaps x.
	Adopt(x *Extent) bool
	// Clean brings home what only x has, and has it Leave. It reports false where x does not leave: somebody maps
	// it, the bytes cannot be brought home, or whoever they would have to be brought to does not answer. copied
	// says that x may leave although somebody copies from it, who frees it at the end: all others were asked before, so
	// whoever is slow is waited for.
	Clean(ctx context.Context, x *Extent, copied bool) bool
	// Rehouse has x Move to mem, memory of a tier, unless somebody maps it or copies from it. It reports false where x
	// stays: then mem is the caller's.
	Rehouse(ctx context.Context, x *Extent, tier Tier, mem gpubackend.Memory) bool
	// Pinned reports whether the Key's extents stay although nobody maps them, and on whose account. It takes no lock:
	// unlike the other methods it is called with Device.mu held.
	Pinned() (by Tenant, pinned bool)
	// Preference returns where the Key's extents are to be. It takes no lock, as Pinned.
	Preference() Preference
}

// Preference says where a Key's extents are to be, as far as there is a choice.
type Preference struct {
	// Priority orders the extents of a tenant: lower ones go first, whatever the rule, and come back last.
	Priority int
	// OnHost has grants take pinned memory of the host for what has none of the device's own, as far as there is any.
	OnHost bool
}

// Request is what Reserve is asked for.
type Request struct {
	// Pages are of the file. They are not empty.
	Pages page.Range
	// Size is that of extents which are made for it: what the function of that name said.
	Size int64
	// Ends says that the Key has no pages behind these, and never will.
	Ends bool
	By   Tenant
}

// errThere says that the Key got memory for the pages while somebody waited for room.
var errThere = errors.New("somebody else reserved these pages")

// Reserve returns a Pin of extents that cover the pages, all with memory; those that it makes have zeros. Where the
// device is full, others make room. It blocks on the Key, on Keys of victims and on the device. After an error nothing
// is pinned. Errors: ENOMEM with a sentence that says why, EOVERFLOW for the last extent that a file can have, those of
// ctx and of the device. No lock is held by the caller that a Key may want.
func (d *Device) Reserve(ctx context.Context, key Key, r Request) (*Pin, error) {
	p := &Pin{dev: d, by: r.By}
	for rest := r.Pages; !rest.Empty(); {
		pieces, bytes := plan(key.Extents(Aligned(rest, r.Size)), rest, r.Size, d.info.Granularity, d.Budget())
		if r.Ends {
			bytes -= cut(pieces, rest, d.info.Granularity)
		}
		err := d.admit(r, rest, pieces, bytes)
		for i := 0; i < len(pieces) && err == nil; i++ {
			var ok bool
			if ok, err = p.afford(ctx, key, pieces[i], d.allocateOwn, d.settle); !ok {
				break // the Key's extents are others by now
			}
			rest.Start = pieces[i].pages.End
		}
		if err != nil {
			p.Free()
			return nil, err
		}
	}
	return p, nil
}

// fitter sees to it that a tenant which counts as owning x, and does not map it yet, owns no more than it may.
type fitter func(ctx context.Context, x *Extent, by Tenant) error

// afford is take, of what is the tenant's from then on too only where that may own as much, or fit has it own less.
func (p *Pin) afford(ctx context.Context, key Key, of piece, allocate allocator, fit fitter) (bool, error) {
	d, owner := p.dev, p.by.id()
	if of.x != nil && d.asks(owner, of.x) {
		err := fit(ctx, of.x, p.by)
		d.mu.Lock()
		d.ledger.Add(owner, -of.x.size)
		d.mu.Unlock()
		if err != nil {
			return false, err
		}
	}
	return p.take(ctx, key, of, allocate)
}

// asks counts x as a tenant's that has a maximum, where it becomes that by being mapped. It reports false where it does
// not.
func (d *Device) asks(owner tenants.ID, x *Extent) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.gainsLocked(owner, x) {
		return false
	}
	d.ledger.Add(owner, x.size)
	return true
}

// gainsLocked reports whether x becomes a tenant's that has a maximum, of the device's own memory, by being mapped,
// with Device.mu held.
func (d *Device) gainsLocked(id tenants.ID, x *Extent) bool {
	return d.ledger.Most(id) > 0 && x.counted == TierVRAM && x.mapped <= x.kept && x.owner != id
}

// settle is the fitter of memory that does not move: what is the tenant's leaves. It fails where programs map that.
func (d *Device) settle(ctx context.Context, _ *Extent, by Tenant) error {
	if err := d.lessen(ctx, by.id()); err != nil || !d.over(by.id()) {
		return err
	}
	return d.most(by.id())
}

// lessen has extents leave that are a tenant's, until it owns no more than it may, or programs map all of them.
func (d *Device) lessen(ctx context.Context, owner tenants.ID) error {
	if !d.over(owner) {
		return nil
	}
	mine, _, err := d.turn(ctx)
	if err != nil {
		return err
	}
	defer d.yield(mine)
	for d.over(owner) {
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

// admit refuses what can never be had: bytes are those of the pieces.
func (d *Device) admit(r Request, rest page.Range, pieces []piece, bytes int64) error {
	if last := pieces[len(pieces)-1]; last.pages.End >= filePages {
		// The extent ends at 2^63, which is no offset any more, here and in every client.
		return refuse(syscall.EOVERFLOW, "the last %s that a file can have cannot be mapped",
			humanize.IBytes(uint64(last.bytes())))
	}
	if budget := d.Budget(); bytes > budget {
		need := max(uint64(bytes), uint64(Aligned(rest, r.Size).Len())<<page.Shift)
		return refuse(syscall.ENOMEM, "the mapping needs %s on device %d, whose budget is %s; map less, or raise gpu-memory with 'gaiafs set'",
			humanize.IBytes(need), d.info.Ordinal, humanize.IBytes(uint64(budget)))
	}
	return nil
}

// take pins a piece, which it makes where it does not exist. It reports false where the Key's extents are no longer as
// they were.
func (p *Pin) take(ctx context.Context, key Key, of piece, allocate allocator) (bool, error) {
	if of.x != nil {
		p.dev.promote(ctx, of.x, p.by.id())
		return p.pin(of.x)
	}
	d, size := p.dev, of.bytes()
	if err := d.charge(p.by, size); err != nil {
		return false, err
	}
	owner := p.by.id()
	d.mu.Lock()
	d.ledger.Add(owner, size) // from now on, so that it counts when a victim is looked for
	d.mu.Unlock()
	x, err := d.make(ctx, key, of.pages, p.by, allocate)
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
	if x.counted == TierHost { // it was born there, since the device's own memory is for others
		d.pinned.own(owner, -size) // what allocateOnHost counted
	}
	d.placeLocked(x, p)
	d.mu.Unlock()
	adopted := key.Adopt(x)
	d.mu.Lock()
	d.making-- // not before: who finds nothing being made, and no extent, gives up
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

// allocator finds memory for an extent that is about to be made, for a tenant. there is as for Device.allocate.
type allocator func(ctx context.Context, key Key, size int64, by Tenant, there func() bool) (found, error)

// found is memory for an extent. littered says that it may have anything in it, and that its extent is to be so.
type found struct {
	tier     Tier
	mem      gpubackend.Memory
	littered bool
}

// allocateOwn is the allocator of memory that does not move.
func (d *Device) allocateOwn(ctx context.Context, _ Key, size int64, by Tenant,
	there func() bool) (found, error) {
	mem, err := d.allocate(ctx, size, by.id(), there)
	return found{TierVRAM, mem, false}, err
}

// make returns an extent that nobody knows of. Its owner is counted as owning it already.
func (d *Device) make(ctx context.Context, key Key, pages page.Range, by Tenant, allocate allocator) (*Extent, error) {
	x := &Extent{dev: d, key: key, pages: pages, size: piece{pages: pages}.bytes(), owner: by.id(),
		pins: make(map[uint32]int)}
	got, err := allocate(ctx, key, x.size, by, func() bool { return len(key.Extents(pages)) > 0 })
	if err != nil {
		return nil, err
	}
	// Memory may hold what another file left in it, and a client can reach every byte of an extent.
	if x.littered = got.littered; !x.littered && !got.mem.Zeroed() {
		if err := d.backend.Zero(ctx, got.mem, 0, x.size); err != nil {
			d.free(Placement{Tier: got.tier, Memory: got.mem}, nil)
			d.unmade(got.tier, x.size)
			d.wake()
			return nil, err
		}
	}
	x.place(TierNone, nil)
	x.place(got.tier, got.mem)
	return x, nil
}

// placeLocked puts x on the device's list, used by its Key and pinned by p, whose user is charged. Device.mu is held.
func (d *Device) placeLocked(x *Extent, p *Pin) {
	d.named++
	x.id, x.state = d.named, held
	d.extents[x.id] = x
	x.users.Add(1)
	d.rule.Note(policy.Event{Kind: policy.Placed, ID: x.id, Bytes: x.size})
	d.pinLocked(x, p)
}

// alloc asks the device for memory of an extent that is being made from now on, until its Key was asked to Adopt it.
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

// unmade takes back what alloc counted, or allocHost.
func (d *Device) unmade(t Tier, size int64) {
	d.mu.Lock()
	d.making--
	d.takenLocked(t, -size)
	d.mu.Unlock()
}
