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

// Programs may change home directly in SOURCE. Home.Look reports that this happened, but not which pages changed. From
// then on all pages are in doubt. Each page is settled before any operation that depends on home's bytes: an acquire, a
// collect, or a change of home through the mount. A background pass settles the rest.
//
// Such a change is like an unannounced write of a CPU program. Settling a page makes up for what ChangeHome would have
// done before that write:
//
//   - A tracked page has home as its base, and home's bytes still have the agreed digest: the page did not change.
//   - If home's bytes have another digest, the base is searched for and kept as a copy. Candidates are a replica's
//     bytes with the agreed digest; home's bytes without those past the former end; and mixtures of both, because a
//     device that stored into the page still has the base in the rest of it. Then home has moved on.
//   - Replicas may not agree, if some were filled before the change and some after it but before it was noticed. Then
//     home has moved on. Replicas that equal home now are up to date. Of the others, the first keeps its base. Those
//     with a different base are brought up to date at once. A replica without digests is filled again.
//   - A page whose base is already a copy needs nothing else: the copy stays, and home has moved on.
//   - For pages without tracked replicas home has moved on too. They are filled again.
//   - The base is lost if every replica was stored into, and home was changed in too many places to reconstruct the
//     base. Home's present bytes then become the base: every difference on a device counts as stored there. The
//     device's stores survive. The device's other bytes of the page survive too, and overwrite direct changes of these
//     bytes in home. Such pages are counted and named in the log.

// A collect looks at home repeatedly: before it determines the bases of released pages, and again right before it
// writes some of them, which may be much later. Direct changes made between that look and the write of their page are
// overwritten: no system call writes only if a file is unchanged. One look is for at most about home.WriteSize bytes,
// and for writes that begin within home.LookAgain, so this takes no longer than one large write does.
//
// A look cannot detect everything. It misses later changes and, if no events are reported, changes made while the mount
// itself changes the file. So bytes that are about to be kept as a base are compared with what the replicas agreed on.
// If they differ, home counts as changed. Bytes never become a base that they were not part of.

// mostBeside limits how often an operation starts over because home changed after it was compared. Each repetition
// needs a program that changes a page in the microseconds between, so it normally ends much earlier; but nobody may be
// able to hold File.mu forever. At the limit the operation fails. Released bytes are kept and tried again.
const mostBeside = 100

// besides counts how often home changed during an operation.
type besides int

// again reports whether the operation should start over: err is changedBeside, and the limit is not reached. pages are
// those that changed. Otherwise it returns the error to report.
func (n *besides) again(err error) (pages []page.Range, again bool, _ error) {
	beside := (*changedBeside)(nil)
	if !errors.As(err, &beside) {
		return nil, false, err
	}
	if *n++; *n > mostBeside {
		return nil, false, fail(syscall.EIO, "the backing file keeps being changed directly in a page that devices changed too")
	}
	return beside.Pages, true, nil
}

// CheckHome reports whether home was changed directly in SOURCE since the File last looked. It does not update replicas
// yet, but none serves a read before it is settled.
func (f *File) CheckHome(ctx context.Context) (changed bool, err error) {
	changed, _, err = f.checkedIn(ctx)
	return changed, err
}

// checkedIn is CheckHome that also returns the kernel's pages of the file. A change is reported only to this caller.
func (f *File) checkedIn(ctx context.Context) (changed bool, kernel KernelPages, err error) {
	if err := f.mu.LockIn(ctx); err != nil {
		return false, nil, err
	}
	defer f.mu.Unlock()
	if f.detached.Load() {
		return false, nil, nil
	}
	before := f.home.LookedAt()
	err = f.lookLocked(ctx)
	return f.home.LookedAt() != before, f.kernel.Pages(), err
}

// lookLocked is CheckHome for callers that hold mu.
func (f *File) lookLocked(ctx context.Context) error {
	n, err := f.home.Look()
	if err != nil || n == f.home.LookedAt() {
		return err
	}
	sig, err := f.home.Signature()
	if err != nil {
		return err
	}
	if err := f.changedBesideLocked(ctx, sig.Size); err != nil {
		return err // the next look tries again
	}
	f.home.HasLookedAt(n)
	return nil
}

// changedBesideLocked puts all pages in doubt after a direct change of home. size is home's present size.
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

// resizedLocked handles a size that was set directly in SOURCE. It settles the page at the end while the former size is
// still known. No replica may be brought up to date before its bytes past the former end are zeroed: zeroing it
// afterwards would lose the bytes that home gained.
func (f *File) resizedLocked(ctx context.Context, size int64) error {
	before := f.home.Size()
	if size == before {
		return nil
	}
	ends := page.Bytes{Off: before, End: size}.Pages()
	if size < before {
		// the pages behind it belong to nobody any more
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
	} else if !f.kernel.MayBeLonger() { // the kernel may already have counted these bytes as part of the file
		// A replica that was filled after home grew, and before the next look, has the added bytes.
		if err := f.movedLocked(ctx, ends); err != nil {
			return err
		}
		err = f.zeroReplicasLocked(ctx, page.Bytes{Off: before, End: size})
	}
	if err == nil {
		f.home.SetSize(size)
	}
	return err
}

// movedLocked records that home moved on in rg. It keeps home's present bytes as the base of the replicas that have
// them.
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

// keepEndLocked keeps home's bytes of the page that holds end, a new or a former end of file, before the page is zeroed
// from there on.
func (f *File) keepEndLocked(ctx context.Context, end int64) error {
	rg := page.Range{Start: page.Index(end >> page.Shift), End: page.Count(end)}
	if rg.Empty() || len(f.lrc.Keeps([]page.Range{rg}, versions.CPU)) == 0 {
		return nil
	}
	return f.movedLocked(ctx, rg)
}

// foundChangedLocked handles pages whose bytes in home differ from what replicas agreed on: they were changed directly,
// undetected by a look. The page at the end of file is an exception: a device may have agreed there on bytes that
// programs stored past the end.
func (f *File) foundChangedLocked(ctx context.Context, pages []page.Range) error {
	f.doubt = union(f.doubt, pages)
	if len(before(slices.Clone(pages), page.Index(f.home.Size()>>page.Shift))) == 0 {
		return nil
	}
	f.home.ChangedBeside()
	return f.lookLocked(ctx)
}

// settleDue settles a part of the pages in doubt. The sooner it does, the likelier a base is found.
func (f *File) settleDue(ctx context.Context) error {
	f.mu.LockLater()
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

// doubtfulLocked reports whether undetected changes of home are possible in rg.
func (f *File) doubtfulLocked(rg page.Range) bool {
	return len(f.doubt) > 0 && slices.ContainsFunc(f.doubt, rg.Overlaps)
}

// settleSomeLocked settles the pages of rg before next, at most as many as one hold allows.
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

// settleHomeLocked finds out which pages in doubt of rg changed. If the bases take more memory than there is, it brings
// the replicas up to date.
func (f *File) settleHomeLocked(ctx context.Context, rg page.Range) error {
	return f.settleWithLocked(ctx, rg, func(part page.Range) error {
		if f.c.memory.fits(0) {
			return nil
		}
		return f.patchBehindLocked(ctx, part)
	})
}

// settleOnlyLocked is settleHomeLocked without updating replicas.
func (f *File) settleOnlyLocked(ctx context.Context, rg page.Range) error {
	return f.settleWithLocked(ctx, rg, func(page.Range) error { return nil })
}

// settleWithLocked settles pages of rg, and calls then for every settled part.
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
