package pagecache

import (
	"context"
	"sync"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

const (
	// holdTime is how long an acquire starts new transfers under one hold of File.mu. It then waits for those under
	// way. A CPU request waits for two holds at worst. Each hold takes holdTime plus the time that home needs for the
	// pieces being read (mover.PieceBytes for each of at most mover.MaxReaders).
	holdTime = 20 * time.Millisecond
	// holdPages is the most pages that one hold examines: 4 GiB.
	holdPages = 1 << 20
	// holdCollect is the most pages that an acquire or a flush collects under one hold: 64 MiB. holdPeer is the most
	// pages that it copies from other devices: 1 GiB.
	holdCollect = 1 << 14
	holdPeer    = 1 << 18
	// stalePages is the number of pages examined at a time before readers may be woken: 128 MiB.
	stalePages = 1 << 15
	// digestGap is the largest gap between two runs that are digested by one call, in pages. The digests of the gap are
	// wasted.
	digestGap = 256
)

// acquire brings the pages of rg up to date on the device of h, and returns how many were stale. It unlocks File.mu
// from time to time.
func (f *File) acquire(ctx context.Context, h *holding, rg page.Range) (pages int64, err error) {
	start := time.Now()
	leave, err := f.enterReads(ctx, h)
	if err != nil {
		return 0, err
	}
	defer leave()
	for rest := rg; !rest.Empty() && err == nil; {
		if err := f.mu.LockIn(ctx); err != nil {
			return pages, err
		}
		if err = ctx.Err(); err == nil {
			var n int64
			n, rest.Start, err = f.acquireLocked(ctx, h, rest, holdTime)
			pages += n
		}
		pause := h.reads.Pause()
		f.mu.Unlock()
		pause(ctx)
	}
	if pages > 0 {
		f.c.counters.FillTime.Observe(time.Since(start))
	}
	return pages, err
}

// acquireAllLocked is acquire under a single hold of File.mu.
func (f *File) acquireAllLocked(ctx context.Context, h *holding, rg page.Range) (err error) {
	for rest := rg; !rest.Empty() && err == nil; {
		_, rest.Start, err = f.acquireLocked(ctx, h, rest, 0)
	}
	return err
}

// acquireLocked brings the pages of rg before next up to date: as many as one hold allows, but at least one piece. It
// starts transfers from home for the time hold, or without limit if hold is 0.
func (f *File) acquireLocked(ctx context.Context, h *holding, rg page.Range,
	hold time.Duration) (pages int64, next page.Index, err error) {
	if err := h.dev.gone(); err != nil {
		return 0, rg.Start, err
	}
	part := rg.Intersect(page.Range{Start: rg.Start, End: rg.Start + holdPages})
	if part.End, err = f.settleSomeLocked(ctx, part); err != nil {
		return 0, rg.Start, err
	}
	part.End, err = f.collectSomeLocked(ctx, part)
	if err != nil {
		return 0, rg.Start, err
	}
	list := updateLists.Get().(*[]lrc.Update)
	defer updateLists.Put(list)
	plan := f.lrc.BeginAcquire(part, h.owner)
	stale, readers := staleOf(plan, (*list)[:0], part)
	defer readers.Dismiss()
	*list = stale
	if len(stale) > 0 {
		// Pages that no program can be storing into may come from another device. The rest comes from home.
		storing := h.storingLocked(part)
		var n int64
		n, part.End, err = f.fromPeersLocked(ctx, h, part, stale, storing, plan)
		if pages += n; err == nil {
			if n > 0 {
				stale = plan.AppendUpdates(nil, part)
			}
			var until time.Time
			if hold != 0 {
				until = time.Now().Add(hold)
			}
			n, part.End, err = f.fromHomeLocked(ctx, h, part, stale, storing, until, readers, &plan)
			pages += n
		}
		if err != nil {
			plan.End()
			f.lostLocked(h.dev, err)
			return pages, part.Start, h.dev.fault(err)
		}
	}
	plan.End()
	return pages, part.End, h.trackLocked(ctx, part)
}

// staleOf appends the updates that plan needs for part to list. If they are more than one reader should read, it wakes
// further readers early, while the list is still being computed.
func staleOf(plan lrc.AcquirePlan, list []lrc.Update, part page.Range) (stale []lrc.Update, called *mover.Crew) {
	seen, bytes := 0, int64(0)
	for rg := range cut(part, stalePages) {
		list = plan.AppendUpdates(list, rg)
		if called != nil {
			continue
		}
		for ; seen < len(list); seen++ {
			bytes += list[seen].Range.Bytes()
		}
		if len(list) > 2*mover.PieceRuns || bytes > 2*mover.LeastPiece {
			called = mover.CallCrew()
		}
	}
	return list, called
}

// updateLists recycles lists of stale pages. Such a list is long if the pages are scattered.
var updateLists = sync.Pool{New: func() any { return new([]lrc.Update) }}

// tracking is a run of pages. track says whether a client maps them for writing.
type tracking struct {
	pages page.Range
	track bool
}

// writersLocked splits rg into parts that some client maps for writing on the device of h, and the rest.
func (h *holding) writersLocked(rg page.Range) []tracking {
	f := h.f
	return f.splitLocked(rg, func(m *Mapping) bool { return m.h == h && m.writable })
}

// storingLocked is writersLocked restricted to clients that have been given the memory: their programs may be storing
// already.
func (h *holding) storingLocked(rg page.Range) []tracking {
	f := h.f
	return f.splitLocked(rg, func(m *Mapping) bool { return m.h == h && m.writable && m.exported })
}

// splitLocked splits rg into parts inside a mapping for which counts is true, and the rest.
func (f *File) splitLocked(rg page.Range, counts func(m *Mapping) bool) (parts []tracking) {
	rest := []page.Range{rg}
	for m := range f.mappings {
		if counts(m) {
			rest = page.Subtract(rest, m.pages)
		}
	}
	at := rg.Start
	for _, r := range rest {
		if at < r.Start {
			parts = append(parts, tracking{page.Range{Start: at, End: r.Start}, true})
		}
		parts = append(parts, tracking{r, false})
		at = r.End
	}
	if at < rg.End {
		parts = append(parts, tracking{page.Range{Start: at, End: rg.End}, true})
	}
	return parts
}

// trackLocked starts tracking the untracked pages of rg that the device holds and that clients map for writing. No
// program can have stored into them yet, so they equal home. The device computes their digests, at the speed of its
// memory.
func (h *holding) trackLocked(ctx context.Context, rg page.Range) error {
	f := h.f
	var runs []page.Range
	for _, w := range h.writersLocked(rg) {
		if w.track {
			runs = append(runs, w.pages)
		}
	}
	if len(runs) == 0 {
		return nil
	}
	plan := f.lrc.BeginExpose(rg, h.owner)
	runs = intersect(plan.Untracked, runs)
	for i := 0; i < len(runs); {
		span, n := runs[i], i+1
		for n < len(runs) && runs[n].Start-span.End <= digestGap {
			span.End = runs[n].End
			n++
		}
		if err := h.digestLocked(ctx, span, runs[i:n]); err != nil {
			plan.Abort()
			f.lostLocked(h.dev, err)
			return h.dev.fault(err)
		}
		i = n
	}
	plan.Commit(runs)
	return nil
}

// digestLocked sets the digests of runs, which lie in span, to those of the bytes on the device.
func (h *holding) digestLocked(ctx context.Context, span page.Range, runs []page.Range) (err error) {
	h.each(span, func(x *extent, part page.Range) {
		if err != nil {
			return
		}
		x.doubtful = x.doubtful || x.writable
		off := x.off(part.Start)
		if len(runs) == 1 {
			err = h.dev.Digests(ctx, x.Memory(), off, x.agreeOn(part))
			return
		}
		sums := make([]gpubackend.Digest, part.Len())
		if err = h.dev.Digests(ctx, x.Memory(), off, sums); err != nil {
			return
		}
		for _, run := range runs {
			if run = run.Intersect(part); !run.Empty() {
				copy(x.agreeOn(run), sums[run.Start-part.Start:])
			}
		}
	})
	return err
}

// rebaseLocked sets the digests of the pages of rg, which the device tracks, to those of the bytes in base.
func (h *holding) rebaseLocked(rg page.Range, base []byte) {
	h.each(rg, func(x *extent, part page.Range) {
		off := (part.Start - rg.Start).Offset()
		h.dev.Key().SumPages(base[off:off+part.Bytes()], x.agreeOn(part))
	})
}

// appendPatchesLocked appends the patches that bring the pages of one update up to date. home has home's bytes of these
// pages, and sums their digests.
func (f *File) appendPatchesLocked(patches []gpubackend.Patch, of *walk, rg page.Range, b lrc.Base, home []byte,
	sums []gpubackend.Digest) ([]gpubackend.Patch, error) {
	for p := rg.Start; p < rg.End; p++ {
		base := f.bases.at(p, b)
		x, _ := of.at(p)
		if base == nil || x == nil {
			return patches, missingBase(p)
		}
		agreed := &x.agreedAt(page.Range{Start: p, End: p + 1})[0]
		if sums[p-rg.Start] == *agreed {
			continue // a write left the bytes as they were
		}
		at := (p - rg.Start).Offset()
		patches = append(patches, gpubackend.Patch{
			Mem: x.Memory(), Off: x.off(p), Base: base[:], Next: home[at : at+page.Size],
			Agreed: agreed,
		})
	}
	return patches, nil
}
