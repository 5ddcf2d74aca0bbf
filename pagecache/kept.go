package pagecache

import (
	"context"
	"sync"
	"time"

	"github.com/gaiafs/gaiafs/pagecache/residency"
	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
)

// A client may keep a bracket after its end. Then the next bracket of the same ranges needs no request, and if
// everything fits in memory, that request is all that a bracket costs. For the Cache a kept bracket is open.
//
// A device that finds no other extents to take asks the clients to end the kept brackets that no kernel uses. Each
// client ends them in the order of their last use. A range that is used again is kept again. So extents leave as in the
// clock algorithm, and a hot extent costs one request per round.
//
// The Cache does not see the uses of a kept bracket. The client counts them, and says at the end of the bracket how
// many there were (Bracket.Used). If the rule counts uses, the device asks for the kept brackets as soon as one of
// their extents may be the coldest, so it knows of all uses that matter. Clients that do not count keep no brackets
// under such a rule.

// askAgain is how long a client that was asked is left alone, unless it keeps more brackets. Then it is asked again,
// because it may not have known of a bracket: the answer that lets it keep the bracket may still have been on its way.
const askAgain = 20 * time.Millisecond

// Keeper is a client that keeps brackets. Two Keepers are equal if they are the same client.
type Keeper interface {
	// Recall asks the client to end the kept brackets that it does not need. It does not wait. wait returns nil once
	// they have ended, or ctx's error.
	Recall() (wait func(ctx context.Context) error, err error)
	// Counts reports whether the client counts the uses of the brackets that it keeps.
	Counts() bool
}

// kept has the brackets on a device that clients keep.
type kept struct {
	mu sync.Mutex
	by map[Keeper]*keeps // protected by mu
}

// keeps counts the brackets that a client keeps, and those of them that it was not asked to end yet (fresh). asked is
// when it was last asked. A client that was asked ends each bracket that it knew of once no kernel uses it.
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

// recall asks clients to end the brackets that they do not use, and waits for the answers, at most movePatience. The
// device needs room.
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
		_ = wait(patience) // a client that does not answer counts as having an open bracket
	}
}

// keepers returns the clients to ask now: those that keep brackets they were not asked for, and those last asked more
// than askAgain ago. It notes that they are asked.
func (k *kept) keepers() (all []Keeper) {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := time.Now()
	for by, of := range k.by {
		if of.fresh > 0 || now.Sub(of.asked) >= askAgain {
			all, of.fresh, of.asked = append(all, by), 0, now
		}
	}
	return all
}

// spared notes that a client could not be asked after all.
func (k *kept) spared(by Keeper) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if of := k.by[by]; of != nil {
		of.fresh = of.brackets
	}
}

// mayKeep reports whether a client may keep a bracket with this grant. All its memory must be the device's own, and the
// eviction rule must not depend on which brackets are open. If the rule counts uses, the client must count them, too.
func (d *device) mayKeep(g *residency.Grant, by Keeper) bool {
	for _, pin := range g.Pins() {
		for _, x := range pin.Extents() {
			if x.Placement().Tier != TierDevice {
				return false
			}
		}
	}
	rule := d.room.Eviction()
	return rule != policy.ByBrackets && (by.Counts() || !policy.Counts(rule))
}
