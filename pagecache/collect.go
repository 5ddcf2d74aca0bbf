package pagecache

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/versions"
)

// collectChunk is the most pages that a device is asked for in one call, scattered or not, 8 MiB; collectRun is the most
// that home is given in one, 1 MiB.
const (
	collectChunk = 2048
	collectRun   = 256
)

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
		// Pages of one owner go together, wherever they are.
		slices.SortStableFunc(pending, func(a, b lrc.Pending) int { return cmp.Compare(a.Owner, b.Owner) })
		for len(pending) > 0 {
			n := 1
			for n < len(pending) && pending[n].Owner == pending[0].Owner {
				n++
			}
			owner := pending[0].Owner
			if err := f.collectOwnerLocked(ctx, owner, pending[:n]); err != nil {
				if d := f.c.owner(owner); d != nil && f.lostLocked(d, err) {
					break // what was pending there is gone; look again
				}
				if d := f.c.owner(owner); d != nil {
					err = d.fault(err)
				}
				f.collectErr = err
				return err
			}
			pending = pending[n:]
		}
		f.collectErr = nil
		f.c.counters.CollectTime.observe(time.Since(start))
	}
}

// collectSomeLocked brings home what devices released of the pages of rg up to next, of which no more than holdCollect pages
// are pending.
func (f *File) collectSomeLocked(ctx context.Context, rg page.Range) (next page.Index, err error) {
	next = rg.End
	count := int64(0)
	for _, p := range f.lrc.Pending(rg, false) {
		if count += p.Range.Len(); count >= holdCollect {
			next = p.Range.End - page.Index(count-holdCollect)
			break
		}
	}
	if count == 0 {
		return next, nil
	}
	return next, f.collectLocked(ctx, page.Range{Start: rg.Start, End: next}, false)
}

// collectOwnerLocked brings home what one owner released, pieces of collectChunk pages at a time.
func (f *File) collectOwnerLocked(ctx context.Context, o versions.Owner, pending []lrc.Pending) error {
	h := f.holdings[o]
	var chunk []lrc.Pending
	room := int64(collectChunk)
	flush := func() error {
		if err := ctx.Err(); err != nil {
			return err
		}
		buf, release, err := h.dev.HostBuffer(int(collectChunk-room) << page.Shift)
		if err != nil {
			return err
		}
		defer release()
		err = f.collectChunkLocked(ctx, h, chunk, buf)
		chunk, room = chunk[:0], collectChunk
		return err
	}
	for _, p := range pending {
		for !p.Range.Empty() {
			part := p
			part.Range.End = min(p.Range.End, p.Range.Start+page.Index(min(room, collectRun)))
			p.Range.Start = part.Range.End
			chunk = append(chunk, part)
			if room -= part.Range.Len(); room == 0 {
				if err := flush(); err != nil {
					return err
				}
			}
		}
	}
	if len(chunk) == 0 {
		return nil
	}
	return flush()
}

// collectChunkLocked brings the pages of chunk home, ascending runs of one owner. The device's bytes are read once, into
// mine, run after run; they, and not what the device has a moment later, are what home gets and what the device is
// compared with from now on. After an error of home, the runs before the one at fault are home.
func (f *File) collectChunkLocked(ctx context.Context, h *holding, chunk []lrc.Pending, mine []byte) error {
	o := chunk[0].Owner
	ranges := make([]page.Range, len(chunk))
	parts := make([][]byte, len(chunk)) // of mine
	var copies []gpubackend.Copy
	at := int64(0)
	for i, p := range chunk {
		ranges[i], parts[i] = p.Range, mine[at:at+p.Range.Bytes()]
		at += p.Range.Bytes()
		copies = append(copies, h.copies(p.Range, parts[i])...)
	}
	if err := h.dev.CopyOut(ctx, copies); err != nil {
		return err
	}
	if err := f.keepHomeLocked(ranges, o); err != nil {
		return err
	}
	merged := make([][]byte, len(chunk))
	sums := make([][]gpubackend.Digest, len(chunk))
	if err := inParallel(len(chunk), maxReaders, func(i int) error {
		sums[i] = make([]gpubackend.Digest, ranges[i].Len())
		h.dev.Key().SumPages(parts[i], sums[i])
		if merged[i] = parts[i]; chunk[i].Base == lrc.BaseHome {
			return nil
		}
		home := make([]byte, len(parts[i]))
		if err := f.readHomeLocked(ranges[i], home); err != nil {
			return err
		}
		merged[i] = make([]byte, len(parts[i]))
		f.mergeLocked(ranges[i], chunk[i].Base, merged[i], parts[i], home)
		return nil
	}); err != nil {
		return err
	}
	written, err := f.writeHomeLocked(ranges, merged)
	for i := range written {
		from := sums[i]
		h.each(ranges[i], func(x *extent, part page.Range) { from = from[copy(x.agreeOn(part), from):] })
	}
	f.collectedLocked(o, ranges[:written], parts, merged)
	return err
}

// collectedLocked reports ranges that are home. parts has the owner's bytes of each, merged what home has now: where they
// differ somebody else's bytes are in home too, and the owner's are kept as its base.
func (f *File) collectedLocked(o versions.Owner, ranges []page.Range, parts, merged [][]byte) {
	var agree, differ []page.Range
	for i, rg := range ranges {
		if &parts[i][0] == &merged[i][0] {
			agree = page.AppendRange(agree, rg)
			continue
		}
		for p := rg.Start; p < rg.End; p++ {
			off, one := (p - rg.Start).Offset(), page.Range{Start: p, End: p + 1}
			if bytes.Equal(merged[i][off:off+page.Size], parts[i][off:off+page.Size]) {
				agree = page.AppendRange(agree, one)
			} else {
				differ = page.AppendRange(differ, one)
			}
		}
	}
	_, drop := f.lrc.Collected(agree, o, true)
	f.dropBasesLocked(drop)
	keep, drop := f.lrc.Collected(differ, o, false)
	i := 0
	for _, k := range keep {
		for p := k.Range.Start; p < k.Range.End; p++ {
			for ranges[i].End <= p {
				i++
			}
			off := (p - ranges[i].Start).Offset()
			f.putBaseLocked(page.Range{Start: p, End: p + 1}, k.Base, parts[i][off:off+page.Size])
		}
	}
	f.dropBasesLocked(drop)
	var pages, merges int64
	for _, rg := range ranges {
		pages += rg.Len()
	}
	for _, rg := range differ {
		merges += rg.Len()
	}
	f.count(func(c *Counters) {
		if c.CollectedPages.Add(pages); pages > 0 {
			c.Collects.Add(1)
		}
		c.MergedPages.Add(merges)
	})
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

// writeHomeLocked writes the pages of ranges home, up to end of file, and returns how many ranges are there. It is no faster
// on several cores: filesystems write one file under one lock.
func (f *File) writeHomeLocked(ranges []page.Range, bufs [][]byte) (written int, err error) {
	sig, err := f.home.Signature()
	if err != nil {
		return 0, err
	}
	for written < len(ranges) && err == nil {
		rg := ranges[written]
		if n := min(rg.Bytes(), sig.Size-rg.Offset()); n > 0 {
			_, err = f.home.WriteAt(bufs[written][:n], rg.Offset())
		}
		if err == nil {
			written++
		}
	}
	// Also after an error: a part may have been written, and is not somebody else's change.
	if note := f.noteHomeLocked(); err == nil {
		err = note
	}
	return written, err
}

// collectAll brings everything released of the file home, a part at a time, leaving out pages that drain. arrived, if it is
// not nil, is called without File.mu after each part.
func (f *File) collectAll(ctx context.Context, arrived func(home Home, part page.Range)) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	whole := page.Range{End: f.lrc.End()}
	started := time.Now()
	for rest := whole; !rest.Empty(); {
		next, err := f.collectSomeLocked(ctx, rest)
		if err != nil {
			return err
		}
		part, home := page.Range{Start: rest.Start, End: next}, f.home
		rest.Start = next
		// Let requests in between.
		f.mu.Unlock()
		if arrived != nil {
			arrived(home, part)
		}
		f.mu.Lock()
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	if len(f.lrc.Pending(whole, true)) == 0 {
		f.pendingSince = time.Time{}
	} else if f.pendingSince.Before(started) {
		f.pendingSince = started
	}
	return nil
}

// Sync brings everything released home, waiting for releases that are under way. It fails with the error of home that kept
// bytes from being written; they are kept and tried again. Then it calls do, which makes home durable, unless do is nil. The
// disk begins to write as soon as the first bytes are home. With do it fails with EIO, once, after released bytes were lost with a
// device; everything else is done then.
func (f *File) Sync(do func() error) error {
	ctx := context.Background()
	f.mu.Lock()
	whole := page.Range{End: f.lrc.End()}
	f.mu.Unlock()
	if err := f.waitDrains(ctx, whole); err != nil {
		return err
	}
	if do == nil {
		return f.collectAll(ctx, nil)
	}
	var writing sync.WaitGroup
	defer writing.Wait()
	if err := f.collectAll(ctx, func(home Home, part page.Range) {
		if h, ok := home.(WriteBacker); ok {
			writing.Go(func() { h.StartWriteBack(part.Offset(), part.Bytes()) })
		}
	}); err != nil {
		return err
	}
	err := do()
	writing.Wait() // home may be closed from here on
	return errors.Join(f.reportLosses(), err)
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
