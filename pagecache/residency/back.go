package residency

import (
	"context"
	"time"

	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
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
	for asked := make(map[policy.ID]bool); ; {
		moved, err := d.backOnce(ctx, asked)
		if !moved || err != nil {
			return err
		}
	}
}

// room is the bytes of the budget that nobody uses.
func (d *Device) room() int64 { return d.Budget() - d.backend.Used() }

// backOnce moves one extent, in a turn of its own, and notes in asked which it tried. It reports whether there may be
// more.
func (d *Device) backOnce(ctx context.Context, asked map[policy.ID]bool) (bool, error) {
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
	x := d.winner(d.room()-d.Budget()/endsBack, asked)
	if x == nil {
		return false, nil
	}
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

// winner returns the extent that goes back next, of at most so many bytes: the last one to leave, by the rule, of the
// tenant that owns least, measured by the share. nil: there is none.
func (d *Device) winner(most int64, asked map[policy.ID]bool) (best *Extent) {
	d.mu.Lock()
	defer d.mu.Unlock()
	above := make(map[tenants.ID]int64)
	for id := range d.rule.Victims() {
		x := d.extents[id]
		if x.Placement().Tier != TierHost || x.size > most || x.mapped > 0 || asked[id] ||
			d.exceedsLocked(x.owner, x.size) {
			continue
		}
		if _, known := above[x.owner]; !known {
			above[x.owner] = d.ledger.Owned(x.owner) - d.ledger.Share(x.owner)
		}
		if best == nil || above[x.owner] < above[best.owner] || x.owner == best.owner {
			best = x
		}
	}
	if best != nil {
		asked[best.id] = true
	}
	return best
}

// exceedsLocked reports whether a tenant may not own so much more of the device's own memory, with Device.mu held.
func (d *Device) exceedsLocked(id tenants.ID, size int64) bool {
	most := d.ledger.Most(id)
	return most > 0 && d.ledger.Owned(id)+size > most
}

// exceeds is exceedsLocked for those who do not hold Device.mu.
func (d *Device) exceeds(id tenants.ID, size int64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.exceedsLocked(id, size)
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
