package pagecache

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/kernel"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// release publishes the stores of programs into the pages of rg on the device of h. It returns the pages that differ
// from their base. On return the kernel holds no old copy of them. No data moves. If ctx ends before the pages are
// published, none of them is. release leaves out pages of open groups, and counts those that differ.
func (f *File) release(ctx context.Context, h *holding,
	rg page.Range) (modified []page.Range, grouped int64, err error) {
	start := time.Now()
	if err := f.prepareRelease(ctx, h, rg); err != nil {
		return nil, 0, err
	}
	if modified, err = h.modified(ctx, []page.Range{rg}); err != nil {
		return nil, 0, err
	}
	if len(modified) > 0 {
		f.c.hold.take()
		defer f.c.hold.drop()
	}
	if err := f.mu.LockIn(ctx); err != nil {
		return nil, 0, err
	}
	if all := pagesOf(modified); len(h.grouped) > 0 {
		modified = subtract(modified, h.grouped)
		grouped = all - pagesOf(modified)
	}
	// Stores past end of file are not kept.
	if modified, err = h.insideFileLocked(ctx, modified); err != nil {
		f.mu.Unlock()
		return nil, 0, err
	}
	p, err := f.releaseLocked(ctx, h, modified, rg)
	if err != nil {
		f.mu.Unlock()
		return nil, 0, err
	}
	f.kernel.Drop(p.drain)
	f.mu.Unlock()
	p.tellTimes(f.kernel.CachesWrites())
	// Another process's release of a shared page may have published our bytes too, and may still be draining.
	if err := f.kernel.Await(ctx, rg); err != nil {
		return modified, grouped, err
	}
	f.count(func(c *Counters) { c.Releases.Add(1); c.ReleasedPages.Add(p.pages) })
	f.c.counters.ReleaseTime.Observe(time.Since(start))
	return modified, grouped, nil
}

// released is the result of publishing pages of one file.
type released struct {
	pages   int64
	drain   lrc.Drain // what the kernel must drop
	dropped bool      // the kernel had pages to drop
	kernel  kernel.Pages
}

// releaseLocked publishes the pages in modified, which are in rg. If the kernel caches writes, earlier releases of the
// pages may have to be brought home first. It fails only if ctx ends while that goes on; then nothing is published.
func (f *File) releaseLocked(ctx context.Context, h *holding, modified []page.Range,
	rg page.Range) (p released, err error) {
	p.pages = pagesOf(modified)
	plan := f.lrc.BeginRelease(modified, rg, h.owner)
	for _, run := range plan.Collect {
		err := f.collectLocked(ctx, run, false)
		if err != nil && ctx.Err() != nil {
			// If the pages were published now, they would come home after the kernel's pages, and undo what the program
			// wrote. The interrupted caller releases again: at the latest when it unmaps.
			plan.Abort()
			return p, err
		}
		if err != nil {
			f.c.log.Warn("an earlier release could not be written back before the next", "file", f.Name(), "error", err)
		}
	}
	p.drain = plan.Commit()
	f.releases++
	f.backlog.coming.Add(p.pages)
	if p.pages > 0 {
		if err := f.home.Modified(); err != nil {
			f.c.log.Warn("a release cannot set the time of modification", "file", f.Name(), "error", err)
		}
	}
	p.kernel, p.dropped = f.kernel.Pages(), len(p.drain.Pages) > 0
	if p.pages > 0 && f.backlog.since.IsZero() {
		f.backlog.since = time.Now()
		f.c.hold.join() // this release is a user, and has waited
	}
	return p, nil
}

// tellTimes makes the kernel drop the file's times, unless they went along with dropped pages. If the kernel caches
// writes, it always does so. The caller holds no lock.
func (p released) tellTimes(cachesWrites bool) {
	if p.pages > 0 && (!p.dropped || cachesWrites) {
		kernel.Modified(p.kernel)
	}
}

// insideFileLocked returns the pages in modified that were modified before the end of the file.
func (h *holding) insideFileLocked(ctx context.Context, modified []page.Range) ([]page.Range, error) {
	f := h.f
	modified = before(modified, page.Count(f.home.Size()))
	last := page.Range{Start: page.Index(f.home.Size() >> page.Shift), End: page.Count(f.home.Size())}
	if n := len(modified); last.Empty() || n == 0 || modified[n-1].End < last.End || !h.covers(last) {
		return modified, nil
	}
	bytes := make([]byte, page.Size)
	if err := h.dev.moves.Out(ctx, mover.WriteBack, h.copies(last, bytes)); err != nil {
		f.lostLocked(h.dev, err)
		return nil, h.dev.fault(err)
	}
	clear(bytes[f.home.Size()-last.Offset():])
	if x, _ := h.at(last.Start); h.sums(bytes)[0] == x.agreedAt(last)[0] {
		modified = before(modified, last.Start)
	}
	return modified, nil
}

// storedLocked returns the tracked pages of rg with unreleased stores that may be part of the file.
func (h *holding) storedLocked(ctx context.Context, rg page.Range) ([]page.Range, error) {
	f := h.f
	modified, err := h.modifiedLocked(ctx, rg)
	if err != nil {
		f.lostLocked(h.dev, err)
		return nil, h.dev.fault(err)
	}
	if f.kernel.MayBeLonger() {
		return modified, nil
	}
	return h.insideFileLocked(ctx, modified)
}

// before returns the pages of ascending ranges before end. It reuses the memory of ranges, because a release of
// scattered pages has very many of them.
func before(ranges []page.Range, end page.Index) []page.Range {
	for n := len(ranges); n > 0; n-- {
		last := &ranges[n-1]
		if last.End = min(last.End, end); !last.Empty() {
			break
		}
		ranges = ranges[:n-1]
	}
	return ranges
}

// scan is a part of an extent that is searched for modified pages without File.mu.
type scan struct {
	x      *extent
	pages  page.Range
	agreed []gpubackend.Digest // at the start; nobody changes these
	of     *digests            // the digests that agreed is part of; nil for zeros
}

// modified returns the tracked pages of ascending ranges whose digests differ from those of their bases. It reads
// device memory without File.mu. The calling mapping pins the extents.
func (h *holding) modified(ctx context.Context, ranges []page.Range) ([]page.Range, error) {
	f := h.f
	if err := f.mu.LockIn(ctx); err != nil {
		return nil, err
	}
	scans, asked := h.beginScansLocked(ranges)
	f.mu.Unlock()
	found, err := h.dev.Modified(ctx, asked)
	if gone := h.dev.gone(); err == nil && gone != nil {
		err = gone // the device is lost, and the pages with it
	}

	// A collect or another process's acquire may have moved the base of a page during the scan. The page was compared
	// with the old digest, so it is compared again, now that nothing moves.
	end := func() (moved [][]page.Range) {
		for _, s := range scans {
			moved = append(moved, h.endScanLocked(s))
		}
		return moved
	}
	if err := f.mu.LockOr(ctx, func() { end() }); err != nil {
		return nil, err
	}
	defer f.mu.Unlock()
	moved := end()
	var modified []page.Range
	if err == nil {
		modified, err = h.gatherScansLocked(ctx, scans, found, moved)
	}
	if err != nil {
		f.lostLocked(h.dev, err)
		return nil, h.dev.fault(err)
	}
	return modified, nil
}

// beginScansLocked begins scans of the tracked pages of ranges. asked has the request to the device for each scan.
func (h *holding) beginScansLocked(ranges []page.Range) (scans []scan, asked []gpubackend.Scan) {
	f := h.f
	var tracked []page.Range
	for _, rg := range ranges {
		tracked = append(tracked, f.lrc.Tracked(rg.Intersect(f.fileRangeLocked()), h.owner)...)
	}
	for _, run := range tracked {
		h.each(run, func(x *extent, part page.Range) {
			x.eachAgreed(part, func(part page.Range, agreed []gpubackend.Digest) {
				s := scan{x: x, pages: part, agreed: agreed}
				if &agreed[0] != &x.dev.zeros[0] {
					s.of = x.agreed
					s.of.users++
					x.scans++
				}
				scans = append(scans, s)
				asked = append(asked, gpubackend.Scan{Mem: x.Memory(), Off: x.off(part.Start), Agreed: agreed})
			})
		})
	}
	return scans, asked
}

// gatherScansLocked joins the results of scans, and checks the pages of moved again. It may overwrite the lists of
// found.
func (h *holding) gatherScansLocked(
	ctx context.Context, scans []scan, found, moved [][]page.Range,
) ([]page.Range, error) {
	runs := 0
	for _, list := range found {
		runs += len(list)
	}
	modified := make([]page.Range, 0, runs)
	for i, s := range scans {
		runs := found[i]
		for k := range runs {
			runs[k].Start, runs[k].End = s.pages.Start+runs[k].Start, s.pages.Start+runs[k].End
		}
		if len(moved[i]) > 0 {
			runs = subtract(runs, moved[i])
			for _, again := range moved[i] {
				more, err := h.modifiedLocked(ctx, again)
				if err != nil {
					return nil, err
				}
				runs = append(runs, more...)
			}
			slices.SortFunc(runs, func(a, b page.Range) int { return cmp.Compare(a.Start, b.Start) })
		}
		for _, run := range runs {
			modified = page.AppendRange(modified, run)
		}
	}
	return modified, nil
}

// endScanLocked ends a scan and returns the runs of its pages whose agreed digests have changed.
func (h *holding) endScanLocked(s scan) (moved []page.Range) {
	defer s.of.drop()
	if !h.has(s.x) {
		return nil // lost with its device
	}
	if s.of != nil && s.of == s.x.agreed {
		s.x.scans--
		return nil
	}
	s.x.eachAgreed(s.pages, func(part page.Range, now []gpubackend.Digest) {
		was := s.agreed[part.Start-s.pages.Start:]
		if &now[0] == &was[0] {
			return // zeros, as before
		}
		for k, d := range now {
			if d != was[k] {
				p := part.Start + page.Index(k)
				moved = page.AppendRange(moved, page.Range{Start: p, End: p + 1})
			}
		}
	})
	return moved
}

// modifiedLocked is modified for callers that hold mu.
func (h *holding) modifiedLocked(ctx context.Context, rg page.Range) (modified []page.Range, err error) {
	f := h.f
	var scans []gpubackend.Scan
	var parts []page.Range
	for _, run := range f.lrc.Tracked(rg, h.owner) {
		h.each(run, func(x *extent, part page.Range) {
			x.eachAgreed(part, func(part page.Range, agreed []gpubackend.Digest) {
				scans = append(scans, gpubackend.Scan{Mem: x.Memory(), Off: x.off(part.Start), Agreed: agreed})
				parts = append(parts, part)
			})
		})
	}
	if len(scans) == 0 {
		return nil, nil
	}
	found, err := h.dev.Modified(ctx, scans)
	if err != nil {
		return nil, err
	}
	for i, part := range parts {
		for _, r := range found[i] {
			modified = page.AppendRange(modified, page.Range{Start: part.Start + r.Start, End: part.Start + r.End})
		}
	}
	return modified, nil
}
