package pagecache

import (
	"context"
	"time"
)

// run does the periodic work of the Cache until ctx ends. It collects released pages before they are older than the
// write-back interval, retries failed collects, refreshes replicas when base copies take too much memory, and makes
// files drop lost devices. It frees unused pinned memory and relays, and locks and unlocks pages of files. It never
// waits for a file: the lanes do the work.
func (c *Cache) run(ctx context.Context) {
	tick, pins := time.NewTicker(max(c.interval/4, 10*time.Millisecond)), time.NewTicker(c.pinTick)
	defer tick.Stop()
	defer pins.Stop()
	wait := firstRetry
	var retry, unused <-chan time.Time // nil: nothing to retry; no mapping has just ended
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			c.lanes.look()
			for _, f := range c.snapshotFiles() {
				f.noteStuck()
				c.lanes.do(f, choreDue, func() { f.collectDue(ctx) })
			}
		case <-pins.C:
			c.pinned.Trim(pinnedAge)
			c.idleRelays.trim(pinnedAge)
			for _, f := range c.snapshotFiles() {
				if f.mayLock() || f.locking.heat.read.Load() >= leastHot {
					c.lanes.do(f, choreLock, func() { f.lockDue(ctx) })
				}
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

// pinnedAge is how long unused pinned memory and relays are kept. Making them takes long. pinTick is how often the
// background looks for these, and for files whose pages are to be locked or unlocked.
const (
	pinnedAge = 30 * time.Second
	pinTick   = 500 * time.Millisecond
)

// unusedAfter is how long after the end of the last mapping everything is brought home, however recent. Programs that
// map files keep the mount open; once they are gone, it should be possible to unmount it soon.
const unusedAfter = 100 * time.Millisecond

// collectUnused starts to bring everything released home, unless a mapping exists.
func (c *Cache) collectUnused(ctx context.Context) {
	if c.mapped.Load() > 0 {
		return
	}
	for _, f := range c.snapshotFiles() {
		c.lanes.do(f, choreCollect, func() { _ = f.collectAll(ctx, nil) }) // errors are recorded by collectAll
	}
}

// noteStuck logs once when the file stops answering, and once when it answers again. It does not block.
func (f *File) noteStuck() {
	stuck := f.stuck()
	if f.sight.stuckNoted.Swap(stuck) == stuck {
		return
	}
	if stuck {
		f.c.log.Warn("a file waits for a backing filesystem or device that does not answer; other files are unaffected",
			"file", f.Name(), "since", time.Now().Add(-f.mu.heldFor()).Format(time.RFC3339))
	} else {
		f.c.log.Info("a file that was stuck answers again", "file", f.Name())
	}
}

// dueLocked reports whether the oldest release is older than half the interval. The tick is a quarter of the interval,
// so the release is home in time. Files whose last collect failed are left to retry.
func (f *File) dueLocked() bool {
	return f.backlog.err == nil && !f.backlog.since.IsZero() && time.Since(f.backlog.since) >= f.c.interval/2
}

// collectDue looks for changes made directly in SOURCE, and collects the file if a release is due.
func (f *File) collectDue(ctx context.Context) {
	if err := f.settleDue(ctx); err != nil && ctx.Err() == nil {
		f.c.log.Debug("comparing replicas with the backing file", "file", f.Name(), "error", err)
	}
	f.mu.LockLater()
	due := f.dueLocked()
	if due {
		f.sight.last.Store(glanceLocked(f)) // the status shows this if home hangs
	}
	f.mu.Unlock()
	if due {
		_ = f.collectAll(ctx, nil) // errors are logged, and the collect is retried
	}
	f.mu.LockLater()
	defer f.mu.Unlock()
	if f.detached.Load() {
		return
	}
	f.untrackIdleLocked()
	if !f.orphan && f.home.Removed() {
		f.orphan = true // it was removed directly in SOURCE
	}
	f.dropIdleLocked()
}

// refreshAll brings replicas up to date so that their base copies are no longer needed. A program may then see another
// program's bytes before it acquires; release consistency allows that.
func (c *Cache) refreshAll(ctx context.Context) {
	for _, f := range c.snapshotFiles() {
		c.lanes.do(f, choreRefresh, func() { f.refreshBases(ctx) })
	}
}
