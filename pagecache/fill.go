package pagecache

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// fromHomeLocked brings the stale pages of part up to date from home. It returns how many pages it brought and the
// first page that it did not reach. storing covers part. called are readers woken early, nil if there are none.
func (f *File) fromHomeLocked(
	ctx context.Context, h *holding, part page.Range, stale []lrc.Update, storing []tracking, until time.Time,
	called *mover.Crew, plan *lrc.AcquirePlan,
) (
	pages int64, next page.Index, err error,
) {
	if len(stale) == 0 {
		return 0, part.End, nil
	}
	defer f.enterReadsLocked(h)()
	spans, spoiled, wide := h.reads.Spans(part, func(span page.Range) bool {
		// Outside of part, released bytes may not be home yet, and the device may have no memory.
		return len(f.lrc.Pending(span, true)) == 0 && !f.flights.overlap(span) && h.covers(span)
	})
	if wide != part {
		plan.Widen(wide)
		stale = plan.Updates()
		storing = h.storingLocked(wide)
	}
	if slices.ContainsFunc(storing, func(t tracking) bool { return t.track }) ||
		slices.ContainsFunc(stale, func(u lrc.Update) bool { return u.Mode == lrc.ModePatch }) {
		// From here on digests change one by one, each by the goroutine that brings its page.
		h.agreeOn(stale)
	}
	fill := f.newFillLocked(h, stale, storing, spans, *plan)
	fill.Class, fill.Until, fill.Cold = mover.Acquire, until, len(spans) > 0
	fill.From, fill.Reads = f.home.Source(f.locking.pages()), &h.reads
	f.home.BeginRead()
	defer f.home.EndRead()
	fill.Forget(wide, spoiled)
	if err = fill.Run(ctx, called); err != nil {
		h.litter([]page.Range{wide})
	}
	// After an error, pieces may have arrived behind one that did not.
	next = part.End
	fills, filled := int64(0), page.Range{}
	for i := range fill.Pieces {
		x := &fill.Pieces[i]
		if !x.Done {
			next = min(next, max(x.Steps[0].Pages.Start, part.Start))
			continue
		}
		for _, s := range x.Steps {
			pages += s.Pages.Intersect(part).Len()
			if stale[s.Update].Mode == lrc.ModeFill {
				if filled.End != s.Pages.Start {
					fills++
				}
				filled = s.Pages
			}
		}
	}
	fill.Into.(*filling).endLocked(fills)
	return pages, next, err
}

// newFillLocked returns a transfer that brings updates from home through the host's page cache.
func (f *File) newFillLocked(
	h *holding, stale []lrc.Update, storing []tracking, spans []page.Range, plan lrc.AcquirePlan,
) *mover.Fill {
	return &mover.Fill{
		Device: h.dev.moves,
		From:   &mover.Source{Home: f.homeLocked()},
		Into:   &filling{f: f, h: h, plan: plan, stale: stale},
		Pieces: piecesOf(stale, storing, spans),
	}
}

// piecesOf converts updates to what mover.Pieces takes, and calls it.
func piecesOf(stale []lrc.Update, storing []tracking, spans []page.Range) []mover.Piece {
	runs := make([]mover.Run, len(storing))
	for i, t := range storing {
		runs[i] = mover.Run{Pages: t.pages, Storing: t.track}
	}
	return mover.Pieces(len(stale), func(i int) mover.Update {
		return mover.Update{Pages: stale[i].Range, Patch: stale[i].Mode == lrc.ModePatch}
	}, runs, spans)
}

// filling is the state and the result of a transfer of updates to one device. The holder of File.mu waits for the
// transfer.
type filling struct {
	f     *File
	h     *holding
	plan  lrc.AcquirePlan
	stale []lrc.Update

	mu sync.Mutex // serialises reports of arrived pieces
	// The fields below are protected by mu until the transfer has ended.
	tracked, others            []page.Range // scratch
	filled, refreshed, patched int64
	from                       mover.Ways
}

// placer walks over the extents of the pages that are filled.
type placer struct {
	walk
	of *filling
}

// Placer implements mover.Target.
func (t *filling) Placer() mover.Placer { return &placer{walk{h: t.h}, t} }

// AppendCopies implements mover.Placer.
func (p *placer) AppendCopies(list []gpubackend.Copy, pages page.Range, buf []byte) []gpubackend.Copy {
	return p.appendCopies(list, pages, buf)
}

// AppendPatches implements mover.Placer.
func (p *placer) AppendPatches(
	list []gpubackend.Patch, s *mover.Step, home []byte, sums []gpubackend.Digest,
) ([]gpubackend.Patch, error) {
	return p.of.f.appendPatchesLocked(list, &p.walk, s.Pages, p.of.stale[s.Update].Base, home, sums)
}

// Sent implements mover.Target.
func (t *filling) Sent([]*mover.Piece) {}

// Arrived implements mover.Target. It leaves alone the bases and digests of other pieces, which are still being read.
func (t *filling) Arrived(pieces []*mover.Piece) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.tracked, t.others = t.tracked[:0], t.others[:0]
	of := walk{h: t.h}
	for _, x := range pieces {
		t.from.Add(x.Ways)
		sums := x.Sums
		for k := range x.Steps {
			s := &x.Steps[k]
			if s.Hashed() {
				of.each(s.Pages, func(x *extent, part page.Range) { sums = sums[copy(x.agreeOn(part), sums):] })
			}
			list := &t.others
			if s.Storing {
				list = &t.tracked
			}
			if *list == nil {
				*list = make([]page.Range, 0, len(pieces)*len(x.Steps))
			}
			*list = page.AppendRange(*list, s.Pages)
			switch n := s.Pages.Len(); t.stale[s.Update].Mode {
			case lrc.ModeFill:
				t.filled += n
			case lrc.ModeCopy:
				t.refreshed += n
			case lrc.ModePatch:
				t.patched += n
			}
		}
	}
	t.f.bases.vacate(t.plan.Updated(t.tracked, true))
	t.f.bases.vacate(t.plan.Updated(t.others, false))
}

// endLocked adds the transfer to the counters. fills is the number of page runs that the device did not hold before.
// The transfer has ended.
func (t *filling) endLocked(fills int64) {
	f := t.f
	f.bases.sweep()
	f.countBases()
	f.count(func(c *Counters) {
		c.Fills.Add(fills)
		c.FilledPages.Add(t.filled)
		c.RefreshedPages.Add(t.refreshed)
		c.PatchedPages.Add(t.patched)
	})
	f.countWays(t.from)
}
