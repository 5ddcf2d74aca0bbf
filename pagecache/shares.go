package pagecache

import (
	"cmp"
	"slices"
	"syscall"

	humanize "github.com/dustin/go-humanize"
)

// pinner is who maps an extent.
type pinner struct {
	user    uint32
	limited bool // to a share of the device
}

// UserPins is how much of a device the programs of one user map. An extent that several map counts once for each user.
type UserPins struct {
	User  uint32 `json:"user"`
	Bytes int64  `json:"bytes"`
}

// share returns how much of the device's memory a limited user may map, in whole allocations.
func (c *Cache) share(d *device) int64 {
	n := int64(float64(d.info.Memory) * c.userShare)
	return min((n+d.info.Granularity-1)/d.info.Granularity*d.info.Granularity, d.info.Memory)
}

// charge notes that a user maps n more bytes of a device, or says why she may not.
func (c *Cache) charge(d *device, by pinner, n int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if most := c.share(d); by.limited && d.pinned[by.user]+n > most {
		return fail(syscall.ENOMEM, "user %d maps %s of device %d already, and no user may map more than %s of its %s, but root and "+
			"who mounted; unmap something, or mount with a larger --user-share",
			by.user, humanize.IBytes(uint64(d.pinned[by.user])), d.info.Ordinal, humanize.IBytes(uint64(most)), humanize.IBytes(uint64(d.info.Memory)))
	}
	if d.pinned == nil {
		d.pinned = make(map[uint32]int64)
	}
	d.pinned[by.user] += n
	return nil
}

// discharge takes a charge back.
func (c *Cache) discharge(d *device, user uint32, n int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if d.pinned[user] -= n; d.pinned[user] == 0 {
		delete(d.pinned, user)
	}
}

// pinLocked counts one more mapping of x.
func (f *File) pinLocked(x *extent, by pinner) error {
	if x.pins[by.user] == 0 {
		if err := f.c.charge(x.dev, by, x.size); err != nil {
			return err
		}
	}
	x.pins[by.user]++
	x.mapped++
	return nil
}

// unpinExtentLocked takes back what pinLocked counted.
func (f *File) unpinExtentLocked(x *extent, user uint32) {
	x.mapped--
	if x.pins[user]--; x.pins[user] == 0 {
		delete(x.pins, user)
		f.c.discharge(x.dev, user, x.size)
	}
}

// pinnedBy returns how much of a device each user's programs map.
func (c *Cache) pinnedBy(d *device) []UserPins {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := make([]UserPins, 0, len(d.pinned))
	for user, n := range d.pinned {
		all = append(all, UserPins{user, n})
	}
	slices.SortFunc(all, func(a, b UserPins) int { return cmp.Compare(a.User, b.User) })
	return all
}
