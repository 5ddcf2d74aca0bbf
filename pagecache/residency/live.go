package residency

import (
	"context"
	"fmt"
	"time"

	humanize "github.com/dustin/go-humanize"
)

// A device's budget may follow what others take of its memory. Two looks that see the same never change it twice: it
// shrinks where less than the floor would be left for others, by enough to leave them two floors, and it grows where
// more than three would be left.

const (
	// liveFloor is the part of a device's largest budget that is left to others: what a program asks for between two
	// looks has to be there.
	liveFloor = 16
	// growsAfter is how long memory has to be free before the budget grows: programs that free memory often take it
	// again.
	growsAfter = 2 * time.Second
	// recallPause is the least time between two times that clients are asked for what they keep, mostRecallPause the
	// most.
	recallPause, mostRecallPause = 500 * time.Millisecond, 16 * time.Second
)

// live is a budget that follows. Its methods are pure.
type live struct {
	most, floor int64
	since       time.Time // since when it could grow; zero: it could not
	// recall is when clients are asked next for what they keep, pause how long after the time before. Zero: at once.
	recall time.Time
	pause  time.Duration
}

func newLive(most, granularity int64) *live {
	return &live{most: most, floor: max(most/liveFloor, granularity)}
}

// next returns the budget that follows from what is used of it and free beside. It is not below least.
func (l *live) next(now time.Time, budget, used, free, least int64) int64 {
	there := used + free
	want := min(l.most, max(there-2*l.floor, least))
	switch {
	case budget > min(there-l.floor, l.most): // somebody may have set more than most
		l.since = time.Time{}
		return min(budget, max(want, least)) // which is more than the budget where least is
	case want <= budget || want < l.most && budget >= there-3*l.floor:
		l.since = time.Time{}
		return budget
	case l.since.IsZero():
		l.since = now
	}
	if now.Sub(l.since) < growsAfter {
		return budget
	}
	l.since = time.Time{}
	return want
}

// SetLive has the budget follow what others take of the device from the next Follow on, up to what the device was made
// with. SetBudget ends that.
func (d *Device) SetLive() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.live = newLive(d.info.Memory, d.info.Granularity)
}

// Follow looks how much of the device's memory others have, and changes a live budget accordingly, as SetBudget does
// and as long as that blocks. It does nothing where the budget is not live. Errors are those of the device and of ctx.
func (d *Device) Follow(ctx context.Context, now time.Time) error {
	d.mu.Lock()
	is := d.live != nil
	d.mu.Unlock()
	if !is {
		return nil
	}
	free, err := d.backend.Free()
	if err != nil {
		return err
	}
	if d.shrinks(now, free) {
		d.options.Recall(ctx) // what clients keep without need is not held
		// Clients may have given memory back meanwhile.
		if free, err = d.backend.Free(); err != nil {
			return err
		}
	}
	if d.follow(now, free) {
		return d.shrink(ctx, TierVRAM, d.overBudget)
	}
	return nil
}

// shrinks reports whether a live budget is more than others leave, so that clients are to be asked for what they keep.
// While that is in vain they are asked less and less often, since what they keep is what makes their brackets cheap.
func (d *Device) shrinks(now time.Time, free int64) bool {
	used := d.backend.Used()
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.live
	if l == nil || d.budget <= used+free-l.floor {
		if l != nil {
			l.pause, l.recall = 0, time.Time{}
		}
		return false
	}
	if now.Before(l.recall) {
		return false
	}
	l.pause = min(max(2*l.pause, recallPause), mostRecallPause)
	l.recall = now.Add(l.pause)
	return true
}

// follow reports whether it changed the budget.
func (d *Device) follow(now time.Time, free int64) bool {
	d.budgeting.Lock()
	defer d.budgeting.Unlock()
	used := d.backend.Used()
	d.mu.Lock()
	if d.live == nil {
		d.mu.Unlock()
		return false
	}
	least := max(d.heldLocked(), d.whole(d.ledger.Guaranteed()), d.info.Granularity)
	to := d.live.next(now, d.budget, used, free, least) &^ (d.info.Granularity - 1)
	was := d.budget
	d.why = d.whyLocked(to, used, free, least)
	d.mu.Unlock()
	if to == was {
		return false
	}
	d.options.Log.Info("the budget follows what others take of the device", "device", d.info.Ordinal, "was", was, "is",
		to,
		"free", free)
	d.resize(to)
	return true
}

// heldLocked is the bytes of the device's own memory that cannot leave, with Device.mu held: what is mapped, used by a
// bracket, or pinned, what is being made for those who asked, and what has left and is not free yet.
func (d *Device) heldLocked() int64 {
	n, stays := d.taken, d.stays()
	for _, x := range d.extents {
		if x.Placement().Tier == TierVRAM && x.mapped == 0 && !stays(x) {
			n -= x.size
		}
	}
	return d.whole(n)
}

// whole returns the bytes of the allocations that n bytes need.
func (d *Device) whole(n int64) int64 {
	return (n + d.info.Granularity - 1) / d.info.Granularity * d.info.Granularity
}

// whyLocked says for people what a live budget comes from; "" where the device has all of it. Device.mu is held.
func (d *Device) whyLocked(budget, used, free, least int64) string {
	if budget == d.live.most {
		return ""
	}
	text := fmt.Sprintf("auto, of %s: others use the device too, and %s are free", humanize.IBytes(uint64(d.live.most)),
		humanize.IBytes(uint64(free)))
	if used+free-d.live.floor < least && budget <= least {
		text += "; programs map the rest, or it is pinned or guaranteed"
	}
	return text
}
