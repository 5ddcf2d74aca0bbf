package residency

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// Extents in pinned memory that nobody uses go back to the device's own memory where that becomes free, in the
// background and in batches (GPUswap, 3.2.3 and 5.3.5): a client has to give an extent up before it moves, and should
// not do so time and again. So a batch begins where much has been free for a while, and ends where little is. What a
// bracket asks for goes back at once (promote).

const (
	// beginsBack and endsBack are the parts of the budget that are free where a batch begins, and where it ends.
	beginsBack, endsBack = 8, 16
	// backAfter is how long much has to be free.
	backAfter = time.Second
)

// Back moves extents back while there is room. It does nothing where others wait for memory. It blocks on Keys and on
// the device. Errors are those of ctx.
func (d *Device) Back(ctx context.Context, now time.Time) error {
	if d.room() < max(d.Budget()/beginsBack, d.info.Granularity) {
		d.mu.Lock()
		d.roomy = time.Time{}
		d.mu.Unlock()
		return nil
	}
	d.mu.Lock()
	if d.roomy.IsZero() {
		d.roomy = now
	}
	since := d.roomy
	d.mu.Unlock()
	if now.Sub(since) < backAfter {
		return nil
	}
	for b := (&batch{}); ; {
		moved, err := d.backOnce(ctx, b)
		if !moved || err != nil {
			return err
		}
	}
}

// batch is what goes back together.
type batch struct {
	// of has what each tenant has in pinned memory, as priorities and the rule have it go: the last one goes back
	// first. It is looked up once, since that takes as long as there are extents. nil: not yet.
	of    map[tenants.ID][]*Extent
	moved bool // one extent was brought
}

// room is the bytes of the budget that nobody uses.
func (d *Device) room() int64 { return d.Budget() - d.backend.Used() }

// backOnce moves one extent, in a turn of its own. It reports whether there may be more.
func (d *Device) backOnce(ctx context.Context, b *batch) (bool, error) {
	if d.needless() {
		return false, nil
	}
	mine, waited, err := d.turn(ctx)
	if err != nil {
		return false, err
	}
	defer d.yield(mine)
	if waited || d.inLine() > 0 {
		return false, nil
	}
	most := d.room()
	if b.moved { // the first one may be large, and leave less
		most -= d.Budget() / endsBack
	}
	x, owner := d.winner(b, most)
	if x == nil {
		return false, nil
	}
	defer d.unclaim(owner, x.size)
	b.moved = true
	d.bring(ctx, x)
	return true, ctx.Err()
}

// needless reports whether nothing is in pinned memory, or others wait for memory, maybe as long as a disk is slow.
func (d *Device) needless() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.takenHost == 0 || len(d.turns)+len(d.line) > 0
}

// hosts reports whether something is in pinned memory.
func (d *Device) hosts() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.takenHost > 0
}

// winner returns the extent that goes back next, of at most so many bytes, claimed for its owner, who is the second
// value: the last one to leave, by the rule, of the tenant that owns least, measured by the share. nil: there is none.
func (d *Device) winner(b *batch, most int64) (*Extent, tenants.ID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if b.of == nil {
		b.of = make(map[tenants.ID][]*Extent)
		for id := range d.rule.Victims() {
			if x := d.extents[id]; x.Placement().Tier == TierHost && !x.key.Preference().OnHost {
				b.of[x.owner] = append(b.of[x.owner], x)
			}
		}
		for _, list := range b.of {
			slices.SortStableFunc(list, func(x, y *Extent) int {
				return cmp.Compare(x.key.Preference().Priority, y.key.Preference().Priority)
			})
		}
	}
	for len(b.of) > 0 {
		least, above := tenants.Nobody, int64(0)
		for id := range b.of {
			n := d.ledger.Owned(id) - d.ledger.Share(id)
			if least == tenants.Nobody || n < above || n == above && id < least {
				least, above = id, n
			}
		}
		list := b.of[least]
		x := list[len(list)-1]
		if b.of[least] = list[:len(list)-1]; len(list) == 1 {
			delete(b.of, least)
		}
		if x.state == held && x.Placement().Tier == TierHost && x.size <= most && x.mapped == 0 && x.owner == least &&
			d.claimLocked(least, x.size) {
			return x, least
		}
	}
	return nil, tenants.Nobody
}

// claimLocked counts n more bytes of the device's own memory as a tenant's, who may not own more meanwhile than it may
// own with them. It reports false where that is too much. Device.mu is held.
func (d *Device) claimLocked(id tenants.ID, n int64) bool {
	if most := d.ledger.Most(id); most > 0 && d.ledger.Owned(id)+n > most {
		return false
	}
	d.ledger.Add(id, n)
	return true
}

// claim is claimLocked for those who do not hold Device.mu.
func (d *Device) claim(id tenants.ID, n int64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.claimLocked(id, n)
}

// unclaim takes back what claim counted, once the bytes are counted as owned, or are not to be.
func (d *Device) unclaim(id tenants.ID, n int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ledger.Add(id, -n)
}

// bring has x move to the device's own memory, where it has some.
func (d *Device) bring(ctx context.Context, x *Extent) {
	mem, err := d.backend.Alloc(x.size)
	if err != nil {
		return
	}
	if !x.key.Rehouse(ctx, x, TierVRAM, mem) {
		_ = mem.Free()
		d.wake()
	}
}
