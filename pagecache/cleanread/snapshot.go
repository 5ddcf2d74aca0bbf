package cleanread

import (
	"github.com/gaiafs/gaiafs/internal/page"
)

// A CPU read has to know that nothing of its pages is pending, and the executor has to know that the kernel may hold
// them from now on. Both take its lock, and so does finding out which device has what. But a program reads most regions
// of a file many times between two changes. So the second read of a region that finds it unchanged publishes what it
// learned, and later reads take no lock at all.
//
// A snapshot is valid for as long as the epoch of its region is the same. Whoever publishes a release advances the
// epoch before the kernel drops its pages. So a read that found the snapshot valid is one that the kernel waits for: it
// holds the pages locked, and drops them afterwards. A read that comes later finds another epoch.

// snapshot says that nothing of a region was pending at an epoch, and what devices had of it. It is immutable.
type snapshot struct {
	region page.Index
	epoch  uint64
	// held says that the executor counts all pages of the region among those that the kernel may hold.
	held bool
	size int64 // of the file
	// serves says that devices may serve reads as long as home's count of changes is changes.
	serves  bool
	changes uint64
	// haves is what devices have; complete says that it is all they have.
	haves    []Have
	complete bool
}

// mostRuns is how many runs of pages a snapshot has of one device at most.
const mostRuns = 64

// valid returns the snapshot of region r; nil if there is none, or something changed.
func (f *File) valid(r page.Index) *snapshot {
	at := f.regions.find(r)
	if at == nil {
		return nil
	}
	s := at.snapshot.Load()
	if s == nil || s.region != r || s.epoch != f.regions.epoch(r) {
		return nil
	}
	return s
}

// NothingPending reports, without any lock, whether it is known that nothing of rg is pending, and, unless direct says
// that the kernel will not hold them, that the executor counts its pages among those that the kernel may hold. size is
// that of the file if devices may serve the read; otherwise it is 0. It may be asked at any time before Close, and is
// to be asked while the kernel holds the pages locked for the read.
func (f *File) NothingPending(rg page.Range, direct bool, home Home) (size int64, ok bool) {
	var s *snapshot
	for r, last := regionsOf(rg); r <= last; r++ {
		if s = f.valid(r); s == nil || !direct && !s.held {
			return 0, false
		}
	}
	if home == nil || !s.serves {
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

// State is what the executor knows of a file.
type State struct {
	Size int64
	// Serves says that devices may serve reads of the file, Changes is home's count of changes then.
	Serves  bool
	Changes uint64
}

// Publish publishes snapshots of the regions of rg, of which nothing is pending. Only a region that did not change
// since the last read of it is worth one. direct is as for NothingPending. Called with the executor's lock held.
func (f *File) Publish(rg page.Range, direct bool, now State) {
	for r, last := regionsOf(rg); r <= last; r++ {
		at := f.regions.need(r)
		s := f.valid(r)
		// What held says stays true for as long as the epoch is the same.
		held := !direct || s != nil && s.held
		if s != nil && s.held == held && (State{s.size, s.serves, s.changes}) == now {
			continue
		}
		epoch := f.regions.epoch(r)
		if at.asked != epoch+1 {
			at.asked = epoch + 1
			continue
		}
		pages := page.Range{Start: r << regionShift, End: (r + 1) << regionShift}
		if !f.ex.NothingPending(pages, !direct) {
			continue
		}
		next := &snapshot{
			region: r, epoch: epoch, held: held, size: now.Size, serves: now.Serves, changes: now.Changes,
			complete: true,
		}
		if now.Serves {
			next.haves = f.ex.Haves(pages)
		}
		for i := range next.haves {
			if len(next.haves[i].Pages)+len(next.haves[i].Tracked) > mostRuns {
				next.haves, next.complete = nil, false
				break
			}
		}
		at.snapshot.Store(next)
	}
}
