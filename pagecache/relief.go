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

// Base copies are needed to bring replicas up to date. If there is no room for more copies, replicas are brought up to
// date early, and their copies are freed. A program may then see bytes of others before it acquires, which release
// consistency allows. A change that needs room makes it in its own file, under that file's File.mu; the background's
// lanes do it for all files before the room runs out. If other files have used all the room, the copies that a change
// keeps are freed right after it. So the account is exceeded by at most the copies of the changes under way, each of at
// most holdBases pages.
//
// A collect waits for a device that hangs, and so does this. If a device fails in another way and is not lost, nobody
// may lose bytes for that: the copies stay, above the limit, and the log says so.

// holdBases is the most pages of which copies are kept at once when there is no room, 8 MiB: those of a portion.
const holdBases = collectPortion

// relieveLocked makes room for copies of so many pages by bringing replicas of f up to date. It reports whether there
// is enough. No portion is on its way home, because portions refer to bases.
func (f *File) relieveLocked(ctx context.Context, pages int64) (room bool) {
	m := &f.c.memory
	if f.c.makeRoom(pages * page.Size) {
		return true
	}
	if len(f.bases.blocks) == 0 {
		return false
	}
	if err := f.refreshLocked(ctx, page.Range{End: f.lrc.End()}); err != nil && ctx.Err() == nil {
		f.c.log.Warn("replicas cannot be brought up to date, so base copies exceed the limit of host memory",
			"file", f.Name(), "error", err)
	}
	return m.fits(pages * page.Size)
}

// refreshLocked brings the tracked pages of rg whose bases are copies up to date, on all devices. Pending pages stay
// pending.
func (f *File) refreshLocked(ctx context.Context, rg page.Range) (err error) {
	for part := range f.lrc.Parts(rg, holdCollect) {
		// Changes made directly in SOURCE must be known before a page is taken for home's.
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

// patchBehindLocked is refreshLocked for pages that are not in doubt. If one device fails, it goes on with the others.
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

// patchLocked carries out a plan for part with bytes from home.
func (f *File) patchLocked(ctx context.Context, h *holding, part page.Range, plan lrc.AcquirePlan) error {
	stale := plan.Updates()
	if len(stale) == 0 {
		return nil
	}
	h.agreeOn(stale)
	fill := f.newFillLocked(h, stale, h.storingLocked(part), nil, plan)
	fill.Class = mover.WriteBack
	err := fill.Run(ctx, nil)
	fill.Into.(*filling).endLocked(0)
	return err
}

// keepsLocked returns how many pages of rg need copies before home changes, at most most. end is where these pages end,
// or the end of rg if they are all.
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

// partLocked returns the first part of a change that can be made in parts, or all of it if there is room for the bases.
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
			f.c.log.Warn("replicas could not be refreshed", "file", f.Name(), "error", err)
		}
		if !little || err != nil {
			return
		}
	}
}

// littleRoom reports whether replicas should be refreshed now, before a change has to wait for room.
func (c *Cache) littleRoom() bool { return !c.memory.fits(c.memory.limit / 4) }
