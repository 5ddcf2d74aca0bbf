package residency

import (
	"context"
	"fmt"
	"time"

	humanize "github.com/dustin/go-humanize"
)

// A device's budget may follow what others use of its memory. Equal observations never change it twice. It shrinks if
// less than one floor would be left for others, by enough to leave two floors. It grows if more than three floors would
// be left.

const (
	// 1/liveFloor of a device's largest budget is left to others: it has to cover what a program asks for between two
	// observations.
	liveFloor = 16
	// growsAfter is how long memory must have been free before the budget grows: programs that free memory often take
	// it again.
	growsAfter = 2 * time.Second
	// recallPause and mostRecallPause are the shortest and the longest pause between two recalls of what clients keep.
	recallPause, mostRecallPause = 500 * time.Millisecond, 16 * time.Second
)

// live is a budget that follows what others use. Its methods are pure.
type live struct {
	most, floor int64
	since       time.Time // since when the budget could grow; zero: it could not
	// recall is the earliest time for the next recall, and pause the last pause before it. Zero: at once.
	recall time.Time
	pause  time.Duration
}

func newLive(most, granularity int64) *live {
	return &live{most: most, floor: max(most/liveFloor, granularity)}
}

// next returns the new budget, given the bytes used of it and the bytes free on the device. It is at least least.
func (l *live) next(now time.Time, budget, used, free, least int64) int64 {
	there := used + free
	want := min(l.most, max(there-2*l.floor, least))
	switch {
	case budget > min(there-l.floor, l.most): // somebody may have set more than most
		l.since = time.Time{}
		return min(budget, max(want, least)) // which exceeds the budget if least does
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

// SetLive makes the budget follow what others use of the device, from the next Follow on, up to the memory that the
// device was made with. SetBudget ends that.
func (d *Device) SetLive() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.live = newLive(d.info.Memory, d.info.Granularity)
}

// Follow looks how much of the device's memory others use, and changes a live budget accordingly. It changes it as
// SetBudget does, and blocks as that does. If the budget is not live, it does nothing. Errors are those of the device
// and of ctx.
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
		d.options.Recall(ctx) // makes clients give up what they keep without need
		// Clients may have given memory back.
		if free, err = d.backend.Free(); err != nil {
			return err
		}
	}
	if d.follow(now, free) {
		return d.shrink(ctx, TierVRAM, d.overBudget)
	}
	return nil
}

// shrinks reports whether a live budget is larger than what others leave, so that clients should be recalled. While
// recalls do not help, they become rarer, because kept brackets are cheap brackets.
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

// follow computes and sets a live budget. It reports whether the budget changed.
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

// heldLocked returns the bytes of the device's own memory that cannot leave: mapped, used by a bracket, or pinned;
// being made; or left but not yet free. Device.mu is held.
func (d *Device) heldLocked() int64 {
	n, stays := d.taken, d.stays()
	for _, x := range d.extents {
		if x.Placement().Tier == TierVRAM && x.mapped == 0 && !stays(x) {
			n -= x.size
		}
	}
	return d.whole(n)
}

// whole rounds n up to whole allocations.
func (d *Device) whole(n int64) int64 {
	return (n + d.info.Granularity - 1) / d.info.Granularity * d.info.Granularity
}

// whyLocked explains a live budget for people; "" if the device has all of it. Device.mu is held.
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
