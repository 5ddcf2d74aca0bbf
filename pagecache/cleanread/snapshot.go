package cleanread

import (
	"github.com/gaiafs/gaiafs/internal/page"
)

// A CPU read must know that nothing of its pages is pending, and the executor must know that the kernel may hold them
// from now on. Both take the executor's lock, and so does finding out which device has what. But programs read most
// regions of a file many times between two changes. So the second read that finds a region unchanged publishes what it
// learned, and later reads take no lock at all.
//
// A snapshot is valid while the epoch of its region stays the same. A release advances the epoch before the kernel
// drops its pages. So the kernel waits for each read that found the snapshot valid: the read's pages are locked, and
// the kernel drops them afterwards. A later read finds another epoch.

// snapshot says that nothing of a region was pending at an epoch, and what devices had of it. It is immutable.
type snapshot struct {
	region page.Index
	epoch  uint64
	// held says that the executor counts all pages of the region among those that the kernel may hold.
	held bool
	size int64 // of the file
	// serves says that devices may serve reads while home's count of changes equals changes.
	serves  bool
	changes uint64
	// haves says what devices have; complete says that it lists everything.
	haves    []Have
	complete bool
}

// mostRuns is the most runs of pages of one device in a snapshot.
const mostRuns = 64

// valid returns the snapshot of region r; nil if there is none, or it is out of date.
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

// NothingPending reports whether it is known that nothing of rg is pending. It takes no lock. Unless direct says that
// the kernel will not hold the pages, it must also be known that the executor counts them among those that the kernel
// may hold. size is the file's size if devices may serve the read; otherwise it is 0. NothingPending may be called at
// any time before Close. The kernel must hold the pages locked for the read during the call.
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

// State is the executor's knowledge of a file.
type State struct {
	Size int64
	// Serves says that devices may serve reads of the file, Changes is home's count of changes at that time.
	Serves  bool
	Changes uint64
}

// Publish publishes snapshots of the regions of rg. Nothing of rg is pending. A region gets a snapshot only if it has
// not changed since the last read of it. direct is as for NothingPending. The caller holds the executor's lock.
func (f *File) Publish(rg page.Range, direct bool, now State) {
	for r, last := regionsOf(rg); r <= last; r++ {
		at := f.regions.need(r)
		s := f.valid(r)
		// held stays true while the epoch stays the same.
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
