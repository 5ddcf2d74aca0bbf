package pagecache

import (
	"context"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// undo takes back unreleased stores of programs into the pages of the group. They get their bytes of the last
// agreement with home. If those cannot be read any more, the device gives the pages up, and they read as zeros. Nobody
// releases the pages during the call, and nothing of them is pending.
func (p *groupPart) undo(ctx context.Context) {
	f, h := p.f, p.h
	modified, err := f.modified(ctx, h, p.pages)
	if h.dev.gone() != nil {
		return // the stores are lost with the device
	}
	if err != nil {
		modified = p.pages
	}
	for _, rg := range modified {
		for part := range cut(rg, bufferPages) {
			f.mu.Lock()
			if err := p.undoLocked(ctx, part); err != nil {
				f.c.log.Error("stores of an unreleased group cannot be taken back; the device gives up their pages",
					"file", f.Name(), "pages", part.String(), "device", h.dev.info.Ordinal, "error", err)
				p.loseStoresLocked(ctx, part)
			}
			f.mu.Unlock()
		}
	}
}

// undoLocked is undo for at most bufferPages pages.
func (p *groupPart) undoLocked(ctx context.Context, rg page.Range) error {
	f, h := p.f, p.h
	if err := f.lookLocked(ctx); err != nil {
		return err
	}
	if err := f.settleHomeLocked(ctx, rg); err != nil {
		return err
	}
	f.changed(rg)
	for _, zeros := range f.lrc.TrackedBy(rg, h.owner, func(b lrc.Base) bool { return b == lrc.BaseZero }) {
		if err := f.zeroPagesLocked(ctx, h, zeros); err != nil {
			return err
		}
	}
	b := takeBuffer()
	defer giveBuffer(b)
	for _, of := range f.lrc.Bases(rg, h.owner) {
		buf := b[:of.Range.Bytes()]
		if of.Base == lrc.BaseHome {
			if err := f.readHomeLocked(of.Range, buf); err != nil {
				return err
			}
		}
		for i := of.Range.Start; of.Base != lrc.BaseHome && i < of.Range.End; i++ {
			base := f.bases.at(i, of.Base)
			if base == nil {
				return missingBase(i)
			}
			copy(buf[(i-of.Range.Start).Offset():], base[:])
		}
		if err := h.dev.moves.In(ctx, mover.Acquire, h.copies(of.Range, buf)); err != nil {
			return err
		}
		f.rebaseLocked(h, of.Range, buf)
	}
	return nil
}

// loseStoresLocked makes the device give up rg. Programs may go on storing there.
func (p *groupPart) loseStoresLocked(ctx context.Context, rg page.Range) {
	f, h := p.f, p.h
	if f.giveUpLocked(ctx, h, rg) != nil {
		return // the device is lost, or the pages are littered
	}
	for _, w := range f.writersLocked(h, rg) {
		if w.track {
			f.hollowLocked(h, w.pages)
		}
	}
}
