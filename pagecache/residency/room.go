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
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// keptTick is how often a device is asked whether clients gave memory back that they had unmapped.
const keptTick = 2 * time.Millisecond

// seen is what a reservation saw before it asked for memory in vain: if that is no longer so, it asks again.
type seen struct{ making, leaving, left int }

func (d *Device) look() seen {
	d.mu.Lock()
	defer d.mu.Unlock()
	return seen{d.making, d.leaving, d.left}
}

// allocate returns memory for an extent that is about to be made, and makes room where there is none. there reports
// whether its Key has got memory meanwhile, upon which allocate may return errThere. Extents that somebody copies from
// go last. No copy of them begins once they have left, and those under way are waited for, though not for longer than
// Options.Patience.
func (d *Device) allocate(ctx context.Context, size int64, owner tenants.ID,
	there func() bool) (gpubackend.Memory, error) {
	before := d.look()
	if !d.over(owner) && d.spare(size) {
		if mem, err := d.alloc(size); !errors.Is(err, gpubackend.ErrNoMemory) {
			return mem, err
		}
	}
	mine, waited, err := d.turn(ctx)
	if err != nil {
		return nil, err
	}
	defer d.yield(mine)
	for w := (waiting{}); ; {
		if !waited || d.over(owner) {
			if err := d.makeRoom(ctx, size, owner, before, there, &w); err != nil {
				return nil, err
			}
		}
		waited = false
		before = d.look()
		if d.over(owner) {
			continue
		}
		if mem, err := d.alloc(size); !errors.Is(err, gpubackend.ErrNoMemory) {
			return mem, err
		}
	}
}

// over reports whether a tenant would own more than it may, with what it asks for.
func (d *Device) over(owner tenants.ID) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.ledger.Over(owner)
}

// spare reports whether there may be room beside what the reservation that has the turn made free for itself.
func (d *Device) spare(size int64) bool {
	d.mu.Lock()
	promised, budget := d.promised, d.budget
	d.mu.Unlock()
	return promised == 0 || d.backend.Used()+promised+size <= budget
}

// makeRoom evicts one extent, or waits until some memory may have become free. Its error says why there will be no
// room.
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
	case d.over(owner):
		return d.most(owner)
	case before.leaving+before.making == 0 && !d.kept():
		return d.full(size)
	}
	return w.wait(ctx, d, size, before)
}

// waiting is how long a reservation has been waiting for memory that is about to be free.
type waiting struct{ patience <-chan time.Time }

// wait returns nil when it is worth asking again.
func (w *waiting) wait(ctx context.Context, d *Device, size int64, before seen) error {
	if w.patience == nil {
		w.patience = time.After(d.options.Patience())
	}
	var again <-chan time.Time
	if before.leaving == 0 {
		// A client that unmapped memory, or that ended, may be giving it back this moment.
		again = time.After(keptTick)
	}
	select {
	case <-d.freed:
	case <-again:
	case <-ctx.Done():
		return ctx.Err()
	case <-w.patience:
		if before.leaving == 0 {
			return d.full(size)
		}
		return d.slow()
	}
	return nil
}

// sparing says which extents are no victims: those that somebody copies from, whose memory would go when that has
// ended; and all that a program changed since they were placed.
type sparing struct{ copied, written bool }

// evict has extents leave a tier, and reports whether there was one that did: of the device, or of pinned memory of any
// device. It is one extent, or as many at once as have so many bytes. The caller has the turn of the device, and needs
// none of others, which keep nothing of pinned memory for whoever has it. Clients are asked for the brackets that they
// keep, which are never of pinned memory, where one of these might go rather than what is idle.
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

// clean has extents leave, all at once, and reports whether one did.
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

// mostVictims is how many extents leave at once. Their clients are told of all of these, and have short queues.
const mostVictims = 8

// victims returns the next victims of devices that have so many bytes, one at least, each as if those before it had
// left. Unless any will do, they end before one that clients might have a better one for.
func victims(devices []*Device, from Tier, asks tenants.ID, but sparing, asked map[*Extent]bool, bytes int64,
	any bool) (batch []*Extent) {
	for {
		var x *Extent
		rank, surely := math.MaxInt, any
		for _, of := range devices {
			if next, at, is := of.victim(from, asks, but, asked); next != nil && at < rank {
				x, rank, surely = next, at, is || any
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

// disown has nobody own x for a while.
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

// reason is why, or that the tenant who asks owns more of the tier than it may.
func (d *Device) reason(from Tier, asks tenants.ID, why Why) Why {
	if from == TierVRAM && d.over(asks) || from == TierHost && d.pinned.overdrawn(asks) {
		return ForMaximum
	}
	return why
}

// victim returns the next extent of the device that may leave a tier; nil where all that may go were asked. It is the
// first, by the rule, of those of the lowest priority of the first tenant that has one, by the ledger, among whose
// victims it is at rank. surely says that nothing would go before it that clients keep.
func (d *Device) victim(from Tier, asks tenants.ID, but sparing, asked map[*Extent]bool) (best *Extent, rank int,
	surely bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	order := d.ledger.Victims(asks)
	if from == TierHost {
		order = d.pinned.victims(asks)
	}
	rank, priority := len(order), math.MaxInt
	stays := d.stays()
	for id := range d.rule.Victims() {
		x := d.extents[id]
		if asked[x] || x.Placement().Tier != from || but.copied && x.copiedLocked() || but.written && x.written ||
			stays(x) {
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
	return best, rank, best != nil && rank == 0 && priority <= d.lowest && !policy.Counts(d.eviction)
}

// kept reports whether clients keep memory that they have unmapped and that was freed.
func (d *Device) kept() bool {
	used := d.backend.Used()
	d.mu.Lock()
	defer d.mu.Unlock()
	return used > d.taken
}

// turn waits until those who came before have their memory, or none. It must end with yield.
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

// yield gives the turn to the next one.
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
