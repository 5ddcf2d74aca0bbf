package pagecache

import (
	"context"
	"slices"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// Reads of home for a device may run without File.mu (mover.Reads). The disk then works while CPU requests are served.
// holding.reads has these reads, protected by File.mu.

// enterReadsLocked lets reads for the device of h continue when File.mu is unlocked, until leave is called with File.mu
// held.
func (f *File) enterReadsLocked(h *holding) (leave func()) {
	h.reads.Enter()
	return h.reads.Leave
}

// enterReads is enterReadsLocked for callers that do not hold File.mu.
func (f *File) enterReads(ctx context.Context, h *holding) (leave func(), err error) {
	if err := f.mu.LockIn(ctx); err != nil {
		return nil, err
	}
	defer f.mu.Unlock()
	leaveLocked := f.enterReadsLocked(h)
	return func() { f.whenFree(ctx, leaveLocked) }, nil
}

// spoilLocked reports to devices' reads, to views and to locked pages that home changed in rg. It is called after the
// change, because fills of views read home, and take further pages, without File.mu.
func (f *File) spoilLocked(rg page.Range) {
	f.spoilHomeLocked()
	for _, h := range f.holdings {
		h.reads.Spoil(rg)
	}
	f.spoilViews(rg)
}

// closeUnread calls what closes a home of the file, or its locked pages, once no read is under way.
func (f *File) closeUnread(closing func() error) error {
	f.readingMu.Lock()
	defer f.readingMu.Unlock()
	if f.reading > 0 {
		f.closing = append(f.closing, closing)
		return nil
	}
	return closing()
}

// beginRead counts a user of home that works without File.mu. It is called with File.mu held. endRead ends the use.
func (f *File) beginRead() {
	f.readingMu.Lock()
	defer f.readingMu.Unlock()
	f.reading++
}

func (f *File) endRead() {
	f.readingMu.Lock()
	defer f.readingMu.Unlock()
	if f.reading--; f.reading > 0 {
		return
	}
	for _, closing := range f.closing {
		if err := closing(); err != nil {
			f.c.log.Warn("closing the backing file", "error", err)
		}
	}
	f.closing = nil
}

// sourceLocked returns home as a source for filling devices. The caller calls beginRead before it unlocks mu.
func (f *File) sourceLocked() *mover.Source {
	s := &mover.Source{Home: f.home}
	if l := f.locking.now.Load(); l != nil {
		s.Locked, s.Size = l, f.size
		return s
	}
	direct, ok := f.home.(DirectReader)
	if !ok || f.c.bufferedReads || f.noDirect.Load() {
		return s
	}
	s.Direct, s.Size, s.Cold = direct, f.size, f.cold
	s.Hold = func() (giveBack func()) {
		f.beginRead()
		f.c.reads.Add(1)
		return func() {
			f.endRead()
			f.c.reads.Done()
		}
	}
	s.Refused = func(reason string) {
		if !f.noDirect.Swap(true) {
			f.c.noDirect(reason)
		}
	}
	return s
}

// coldWay returns the measurements of the disk of a filesystem.
func (c *Cache) coldWay(dev uint64) *mover.ColdWay {
	c.mu.Lock()
	defer c.mu.Unlock()
	way := c.coldWays[dev]
	if way == nil {
		way = new(mover.ColdWay)
		c.coldWays[dev] = way
	}
	return way
}

// noDirect logs a reason why files are read through the host's page cache, once per reason.
func (c *Cache) noDirect(reason string) {
	c.mu.Lock()
	known := slices.Contains(c.noDirectReasons, reason)
	if !known {
		c.noDirectReasons = append(c.noDirectReasons, reason)
	}
	c.mu.Unlock()
	if !known {
		c.log.Info("devices read files through the host's page cache", "reason", reason)
	}
}

func (c *Cache) snapshotNoDirect() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]string{}, c.noDirectReasons...)
}
