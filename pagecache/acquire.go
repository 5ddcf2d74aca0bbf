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
	// holdTime is how long an acquire begins new transfers under one hold of File.mu. Those under way then are waited
	// for: a request of the CPU waits for two holds at worst, each of which is this and as long as home takes for the
	// pieces that the readers are at (mover.PieceBytes for each of at most mover.MaxReaders).
	holdTime = 20 * time.Millisecond
	// holdPages is the most pages that one hold looks at: 4 GiB.
	holdPages = 1 << 20
	// holdCollect is the most pages that an acquire or a flush collects under one hold, 64 MiB; holdPeer the most that
	// it copies from other devices, 1 GiB.
	holdCollect = 1 << 14
	holdPeer    = 1 << 18
	// stalePages is the number of pages that are looked at before readers are called for what was found, 128 MiB.
	stalePages = 1 << 15
	// digestGap is the number of pages between two runs whose digests are taken along with theirs, to save a call.
	digestGap = 256
)

// acquire brings the pages of rg up to date on the device of h, and returns how many were not. It lets go of File.mu
// now and then.
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

// acquireAllLocked is acquire under one hold.
func (f *File) acquireAllLocked(ctx context.Context, h *holding, rg page.Range) (err error) {
	for rest := rg; !rest.Empty() && err == nil; {
		_, rest.Start, err = f.acquireLocked(ctx, h, rest, 0)
	}
	return err
}

// acquireLocked brings the pages of rg up to next up to date: all, or as many as a hold allows, but one piece at least.
// Transfers from home begin for so long, or without end if hold is 0.
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
		// What nobody can be storing into may come from another device; the rest, and what no device has, from home.
		storing := f.storingLocked(h, part)
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
	return pages, part.End, f.trackLocked(ctx, h, part)
}

// staleOf appends to list what a plan has to bring of part. Where that is more than one reader should bring, it calls
// readers, who are being woken while the caller finds out the rest.
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

// updateLists has memory for what is stale: of scattered pages it is a long list.
var updateLists = sync.Pool{New: func() any { return new([]lrc.Update) }}

// tracking is a run of pages that clients do, or do not, map for writing.
type tracking struct {
	pages page.Range
	track bool
}

// writersLocked cuts rg into the parts that some client maps for writing on the device of h, and the rest.
func (f *File) writersLocked(h *holding, rg page.Range) []tracking {
	return f.splitLocked(rg, func(m *Mapping) bool { return m.h == h && m.writable })
}

// storingLocked is writersLocked for clients whose programs may be storing already: they were given the memory.
func (f *File) storingLocked(h *holding, rg page.Range) []tracking {
	return f.splitLocked(rg, func(m *Mapping) bool { return m.h == h && m.writable && m.exported })
}

// splitLocked cuts rg into the parts that are in a mapping that is counted, and the rest.
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

// trackLocked starts tracking the pages of rg that the device holds untracked and that clients map for writing. No
// program can have stored into them before: the digests of what is there are those of home. So the device takes them,
// at the speed of its memory.
func (f *File) trackLocked(ctx context.Context, h *holding, rg page.Range) error {
	var runs []page.Range
	for _, w := range f.writersLocked(h, rg) {
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
		if err := f.digestLocked(ctx, h, span, runs[i:n]); err != nil {
			plan.Abort()
			f.lostLocked(h.dev, err)
			return h.dev.fault(err)
		}
		i = n
	}
	plan.Commit(runs)
	return nil
}

// digestLocked makes the digests of runs, which lie in span, those of what the device has.
func (f *File) digestLocked(ctx context.Context, h *holding, span page.Range, runs []page.Range) (err error) {
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

// rebaseLocked makes the digests of the pages of rg, which dev tracks, those of the bytes in base, page for page.
func (f *File) rebaseLocked(h *holding, rg page.Range, base []byte) {
	h.each(rg, func(x *extent, part page.Range) {
		off := (part.Start - rg.Start).Offset()
		h.dev.Key().SumPages(base[off:off+part.Bytes()], x.agreeOn(part))
	})
}

// appendPatchesLocked appends what brings the pages of one update, of which home has the bytes in home with the digests
// sums, up to date.
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
			continue // bytes were written that were there before
		}
		at := (p - rg.Start).Offset()
		patches = append(patches, gpubackend.Patch{
			Mem: x.Memory(), Off: x.off(p), Base: base[:], Next: home[at : at+page.Size],
			Agreed: agreed,
		})
	}
	return patches, nil
}
