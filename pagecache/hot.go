package pagecache

import (
	"context"
	"math"
	"sync/atomic"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// A file is hot when devices have got one and a half times its size through the host's page cache: it is loaded again
// and again, or its extents do not fit on the devices that use them. The background locks the pages of hot files, as if
// they were pinned on the host. So the next bytes come at the speed of the link, and take no cores. Hot files have
// memory of their own for that (residency.Pinned.LockHot). The pages are unlocked when home changes, and after hotAge
// without use.

const (
	// leastHot is the fewest bytes that make a file hot (hotFrom).
	leastHot = leastLocked + leastLocked/2
	// hotAge is how long the pages of a hot file stay locked without being used, and how long a file whose pages could
	// not stay locked is not hot again.
	hotAge = pinnedAge
	// Loads count together unless heatAge passes between them.
	heatAge = 15 * time.Minute
	// mostHeats bounds the number of detached files whose heat is remembered.
	mostHeats = 4096
)

// heat says whether a file is hot.
type heat struct {
	hot atomic.Bool
	// read counts bytes that devices got through the host's page cache since the file was hot. used is when bytes last
	// came from there or from locked pages, and cooled when the file was last hot (clock).
	read, used, cooled atomic.Int64
}

// hotFrom returns how many bytes make a file of a given size hot: those of the second load, even if loads leave out a
// part of the file. Locking takes about as long as one load.
func hotFrom(size int64) int64 { return countsFor(size) + countsFor(size)/2 }

// warm notes that a device got n bytes through the host's page cache. It reports true each time the sum passes another
// leastHot; the caller then decides whether the file is hot.
func (h *heat) warm(n int64) bool {
	if since(h.used.Swap(clock())) > heatAge {
		h.read.Store(0)
	}
	read := h.read.Add(n)
	return read/leastHot > (read-n)/leastHot
}

// cool ends the heat of a file.
func (h *heat) cool() {
	h.read.Store(0)
	if h.hot.Swap(false) {
		h.cooled.Store(clock())
	}
}

// heats remembers how much was read from home of files that are not attached. Programs may load a file again and again,
// each time after it has left all devices.
type heats map[FileID]remembered

// remembered is a heat.
type remembered struct{ read, used, cooled int64 }

// keep remembers a file that is detached.
func (h heats) keep(f *File) {
	from := &f.locking.heat
	of := remembered{from.read.Load(), from.used.Load(), from.cooled.Load()}
	if of.read < leastLocked && since(of.cooled) > f.c.hotAge || f.orphan { // a small file, for example
		return
	}
	if len(h) == mostHeats {
		clear(h)
	}
	h[f.id] = of
}

// recall gives a new File what is remembered of its file.
func (h heats) recall(f *File) {
	of, to := h[f.id], &f.locking.heat
	to.read.Store(of.read)
	to.used.Store(of.used)
	to.cooled.Store(of.cooled)
	delete(h, f.id)
}

// started is some time in the past.
var started = time.Now().Add(-time.Hour)

// clock returns the time in nanoseconds since started, whatever happens to the wall clock. It is never 0.
func clock() int64 { return int64(time.Since(started)) }

// since returns how long ago clock returned t. 0 is longer ago than anything else.
func since(t int64) time.Duration {
	if t == 0 {
		return math.MaxInt64
	}
	return time.Duration(clock() - t)
}

// countWays adds a transfer from home to the counters, and to the heat of the file.
func (f *File) countWays(from mover.Ways) {
	f.count(func(c *Counters) {
		c.LockedPages.Add(from.Locked)
		c.CachedPages.Add(from.Cached)
		c.DirectPages.Add(from.Direct)
		c.BufferedPages.Add(from.Buffered)
	})
	if from.Locked+from.Cached+from.Buffered > 0 &&
		f.locking.heat.warm((from.Cached+from.Buffered)<<page.Shift) {
		f.c.lanes.do(f, choreLock, func() { f.lockDue(f.c.life) }) // at once, because the file may leave all devices
	}
}

// heatLocked decides whether the file is hot. A file that is hot no longer is unlocked, unless it is pinned.
func (f *File) heatLocked() {
	h := &f.locking.heat
	switch {
	case f.Pinning().Host:
		h.cool()
	case h.hot.Load():
		if f.locking.now.Load() != nil && since(h.used.Load()) > f.c.hotAge {
			f.coolLocked()
		}
	case h.read.Load() >= hotFrom(f.home.Size()) && since(h.used.Load()) <= heatAge &&
		since(h.cooled.Load()) > f.c.hotAge:
		h.hot.Store(true)
	}
}

// lockDue locks or unlocks the pages of the file, if that is due.
func (f *File) lockDue(ctx context.Context) {
	f.mu.LockLater()
	defer f.mu.Unlock()
	if f.detached.Load() {
		return
	}
	f.heatLocked()
	f.relockDueLocked(ctx)
	f.dropIdleLocked()
}

// coolLocked ends the heat of the file, and unlocks its pages unless it is pinned.
func (f *File) coolLocked() {
	f.locking.heat.cool()
	if !f.Pinning().Host {
		f.unlockHomeLocked()
	}
}
