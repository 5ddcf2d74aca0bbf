package pagecache

import (
	"context"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/cleanread"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// collectingReadPages is the least number of pages that a CPU read brings from a device at once, if that many are
// there: 1 MiB, more than the kernel's read-ahead asks for.
const collectingReadPages = 256

// mostCollectingReadPages is the most, 8 MiB: the size of one device call, and enough work for several processors to
// merge.
const mostCollectingReadPages = collectPortion

// collectingRuns remembers the last runs that CPU reads brought home. A read that continues one of them takes twice as
// much. Unlike read-ahead, it is asked only when something has to be brought anyway.
type collectingRuns struct {
	runs [8]collectingRun
	next int // the next one to forget
}

type collectingRun struct {
	end   page.Index
	pages page.Index
}

// from returns the pages to bring home for a read of rg: rg, and pages after it up to most in all.
func (r *collectingRuns) from(rg page.Range, most page.Index) page.Range {
	run := &r.runs[r.next]
	pages := min(collectingReadPages, most)
	for i := range r.runs {
		if x := &r.runs[i]; x.pages > 0 && rg.Start <= x.end && x.end <= rg.End {
			run, pages = x, min(2*x.pages, most)
			break
		}
	}
	if run == &r.runs[r.next] {
		r.next = (r.next + 1) % len(r.runs)
	}
	*run = collectingRun{end: max(rg.End, rg.Start+pages), pages: pages}
	return page.Range{Start: rg.Start, End: run.end}
}

// Read serves a read request of len(p) bytes at off. direct says that the bytes will not enter the kernel's page cache.
// If fromHome is true, home has everything and the caller reads it there; otherwise n bytes are in p. home is the
// caller's way to read it. If it is nil, devices are used only for bytes that nobody else has. Read blocks on home and
// on devices, never on the kernel. If ctx ends, the remaining bytes come home later.
func (f *File) Read(ctx context.Context, p []byte, off int64, direct bool,
	home HomeReader) (n int, fromHome bool, err error) {
	if f.readFlying(p, off) {
		return len(p), false, nil
	}
	size, ok := int64(0), false
	if len(p) > 0 {
		size, ok = f.nothingPending(page.Covering(off, int64(len(p))), direct, home)
	}
	if !ok {
		size, n, fromHome, err = f.readInTurn(ctx, p, off, direct, home != nil)
	}
	if size <= off {
		return n, fromHome || ok, err
	}
	n, err = f.clean.Serve(ctx, p[:min(int64(len(p)), size-off)], off, size, home, direct)
	return n, false, err
}

// nothingPending answers as readPending does, but without taking mu; ok says whether it could. It may be called at any
// time.
func (f *File) nothingPending(rg page.Range, direct bool, home HomeReader) (size int64, ok bool) {
	size, ok = f.clean.NothingPending(rg, direct, home)
	return size, ok && !f.detached.Load()
}

// readInTurn is readPending, but only one read of a file at a time waits for mu. The next ones usually find that it
// brought their pages, too. A crowd of reads at mu would keep the background from bringing more.
func (f *File) readInTurn(
	ctx context.Context, p []byte, off int64, direct, fromDevices bool,
) (size int64, n int, fromHome bool, err error) {
	select {
	case f.turn <- struct{}{}:
	default: // Done starts a goroutine for requests of the kernel
		select {
		case f.turn <- struct{}{}:
		case <-ctx.Done():
			return 0, 0, false, ctx.Err()
		}
	}
	parts, ok := f.holdShown(p, off)
	if !ok {
		defer func() { <-f.turn }()
		return f.readPending(ctx, p, off, direct, fromDevices)
	}
	<-f.turn
	f.readParts(p, off, parts)
	return 0, len(p), false, nil
}

// readPending makes sure that home has all released bytes of a read. If nothing had to be done, and devices may serve
// the read, size is the file's size; otherwise it is 0.
func (f *File) readPending(
	ctx context.Context, p []byte, off int64, direct, fromDevices bool,
) (size int64, n int, fromHome bool, err error) {
	rg := page.Covering(off, int64(len(p)))
	if err := f.mu.LockIn(ctx); err != nil {
		return 0, 0, false, err
	}
	defer f.mu.Unlock()
	if f.detached.Load() {
		return 0, 0, true, nil
	}
	var pending []lrc.Pending
	if direct {
		// The kernel may have a dirty copy, so draining pages are left alone: their release has not returned yet.
		pending = f.lrc.Pending(rg, false)
	} else {
		f.kernel.Reads(rg)
		pending = f.lrc.CPURead(rg)
	}
	if len(pending) > 0 {
		n, fromHome, err = f.readBringingLocked(ctx, p, off, direct, pending)
		return 0, n, fromHome, err
	}
	if f.flights.overlap(rg) {
		n, err := f.readOverLocked(p, off)
		f.showLocked(rg)
		return 0, n, false, err
	}
	serves := fromDevices && f.servesLocked()
	if serves {
		size = f.home.Size()
	}
	if fromDevices && !f.kernel.HasMerged() {
		f.clean.Publish(rg, direct, cleanread.State{Size: f.home.Size(), Serves: serves, Changes: f.home.LookedAt()})
	}
	return size, 0, true, nil
}

// readBringingLocked is readPending for pages of which something is pending.
func (f *File) readBringingLocked(
	ctx context.Context, p []byte, off int64, direct bool, pending []lrc.Pending,
) (n int, fromHome bool, err error) {
	rg := page.Covering(off, int64(len(p)))
	start := time.Now()
	var pages int64
	for _, q := range pending {
		pages += q.Range.Len()
	}
	fly := pages >= f.c.leastFlight
	if err := f.bringLocked(ctx, rg, !direct, fly); err != nil {
		if ctx.Err() != nil {
			return 0, false, err
		}
		// Home cannot take the bytes now: its disk may be full. The program must see them all the same, but the kernel
		// must not keep a page of which something is pending.
		return f.readMergedLocked(ctx, p, off, !direct, !direct)
	}
	// The next pages will be asked for next. Transfers page by page would cost ten times as much.
	ahead := f.aheadLocked(rg, fly)
	if ahead.End > rg.End {
		_ = f.bringLocked(ctx, page.Range{Start: rg.End, End: ahead.End}, false, fly)
	}
	f.count(func(c *Counters) { c.CollectingReads.Add(1); c.CollectingReadPages.Add(pages) })
	f.c.counters.CollectingReadTime.Observe(time.Since(start))
	f.followLocked(page.Range{Start: rg.Start, End: max(rg.End, ahead.End)}, rg.End)
	if !f.flights.overlap(rg) {
		return 0, true, nil
	}
	n, err = f.readOverLocked(p, off)
	return n, false, err
}

// ReadRange brings released bytes home for requests that read home by other means than Read.
func (f *File) ReadRange(ctx context.Context, bytes page.Bytes) error {
	if err := f.mu.LockIn(ctx); err != nil {
		return err
	}
	defer f.mu.Unlock()
	if f.detached.Load() {
		return nil
	}
	return f.collectLocked(ctx, bytes.Pages(), false)
}

// readMergedLocked reads [off, off+len(p)) as if all released bytes were home, without changing home. entering is as
// for lrc.File.Pending. kept says that the bytes enter the kernel's page cache: the kernel is made to drop them again.
func (f *File) readMergedLocked(ctx context.Context, p []byte, off int64,
	entering, kept bool) (n int, fromHome bool, err error) {
	rg := page.Covering(off, int64(len(p)))
	buf, err := f.mergedLocked(ctx, rg, entering)
	if kept {
		f.kernel.GetsMerged(rg, buf, f.c.background.Go)
	}
	got := page.Span(off, int64(len(p))).Intersect(page.Bytes{End: f.home.Size()})
	if err != nil || got.Empty() {
		return 0, false, err
	}
	skip := off - rg.Offset()
	return copy(p, buf[skip:skip+got.Len()]), false, nil
}

// mergedLocked returns the bytes of rg as if all released bytes were home. Bytes past the end of the file are zero.
func (f *File) mergedLocked(ctx context.Context, rg page.Range, entering bool) ([]byte, error) {
	buf := make([]byte, rg.Bytes())
	if err := f.readHomeLocked(rg, buf); err != nil {
		return nil, err
	}
	mine := make([]byte, page.Size)
	before := make([]byte, page.Size)
	for i := rg.Start; i < rg.End; i++ {
		at := (i - rg.Start).Offset()
		theirs := buf[at : at+page.Size]
		copy(before, theirs)
		for _, q := range f.lrc.AllPending(i, entering) {
			h := f.holdings[q.Owner]
			if err := h.dev.moves.Out(ctx, mover.CPURead, h.copies(q.Range, mine)); err != nil {
				if f.lostLocked(h.dev, err) {
					return f.mergedLocked(ctx, rg, entering) // without it
				}
				return nil, err
			}
			base := before
			if b := f.bases.at(i, q.Base); q.Base != lrc.BaseHome && b != nil {
				base = b[:]
			}
			lrc.Merge3(theirs, base, mine, theirs)
		}
	}
	clear(buf[min(max(f.home.Size()-rg.Offset(), 0), int64(len(buf))):])
	return buf, nil
}
