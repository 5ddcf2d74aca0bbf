package pagecache

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/versions"
)

// lookPatience is how long a status waits for files that are busy. After that it shows them as they were last seen.
const lookPatience = 500 * time.Millisecond

// glance is what the status shows of a File at one moment.
type glance struct {
	FileStatus
	detached       bool
	pendingSince   time.Time
	digests, state int64
}

// sight is what the status saw of a file.
type sight struct {
	last       atomic.Pointer[glance]
	stuckNoted atomic.Bool // the log has reported that the file is stuck
	mu         sync.Mutex
	// looking is closed when the goroutine that waits for File.mu has looked. Protected by mu; nil if nobody waits.
	looking chan struct{}
}

// glanceLocked returns the present state of a file.
func glanceLocked(f *File) *glance {
	v := &glance{
		FileStatus: FileStatus{
			SizeBytes:    f.home.Size(),
			Mappings:     f.mappedLocked(),
			MapPages:     int64(mapWidth(f.home.Size())),
			Bases:        f.counters.Bases.Load(),
			Holders:      []HoldingStatus{},
			WaitingBytes: f.waitingBytesLocked(),
		},
		detached:     f.detached.Load(),
		pendingSince: f.backlog.since,
		state:        f.lrc.Memory(),
	}
	if p := f.Pinning(); p.Any() {
		v.FileStatus.Pinned, v.PinnedBy = p.String(), p.User
	}
	v.LockedBytes = min(f.locking.bytes.Load(), f.home.Size())
	if err := f.locking.failed.Load(); err != nil {
		v.LockError = (*err).Error()
	}
	if f.backlog.err != nil {
		v.Error = f.backlog.err.Error()
	}
	for o, h := range f.holdings {
		largest, memory, pinned := int64(0), int64(0), 0
		for _, x := range h.extents {
			largest = max(largest, x.Size())
			if x.Placement().Tier == TierHost {
				pinned++
			} else {
				memory += x.Size()
			}
			if x.agreed != nil {
				v.digests += x.agreed.bytes
			}
		}
		if h.empty() {
			continue
		}
		held := HoldingStatus{
			Device: h.dev.info.Ordinal, ExtentBytes: largest, Extents: len(h.extents), Memory: memory,
			PinnedExtents: pinned,
		}
		held.count(&f.lrc, o, page.Count(f.home.Size()), page.Index(v.MapPages))
		v.Holders = append(v.Holders, held)
	}
	slices.SortFunc(v.Holders, func(a, b HoldingStatus) int { return cmp.Compare(a.Device, b.Device) })
	return v
}

// mapCells is the most letters in a HoldingStatus.Map.
const mapCells = 64

// mapWidth returns how many pages each letter of the map of a file stands for.
func mapWidth(size int64) page.Index { return max(1, (page.Count(size)+mapCells-1)/mapCells) }

// count fills in what owner o holds of a file with the given number of pages. Each letter of the map stands for width
// pages.
func (h *HoldingStatus) count(file *lrc.File, o versions.Owner, pages, width page.Index) {
	parts := make([]lrc.Counts, max(1, (pages+width-1)/width))
	file.CountParts(o, width, parts)
	letters := make([]byte, len(parts))
	for i, c := range parts {
		h.Resident += c.Resident
		h.Clean += c.Clean
		h.Tracked += c.Tracked
		h.Stale += c.Stale
		h.Dirty += c.Pending
		letters[i] = mapLetter(c.Resident, c.Stale, c.Pending)
	}
	h.Map = string(letters)
}

// look looks at the file, and returns a channel that is closed once last is no older than the call. At most one
// goroutine waits for File.mu for all callers.
func (s *sight) look(f *File) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.looking != nil {
		return s.looking
	}
	done := make(chan struct{})
	if f.mu.TryLock() {
		s.last.Store(glanceLocked(f))
		f.mu.Unlock()
		close(done)
		return done
	}
	s.looking = done
	f.c.lanes.work.Go(func() {
		f.mu.LockLater()
		defer f.mu.Unlock()
		s.mu.Lock() // later callers must get a newer glance
		s.looking = nil
		s.mu.Unlock()
		s.last.Store(glanceLocked(f))
		close(done)
	})
	return done
}

// glances looks at all files. For files that do not answer it returns what was last seen.
func (c *Cache) glances() []glance { return glancesOf(c.snapshotFiles()) }

// glancesOf is glances for the given files.
func glancesOf(files []*File) []glance {
	looks := make([]<-chan struct{}, len(files))
	for i, f := range files {
		looks[i] = f.sight.look(f)
	}
	timer := time.NewTimer(lookPatience)
	defer timer.Stop()
	late := false
	var all []glance
	for i, f := range files {
		v := glance{FileStatus: FileStatus{Holders: []HoldingStatus{}}}
		fresh := awaitLook(looks[i], timer.C, &late, f.stuck)
		if seen := f.sight.last.Load(); seen != nil {
			v = *seen
		}
		if v.detached || f.detached.Load() {
			continue
		}
		v.ID, v.Name, v.Counters = f.id, f.Name(), f.counters.snapshot()
		v.Views = viewStatuses(f, page.Index(v.MapPages), page.Count(v.SizeBytes))
		if !v.pendingSince.IsZero() {
			v.PendingSeconds = time.Since(v.pendingSince).Seconds()
		}
		if !fresh {
			v.BusySeconds = f.mu.heldFor().Seconds()
			v.WaitingBytes = f.Coming().Offset() // an upper bound; what was seen may be older than the last release
			v.Error = cmp.Or(v.Error, f.notAnswered().Error())
		}
		all = append(all, v)
	}
	return all
}

// awaitLook waits for a look until the timer fires; late remembers that it did. It does not wait for a stuck file.
func awaitLook(look <-chan struct{}, timer <-chan time.Time, late *bool, stuck func() bool) (fresh bool) {
	select {
	case <-look:
		return true
	default:
	}
	if *late || stuck() {
		return false
	}
	select {
	case <-look:
		return true
	case <-timer:
		*late = true
		return false
	}
}
