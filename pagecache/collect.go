package pagecache

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/versions"
)

// collectWindow is how many pages are searched for pending ones at a time: 256 MiB. The lists are long if pending pages
// are scattered.
const collectWindow = 1 << 16

// carefulTries is how often a collect starts over because home was changed directly during it. After that it no longer
// checks before it writes: constant direct changes must not keep released bytes from getting home.
const carefulTries = 3

// collectLocked brings home what devices released of rg; if several owners released a page, the lowest goes first.
// entering means that the kernel is about to hold the pages; without it, draining pages are skipped. After an error,
// the pages that did not get home are still pending or in flights.
func (f *File) collectLocked(ctx context.Context, rg page.Range, entering bool) error {
	if err := f.landLocked(rg); err != nil {
		return err
	}
	return f.bringLocked(ctx, rg, entering, false)
}

// bringLocked is collectLocked that leaves flights alone. If fly is set, the bytes become flights where possible.
func (f *File) bringLocked(ctx context.Context, rg page.Range, entering, fly bool) error {
	for part := range f.lrc.Parts(rg, collectWindow) {
		if err := f.collectPartLocked(ctx, part, entering, fly); err != nil {
			return err
		}
	}
	return nil
}

// collectPartLocked is bringLocked for a range small enough that its lists are short.
func (f *File) collectPartLocked(ctx context.Context, rg page.Range, entering, fly bool) error {
	found := besides(0)
	for looked := false; ; looked = true {
		pending := f.lrc.Pending(rg, entering)
		if len(pending) == 0 {
			return nil
		}
		if !looked {
			if err := f.settlePendingLocked(ctx, pending); err != nil {
				if ctx.Err() == nil {
					f.failedLocked(err)
				}
				return err
			}
			continue // some may have been cut off by a new end of home
		}
		room := f.c.memory.fits(2 * collectPortion * page.Size)
		if !room {
			f.relieveLocked(ctx, 2*collectPortion)
			pending = f.lrc.Pending(rg, entering) // their bases may have changed
		}
		start := time.Now()
		// Collect the pages of one owner together, wherever they are in the file.
		slices.SortStableFunc(pending, func(a, b lrc.Pending) int { return cmp.Compare(a.Owner, b.Owner) })
		for again := false; len(pending) > 0 && !again; {
			n := 1
			for n < len(pending) && pending[n].Owner == pending[0].Owner {
				n++
			}
			owner := pending[0].Owner
			all, err := f.collectOwnerLocked(ctx, owner, pending[:n], fly, found < carefulTries)
			pages, changed, err := found.again(err)
			if changed {
				all, err = false, f.settleFoundLocked(ctx, pages, rg, entering)
			}
			if err != nil {
				if err := f.collectFailedLocked(ctx, owner, err); err != nil {
					return err
				}
				all = false // the device's pending pages are gone
			}
			pending, again = pending[n:], !all // there may be no room for more bases
		}
		if !room {
			f.relieveLocked(ctx, 0)
		}
		if f.backlog.err != nil && !f.waitsLocked() {
			f.recoveredLocked()
		}
		f.c.counters.CollectTime.Observe(time.Since(start))
	}
}

// settleFoundLocked handles pages of rg that were changed directly during a collect, so that the collect can start
// over.
func (f *File) settleFoundLocked(ctx context.Context, pages []page.Range, rg page.Range, entering bool) error {
	if err := f.foundChangedLocked(ctx, pages); err != nil {
		return err
	}
	return f.settlePendingLocked(ctx, f.lrc.Pending(rg, entering))
}

// collectFailedLocked records that an owner's released pages could not be brought home. It returns nil if the device is
// lost: then none of them are pending any more.
func (f *File) collectFailedLocked(ctx context.Context, owner versions.Owner, err error) error {
	d := f.holdings[owner].dev
	if f.lostLocked(d, err) {
		return nil
	}
	err = d.fault(err)
	if ctx.Err() == nil { // a client that ended is no fault of home or of the device
		f.failedLocked(err)
	}
	return err
}

// settlePendingLocked detects direct changes of home before released pages are written over them.
func (f *File) settlePendingLocked(ctx context.Context, pending []lrc.Pending) error {
	if err := f.lookLocked(ctx); err != nil {
		return err
	}
	for _, p := range pending {
		if err := f.settleHomeLocked(ctx, p.Range); err != nil {
			return err
		}
	}
	return nil
}

// collectRangesLocked is collectLocked for the first most pages of ranges.
func (f *File) collectRangesLocked(ctx context.Context, ranges []page.Range, most int64) error {
	for left := page.Index(most); len(ranges) > 0 && left > 0; ranges = ranges[1:] {
		rg := ranges[0]
		rg.End = min(rg.End, rg.Start+left)
		left -= page.Index(rg.Len())
		if err := f.collectLocked(ctx, rg, false); err != nil {
			return err
		}
	}
	return nil
}

// collectSomeLocked brings home what devices released of the pages of rg before next. It stops at holdCollect pending
// pages.
func (f *File) collectSomeLocked(ctx context.Context, rg page.Range) (next page.Index, err error) {
	if err := f.landLocked(rg); err != nil {
		return rg.Start, err
	}
	next = rg.End
	count := int64(0)
	for part := range f.lrc.Parts(rg, collectWindow) {
		for _, p := range f.lrc.Pending(part, false) {
			if count += p.Range.Len(); count >= holdCollect {
				next = p.Range.End - page.Index(count-holdCollect)
				break
			}
		}
		if count >= holdCollect {
			break
		}
	}
	if count == 0 {
		return next, nil
	}
	return next, f.collectLocked(ctx, page.Range{Start: rg.Start, End: next}, false)
}

// collectOwnerLocked brings home what one owner released, a portion at a time. While one portion is written, the next
// is fetched from the device. Portions that are to fly are small, so several are fetched meanwhile. all is false if it
// stopped early because there is no room for more base copies. With careful set, it fails with changedBeside if home
// was changed directly since the last look.
func (f *File) collectOwnerLocked(
	ctx context.Context, o versions.Owner, pending []lrc.Pending, fly, careful bool,
) (all bool, err error) {
	h := f.holdings[o]
	most, atOnce := int64(collectPortion), 1
	if fly {
		most, atOnce = flightPortion, collectPortion/flightPortion
	}
	portions := portionsOf(pending, most)
	var under []*portion // being fetched, besides the one that is stored next
	begin := func() {
		c := f.newPortionLocked(h, portions[0])
		if under, portions = append(under, c), portions[1:]; len(portions) == 0 && len(under) == 1 && !f.flights.any() {
			c.fetch(ctx) // nothing can be done meanwhile
			return
		}
		go c.fetch(ctx)
	}
	for begin(); len(under) > 0; {
		for len(portions) > 0 && len(under) <= atOnce && f.c.memory.fits(2*collectPortion*page.Size) {
			begin()
		}
		c := under[0]
		under = under[1:]
		f.landUntilLocked(c.fetched)
		err := f.storeLocked(c, fly, careful)
		if !c.flies {
			c.free()
		}
		if err != nil {
			for _, x := range under {
				<-x.fetched
				x.abortLocked()
				x.free()
			}
			return false, err
		}
	}
	return len(portions) == 0, nil
}

// collectedLocked commits the ranges of a plan that are home. parts has the owner's bytes of each range. Where home
// differs from them, home has other programs' bytes too; the owner's bytes are kept as its base.
func (f *File) collectedLocked(plan lrc.CollectPlan, ranges []page.Range, parts [][]byte, differences [][]page.Range) {
	var differ []page.Range
	for _, d := range differences[:len(ranges)] {
		for _, rg := range d {
			differ = page.AppendRange(differ, rg)
		}
	}
	keep, drop := plan.Commit(subtract(joined(ranges), differ), differ)
	f.keepCollectedLocked(keep, ranges, parts)
	f.dropBasesLocked(drop)
	pages, merges := pagesOf(ranges), pagesOf(differ)
	f.count(func(c *Counters) {
		if c.CollectedPages.Add(pages); pages > 0 {
			c.Collects.Add(1)
		}
		c.MergedPages.Add(merges)
	})
}

// keepCollectedLocked keeps pages of ranges, whose bytes are in parts, as bases.
func (f *File) keepCollectedLocked(keep []lrc.PageBase, ranges []page.Range, parts [][]byte) {
	type piece struct {
		lrc.PageBase
		from  []byte
		pages []*pageBytes
	}
	var all []piece
	i := 0
	for _, k := range keep {
		for rest := k.Range; !rest.Empty(); {
			for ranges[i].End <= rest.Start {
				i++
			}
			part := rest.Intersect(ranges[i])
			from := parts[i][(part.Start - ranges[i].Start).Offset():][:part.Bytes()]
			all = append(all, piece{PageBase: lrc.PageBase{Range: part, Base: k.Base}, from: from})
			rest.Start = part.End
		}
	}
	_ = mover.InParallel(len(all), mover.MaxReaders, func(i int) error {
		all[i].pages = f.c.pages.copies(all[i].from)
		return nil
	})
	for _, x := range all {
		f.putBasesLocked(x.Range, x.Base, x.pages)
	}
}

// collectAll brings everything released of the file home, except draining pages. It works in parts, and calls arrived,
// if not nil, after each part without File.mu.
func (f *File) collectAll(ctx context.Context, arrived func(part page.Range)) error {
	if err := f.mu.LockIn(ctx); err != nil {
		return err
	}
	held := true
	defer func() {
		if held {
			f.mu.Unlock()
		}
	}()
	for f.flights.any() {
		if err := f.landSomeLocked(); err != nil {
			return err
		}
		f.mu.Unlock() // let requests get the lock
		if err := f.mu.LockIn(ctx); err != nil {
			held = false
			return err
		}
	}
	whole := page.Range{End: f.lrc.End()}
	started := time.Now()
	for rest := whole; !rest.Empty(); {
		next, err := f.collectSomeLocked(ctx, rest)
		if err != nil {
			return err
		}
		part := page.Range{Start: rest.Start, End: next}
		rest.Start = next
		// Let requests get the lock.
		f.mu.Unlock()
		if arrived != nil {
			arrived(part)
		}
		if err := f.mu.LockIn(ctx); err != nil {
			held = false
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	if !f.waitsLocked() {
		f.recoveredLocked()
		f.nothingWaitsLocked()
	} else if f.backlog.since.Before(started) {
		f.backlog.since = started
	}
	return nil
}

// BringHome brings home everything released, except by releases still under way. It fails as Sync does.
func (f *File) BringHome(ctx context.Context) error { return f.collectAll(ctx, nil) }

// Sync brings everything released home, and waits for releases under way. It fails with home's error if bytes could not
// be written; they are kept and tried again. Then it calls do, unless nil, which makes home durable. If do is given and
// home is a WriteBacker, the disk starts to write each part as soon as it is home. Home stays open until Sync returns.
// If released bytes were lost with a device, one Sync with do fails with EIO, after it has done everything else.
func (f *File) Sync(ctx context.Context, do func() error) error {
	if err := f.mu.LockIn(ctx); err != nil {
		return err
	}
	whole := page.Range{End: f.lrc.End()}
	var start func(off, n int64)
	if !f.detached.Load() {
		start = f.home.WriteBack()
	}
	f.home.BeginRead()
	f.mu.Unlock()
	defer f.home.EndRead()
	if err := f.kernel.Await(ctx, whole); err != nil {
		return err
	}
	if do == nil {
		return f.collectAll(ctx, nil)
	}
	var writing sync.WaitGroup
	defer writing.Wait()
	if err := f.collectAll(ctx, func(part page.Range) {
		if start != nil {
			writing.Go(func() { start(part.Offset(), part.Bytes()) })
		}
	}); err != nil {
		return err
	}
	err := do()
	writing.Wait()
	return errors.Join(f.reportLosses(), err)
}

// untrackIdleLocked stops tracking pages that no client maps for writing any more, so that they need no bases.
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
