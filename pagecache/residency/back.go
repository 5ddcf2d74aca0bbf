package residency

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// Extents in pinned memory that nobody uses move back to the device's own memory when it becomes free: in the
// background and in batches (GPUswap, 3.2.3 and 5.3.5). Before an extent moves, a client has to give it up, and that
// must not happen over and over. So a batch begins when much memory has been free for a while, and ends when little is
// left. Extents that a bracket asks for move back at once (promote).

const (
	// A batch begins when 1/beginsBack of the budget is free, and ends when 1/endsBack is left.
	beginsBack, endsBack = 8, 16
	// backAfter is how long that much must have been free.
	backAfter = time.Second
)

// Back moves extents back while there is room. It does nothing while others wait for memory. It blocks on Keys and on
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

// batch is a series of extents that move back together.
type batch struct {
	// of has each tenant's extents in pinned memory, in the order in which priorities and the rule would evict them:
	// the last one moves back first. It is computed once per batch, because that looks at every extent. nil: not yet
	// computed.
	of    map[tenants.ID][]*Extent
	moved bool // at least one extent was chosen
}

// room returns the bytes of the budget that are free.
func (d *Device) room() int64 { return d.Budget() - d.backend.Used() }

// backOnce moves one extent, in a turn of its own. It reports whether to try another.
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
	if b.moved { // the first extent may be large, and leave less free
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

// needless reports whether pinned memory is empty, or others wait for memory, possibly for as long as a disk is slow.
func (d *Device) needless() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.takenHost == 0 || len(d.turns)+len(d.line) > 0
}

// hosts reports whether the device has extents in pinned memory.
func (d *Device) hosts() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.takenHost > 0
}

// winner chooses the extent that moves back next, of at most most bytes, and claims memory for its owner. It returns
// both. It takes the tenant that owns least relative to its share, and of this tenant's extents the one that the rule
// would evict last. nil: there is none.
func (d *Device) winner(b *batch, most int64) (*Extent, tenants.ID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if b.of == nil {
		b.of = make(map[tenants.ID][]*Extent)
		for id := range d.rule.Victims() {
			x := d.extents[id]
			if x.Placement().Tier == TierHost && !x.key.Preference().OnHost && !d.isDelayedLocked(x) {
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

// claimLocked counts n more bytes of the device's own memory as a tenant's, so that the tenant cannot exceed its limit
// meanwhile. It reports false if the tenant would own too much. Device.mu is held.
func (d *Device) claimLocked(id tenants.ID, n int64) bool {
	if !d.ledger.May(id, n) {
		return false
	}
	d.ledger.Add(id, n)
	return true
}

// claim is claimLocked for callers that do not hold Device.mu.
func (d *Device) claim(id tenants.ID, n int64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.claimLocked(id, n)
}

// unclaim takes a claim back, once the bytes are counted as owned, or are not needed.
func (d *Device) unclaim(id tenants.ID, n int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ledger.Add(id, -n)
}

// bring moves x to the device's own memory, if there is some.
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
