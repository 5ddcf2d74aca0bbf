package residency

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
	"github.com/gaiafs/gaiafs/pagecache/residency/shortage"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// keptTick is how often a device is asked whether clients gave back memory that they had unmapped.
const keptTick = 2 * time.Millisecond

// seen is what a reservation saw before it asked for memory and got none. If that has changed, it asks again.
type seen struct{ making, leaving, left int }

func (d *Device) look() seen {
	d.mu.Lock()
	defer d.mu.Unlock()
	return seen{d.making, d.leaving, d.left}
}

// allocate returns memory for an extent that will be made. If there is none, it makes room. there reports whether the
// Key has got memory for the same pages in the meantime; then allocate may return errThere. Extents that somebody
// copies from are evicted last. Once they have left, no new copy begins, and allocate waits for the old ones, for at
// most Options.Patience.
func (d *Device) allocate(ctx context.Context, size int64, owner tenants.ID,
	there func() bool) (gpubackend.Memory, error) {
	before := d.look()
	var last error // of alloc
	if !d.over(owner, size) && d.spare(size) {
		mem, err := d.alloc(size)
		if !errors.Is(err, gpubackend.ErrNoMemory) {
			return mem, err
		}
		last = err
	}
	mine, waited, err := d.turn(ctx)
	if err != nil {
		return nil, err
	}
	defer d.yield(mine)
	for w := (waiting{}); ; {
		if !waited || d.over(owner, size) {
			if err := d.makeRoom(ctx, size, owner, before, there, &w); err != nil {
				return nil, lacking(d, err, last)
			}
		}
		waited = false
		before = d.look()
		if d.over(owner, size) {
			continue
		}
		mem, err := d.alloc(size)
		if !errors.Is(err, gpubackend.ErrNoMemory) {
			return mem, err
		}
		last = err
	}
}

// over reports whether a tenant owns more than it may, including what it asks for: more than its maximum, or memory
// that is guaranteed to others. more is how many bytes of that have no memory yet.
func (d *Device) over(owner tenants.ID, more int64) bool {
	used := d.backend.Used() + more
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.ledger.Over(owner) || d.ledger.Crowds(owner, used)
}

// spare reports whether there is room in addition to what the turn's holder has freed for itself.
func (d *Device) spare(size int64) bool {
	d.mu.Lock()
	promised, budget := d.promised, d.budget
	d.mu.Unlock()
	return promised == 0 || d.backend.Used()+promised+size <= budget
}

// makeRoom evicts one extent, or waits until memory may have become free. Its error says why there will be no room.
func (d *Device) makeRoom(ctx context.Context, size int64, owner tenants.ID, before seen, there func() bool,
	w *waiting) error {
	evicted, err := d.evict(ctx, TierVRAM, owner, ForMapping, sparing{copied: true}, 0)
	if err == nil && !evicted && before.leaving == 0 {
		evicted, err = d.evict(ctx, TierVRAM, owner, ForMapping, sparing{}, 0)
	}
	switch {
	case err != nil:
		return err
	case evicted, d.look().left != before.left:
		return nil
	case there():
		return errThere
	case d.reason(TierVRAM, owner, ForMapping) == ForMaximum:
		return shortage.OverMaximum
	case before.leaving+before.making == 0 && !d.kept():
		return d.full(size, owner)
	}
	return w.wait(ctx, d, size, owner, before)
}

// waiting is one reservation's wait for memory that is about to be free.
type waiting struct{ patience <-chan time.Time }

// wait returns nil when it is worth trying again.
func (w *waiting) wait(ctx context.Context, d *Device, size int64, owner tenants.ID, before seen) error {
	if w.patience == nil {
		w.patience = time.After(d.options.Patience())
	}
	var again <-chan time.Time
	if before.leaving == 0 {
		// A client that unmapped memory, or that ended, may be giving it back right now.
		again = time.After(keptTick)
	}
	select {
	case <-d.freed:
	case <-again:
	case <-ctx.Done():
		return ctx.Err()
	case <-w.patience:
		if before.leaving == 0 {
			return d.full(size, owner)
		}
		return shortage.TooSlow
	}
	return nil
}

// sparing says which extents are not evicted: copied spares those that somebody copies from, because their memory is
// freed only when the copy has ended; written spares those that a program changed since they were placed.
type sparing struct{ copied, written bool }

// evict evicts extents from a tier, and reports whether one left. From pinned memory it evicts extents of any device.
// It evicts one extent, or several at once that together have so many bytes. The caller has the turn of this device. It
// needs no turn of another one, because no turn reserves pinned memory. Before evict takes an extent although one in a
// bracket that a client keeps might be the better victim, it recalls kept brackets. Kept brackets are never in pinned
// memory.
func (d *Device) evict(ctx context.Context, from Tier, asks tenants.ID, why Why, but sparing,
	bytes int64) (bool, error) {
	why = d.reason(from, asks, why)
	devices := []*Device{d}
	if from == TierHost {
		devices = d.pinned.devicesFrom(d)
	}
	recalled := from == TierHost
	for asked := make(map[*Extent]bool); ; {
		batch := victims(devices, from, asks, but, asked, bytes, recalled)
		if err := ctx.Err(); err != nil || len(batch) == 0 && recalled {
			return false, err
		}
		if len(batch) == 0 {
			d.options.Recall(ctx)
			recalled = true
		}
		if d.clean(ctx, batch, from, why, but) {
			return true, nil
		}
	}
}

// clean evicts all extents of batch at once, and reports whether one left.
func (d *Device) clean(ctx context.Context, batch []*Extent, from Tier, why Why, but sparing) bool {
	var left atomic.Bool
	var all sync.WaitGroup
	for _, x := range batch {
		all.Go(func() {
			if !x.key.Clean(ctx, x, !but.copied) {
				return
			}
			left.Store(true)
			x.dev.departed(x, from, why, x.dev.Eviction())
			if from == TierVRAM {
				d.mu.Lock()
				d.promised += x.size
				d.mu.Unlock()
			}
		})
	}
	all.Wait()
	return left.Load()
}

// mostVictims limits how many extents leave at once, because each client hears of all of its victims and has a short
// queue.
const mostVictims = 8

// victims returns the next victims, at least one, that together have so many bytes, each chosen as if the earlier ones
// had left. Unless any is set, the batch ends before a victim if a kept bracket may have a better one.
func victims(devices []*Device, from Tier, asks tenants.ID, but sparing, asked map[*Extent]bool, bytes int64,
	any bool) (batch []*Extent) {
	for {
		var x *Extent
		rank, surely := math.MaxInt, false
		for _, of := range devices {
			if next, at, is := of.victim(from, asks, but, asked, any); next != nil && at < rank {
				x, rank, surely = next, at, is
			}
		}
		if x == nil || !surely {
			return batch
		}
		asked[x] = true
		defer x.dev.disown(x, from)()
		if batch, bytes = append(batch, x), bytes-x.size; bytes <= 0 || len(batch) == mostVictims {
			return batch
		}
	}
}

// disown takes x off its owner's account until end is called.
func (d *Device) disown(x *Extent, in Tier) (end func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	owner := x.owner
	d.ownLocked(in, owner, -x.size)
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.ownLocked(in, owner, x.size)
	}
}

// reason returns why, or ForMaximum if the tenant who asks owns more of the tier than it may.
func (d *Device) reason(from Tier, asks tenants.ID, why Why) Why {
	d.mu.Lock()
	over := d.ledger.Over(asks)
	d.mu.Unlock()
	if from == TierVRAM && over || from == TierHost && d.pinned.overdrawn(asks) {
		return ForMaximum
	}
	return why
}

// victim returns the device's next victim in a tier, or nil if all candidates were asked. The ledger orders the
// tenants. victim takes the first tenant that has a candidate, of its extents those of the lowest priority, and of
// these the first by the rule. rank is the tenant's place in the order. surely means that kept brackets need not be
// recalled before this choice. It is always true if any is set.
func (d *Device) victim(from Tier, asks tenants.ID, but sparing, asked map[*Extent]bool, any bool) (best *Extent,
	rank int, surely bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	order := d.ledger.Victims(asks)
	if from == TierHost {
		order = d.pinned.victims(asks)
	}
	rank, priority := len(order), math.MaxInt
	stays := d.stays()
	may := func(x *Extent) bool {
		return !asked[x] && x.Placement().Tier == from && !(but.copied && x.copiedLocked()) &&
			!(but.written && x.written) && !stays(x)
	}
	for id := range d.rule.Victims() {
		x := d.extents[id]
		if !may(x) {
			continue
		}
		i, of := slices.Index(order[:min(rank+1, len(order))], x.owner), x.key.Preference().Priority
		if i >= 0 && (i < rank || of < priority) {
			best, rank, priority = x, i, of
		}
		if rank == 0 && priority <= d.lowest {
			break
		}
	}
	surely = any || best != nil && rank == 0 && priority <= d.lowest && d.coldestLocked(best, priority, may)
	return best, rank, surely
}

// coldestLocked reports whether, under a rule that counts uses, best would also be the victim if the clients had ended
// the brackets that they keep. Not all uses of their extents are known, but further ones only make these hotter. Under
// other rules it is true. may says which extents may leave once nobody maps them. Device.mu is held.
func (d *Device) coldestLocked(best *Extent, priority int, may func(x *Extent) bool) bool {
	rule, counts := d.rule.(policy.Counter)
	if !counts {
		return true
	}
	for id := range rule.Colder(best.id) {
		if x := d.extents[id]; x.owner == best.owner && x.key.Preference().Priority == priority && may(x) {
			return false
		}
	}
	return true
}

// kept reports whether clients keep memory that they have unmapped and that was freed here.
func (d *Device) kept() bool {
	used := d.backend.Used()
	d.mu.Lock()
	defer d.mu.Unlock()
	return used > d.taken
}

// turn waits until all earlier reservations have their memory or have failed. If it succeeds, the caller must call
// yield.
func (d *Device) turn(ctx context.Context) (mine chan struct{}, waited bool, err error) {
	mine = make(chan struct{})
	d.mu.Lock()
	d.turns = append(d.turns, mine)
	if waited = len(d.turns) > 1; !waited {
		close(mine)
	}
	d.mu.Unlock()
	select {
	case <-mine:
		return mine, waited, nil
	case <-ctx.Done():
		d.yield(mine)
		return nil, waited, ctx.Err()
	}
}

// yield passes the turn on.
func (d *Device) yield(mine chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := slices.Index(d.turns, mine)
	if d.turns = slices.Delete(d.turns, i, i+1); i > 0 {
		return
	}
	d.promised = 0
	if len(d.turns) > 0 {
		close(d.turns[0])
	}
}
