//go:build invariants

package residency

import "fmt"

// checkLocked panics if the Device's counts contradict its extents. Device.mu is held.
func (d *Device) checkLocked() {
	charges, mapped, bytes := make(map[uint32]int64), int64(0), int64(0)
	for id, x := range d.extents {
		pins := x.kept
		for user, n := range x.pins {
			charges[user] += x.size
			pins += n
		}
		if x.mapped > 0 {
			mapped += x.size
		}
		if x.Placement().Tier == TierVRAM && !x.moving { // Move counts it after it has placed it
			bytes += x.size
		}
		if x.counted != TierNone && x.counted != x.Placement().Tier && !x.moving {
			panic(fmt.Sprintf("extent %d of pages %s is counted in tier %d, and in %+v", id, x.pages, x.counted,
				x.Placement()))
		}
		if x.id != id || x.state != held || pins != x.mapped || x.recalls > pins ||
			x.recallable != (pins > 0 && x.recalls == pins) ||
			!x.moving && int(x.users.Load()) < x.mapped ||
			x.Placement().Tier == TierNone {
			panic(fmt.Sprintf("extent %d of pages %s: state %d, %d users, mapped %d times by %v, in %+v",
				id, x.pages, x.state, x.users.Load(), x.mapped, x.pins, x.Placement()))
		}
	}
	// A user may also be charged for extents being made, and for extents that left with a lost device.
	for user, n := range charges {
		if d.charges[user] < n {
			panic(fmt.Sprintf("user %d maps %d bytes and is charged for %d", user, n, d.charges[user]))
		}
	}
	if d.mapped < mapped || d.taken < bytes || d.leaving < 0 || d.making < 0 || d.promised < 0 {
		panic(fmt.Sprintf("%d of %d bytes are mapped, %d are counted, of %d", mapped, bytes, d.mapped, d.taken))
	}
}
