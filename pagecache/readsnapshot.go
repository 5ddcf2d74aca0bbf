package pagecache

import (
	"sync/atomic"

	"github.com/gaiafs/gaiafs/internal/page"
)

// A CPU read has to know that nothing of its pages is pending, and the lrc machine has to know that the kernel may hold
// them from now on. Both take mu. But a program reads most regions of a file many times between two changes. So the
// second read of a region that finds it unchanged publishes what it learned, and later reads take no lock at all.
//
// A snapshot is valid for as long as the epoch of its region is the same. Whoever publishes a release advances the
// epoch before the kernel drops its pages. So a read that found the snapshot valid is one that the kernel waits for: it
// holds the pages locked, and drops them afterwards. A read that comes later finds another epoch.

// readSnapshot says that nothing of a region was pending at an epoch. It is immutable.
type readSnapshot struct {
	region page.Index
	epoch  uint64
	// held says that the lrc machine counts all pages of the region among those that the kernel may hold.
	held bool
	size int64 // of the file
	// home says that devices may serve reads as long as home's count of changes is changes.
	home    bool
	changes uint64
}

// readSnapshots has the latest one of each region, and the epoch at which a read last took mu for it. Regions that have
// the same epoch counter have the same place here.
type readSnapshots [epochRegions]struct {
	at    atomic.Pointer[readSnapshot]
	asked uint64 // epoch + 1; protected by File.mu
}

// regionsOf returns the regions of the pages of rg, which has some.
func regionsOf(rg page.Range) (first, last page.Index) {
	return rg.Start >> regionShift, (rg.End - 1) >> regionShift
}

// readUnlocked answers Read's question without taking mu: what readPending would return, if ok. It may be asked at any
// time.
func (f *File) readUnlocked(rg page.Range, direct bool, home HomeReader) (size int64, ok bool) {
	var s *readSnapshot
	for r, last := regionsOf(rg); r <= last; r++ {
		i := r % epochRegions
		s = f.snapshots[i].at.Load()
		if s == nil || s.region != r || s.epoch != f.epochs[i].Load() || !direct && !s.held {
			return 0, false
		}
	}
	if f.detached.Load() {
		return 0, false
	}
	if home == nil || !s.home {
		return 0, true
	}
	if rg.End.Offset() > s.size { // the file may have become longer
		return 0, false
	}
	changes, err := home.Look()
	if err != nil || changes != s.changes {
		return 0, false
	}
	return s.size, true
}

// publishLocked publishes snapshots of the regions of rg, of which nothing is pending. Only a region that did not
// change since the last read of it is worth one. Called with mu held.
func (f *File) publishLocked(rg page.Range, direct, serves bool) {
	for r, last := regionsOf(rg); r <= last; r++ {
		at := &f.snapshots[r%epochRegions]
		epoch := f.epochs[r%epochRegions].Load()
		s := at.at.Load()
		// What held says stays true for as long as the epoch is the same.
		held := !direct || s != nil && s.region == r && s.epoch == epoch && s.held
		if s != nil && *s == (readSnapshot{r, epoch, held, f.size, serves, f.changes}) {
			continue
		}
		if at.asked != epoch+1 {
			at.asked = epoch + 1
			continue
		}
		pages := page.Range{Start: r << regionShift, End: (r + 1) << regionShift}
		if len(f.lrc.Pending(pages, true)) > 0 {
			continue
		}
		if !direct {
			f.lrc.CPURead(pages)
		}
		at.at.Store(&readSnapshot{
			region: r, epoch: epoch, held: held, size: f.size, home: serves, changes: f.changes,
		})
	}
}
