package pagecache

import (
	"context"
	"errors"
	"math"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/versions"
)

// Base copies are what a replica needs to be brought up to date. So when there is no room for more, replicas are
// brought up to date before anybody asks, and their copies go: a program may see bytes of others before it acquires,
// which release consistency allows. Whoever needs the room does so for the file that he changes, of which he has
// File.mu; the background's lanes do it for all files, before there is none left. Where other files have all of it,
// what a change keeps goes again right after it. So the account is exceeded by no more than what the changes under way
// keep, each of at most holdBases pages.
//
// A device that hangs is waited for, as by a collect. Where it fails in another way, and is not lost, nobody is to lose
// bytes for that: the copies stay, beyond the limit, and the log says so.

// holdBases is the most pages of which copies are kept at once where there is no room, 8 MiB: those of a portion.
const holdBases = collectPortion

// relieveLocked makes room for copies of so many pages by bringing replicas of f up to date, and reports whether there
// is enough. No portion is on its way home, which refers to bases.
func (f *File) relieveLocked(ctx context.Context, pages int64) (room bool) {
	m := &f.c.memory
	if m.fits(pages * page.Size) {
		return true
	}
	if len(f.bases.blocks) == 0 {
		return false
	}
	if err := f.refreshLocked(ctx, page.Range{End: f.lrc.End()}); err != nil && ctx.Err() == nil {
		f.c.log.Warn("replicas cannot be brought up to date, and base copies take more than the host memory that they should",
			"file", f.Name(), "error", err)
	}
	return m.fits(pages * page.Size)
}

// refreshLocked brings the tracked pages of rg whose bases are copies up to date, on all devices. What is pending stays
// pending.
func (f *File) refreshLocked(ctx context.Context, rg page.Range) (err error) {
	for part := range f.lrc.Parts(rg, holdCollect) {
		// What others did to home is known of a page before it is taken for home's.
		if err := f.settleHomeLocked(ctx, part); err != nil {
			return err
		}
		if e := f.patchBehindLocked(ctx, part); e != nil {
			err = e
		}
		if e := ctx.Err(); e != nil {
			return e
		}
	}
	return err
}

// patchBehindLocked is refreshLocked of pages that are not in doubt. It goes on with other devices where one fails.
func (f *File) patchBehindLocked(ctx context.Context, rg page.Range) (err error) {
	for o, h := range f.holdings {
		plan := f.lrc.BeginRelieve(rg, o)
		e := f.patchLocked(ctx, h, rg, plan)
		plan.End()
		if e != nil && !f.lostLocked(h.dev, e) {
			err = errors.Join(err, h.dev.fault(e))
		}
	}
	return err
}

// patchLocked carries out a plan for part from home.
func (f *File) patchLocked(ctx context.Context, h *holding, part page.Range, plan lrc.AcquirePlan) error {
	stale := plan.Updates()
	if len(stale) == 0 {
		return nil
	}
	h.agreeOn(stale)
	fill := f.newFillLocked(h, stale, f.storingLocked(h, part), nil, plan)
	fill.Class = mover.WriteBack
	err := fill.Run(ctx, nil)
	fill.Into.(*filling).endLocked(0)
	return err
}

// keepsLocked returns how many pages of rg need copies before home changes, but no more than most, and where the last
// of these ends: that of rg, if they are all.
func (f *File) keepsLocked(rg page.Range, except versions.Owner, most int64) (pages int64, end page.Index) {
	for part := range f.lrc.Parts(rg, holdPeer) {
		for _, run := range f.lrc.Keeps([]page.Range{part}, except) {
			if pages += run.Len(); pages > most {
				return most, run.End - page.Index(pages-most)
			}
		}
	}
	return pages, rg.End
}

// partLocked returns the first part of a change that can be made in parts, or all where there is room for the bases.
func (f *File) partLocked(c Change) Change {
	if c.Kind != ChangeZero {
		return c
	}
	rg := page.Span(c.Off, c.Len).Pages()
	if pages, _ := f.keepsLocked(rg, versions.CPU, math.MaxInt64); f.c.memory.fits(pages * page.Size) {
		return c
	}
	if _, end := f.keepsLocked(rg, versions.CPU, holdBases); end < rg.End {
		c.Len = end.Offset() - c.Off
	}
	return c
}

// refreshBases brings the file's replicas up to date in the background while base copies leave little room.
func (f *File) refreshBases(ctx context.Context) {
	f.mu.Lock()
	whole := page.Range{End: f.lrc.End()}
	f.mu.Unlock()
	for part := range cut(whole, holdCollect) {
		f.mu.Lock()
		little := len(f.bases.blocks) > 0 && f.c.littleRoom()
		var err error
		if little {
			err = f.refreshLocked(ctx, part)
		}
		f.mu.Unlock()
		if err != nil && !errors.Is(err, context.Canceled) {
			f.c.log.Warn("refreshing replicas", "file", f.Name(), "error", err)
		}
		if !little || err != nil {
			return
		}
	}
}

// littleRoom says that replicas are to be refreshed before somebody has to wait for it.
func (c *Cache) littleRoom() bool { return !c.memory.fits(c.memory.limit / 4) }
