package pagecache

import (
	"cmp"
	"context"
	"maps"
	"slices"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// Programs may change home beside the mount, directly in SOURCE. Home says that this happened (Home.Look), but not to which
// pages. So all pages are in doubt from then on, and each is settled before anything is done that needs to know what home has:
// an acquire, a collect, a change of home through the mount. A background pass settles the others.
//
// Such a change is like a write of a CPU program that was not announced. Settling a page makes up for what ChangeHome would
// have done before it:
//
//   - A tracked page whose base is home, and whose bytes in home have the digest that was agreed on, did not change.
//   - If they have another digest, the base is found elsewhere and kept as a copy: the bytes of any replica that have the
//     agreed digest, or home's without what lies behind its former end, or a mixture of both, since a device that stored into
//     the page has the base elsewhere. Then home has moved on.
//   - A page whose base is a copy needs nothing else: the copy stays, and home has moved on.
//   - So has home for pages without tracked replicas. They are filled again.
//   - If every replica was stored into and home was changed too, in so many places that the base cannot be put together, it is
//     lost. What home has now becomes the base: all that differs from it on a device counts as stored there. The device's
//     stores survive, and of the page's other bytes the device's win over those that were changed in home. Such pages are
//     counted and named in the log.

// CheckHome asks whether somebody changed home beside the mount since the last time that the File looked. Replicas are not
// changed yet, but nobody is served from them any more before they are settled.
func (f *File) CheckHome(ctx context.Context) (changed bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.detached.Load() {
		return false, nil
	}
	before := f.changes
	err = f.lookLocked(ctx)
	return f.changes != before, err
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

// resizedLocked takes note of a size that home was given beside the mount. It settles the page of the end while the former size
// is known. No replica may be brought up to date between that and the moment when its bytes past the former end are zeroed: it
// would lose what home was made longer by.
func (f *File) resizedLocked(ctx context.Context, size int64) error {
	before := f.size
	if size == before {
		return nil
	}
	ends := page.Bytes{Off: before, End: size}.Pages()
	if size < before {
		ends = page.Bytes{Off: size &^ (page.Size - 1), End: size}.Pages() // what is behind its page is nobody's any more
	}
	if err := f.settleOnlyLocked(ctx, ends); err != nil {
		return err
	}
	var err error
	if size < before {
		err = f.cutLocked(ctx, size)
	} else if !f.longerLocked() { // the kernel may have known these bytes to be part of the file
		// A replica that was filled after home became longer, and before anybody looked, has what was added.
		if err := f.movedLocked(ends); err != nil {
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
func (f *File) movedLocked(rg page.Range) error {
	plan := f.lrc.BeginCompare(rg)
	var home []lrc.PageBase
	for _, run := range plan.Compare {
		home = append(home, lrc.PageBase{Range: run})
	}
	k := newKeeping(home)
	if err := k.read(f); err != nil {
		k.free(f)
		plan.Abort()
		return err
	}
	for _, b := range plan.Commit(plan.Compare) {
		for i, p := range k.parts {
			if run := p.Range.Intersect(b.Range); !run.Empty() {
				f.putBasesLocked(run, b.Base, k.pages[i][run.Start-p.Range.Start:][:run.Len()])
			}
		}
	}
	return nil
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

// settleHomeLocked finds out which pages of rg that are in doubt did change. Where that takes more memory than there is, it
// brings their replicas up to date.
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
	for _, run := range intersect(f.doubt, []page.Range{rg}) {
		for part := range cut(run, batchPages) {
			if err := f.settlePartLocked(ctx, part); err != nil {
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

// settlePartLocked is settleHomeLocked of pages that are all in doubt. After an error it may be called again.
func (f *File) settlePartLocked(ctx context.Context, part page.Range) error {
	plan := f.lrc.BeginCompare(part)
	var differ []*comparedPage
	for _, run := range plan.Compare {
		pages, err := f.compareHomeLocked(ctx, run)
		if err != nil {
			plan.Abort()
			return err
		}
		differ = append(differ, pages...)
	}
	f.keepFoundLocked(plan, differ)
	return nil
}

// comparedPage is a page that home has changed, while it was the base of a tracked replica.
type comparedPage struct {
	page page.Index
	h    *holding // one that has it as its base
	home []byte
	base []byte // nil until it is found
}

// compareHomeLocked returns which pages home has changed, of some of which every one has a tracked replica whose base is home. It
// looks for what they were before.
func (f *File) compareHomeLocked(ctx context.Context, rg page.Range) (differ []*comparedPage, err error) {
	owners := slices.Sorted(maps.Keys(f.holdings))
	home := make([]byte, rg.Bytes())
	parts := slices.Collect(cut(rg, bufferPages))
	if err := inParallel(len(parts), maxReaders, func(i int) error {
		at := (parts[i].Start - rg.Start).Offset()
		return f.readHomeLocked(parts[i], home[at:at+parts[i].Bytes()])
	}); err != nil {
		return nil, err
	}
	// One replica of a page says for all: they have the same base.
	rest := []page.Range{rg}
	for _, o := range owners {
		h := f.holdings[o]
		for _, run := range intersect(f.lrc.TrackedBy(rg, o, onHome), rest) {
			differ = append(differ, f.differLocked(h, run, home[(run.Start - rg.Start).Offset():][:run.Bytes()])...)
			rest = page.Subtract(rest, run)
		}
	}
	slices.SortFunc(differ, func(a, b *comparedPage) int { return cmp.Compare(a.page, b.page) })
	for _, p := range differ {
		f.findInHomeLocked(p)
	}
	for _, o := range owners {
		if err := f.findOnDeviceLocked(ctx, f.holdings[o], differ); err != nil && !f.lostLocked(f.holdings[o].dev, err) {
			return nil, err
		}
	}
	return differ, nil
}

// differLocked returns the pages of run of which home's bytes do not have the digest that was agreed on.
func (f *File) differLocked(h *holding, run page.Range, home []byte) (differ []*comparedPage) {
	sums := f.sums(h, home)
	h.each(run, func(x *extent, part page.Range) {
		for i, agreed := range x.agreedAt(part) {
			p := part.Start + page.Index(i)
			if at := int(p - run.Start); sums[at] != agreed {
				differ = append(differ, &comparedPage{page: p, h: h, home: home[at<<page.Shift:][:page.Size]})
			}
		}
	})
	return differ
}

// isBase reports whether bytes are those that the replicas of p agreed on.
func (f *File) isBase(p *comparedPage, bytes []byte) bool {
	x, _ := p.h.at(p.page)
	return x != nil && f.sums(p.h, bytes)[0] == x.agreedAt(page.Range{Start: p.page, End: p.page + 1})[0]
}

// findInHomeLocked looks for the base of p in what home has up to its former end, and in a hole.
func (f *File) findInHomeLocked(p *comparedPage) {
	for _, bytes := range [][]byte{f.withoutTail(p.page, p.home), zeroPage[:]} {
		if p.base == nil && f.isBase(p, bytes) {
			p.base = bytes
		}
	}
}

// withoutTail returns the bytes of a page with zeros behind the former end of the file: there home has what it was made longer by,
// and devices have what programs stored for nobody.
func (f *File) withoutTail(at page.Index, bytes []byte) []byte {
	end := max(f.size-at.Offset(), 0)
	if end >= page.Size {
		return bytes
	}
	bytes = slices.Clone(bytes)
	clear(bytes[end:])
	return bytes
}

// findOnDeviceLocked looks for bases in what a device has.
func (f *File) findOnDeviceLocked(ctx context.Context, h *holding, pages []*comparedPage) error {
	var from []*comparedPage
	var ranges []page.Range
	for _, p := range pages {
		one := page.Range{Start: p.page, End: p.page + 1}
		if p.base == nil && len(f.lrc.Current(one, h.owner))+len(f.lrc.TrackedBy(one, h.owner, onHome)) > 0 {
			from, ranges = append(from, p), page.AppendRange(ranges, one)
		}
	}
	if len(from) == 0 || h.dev.lost.Load() {
		return nil
	}
	buf := make([]byte, len(from)<<page.Shift)
	rest, of := buf, walk{h: h}
	var pieces []gpubackend.Copy
	for _, rg := range ranges {
		pieces = of.appendCopies(pieces, rg, rest[:rg.Bytes()])
		rest = rest[rg.Bytes():]
	}
	if err := h.dev.moves.Out(ctx, mover.WriteBack, pieces); err != nil {
		return err
	}
	for i, p := range from {
		mine := buf[i<<page.Shift:][:page.Size]
		for _, bytes := range [][]byte{mine, f.withoutTail(p.page, mine)} {
			if p.base == nil && f.isBase(p, bytes) {
				p.base = bytes
			}
		}
		if p.base == nil {
			p.base = f.mixed(p, f.withoutTail(p.page, mine), f.withoutTail(p.page, p.home))
		}
	}
	return nil
}

const (
	// mostPieces is the most places in which a page differs that mixed tries in all ways: that takes a tenth of a millisecond.
	mostPieces = 8
	// nearBytes is the number of equal bytes between two differences that are taken for one at first.
	nearBytes = 16
)

// mixed looks for the base of a page that a device stored into and that was changed in home too: where the two differ, it has
// mostly what the one or the other has. The digest tells. It returns nil if it is not found.
func (f *File) mixed(p *comparedPage, mine, home []byte) []byte {
	for _, near := range []int{nearBytes, 1} {
		pieces := differences(mine, home, near)
		if len(pieces) > mostPieces {
			continue
		}
		base := slices.Clone(mine)
		for mix := range 1 << len(pieces) {
			for i, d := range pieces {
				from := mine
				if mix>>i&1 == 1 {
					from = home
				}
				copy(base[d.Off:d.End], from[d.Off:d.End])
			}
			if f.isBase(p, base) {
				return base
			}
		}
	}
	return nil
}

// differences returns where a and b differ. Places that are fewer than near bytes apart are one.
func differences(a, b []byte, near int) (out []page.Bytes) {
	for i := range a {
		if a[i] == b[i] {
			continue
		}
		at := int64(i)
		if n := len(out); n > 0 && at < out[n-1].End+int64(near) {
			out[n-1].End = at + 1
		} else {
			out = append(out, page.Bytes{Off: at, End: at + 1})
		}
	}
	return out
}

// keepFoundLocked says that of a plan's pages these changed, and keeps their bases. Where none was found, what home has counts as it.
func (f *File) keepFoundLocked(plan lrc.ComparePlan, pages []*comparedPage) {
	var ranges, lost []page.Range
	for _, p := range pages {
		one := page.Range{Start: p.page, End: p.page + 1}
		ranges = page.AppendRange(ranges, one)
		if p.base != nil {
			continue
		}
		p.base = f.withoutTail(p.page, p.home)
		lost = page.AppendRange(lost, one)
		for o, h := range f.holdings {
			if len(f.lrc.TrackedBy(one, o, onHome)) > 0 {
				f.rebaseLocked(h, one, p.base)
			}
		}
	}
	for _, k := range plan.Commit(ranges) {
		for ; !k.Range.Empty(); k.Range.Start++ {
			i, _ := slices.BinarySearchFunc(pages, k.Range.Start, func(p *comparedPage, at page.Index) int { return cmp.Compare(p.page, at) })
			f.putBasesLocked(page.Range{Start: k.Range.Start, End: k.Range.Start + 1}, k.Base, f.c.pages.copies(pages[i].base))
		}
	}
	if len(lost) > 0 {
		n := int64(0)
		for _, rg := range lost {
			n += rg.Len()
		}
		f.count(func(c *Counters) { c.BaselessPages.Add(n) })
		f.c.log.Warn("pages were changed directly in the backing file and stored into by a device; the device's bytes are kept",
			"file", f.Name(), "pages", n, "first", lost[0].String())
	}
}

// sums returns the digests of the pages in bytes, as the device of h takes them.
func (f *File) sums(h *holding, bytes []byte) []gpubackend.Digest {
	sums := make([]gpubackend.Digest, len(bytes)>>page.Shift)
	h.dev.Key().SumPages(bytes, sums)
	return sums
}
