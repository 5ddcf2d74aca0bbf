package fs

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// descriptors limits how many nodes have an open descriptor. If there are too many, a clock hand goes round and closes
// the descriptors that were not used since it last passed. It leaves open descriptors in use and those of nodes that
// could not be found again. So the limit is not strict.
type descriptors struct {
	limit int // immutable

	wake chan struct{} // has an element when below is no longer empty; immutable

	mu    sync.Mutex
	ring  []*node            // nodes with a descriptor; protected by mu
	hand  int                // protected by mu
	below map[*node]struct{} // nodes that are, or were, on mounts below SOURCE; protected by mu
}

// belowIdle is the interval at which idle descriptors on mounts below SOURCE are closed. An idle descriptor lasts one
// or two intervals. If it were closed right after use, each request would open all directories on the way anew.
const belowIdle = 10 * time.Millisecond

// add notes that n has a descriptor. The caller holds n.mu.
func (d *descriptors) add(n *node) {
	d.mu.Lock()
	n.slot = len(d.ring)
	d.ring = append(d.ring, n)
	d.mu.Unlock()
}

// addBelow marks the descriptor of n to be closed once it is idle. The caller holds n.mu.
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

// closeIdleBelow closes the descriptors that were not used since its last call, and reports whether others are left.
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

// remove notes that n no longer has a descriptor. The caller holds n.mu.
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

// shed closes about half of the descriptors if they are idle, and reports whether it closed any. It is for callers that
// got EMFILE or ENFILE.
func (d *descriptors) shed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	before := len(d.ring)
	d.closeLocked(before / 2)
	return len(d.ring) < before
}

// closeLocked closes idle descriptors until at most target are left. It goes round at most twice.
func (d *descriptors) closeLocked(target int) {
	for steps := 2 * len(d.ring); steps > 0 && len(d.ring) > target; steps-- {
		if d.hand >= len(d.ring) {
			d.hand = 0
		}
		n := d.ring[d.hand]
		// A locked node is in use. Waiting for its lock would invert the lock order.
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
