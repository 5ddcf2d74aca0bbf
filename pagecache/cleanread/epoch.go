package cleanread

import (
	"sync/atomic"

	"github.com/gaiafs/gaiafs/internal/page"
)

const (
	// regionShift is the binary logarithm of the number of pages of a region, 2 MiB.
	regionShift = 9
	// groups times groupRegions regions of a file have an epoch of their own: 8 GiB. Regions that lie this far apart
	// share one.
	groups       = 128
	groupRegions = 32
)

// region is what is known of 2 MiB of a file.
type region struct {
	// epoch counts changes. torn is one more than the epoch at which a page was found with unreleased stores.
	epoch, torn atomic.Uint64
	snapshot    atomic.Pointer[snapshot]
	asked       uint64 // the epoch plus 1 of the last read without a snapshot; protected by the executor's lock
}

// regions has the regions of a file. Groups are made on demand. The zero value has none.
type regions struct {
	// all counts changes of so many pages that counting them in each region would take long.
	all    atomic.Uint64
	groups [groups]atomic.Pointer[[groupRegions]region]
}

// regionsOf returns the first and last region of rg, which is not empty.
func regionsOf(rg page.Range) (first, last page.Index) {
	return rg.Start >> regionShift, (rg.End - 1) >> regionShift
}

// find returns region r, or nil if nothing is known of it.
func (x *regions) find(r page.Index) *region {
	g := x.groups[r/groupRegions%groups].Load()
	if g == nil {
		return nil
	}
	return &g[r%groupRegions]
}

// need returns region r, and makes it if necessary.
func (x *regions) need(r page.Index) *region {
	at := &x.groups[r/groupRegions%groups]
	if at.Load() == nil {
		at.CompareAndSwap(nil, new([groupRegions]region))
	}
	return &at.Load()[r%groupRegions]
}

// epoch returns the epoch of region r. It stays the same as long as nothing in the region changes.
func (x *regions) epoch(r page.Index) uint64 {
	all := x.all.Load()
	if at := x.find(r); at != nil {
		return all + at.epoch.Load()
	}
	return all
}

// Changed notes that the pages of rg change: facts about them, and bytes read from them, are no longer known to be
// valid. The caller holds the executor's lock. It calls Changed before home changes and after, and before a device's
// bytes or their memory change.
func (f *File) Changed(rg page.Range) {
	if rg.Empty() {
		return
	}
	first, last := regionsOf(rg)
	if last-first >= groupRegions {
		f.regions.all.Add(1)
		return
	}
	for r := first; r <= last; r++ {
		f.regions.need(r).epoch.Add(1)
	}
}

// epoch returns the sum of the epochs of rg's regions. It stays the same as long as nothing in them changes.
func (f *File) epoch(rg page.Range) (sum uint64) {
	if rg.Empty() {
		return 0
	}
	first, last := regionsOf(rg)
	for r := first; r <= min(last, first+groups*groupRegions-1); r++ {
		sum += f.regions.epoch(r)
	}
	return sum
}

// Copies of pages with unreleased stores fail every time. So once such a page was found, the tracked pages of its
// region are left alone until something changes.

// Torn reports whether a page with unreleased stores was found in the regions of rg.
func (f *File) Torn(rg page.Range) bool {
	for r, last := regionsOf(rg); r <= last; r++ {
		if at := f.regions.find(r); at != nil && at.torn.Load() == f.regions.epoch(r)+1 {
			return true
		}
	}
	return false
}

// setTorn notes that such a page was found in rg. now says that nothing has changed since the copy; otherwise setTorn
// does nothing.
func (f *File) setTorn(rg page.Range, now bool) {
	for r, last := regionsOf(rg); now && r <= last; r++ {
		f.regions.need(r).torn.Store(f.regions.epoch(r) + 1)
	}
}
