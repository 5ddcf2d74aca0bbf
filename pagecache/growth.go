package pagecache

import (
	"bytes"
	"context"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// What devices store past end of file is not part of the file, also not when it grows. Where every write goes home at
// once, a request that makes the file longer has such bytes zeroed before. A kernel that caches writes makes files
// longer without a request, so by the time that home grows a device may have stored inside the length that only the
// kernel knew. Therefore:
//
//   - Before the pages of a release are looked at, the kernel sends what it has past home's end, and home is as long as
//     the kernel knows. What all devices stored past that goes, not only what the one that releases did.
//   - The kernel asks for attributes before each write of a file that a device maps for writing past its end, since it
//     may not keep those (package fs). That is when bytes past the end are zeroed, on the pages that follow the end.
//   - When the kernel's pages make home longer, nothing is zeroed.
//   - Requests that make the file longer zero as ever, unless a write may have come since the kernel last sent
//     everything. The same goes for whoever makes it longer in SOURCE.

// GrowingPages is a KernelPages of a kernel that may know a file to be longer than home is.
type GrowingPages interface {
	KernelPages
	// SendFrom has the kernel send what it has of the file from off on. It blocks as Invalidate does.
	SendFrom(off int64) error
}

const (
	// askedPages is the most pages past end of file that are looked at before a write: 4 MiB.
	askedPages = batchPages
	// pastPages is the most pages past end of file that are copied from a device at once: 16 MiB.
	pastPages = 4 * batchPages
	// pastHold is the most pages past end of file that are looked at under one hold of File.mu: 32 MiB.
	pastHold = 2 * pastPages
)

// sendGrowth makes home as long as the kernel knows the file to be.
func (f *File) sendGrowth(ctx context.Context) error {
	if err := f.mu.LockIn(ctx); err != nil {
		return err
	}
	kernel, grows := f.kernel.(GrowingPages)
	size, asked := f.size, f.asked.Load()
	f.mu.Unlock()
	if !grows {
		return nil
	}
	if err := kernel.SendFrom(size); err != nil {
		return err
	}
	if err := f.mu.LockIn(ctx); err != nil {
		return err
	}
	f.sentAll = asked
	f.mu.Unlock()
	return nil
}

// prepareRelease prepares for a release of rg by h, of which what lies past end of file goes nowhere, now or later. In
// the page that the file ends in it is looked for only where the kernel may know the file to be longer. There the
// memory of all holdings is looked at: the file may become longer without a request.
func (f *File) prepareRelease(ctx context.Context, h *holding, rg page.Range) error {
	if err := f.mu.LockIn(ctx); err != nil {
		return err
	}
	past := rg.End > page.Count(f.size) || f.c.writeBack && rg.End.Offset() > f.size
	f.mu.Unlock()
	if !past {
		return nil
	}
	if err := f.sendGrowth(ctx); err != nil {
		return err
	}
	if f.c.writeBack {
		h = nil
	}
	return f.forgetPastEnd(ctx, h, rg)
}

// longerLocked reports whether the kernel may know the file to be longer than home is.
func (f *File) longerLocked() bool { return f.c.writeBack && f.sentAll != f.asked.Load() }

// ReachesPast reports whether a device maps the file for writing past size, or may: it does not wait for others.
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

// BeforeWrite is called before a program may write to the file without a request. It blocks on devices and on the
// kernel.
func (f *File) BeforeWrite(ctx context.Context) error {
	defer f.asked.Add(1)
	if err := f.mu.RLockIn(ctx); err != nil {
		return err
	}
	end := page.Count(f.size) + askedPages
	f.mu.RUnlock()
	return f.forgetPastEnd(ctx, nil, page.Range{End: end})
}

// pastEnd is a run of pages of which a device has something past end of file, and what that is.
type pastEnd struct {
	h     *holding
	pages page.Range
	bytes []byte
}

// forgetPastEnd zeroes what was stored past end of file in the pages of rg, into memory of h, or of all holdings where
// that is nil. The end may move meanwhile, and programs store inside what they know to be the file by then: only bytes
// that are as they were before go.
func (f *File) forgetPastEnd(ctx context.Context, h *holding, rg page.Range) (err error) {
	for err == nil && !rg.Empty() {
		rg.Start, err = f.forgetSomePastEnd(ctx, h, rg)
	}
	return err
}

// forgetSomePastEnd is forgetPastEnd of the pages of rg up to next.
func (f *File) forgetSomePastEnd(ctx context.Context, of *holding, rg page.Range) (next page.Index, err error) {
	for range 3 {
		var found []pastEnd
		if err := f.mu.LockIn(ctx); err != nil {
			return rg.Start, err
		}
		size := f.size
		found, next, err = f.pastEndLocked(ctx, of, rg)
		f.mu.Unlock()
		if err != nil || len(found) == 0 {
			return next, err
		}
		if err := f.sendGrowth(ctx); err != nil {
			return next, err
		}
		if err := f.mu.LockIn(ctx); err != nil {
			return next, err
		}
		same := f.size == size
		if same {
			err = f.zeroPastEndLocked(ctx, found)
		}
		f.mu.Unlock()
		if same || err != nil {
			return next, err
		}
	}
	return next, nil // programs are making it longer all the time
}

// pastEndLocked finds the first runs in the pages of rg, and no more than one hold should. There are none of others up
// to next.
func (f *File) pastEndLocked(ctx context.Context, of *holding,
	rg page.Range) (found []pastEnd, next page.Index, err error) {
	past := page.From(f.size).Pages().Intersect(rg).Intersect(page.Range{End: f.lrc.End()})
	looked := int64(0)
	for some := range f.lrc.Parts(past, pastPages) {
		for _, h := range f.holdings {
			if of != nil && h != of {
				continue
			}
			runs, err := f.modifiedLocked(ctx, h, some)
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
		clear(next[max(0, f.size-x.pages.Offset()):])
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

// foundPastEndLocked counts pages with stores past end of file. The log names the file the first time: the stores are
// not kept, and their program may not know.
func (f *File) foundPastEndLocked(h *holding, pages int) {
	f.count(func(c *Counters) { c.PastEndPages.Add(int64(pages)) })
	h.pastEnd.Add(int64(pages))
	if !f.toldPastEnd {
		f.toldPastEnd = true
		f.c.log.Warn("stores past the end of a file are not kept: make it as long as what is mapped before",
			"file", f.Name(), "size", f.size, "pages", pages)
	}
}
