package pagecache

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/gaiafs/gaiafs/pagecache/residency"
	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
)

// A client may keep a bracket after its end. So the next one of the same range asks nobody, which is what brackets cost
// where all fits. Nothing is different here: the bracket is open. Once a device needs room, those who keep brackets of
// it are asked to end what no kernel uses, and for a while everybody asks for each bracket again, so that the rule sees
// who uses what.

const (
	// recallInterval is the least time between two times that keepers are asked.
	recallInterval = 20 * time.Millisecond
	// keepAfter is for how long nobody keeps brackets of a device once it needed room.
	keepAfter = 100 * time.Millisecond
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
	by       map[Keeper]int // how many; protected by mu
	recalled time.Time      // when room was needed last; protected by mu
}

func (k *kept) add(by Keeper, n int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.by == nil {
		k.by = make(map[Keeper]int)
	}
	if k.by[by] += n; k.by[by] == 0 {
		delete(k.by, by)
	}
}

// recall has clients end what they keep without need. It waits for those who answer at once. Room is needed.
func (k *kept) recall(ctx context.Context) {
	k.mu.Lock()
	if time.Since(k.recalled) < recallInterval {
		k.mu.Unlock()
		return
	}
	k.recalled = time.Now()
	all := slices.Collect(maps.Keys(k.by))
	k.mu.Unlock()
	var waits []func(ctx context.Context) error
	for _, by := range all {
		if wait, err := by.Recall(); err == nil {
			waits = append(waits, wait)
		}
	}
	patience, cancel := context.WithTimeout(ctx, movePatience)
	defer cancel()
	for _, wait := range waits {
		_ = wait(patience) // who does not answer has an open bracket, as those who use it
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
	if d.room.Eviction() == policy.ByBrackets {
		return false
	}
	d.kept.mu.Lock()
	defer d.kept.mu.Unlock()
	return time.Since(d.kept.recalled) >= keepAfter
}
