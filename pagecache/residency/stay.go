package residency

import (
	"cmp"
	"maps"
	"slices"
	"syscall"

	humanize "github.com/dustin/go-humanize"

	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
)

// pinnedExtent is an extent of a pinned Key.
type pinnedExtent struct {
	*Extent
	by Tenant
	// stays means that it is within its user's share.
	stays bool
}

// pins has the extents of a device's pinned Keys by ID.
type pins map[policy.ID]pinnedExtent

// pinsLocked finds all pinned extents. It looks at every extent. Device.mu is held.
func (d *Device) pinsLocked() pins {
	found := pins{}
	for id, x := range d.extents {
		if by, pinned := x.key.Pinned(); pinned {
			found[id] = pinnedExtent{x, by, true}
		}
	}
	used := map[uint32]int64{}
	for _, id := range slices.Sorted(maps.Keys(found)) {
		p := found[id]
		if used[p.by.User] += p.size; p.by.Limited && used[p.by.User] > d.shareLocked() {
			p.stays = false
			found[id] = p
		}
	}
	return found
}

// sums returns the bytes by user, and the bytes of extents that stay although nobody maps them.
func (p pins) sums() (users []UserPins, idle int64) {
	of := map[uint32]int64{}
	for _, x := range p {
		of[x.by.User] += x.size
		if x.stays && x.mapped == 0 {
			idle += x.size
		}
	}
	users = []UserPins{}
	for user, n := range of {
		users = append(users, UserPins{user, n})
	}
	slices.SortFunc(users, func(a, b UserPins) int { return cmp.Compare(a.User, b.User) })
	return users, idle
}

// stays returns a function that reports whether an extent is pinned within its user's share. Both are called with
// Device.mu held. The function computes shares only if a limited user has pinned something.
func (d *Device) stays() func(x *Extent) bool {
	var all pins
	return func(x *Extent) bool {
		by, pinned := x.key.Pinned()
		if !pinned || !by.Limited {
			return pinned
		}
		if all == nil {
			all = d.pinsLocked()
		}
		return all[x.id].stays
	}
}

// CheckPinned returns an error if a user cannot pin need more bytes: ENOSPC for more than the device has, EDQUOT if the
// user's pins would exceed its share.
func (d *Device) CheckPinned(by Tenant, need int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	users, _ := d.pinsLocked().sums()
	pinned, own := int64(0), int64(0)
	for _, u := range users {
		pinned += u.Bytes
		if u.User == by.User {
			own = u.Bytes
		}
	}
	switch {
	case pinned+need > d.budget:
		return refuse(syscall.ENOSPC, "%s do not fit on device %d, whose budget is %s, of which %s are pinned already; unpin something, "+
			"or raise gpu-memory with 'gaiafs set'", humanize.IBytes(uint64(need)), d.info.Ordinal,
			humanize.IBytes(uint64(d.budget)),
			humanize.IBytes(uint64(pinned)))
	case by.Limited && own+need > d.shareLocked():
		return refuse(syscall.EDQUOT, "%s are more than user %d may pin on device %d in addition to %s that are pinned already: no user may have more "+
			"than %s, except root and the one who mounted; unpin something, or raise user-share with 'gaiafs set'",
			humanize.IBytes(uint64(need)), by.User,
			d.info.Ordinal, humanize.IBytes(uint64(own)), humanize.IBytes(uint64(d.shareLocked())))
	}
	return nil
}
