package pagecache

import (
	"context"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
)

// acquire brings the pages of rg up to date on the device of h, and returns how many were not.
func (f *File) acquire(ctx context.Context, h *holding, rg page.Range) (pages int64, err error) {
	start := time.Now()
	err = batches(rg, func(part page.Range) error {
		f.mu.Lock()
		defer f.mu.Unlock()
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := f.acquireLocked(ctx, h, part)
		pages += n
		return err
	})
	if pages > 0 {
		f.c.counters.FillTime.observe(time.Since(start))
	}
	return pages, err
}

func (f *File) acquireLocked(ctx context.Context, h *holding, rg page.Range) (pages int64, err error) {
	if err := f.collectLocked(ctx, rg, false); err != nil {
		return 0, err
	}
	for _, u := range f.lrc.Stale(rg, h.dev.owner) {
		if err := f.updateLocked(ctx, h, u); err != nil {
			f.lostLocked(h.dev, err)
			return pages, err
		}
		pages += u.Range.Len()
	}
	return pages, f.trackLocked(ctx, h, rg)
}

// updateLocked brings one run of pages from home to the device.
func (f *File) updateLocked(ctx context.Context, h *holding, u lrc.Update) error {
	buf, release, err := h.dev.HostBuffer(int(u.Range.Bytes()))
	if err != nil {
		return err
	}
	defer release()
	if err := f.readHomeLocked(u.Range, buf); err != nil {
		return err
	}
	switch u.Mode {
	case lrc.ModeFill, lrc.ModeCopy:
		if err := h.dev.CopyIn(ctx, h.copies(u.Range, buf)); err != nil {
			return err
		}
	case lrc.ModePatch:
		if err := h.dev.Patch(ctx, f.patchesLocked(h, u, buf)); err != nil {
			return err
		}
	}
	// The device agrees with the bytes in buf: with these, and not with home as somebody may read it later.
	for _, part := range f.writersLocked(h, u.Range) {
		if part.track || u.Mode == lrc.ModePatch {
			off := (part.pages.Start - u.Range.Start).Offset()
			f.rebaseLocked(h, part.pages, buf[off:off+part.pages.Bytes()])
		}
		f.dropBasesLocked(f.lrc.Updated(part.pages, h.dev.owner, part.track))
	}
	n := u.Range.Len()
	f.count(func(c *Counters) {
		switch u.Mode {
		case lrc.ModeFill:
			c.Fills.Add(1)
			c.FilledPages.Add(n)
		case lrc.ModeCopy:
			c.RefreshedPages.Add(n)
		case lrc.ModePatch:
			c.PatchedPages.Add(n)
		}
	})
	return nil
}

func (f *File) patchesLocked(h *holding, u lrc.Update, home []byte) []gpubackend.Patch {
	patches := make([]gpubackend.Patch, 0, u.Range.Len())
	for p := u.Range.Start; p < u.Range.End; p++ {
		base := f.bases[baseKey{p, u.Base}]
		x, off := h.at(p)
		if base == nil || x == nil {
			continue
		}
		at := (p - u.Range.Start).Offset()
		patches = append(patches, gpubackend.Patch{Mem: x.mem, Off: off, Base: base[:], Next: home[at : at+page.Size]})
	}
	return patches
}

// tracking is a run of pages that clients do, or do not, map for writing.
type tracking struct {
	pages page.Range
	track bool
}

// writersLocked cuts rg into the parts that some client maps for writing on the device of h, and the rest.
func (f *File) writersLocked(h *holding, rg page.Range) (parts []tracking) {
	rest := []page.Range{rg}
	for m := range f.mappings {
		if m.h == h && m.writable {
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
// program can have stored into them before: the digests of what is there are those of home.
func (f *File) trackLocked(ctx context.Context, h *holding, rg page.Range) error {
	for _, run := range f.lrc.Untracked(rg, h.dev.owner) {
		for _, part := range f.writersLocked(h, run) {
			if !part.track {
				continue
			}
			var err error
			h.each(part.pages, func(x *extent, pages page.Range) {
				if err == nil {
					err = h.dev.Digests(ctx, x.mem, pages.Offset()-x.index*x.size, x.agreedAt(pages))
				}
			})
			if err != nil {
				f.lostLocked(h.dev, err)
				return err
			}
			f.lrc.Track(part.pages, h.dev.owner)
		}
	}
	return nil
}
