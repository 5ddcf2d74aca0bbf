package pagecache

import (
	"bytes"
	"context"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// Bytes that devices store past end of file are not part of the file, even if it grows later. Without the kernel's
// write-back cache, a request that extends the file zeroes such bytes first. With it, the kernel extends files without
// a request. When home grows, a device may already have stored inside a length that only the kernel knew. Therefore:
//
//   - Before a release examines its pages, the kernel sends what it has past home's end. Home is then as long as the
//     kernel knows. Stores past that end are discarded, on all devices, not only on the one that releases.
//   - If a device maps a file for writing past its end, the kernel asks for attributes before each write to the file,
//     since package fs does not let it cache them. Bytes in the pages after the end that the kernel knows are zeroed
//     then.
//   - When write-back by the kernel extends home, nothing is zeroed.
//   - Requests that extend the file zero from the end that the kernel knows (Change.Known). If package fs cannot find
//     that out, they zero from home's end, unless a write may have come since the kernel last sent everything. The
//     same holds for direct changes in SOURCE that extend the file.

const (
	// askedPages is the most pages past end of file that are examined before a write: 4 MiB.
	askedPages = batchPages
	// pastPages is the most pages past end of file that are copied from a device at once: 16 MiB.
	pastPages = 4 * batchPages
	// pastHold is the most pages past end of file that are examined under one hold of File.mu: 32 MiB.
	pastHold = 2 * pastPages
)

// prepareRelease prepares a release of rg by h: it discards stores past end of file, so that they go nowhere, now or
// later. It examines the page at the end of file only if the kernel may know the file to be longer. In that case it
// examines the memory of all holdings, since the file may grow without a request.
func (f *File) prepareRelease(ctx context.Context, h *holding, rg page.Range) error {
	if err := f.mu.LockIn(ctx); err != nil {
		return err
	}
	past := rg.End > page.Count(f.home.Size()) || f.kernel.CachesWrites() && rg.End.Offset() > f.home.Size()
	f.mu.Unlock()
	if !past {
		return nil
	}
	if err := f.kernel.SendGrowth(ctx); err != nil {
		return err
	}
	if f.kernel.CachesWrites() {
		h = nil
	}
	return f.forgetPastEnd(ctx, h, rg)
}

// ReachesPast reports whether a device maps the file for writing past size. It does not wait for File.mu: if the lock
// is not free, it returns true.
func (f *File) ReachesPast(size int64) bool {
	if !f.mu.TryRLock() {
		return true
	}
	defer f.mu.RUnlock()
	for m := range f.mappings {
		if m.writable && m.pages.End.Offset() > size {
			return true
		}
	}
	return false
}

// BeforeWrite is called before a program may write to the file without a request. known is Change.Known. It blocks on
// devices and on the kernel.
func (f *File) BeforeWrite(ctx context.Context, known int64) error {
	defer f.kernel.MayExtend()
	if err := f.mu.RLockIn(ctx); err != nil {
		return err
	}
	past := page.From(max(f.home.Size(), known)).Pages()
	f.mu.RUnlock()
	past.End = past.Start + 1 + askedPages
	return f.forgetPastEnd(ctx, nil, past)
}

// pastEnd is a run of pages with stores past end of file. bytes are the device's bytes of the whole run.
type pastEnd struct {
	h     *holding
	pages page.Range
	bytes []byte
}

// forgetPastEnd zeroes stores past end of file in the pages of rg, in memory of h or, if h is nil, of all holdings. The
// end may move meanwhile, and programs may then store inside the new length. So it zeroes only bytes that have not
// changed since it examined them.
func (f *File) forgetPastEnd(ctx context.Context, h *holding, rg page.Range) (err error) {
	for err == nil && !rg.Empty() {
		rg.Start, err = f.forgetSomePastEnd(ctx, h, rg)
	}
	return err
}

// forgetSomePastEnd is forgetPastEnd for the pages of rg before next.
func (f *File) forgetSomePastEnd(ctx context.Context, of *holding, rg page.Range) (next page.Index, err error) {
	for range 3 {
		var found []pastEnd
		if err := f.mu.LockIn(ctx); err != nil {
			return rg.Start, err
		}
		size := f.home.Size()
		found, next, err = f.pastEndLocked(ctx, of, rg)
		f.mu.Unlock()
		if err != nil || len(found) == 0 {
			return next, err
		}
		if err := f.kernel.SendGrowth(ctx); err != nil {
			return next, err
		}
		if err := f.mu.LockIn(ctx); err != nil {
			return next, err
		}
		same := f.home.Size() == size
		if same {
			err = f.zeroPastEndLocked(ctx, found)
		}
		f.mu.Unlock()
		if same || err != nil {
			return next, err
		}
	}
	return next, nil // programs keep extending the file
}

// pastEndLocked finds runs with stores past end of file in rg. It stops at the first ones found, or after as many pages
// as one hold allows. It has examined all pages before next.
func (f *File) pastEndLocked(ctx context.Context, of *holding,
	rg page.Range) (found []pastEnd, next page.Index, err error) {
	past := page.From(f.home.Size()).Pages().Intersect(rg).Intersect(page.Range{End: f.lrc.End()})
	looked := int64(0)
	for some := range f.lrc.Parts(past, pastPages) {
		for _, h := range f.holdings {
			if of != nil && h != of {
				continue
			}
			runs, err := h.modifiedLocked(ctx, some)
			for _, run := range runs {
				for part := range cut(run, bufferPages) {
					x := pastEnd{h, part, make([]byte, part.Bytes())}
					if err == nil {
						err = h.dev.moves.Out(ctx, mover.WriteBack, h.copies(part, x.bytes))
					}
					found = append(found, x)
				}
			}
			if err != nil && !f.lostLocked(h.dev, err) {
				return nil, some.End, h.dev.fault(err)
			}
		}
		if looked += some.Len(); len(found) > 0 || looked >= pastHold {
			return found, some.End, nil
		}
	}
	return nil, rg.End, nil
}

func (f *File) zeroPastEndLocked(ctx context.Context, found []pastEnd) error {
	for _, x := range found {
		if x.h.dev.lost.Load() || !x.h.covers(x.pages) {
			continue
		}
		next := bytes.Clone(x.bytes)
		clear(next[max(0, f.home.Size()-x.pages.Offset()):])
		var patches []gpubackend.Patch
		for p := x.pages.Start; p < x.pages.End; p++ {
			at := (p - x.pages.Start).Offset()
			before, after := x.bytes[at:at+page.Size], next[at:at+page.Size]
			if bytes.Equal(before, after) {
				continue
			}
			e, off := x.h.at(p)
			patches = append(patches, gpubackend.Patch{Mem: e.Memory(), Off: off, Base: before, Next: after})
		}
		if len(patches) == 0 {
			continue
		}
		f.foundPastEndLocked(x.h, len(patches))
		f.changed(x.pages)
		if err := x.h.dev.moves.Patch(ctx, mover.WriteBack, patches); err != nil && !f.lostLocked(x.h.dev, err) {
			return x.h.dev.fault(err)
		}
	}
	return nil
}

// foundPastEndLocked counts pages with stores past end of file. The log names the file the first time, because the
// stores are lost and their program may not know.
func (f *File) foundPastEndLocked(h *holding, pages int) {
	f.count(func(c *Counters) { c.PastEndPages.Add(int64(pages)) })
	h.pastEnd.Add(int64(pages))
	if !f.toldPastEnd {
		f.toldPastEnd = true
		f.c.log.Warn("stores past the end of a file are not kept; extend the file before it is mapped",
			"file", f.Name(), "size", f.home.Size(), "pages", pages)
	}
}
