package fs

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// descriptors bounds how many nodes have a descriptor open. When there are too many, a clock hand goes round and closes
// those that were not used since it last came by. Descriptors in use, and those of nodes that could not be found again,
// are left open, so the bound is a wish.
type descriptors struct {
	limit int // immutable

	wake chan struct{} // has an element when below is no longer empty; immutable

	mu    sync.Mutex
	ring  []*node            // nodes with a descriptor; protected by mu
	hand  int                // protected by mu
	below map[*node]struct{} // of these, those on mounts below SOURCE, and others that have been; protected by mu
}

// belowIdle is how often descriptors on mounts below SOURCE that nobody used are closed: each lasts once or twice as
// long. Were they closed right after use, each request would open a directory, and all those above it, anew.
const belowIdle = 10 * time.Millisecond

// add notes that n has a descriptor. The caller holds n.mu.
func (d *descriptors) add(n *node) {
	d.mu.Lock()
	n.slot = len(d.ring)
	d.ring = append(d.ring, n)
	d.mu.Unlock()
}

// addBelow has the descriptor of n closed once it is idle. The caller holds n.mu.
func (d *descriptors) addBelow(n *node) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.below == nil {
		d.below = make(map[*node]struct{})
	}
	d.below[n] = struct{}{}
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// closeBelow closes idle descriptors on mounts below SOURCE, until ctx ends.
func (d *descriptors) closeBelow(ctx context.Context) {
	var later <-chan time.Time
	for {
		wake := d.wake
		if later != nil {
			wake = nil
		}
		select {
		case <-ctx.Done():
			return
		case <-wake:
			later = time.After(belowIdle)
		case <-later:
			if later = nil; d.closeIdleBelow() {
				later = time.After(belowIdle)
			}
		}
	}
}

// closeIdleBelow closes those that were not used since it was last called, and reports whether others are left.
func (d *descriptors) closeIdleBelow() (left bool) {
	d.mu.Lock()
	nodes := slices.Collect(maps.Keys(d.below))
	d.mu.Unlock()
	for _, n := range nodes {
		n.mu.Lock()
		idle := n.fd < 0 || !n.below || n.where.parent == nil || n.users == 0 && !n.recent
		n.recent = false
		d.mu.Lock()
		if idle {
			delete(d.below, n)
		}
		if idle && n.fd >= 0 && n.below && n.where.parent != nil {
			unix.Close(n.fd)
			n.fd = -1
			d.removeLocked(n)
		}
		d.mu.Unlock()
		n.mu.Unlock()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.below) > 0
}

// remove notes that n has none any more. The caller holds n.mu.
func (d *descriptors) remove(n *node) {
	d.mu.Lock()
	d.removeLocked(n)
	d.mu.Unlock()
}

func (d *descriptors) removeLocked(n *node) {
	last := len(d.ring) - 1
	d.ring[n.slot] = d.ring[last]
	d.ring[n.slot].slot = n.slot
	d.ring[last] = nil
	d.ring = d.ring[:last]
	n.slot = -1
}

// count returns the number of nodes with a descriptor.
func (d *descriptors) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.ring)
}

// trim closes idle descriptors if there are more than the limit.
func (d *descriptors) trim() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.ring) > d.limit {
		d.closeLocked(d.limit - d.limit/8)
	}
}

// shed closes about half of the idle descriptors, for want of any, and reports whether it closed one.
func (d *descriptors) shed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	before := len(d.ring)
	d.closeLocked(before / 2)
	return len(d.ring) < before
}

// closeLocked closes idle descriptors until at most target are left, going round at most twice.
func (d *descriptors) closeLocked(target int) {
	for steps := 2 * len(d.ring); steps > 0 && len(d.ring) > target; steps-- {
		if d.hand >= len(d.ring) {
			d.hand = 0
		}
		n := d.ring[d.hand]
		// A node that somebody has locked is in use. Waiting for it would turn the lock order round.
		if !n.mu.TryLock() {
			d.hand++
			continue
		}
		switch {
		case n.users > 0 || n.where.parent == nil:
			d.hand++
		case n.recent:
			n.recent = false
			d.hand++
		default:
			unix.Close(n.fd)
			n.fd = -1
			d.removeLocked(n)
		}
		n.mu.Unlock()
	}
}
