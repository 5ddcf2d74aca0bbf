package pagecache

import (
	"context"
	"sync"
	"time"

	"github.com/gaiafs/gaiafs/pagecache/residency"
	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
)

// A client may keep a bracket after its end. So the next one of the same ranges asks nobody, which is what brackets
// cost where all fits. Nothing is different here: the bracket is open. A device that has no other extents to take asks
// those who keep brackets of it to end what no kernel uses, and they do in the order in which they used them last.
// Whatever is used again is kept again: so extents go as by the clock algorithm, and a hot one asks once a round. A
// rule that counts uses would not see them: by such a rule nobody keeps brackets for keepAfter once the device needed
// room.

const (
	// keepAfter is how long clients then ask for each bracket.
	keepAfter = 100 * time.Millisecond
	// askAgain is how long a client that was asked is not asked again, unless it keeps more. It is asked again since
	// the answer that lets it keep a bracket may have been on its way: then it did not know yet that it keeps it.
	askAgain = 20 * time.Millisecond
)

// Keeper is a client that keeps brackets. Keepers are equal where the client is the same one.
type Keeper interface {
	// Recall asks the client to end the brackets that it keeps without need, and does not wait. wait returns nil once
	// they have ended, or ctx's error.
	Recall() (wait func(ctx context.Context) error, err error)
}

// kept are the brackets of a device that clients keep.
type kept struct {
	mu       sync.Mutex
	by       map[Keeper]*keeps // protected by mu
	recalled time.Time         // when room was needed last; protected by mu
}

// keeps is what a client keeps: how many brackets, how many of these it was not asked to end yet, and when it was asked
// last. What it was asked for and knew of ends when no kernel uses it any more.
type keeps struct {
	brackets, fresh int
	asked           time.Time
}

func (k *kept) add(by Keeper) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.by == nil {
		k.by = make(map[Keeper]*keeps)
	}
	if k.by[by] == nil {
		k.by[by] = new(keeps)
	}
	k.by[by].brackets++
	k.by[by].fresh++
}

func (k *kept) drop(by Keeper) {
	k.mu.Lock()
	defer k.mu.Unlock()
	of := k.by[by]
	if of.brackets--; of.brackets == 0 {
		delete(k.by, by)
	}
	of.fresh = min(of.fresh, of.brackets)
}

// recall has clients end what they keep without need. It waits for those who answer at once. Room is needed.
func (k *kept) recall(ctx context.Context) {
	var waits []func(ctx context.Context) error
	for _, by := range k.keepers() {
		if wait, err := by.Recall(); err == nil {
			waits = append(waits, wait)
		} else {
			k.spared(by)
		}
	}
	if len(waits) == 0 {
		return
	}
	patience, cancel := context.WithTimeout(ctx, movePatience)
	defer cancel()
	for _, wait := range waits {
		_ = wait(patience) // who does not answer has an open bracket, as those who use it
	}
}

// keepers returns those who keep what they were not asked for yet, or not for a while, and are asked now.
func (k *kept) keepers() (all []Keeper) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.recalled = time.Now()
	for by, of := range k.by {
		if of.fresh > 0 || k.recalled.Sub(of.asked) >= askAgain {
			all, of.fresh, of.asked = append(all, by), 0, k.recalled
		}
	}
	return all
}

// spared says that a client could not be asked after all.
func (k *kept) spared(by Keeper) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if of := k.by[by]; of != nil {
		of.fresh = of.brackets
	}
}

// mayKeep reports whether a client may keep what a bracket was granted: memory of the device's own, of which it needs
// none back, by a rule that does not go by which brackets are open.
func (d *device) mayKeep(g *residency.Grant) bool {
	for _, pin := range g.Pins() {
		for _, x := range pin.Extents() {
			if x.Placement().Tier != TierDevice {
				return false
			}
		}
	}
	switch rule := d.room.Eviction(); {
	case rule == policy.ByBrackets:
		return false
	case !policy.Counts(rule):
		return true
	}
	d.kept.mu.Lock()
	defer d.kept.mu.Unlock()
	return time.Since(d.kept.recalled) >= keepAfter
}
