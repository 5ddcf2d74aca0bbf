package pagecache

import (
	"bytes"
	"context"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
)

// collectChunk is the number of pages that are brought home in one piece: 1 MiB.
const collectChunk = 256

// collectLocked brings home what devices released of rg, the lowest owner of a page first. entering says that the kernel
// asks for the pages in order to hold them; otherwise pages that drain are left alone. After an error the pages that
// were not brought home are still pending.
func (f *File) collectLocked(ctx context.Context, rg page.Range, entering bool) error {
	for {
		pending := f.lrc.Pending(rg, entering)
		if len(pending) == 0 {
			return nil
		}
		start := time.Now()
		for _, p := range pending {
			if err := f.collectRunLocked(ctx, p); err != nil {
				if d := f.c.owner(p.Owner); d != nil && f.lostLocked(d, err) {
					break // what was pending there is gone; look again
				}
				f.collectErr = err
				return err
			}
		}
		f.collectErr = nil
		f.c.counters.CollectTime.observe(time.Since(start))
	}
}

func (f *File) collectRunLocked(ctx context.Context, p lrc.Pending) error {
	h := f.holdings[p.Owner]
	size := int(min(p.Range.Len(), collectChunk)) << page.Shift
	buf, release, err := h.dev.HostBuffer(size)
	if err != nil {
		return err
	}
	defer release()
	for at := p.Range.Start; at < p.Range.End; at += collectChunk {
		if err := ctx.Err(); err != nil {
			return err
		}
		part := page.Range{Start: at, End: min(at+collectChunk, p.Range.End)}
		if err := f.collectChunkLocked(ctx, h, part, p, buf[:part.Bytes()]); err != nil {
			return err
		}
	}
	return nil
}

// collectChunkLocked brings the pages of part home. The device's bytes are read once, into mine; they, and not what the
// device has a moment later, are what home gets and what the device is compared with from now on.
func (f *File) collectChunkLocked(ctx context.Context, h *holding, part page.Range, p lrc.Pending, mine []byte) error {
	if err := h.dev.CopyOut(ctx, h.copies(part, mine)); err != nil {
		return err
	}
	if err := f.keepHomeLocked(part, p.Owner); err != nil {
		return err
	}
	merged := mine
	agrees := func(page.Index) bool { return true }
	if p.Base != lrc.BaseHome {
		home := make([]byte, part.Bytes())
		if err := f.readHomeLocked(part, home); err != nil {
			return err
		}
		merged = make([]byte, part.Bytes())
		f.mergeLocked(part, p.Base, merged, mine, home)
		agrees = func(i page.Index) bool {
			off := (i - part.Start).Offset()
			return bytes.Equal(merged[off:off+page.Size], mine[off:off+page.Size])
		}
	}
	if err := f.writeHomeLocked(part, merged); err != nil {
		return err
	}
	h.each(part, func(x *extent, pages page.Range) {
		off := (pages.Start - part.Start).Offset()
		sums := x.agreedAt(pages)
		h.dev.Key().SumPages(mine[off:off+pages.Bytes()], sums)
	})
	// Runs of pages with the same outcome are reported together.
	for at := part.Start; at < part.End; {
		same := agrees(at)
		end := at + 1
		for end < part.End && agrees(end) == same {
			end++
		}
		run := page.Range{Start: at, End: end}
		keep, drop := f.lrc.Collected(run, p.Owner, same)
		for _, k := range keep {
			from := (k.Range.Start - part.Start).Offset()
			f.putBaseLocked(k.Range, k.Base, mine[from:from+k.Range.Bytes()])
		}
		f.dropBasesLocked(drop)
		if !same {
			f.count(func(c *Counters) { c.MergedPages.Add(run.Len()) })
		}
		at = end
	}
	f.count(func(c *Counters) { c.Collects.Add(1); c.CollectedPages.Add(part.Len()) })
	return nil
}

// mergeLocked merges the pages of rg: dst is theirs with what mine changed since base b on top. Overlaps are counted.
func (f *File) mergeLocked(rg page.Range, b lrc.Base, dst, mine, theirs []byte) {
	var overlap int64
	for i := rg.Start; i < rg.End; i++ {
		off := (i - rg.Start).Offset()
		d, m, t := dst[off:off+page.Size], mine[off:off+page.Size], theirs[off:off+page.Size]
		base := f.bases[baseKey{i, b}]
		if base == nil {
			// Home could not be read when it was about to change, and so did not change.
			copy(d, m)
			continue
		}
		// What lies past end of file is nobody's.
		n := max(min(f.size-i.Offset(), page.Size), 0)
		overlap += int64(lrc.Merge3(d[:n], base[:n], m[:n], t[:n]))
		copy(d[n:], m[n:])
	}
	if overlap > 0 {
		f.count(func(c *Counters) { c.OverlappingBytes.Add(overlap) })
	}
}

// writeHomeLocked writes the pages of rg home, up to end of file.
func (f *File) writeHomeLocked(rg page.Range, p []byte) error {
	sig, err := f.home.Signature()
	if err != nil {
		return err
	}
	n := min(rg.Bytes(), sig.Size-rg.Offset())
	if n > 0 {
		_, err = f.home.WriteAt(p[:n], rg.Offset())
	}
	// Also after an error: a part may have been written, and is not somebody else's change.
	if note := f.noteHomeLocked(); err == nil {
		err = note
	}
	return err
}

// collectAll brings everything released of the file home, a batch at a time, leaving out pages that drain.
func (f *File) collectAll(ctx context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	whole := page.Range{End: f.lrc.End()}
	started := time.Now()
	err := batches(whole, func(part page.Range) error {
		if err := f.collectLocked(ctx, part, false); err != nil {
			return err
		}
		// Let requests in between.
		f.mu.Unlock()
		f.mu.Lock()
		return ctx.Err()
	})
	if err != nil {
		return err
	}
	if len(f.lrc.Pending(whole, true)) == 0 {
		f.pendingSince = time.Time{}
	} else if f.pendingSince.Before(started) {
		f.pendingSince = started
	}
	return nil
}

// Sync brings everything released home, waiting for releases that are under way, and then calls do, which makes home
// durable. It fails with the error of home that kept bytes from being written; they are kept and tried again.
func (f *File) Sync(do func() error) error {
	ctx := context.Background()
	f.mu.Lock()
	whole := page.Range{End: f.lrc.End()}
	f.mu.Unlock()
	if err := f.waitDrains(ctx, whole); err != nil {
		return err
	}
	if err := f.collectAll(ctx); err != nil {
		return err
	}
	return do()
}

// untrackIdleLocked stops tracking what no client maps for writing any more, so that no bases are kept for it.
func (f *File) untrackIdleLocked() {
	for o, h := range f.holdings {
		idle := []page.Range{{End: f.lrc.End()}}
		for m := range f.mappings {
			if m.h == h && m.writable {
				idle = page.Subtract(idle, m.pages)
			}
		}
		for _, rg := range idle {
			f.dropBasesLocked(f.lrc.Untrack(rg, o))
		}
	}
}

// rebaseLocked makes the digests of the pages of rg, which dev tracks, those of the bytes in base, page for page.
func (f *File) rebaseLocked(h *holding, rg page.Range, base []byte) {
	h.each(rg, func(x *extent, part page.Range) {
		off := (part.Start - rg.Start).Offset()
		h.dev.Key().SumPages(base[off:off+part.Bytes()], x.agreedAt(part))
	})
}
