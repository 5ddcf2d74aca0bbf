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
	unused := c.unusedViews(leastList)
	byUser, all := make(map[uint32]int64), int64(0)
	for _, v := range unused {
		byUser[v.user] += v.host
		all += v.host
	}
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

// unusedViews returns the views that may be dropped and take more than so many bytes of host memory, the least recently
// used first.
func (c *Cache) unusedViews(least int64) (unused []*View) {
	c.mu.Lock()
	for _, v := range c.viewsByKey {
		if v.users == 0 && v.host > least {
			unused = append(unused, v)
		}
	}
	slices.SortFunc(unused, func(a, b *View) int { return cmp.Compare(a.used, b.used) })
	c.mu.Unlock()
	return slices.DeleteFunc(unused, func(v *View) bool { _, pinned := v.Pinned(); return pinned })
}

// CloseUnused drops half of the views that nobody uses, the least recently used first, and closes files that nothing
// else uses. It reports whether it dropped any. It is for callers that got EMFILE or ENFILE, whatever locks they hold:
// it does not block. Pinned views stay.
func CloseUnused(c *Cache) (any bool) {
	unused := c.unusedViews(0)
	for _, v := range unused[:(len(unused)+1)/2] {
		if !v.forget() {
			continue
		}
		any = true
		c.lanes.work.Go(func() { v.free() })
		busy := false
		for _, f := range v.files {
			if !f.mu.TryLock() {
				busy = true
				continue
			}
			f.dropIdleLocked()
			f.mu.Unlock()
		}
		if busy {
			v.dropEmptyBeside()
		}
	}
	return any
}
