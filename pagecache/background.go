package pagecache

import (
	"context"
	"errors"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
)

// run collects released pages before they are older than the write-back interval, refreshes replicas when base copies take too
// much memory, and has files let go of lost devices. It ends with ctx.
func (c *Cache) run(ctx context.Context) {
	defer c.background.Done()
	tick := time.NewTicker(max(c.interval/4, 10*time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			c.collectDue(ctx)
		case <-c.relieve:
			c.refreshAll(ctx)
		case <-c.lost:
			c.letGoOfLost()
		}
	}
}

// collectDue collects files with releases older than half the interval: with a tick of a quarter, they are home in time.
func (c *Cache) collectDue(ctx context.Context) {
	for _, f := range c.snapshotFiles() {
		f.mu.Lock()
		due := !f.pendingSince.IsZero() && time.Since(f.pendingSince) >= c.interval/2
		failed := f.collectErr
		f.mu.Unlock()
		if due {
			err := f.collectAll(ctx, nil)
			// One line when it starts to fail, not one a tick.
			if err != nil && !errors.Is(err, context.Canceled) && failed == nil {
				c.log.Error("released bytes cannot be written back; they are kept and tried again", "file", f.Name(), "error", err)
			}
			if err == nil && failed != nil {
				c.log.Info("released bytes are written back again", "file", f.Name())
			}
		}
		f.mu.Lock()
		if !f.detached.Load() {
			f.untrackIdleLocked()
		}
		f.mu.Unlock()
	}
}

// refreshAll brings replicas up to date so that their base copies are no longer needed. A program may see bytes of others
// before it acquires; release consistency allows that.
func (c *Cache) refreshAll(ctx context.Context) {
	for _, f := range c.snapshotFiles() {
		if c.baseBytes.Load() <= c.baseLimit {
			return
		}
		f.mu.Lock()
		var held []*holding
		if f.bases.n > 0 {
			for _, h := range f.holdings {
				held = append(held, h)
			}
		}
		f.mu.Unlock()
		for _, h := range held {
			if err := f.refresh(ctx, h); err != nil && !errors.Is(err, context.Canceled) {
				c.log.Warn("refreshing replicas", "file", f.Name(), "device", h.dev.info.Ordinal, "error", err)
			}
		}
	}
}

// refresh brings the stale pages that h tracks up to date.
func (f *File) refresh(ctx context.Context, h *holding) error {
	f.mu.Lock()
	whole := page.Range{End: f.lrc.End()}
	f.mu.Unlock()
	for part := range cut(whole, batchPages) {
		if err := f.refreshPart(ctx, h, part); err != nil {
			return err
		}
	}
	return nil
}

// refreshPart is refresh of one part. Nothing pins the extents between two of them, so what is there is asked for in each.
func (f *File) refreshPart(ctx context.Context, h *holding, part page.Range) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, run := range f.lrc.Tracked(part, h.dev.owner) {
		if err := f.acquireAllLocked(ctx, h, run); err != nil {
			return err
		}
	}
	return ctx.Err()
}
