package pagecache

import (
	"context"
	"time"
)

// run collects released pages before they are older than the write-back interval, tries again what could not be
// collected, refreshes replicas when base copies take too much memory, and has files let go of lost devices. It ends
// with ctx. It never waits for a file: the lanes do the work.
func (c *Cache) run(ctx context.Context) {
	tick := time.NewTicker(max(c.interval/4, 10*time.Millisecond))
	defer tick.Stop()
	wait := firstRetry
	var retry, unused <-chan time.Time // nil while nothing fails, and while nobody has just ended the last mapping
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			c.lanes.look()
			c.pinned.Trim(pinnedAge)
			for _, f := range c.snapshotFiles() {
				f.noteStuck()
				c.lanes.do(f, choreDue, func() { f.collectDue(ctx) })
			}
		case <-c.idle:
			unused = time.After(unusedAfter)
		case <-unused:
			unused = nil
			c.collectUnused(ctx)
		case <-c.failed:
			if retry == nil {
				wait = firstRetry
				retry = time.After(wait)
			}
		case <-retry:
			if retry = nil; c.retry(ctx) {
				wait = min(2*wait, longestRetry)
				retry = time.After(wait)
			}
		case <-c.relieve:
			c.refreshAll(ctx)
		case <-c.lost:
			c.letGoOfLost()
		}
	}
}

// pinnedAge is how long pinned memory is kept that no extent has: to pin some again takes long.
const pinnedAge = 30 * time.Second

// unusedAfter is how long nobody has mapped anything when everything is brought home, of whatever age it is: programs
// that map something have the mount open, and after the last of them it should not be long until it can be unmounted.
const unusedAfter = 100 * time.Millisecond

// collectUnused has everything released brought home, unless somebody maps something.
func (c *Cache) collectUnused(ctx context.Context) {
	if c.mapped.Load() > 0 {
		return
	}
	for _, f := range c.snapshotFiles() {
		c.lanes.do(f, choreCollect, func() { _ = f.collectAll(ctx, nil) }) // what fails is noted
	}
}

// noteStuck logs once that the file does not answer, and once that it does again. It does not block.
func (f *File) noteStuck() {
	stuck := f.stuck()
	if f.stuckNoted.Swap(stuck) == stuck {
		return
	}
	if stuck {
		f.c.log.Warn("a file waits for its backing filesystem, or for a device, which does not answer; other files go on",
			"file", f.Name(), "since", time.Now().Add(-f.mu.heldFor()).Format(time.RFC3339))
	} else {
		f.c.log.Info("a file that waited goes on", "file", f.Name())
	}
}

// dueLocked reports whether a release is older than half the interval: with a tick of a quarter, it is home in time.
// Files of which a collect failed are left to retry.
func (f *File) dueLocked() bool {
	return f.collectErr == nil && !f.pendingSince.IsZero() && time.Since(f.pendingSince) >= f.c.interval/2
}

// collectDue notices what others did to the file in SOURCE, and collects the file if something in it is due.
func (f *File) collectDue(ctx context.Context) {
	if err := f.settleDue(ctx); err != nil && ctx.Err() == nil {
		f.c.log.Debug("comparing replicas with the backing file", "file", f.Name(), "error", err)
	}
	f.mu.Lock()
	due := f.dueLocked()
	if due {
		f.seen.Store(f.glanceLocked()) // what the status shows should home hang
	}
	f.mu.Unlock()
	if due {
		_ = f.collectAll(ctx, nil) // logged, and tried again
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.detached.Load() {
		return
	}
	f.untrackIdleLocked()
	if home, ok := f.home.(RemovableHome); ok && !f.orphan && home.Removed() {
		f.orphan = true // somebody removed it in SOURCE
		f.dropIdleLocked()
	}
}

// refreshAll brings replicas up to date so that their base copies are no longer needed. A program may see bytes of
// others before it acquires; release consistency allows that.
func (c *Cache) refreshAll(ctx context.Context) {
	for _, f := range c.snapshotFiles() {
		c.lanes.do(f, choreRefresh, func() { f.refreshBases(ctx) })
	}
}
