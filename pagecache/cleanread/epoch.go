package cleanread

import (
	"sync/atomic"

	"github.com/gaiafs/gaiafs/internal/page"
)

const (
	// regionShift is the binary logarithm of the pages of a region, 2 MiB.
	regionShift = 9
	// Of a file, groups times groupRegions regions have an epoch of their own: 8 GiB of it. Regions that lie so far
	// apart share one.
	groups       = 128
	groupRegions = 32
)

// region is what is known of 2 MiB of a file.
type region struct {
	// epoch counts changes. torn is one more than the epoch at which a page was found that a program had stored into
	// and not released.
	epoch, torn atomic.Uint64
	snapshot    atomic.Pointer[snapshot]
	asked       uint64 // the epoch at which a read last found no snapshot, and one; protected by the executor's lock
}

// regions are those of a file. A group is made when there is something to say of it. The zero value has none.
type regions struct {
	// all counts changes of so many pages that it would take long to count them in each region.
	all    atomic.Uint64
	groups [groups]atomic.Pointer[[groupRegions]region]
}

// regionsOf returns the regions of the pages of rg, which has some.
func regionsOf(rg page.Range) (first, last page.Index) {
	return rg.Start >> regionShift, (rg.End - 1) >> regionShift
}

// find returns a region; nil if nothing is known of it.
func (x *regions) find(r page.Index) *region {
	g := x.groups[r/groupRegions%groups].Load()
	if g == nil {
		return nil
	}
	return &g[r%groupRegions]
}

// need returns a region.
func (x *regions) need(r page.Index) *region {
	at := &x.groups[r/groupRegions%groups]
	if at.Load() == nil {
		at.CompareAndSwap(nil, new([groupRegions]region))
	}
	return &at.Load()[r%groupRegions]
}

// epoch is the same number as before if nothing changed of region r.
func (x *regions) epoch(r page.Index) uint64 {
	all := x.all.Load()
	if at := x.find(r); at != nil {
		return all + at.epoch.Load()
	}
	return all
}

// Changed notes that something of the pages of rg changes: what was found out about them, or read of them, is no longer
// known to be so. It is called with the executor's lock held: before home changes and after, and before a device's
// bytes do, or their memory.
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

// epoch is the same number as before if nothing changed of the pages of rg.
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

// Pages that a program stored into and did not release are copied in vain every time. So where one was found, its
// region's tracked pages are left alone until something changes.

// Torn reports whether such a page was found in the regions of rg.
func (f *File) Torn(rg page.Range) bool {
	for r, last := regionsOf(rg); r <= last; r++ {
		if at := f.regions.find(r); at != nil && at.torn.Load() == f.regions.epoch(r)+1 {
			return true
		}
	}
	return false
}

// setTorn remembers it; unless nothing changed meanwhile, it says nothing about what is now.
func (f *File) setTorn(rg page.Range, now bool) {
	for r, last := regionsOf(rg); now && r <= last; r++ {
		f.regions.need(r).torn.Store(f.regions.epoch(r) + 1)
	}
}
