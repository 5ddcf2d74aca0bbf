package pagecache

import (
	"context"
	"errors"
	"slices"
	"syscall"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/versions"
)

// Programs may change home beside the mount, directly in SOURCE. Home says that this happened (Home.Look), but not to
// which pages. So all pages are in doubt from then on, and each is settled before anything is done that needs to know
// what home has: an acquire, a collect, a change of home through the mount. A background pass settles the others.
//
// Such a change is like a write of a CPU program that was not announced. Settling a page makes up for what ChangeHome
// would have done before it:
//
//   - A tracked page whose base is home, and whose bytes in home have the digest that was agreed on, did not change.
//   - If they have another digest, the base is found elsewhere and kept as a copy: the bytes of any replica that have
//     the agreed digest, or home's without what lies behind its former end, or a mixture of both, since a device that
//     stored into the page has the base elsewhere. Then home has moved on.
//   - Replicas that were filled before and after the change, but before it was noticed, do not agree. Then home has
//     moved on. Those that have what home has now are up to date. Of the others, the first keeps its base; the rest,
//     each with another base, are brought up to date at once. A replica without digests is filled again.
//   - A page whose base is a copy needs nothing else: the copy stays, and home has moved on.
//   - So has home for pages without tracked replicas. They are filled again.
//   - If every replica was stored into and home was changed too, in so many places that the base cannot be put
//     together, it is lost. What home has now becomes the base: all that differs from it on a device counts as stored
//     there. The device's stores survive. So do its other bytes of the page, and changes of these in home are lost.
//     Such pages are counted and named in the log.

// A collect looks again and again: before it asks what the bases of released pages are, and right before each write,
// which may be much later. What others do in the microseconds between that look and the write is
// overwritten: no system call writes only where a file is as it was.
//
// A look cannot always tell: not what others do after it, nor, where nobody reports events, what they do while the
// mount changes the file. So what is about to be kept as a base is compared with what its replicas agreed on, and where
// it is something else, home counts as changed. Nobody's bytes become a base of which they were never a part.

// mostBeside is how often something begins again since home changed meanwhile, after home was compared. Each time that
// needs somebody who changes a page back in the microseconds between, so it ends long before; but nobody could hold
// File.mu for good. What was asked for fails, and released bytes are kept and tried again.
const mostBeside = 100

// besides counts how often home changed meanwhile.
type besides int

// again reports whether err says that home changed, and of which pages, and has not too often. Otherwise it returns
// err, or what is to be said instead.
func (n *besides) again(err error) (pages []page.Range, again bool, _ error) {
	beside := (*changedBeside)(nil)
	if !errors.As(err, &beside) {
		return nil, false, err
	}
	if *n++; *n > mostBeside {
		return nil, false, fail(syscall.EIO, "the backing file is changed directly, again and again, in a page that devices changed too")
	}
	return beside.pages, true, nil
}

// CheckHome asks whether somebody changed home beside the mount since the last time that the File looked. Replicas are
// not changed yet, but nobody is served from them any more before they are settled.
func (f *File) CheckHome(ctx context.Context) (changed bool, err error) {
	changed, _, err = f.checkedIn(ctx)
	return changed, err
}

// checkedIn is CheckHome that also returns the kernel's pages of the file. Nobody else is told of the change.
func (f *File) checkedIn(ctx context.Context) (changed bool, kernel KernelPages, err error) {
	if err := f.mu.LockIn(ctx); err != nil {
		return false, nil, err
	}
	defer f.mu.Unlock()
	if f.detached.Load() {
		return false, nil, nil
	}
	before := f.changes
	err = f.lookLocked(ctx)
	return f.changes != before, f.kernel, err
}

// lookLocked is CheckHome for callers that hold mu.
func (f *File) lookLocked(ctx context.Context) error {
	n, err := f.home.Look()
	if err != nil || n == f.changes {
		return err
	}
	sig, err := f.home.Signature()
	if err != nil {
		return err
	}
	if err := f.changedBesideLocked(ctx, sig.Size); err != nil {
		return err // the next look tries again
	}
	f.changes = n
	return nil
}

// asSeenLocked fails with changedBeside if somebody changed home since the last look, of which this is none.
func (f *File) asSeenLocked() error {
	n, err := f.home.Look()
	if err == nil && n != f.changes {
		err = &changedBeside{}
	}
	return err
}

// changedBesideLocked puts all pages in doubt, since somebody changed home beside the mount. size is what home has now.
func (f *File) changedBesideLocked(ctx context.Context, size int64) error {
	if len(f.doubt) == 0 {
		f.c.log.Info("the backing file was changed directly; replicas are compared with it", "file", f.Name())
	}
	f.count(func(c *Counters) { c.HomeReplacements.Add(1) })
	f.spoilLocked(page.From(0).Pages())
	f.doubt = nil
	for _, h := range f.holdings {
		for _, x := range h.sorted() {
			rg := x.pages()
			f.doubt = union(page.Subtract(f.doubt, rg), []page.Range{rg})
			f.changed(rg)
		}
	}
	return f.resizedLocked(ctx, size)
}

// resizedLocked takes note of a size that home was given beside the mount. It settles the page of the end while the
// former size is known. No replica may be brought up to date between that and the moment when its bytes past the former
// end are zeroed: it would lose what home was made longer by.
func (f *File) resizedLocked(ctx context.Context, size int64) error {
	before := f.size
	if size == before {
		return nil
	}
	ends := page.Bytes{Off: before, End: size}.Pages()
	if size < before {
		// what is behind its page is nobody's any more
		ends = page.Bytes{Off: size &^ (page.Size - 1), End: size}.Pages()
	}
	if err := f.settleOnlyLocked(ctx, ends); err != nil {
		return err
	}
	var err error
	if size < before {
		if err := f.keepEndLocked(ctx, size); err != nil {
			return err
		}
		err = f.cutLocked(ctx, size)
	} else if !f.longerLocked() { // the kernel may have known these bytes to be part of the file
		// A replica that was filled after home became longer, and before anybody looked, has what was added.
		if err := f.movedLocked(ctx, ends); err != nil {
			return err
		}
		err = f.zeroReplicasLocked(ctx, page.Bytes{Off: before, End: size})
	}
	if err == nil {
		f.size = size
	}
	return err
}

// movedLocked says that home moved on in rg, and keeps what it has there now for the replicas that have that.
func (f *File) movedLocked(ctx context.Context, rg page.Range) error {
	for found := besides(0); ; {
		plan := f.lrc.BeginCompare(rg)
		var home []lrc.PageBase
		for _, run := range plan.Compare {
			home = append(home, lrc.PageBase{Range: run})
		}
		k := f.newKeepingLocked(home)
		err := k.read(f)
		if err == nil {
			f.keepMovedLocked(plan, k)
			return nil
		}
		k.free(f)
		plan.Abort()
		pages, again, err := found.again(err)
		if !again {
			return err
		}
		f.doubt = union(f.doubt, pages)
		if err := f.settleOnlyLocked(ctx, rg); err != nil {
			return err
		}
	}
}

func (f *File) keepMovedLocked(plan lrc.ComparePlan, k keeping) {
	for _, b := range plan.Commit(plan.Compare) {
		for i, p := range k.parts {
			if run := p.Range.Intersect(b.Range); !run.Empty() {
				f.putBasesLocked(run, b.Base, k.pages[i][run.Start-p.Range.Start:][:run.Len()])
			}
		}
	}
}

// keepEndLocked keeps what home has of the page that a new end is in, or a former one, before it is zeroed from there
// on.
func (f *File) keepEndLocked(ctx context.Context, end int64) error {
	rg := page.Range{Start: page.Index(end >> page.Shift), End: page.Count(end)}
	if rg.Empty() || len(f.lrc.Keeps([]page.Range{rg}, versions.CPU)) == 0 {
		return nil
	}
	return f.movedLocked(ctx, rg)
}

// foundChangedLocked is told of pages that were to be kept and that home has otherwise than replicas agreed on:
// somebody changed them beside the mount, when a look could not tell. Of the page that the file ends in, a device may
// have agreed on what programs stored past the end, as nobody else did.
func (f *File) foundChangedLocked(ctx context.Context, pages []page.Range) error {
	f.doubt = union(f.doubt, pages)
	if len(before(slices.Clone(pages), page.Index(f.size>>page.Shift))) == 0 {
		return nil
	}
	f.home.ChangedBeside()
	return f.lookLocked(ctx)
}

// settleDue settles what is in doubt, a part at a time: the sooner, the more likely it is that a base can be found.
func (f *File) settleDue(ctx context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.detached.Load() {
		return nil
	}
	if err := f.lookLocked(ctx); err != nil || len(f.doubt) == 0 {
		return err
	}
	_, err := f.settleSomeLocked(ctx, page.From(0).Pages())
	return err
}

// doubtfulLocked reports whether home may have changed unseen in rg.
func (f *File) doubtfulLocked(rg page.Range) bool {
	return len(f.doubt) > 0 && slices.ContainsFunc(f.doubt, rg.Overlaps)
}

// settleSomeLocked settles pages of rg up to next, no more than one hold should.
func (f *File) settleSomeLocked(ctx context.Context, rg page.Range) (next page.Index, err error) {
	next = rg.End
	count := int64(0)
	for _, d := range intersect(f.doubt, []page.Range{rg}) {
		if count += d.Len(); count >= holdCollect {
			next = d.End - page.Index(count-holdCollect)
			break
		}
	}
	if count == 0 {
		return next, nil
	}
	return next, f.settleHomeLocked(ctx, page.Range{Start: rg.Start, End: next})
}

// settleHomeLocked finds out which pages of rg that are in doubt did change. Where that takes more memory than there
// is, it brings their replicas up to date.
func (f *File) settleHomeLocked(ctx context.Context, rg page.Range) error {
	return f.settleWithLocked(ctx, rg, func(part page.Range) error {
		if f.c.memory.fits(0) {
			return nil
		}
		return f.patchBehindLocked(ctx, part)
	})
}

// settleOnlyLocked is settleHomeLocked that leaves replicas alone.
func (f *File) settleOnlyLocked(ctx context.Context, rg page.Range) error {
	return f.settleWithLocked(ctx, rg, func(page.Range) error { return nil })
}

// settleWithLocked settles pages of rg, and calls then with every part that is settled.
func (f *File) settleWithLocked(ctx context.Context, rg page.Range, then func(part page.Range) error) error {
	tries := allTries
	for _, run := range intersect(f.doubt, []page.Range{rg}) {
		for part := range cut(run, batchPages) {
			if err := f.settlePartLocked(ctx, part, &tries); err != nil {
				return err
			}
			f.doubt = page.Subtract(f.doubt, part)
			if err := then(part); err != nil {
				return err
			}
		}
	}
	return nil
}
