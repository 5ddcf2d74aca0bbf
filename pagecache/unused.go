package pagecache

import (
	"cmp"
	"slices"
)

// makeRoom drops views that nobody uses until there is room for n more bytes of host memory, and reports whether there
// is. It begins with those of the user whose unused views take the most, the least recently used first. Small lists of
// segments and pinned views stay. If all of them would not make enough room, makeRoom drops none. It does not block:
// the device memory is freed in the background.
func (c *Cache) makeRoom(n int64) bool {
	if c.memory.fits(n) {
		return true
	}
	unused, byUser, all := c.unusedViews()
	for c.memory.fits(n-all) && !c.memory.fits(n) && len(unused) > 0 {
		i := 0
		for k, v := range unused {
			if byUser[v.user] > byUser[unused[i].user] {
				i = k
			}
		}
		v := unused[i]
		unused = slices.Delete(unused, i, i+1)
		byUser[v.user] -= v.host
		all -= v.host
		if v.forget() {
			c.lanes.work.Go(func() { v.free() })
			v.dropEmptyBeside()
		}
	}
	return c.memory.fits(n)
}

// unusedViews returns the views that makeRoom may drop, the least recently used first, and the host memory that they
// take: by user, and in all.
func (c *Cache) unusedViews() (unused []*View, byUser map[uint32]int64, all int64) {
	c.mu.Lock()
	for _, v := range c.viewsByKey {
		if v.users == 0 && v.host > leastList {
			unused = append(unused, v)
		}
	}
	slices.SortFunc(unused, func(a, b *View) int { return cmp.Compare(a.used, b.used) })
	c.mu.Unlock()
	unused = slices.DeleteFunc(unused, func(v *View) bool { _, pinned := v.Pinned(); return pinned })
	byUser = make(map[uint32]int64)
	for _, v := range unused {
		byUser[v.user] += v.host
		all += v.host
	}
	return unused, byUser, all
}
