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
	"github.com/gaiafs/gaiafs/versions"
)

// comparison compares home with the replicas of pages that are in doubt, and finds their bases. It runs under File.mu.
// Its results are for pages that have a tracked replica whose base is home.
type comparison struct {
	f    *File
	plan lrc.ComparePlan
	// differ has, for each page on which a replica differs from home, the first such replica. It is ordered by page.
	differ []*comparedPage
	// moved are the pages of differ, and those with a replica whose bytes are not known.
	moved []page.Range
	// same has, for each owner, the pages on which its replica equals home now.
	same map[versions.Owner][]page.Range
	// lost are pages with a replica whose base was not found.
	lost []page.Range
	// tries is how many attempts the base search has left.
	tries *int
}

// settlePartLocked is settleHomeLocked for pages that are all in doubt. It deducts the attempts of the base search from
// tries. It may be called again after an error.
func (f *File) settlePartLocked(ctx context.Context, part page.Range, tries *int) error {
	c := comparison{f: f, plan: f.lrc.BeginCompare(part), same: make(map[versions.Owner][]page.Range), tries: tries}
	for _, run := range c.plan.Compare {
		if err := c.compare(ctx, run); err != nil {
			c.plan.Abort()
			return err
		}
	}
	c.keep()
	return nil
}

// comparedPage is a tracked replica whose base was home, and home has changed.
type comparedPage struct {
	page   page.Index
	h      *holding
	agreed gpubackend.Digest // of the base
	home   []byte
	base   []byte // nil until it is found
}

func (p *comparedPage) pages() page.Range { return page.Range{Start: p.page, End: p.page + 1} }

// compare compares home with the replicas of rg. Each page has a tracked replica whose base is home. It
// searches for the bases of replicas that differ, and leaves no two replicas of a page with different bases.
func (c *comparison) compare(ctx context.Context, rg page.Range) error {
	f := c.f
	owners := slices.Sorted(maps.Keys(f.holdings))
	home := make([]byte, rg.Bytes())
	parts := slices.Collect(cut(rg, bufferPages))
	if err := mover.InParallel(len(parts), mover.MaxReaders, func(i int) error {
		at := (parts[i].Start - rg.Start).Offset()
		return f.readHomeLocked(parts[i], home[at:at+parts[i].Bytes()])
	}); err != nil {
		return err
	}
	var differ []*comparedPage
	var moved []page.Range
	for _, o := range owners {
		same := f.lrc.TrackedBy(rg, o, onHome)
		var others []page.Range
		for _, run := range same {
			for _, p := range differing(f.holdings[o], run, home[(run.Start - rg.Start).Offset():][:run.Bytes()]) {
				differ, others = append(differ, p), page.AppendRange(others, p.pages())
			}
		}
		c.same[o] = append(c.same[o], subtract(same, others)...)
		for _, r := range f.lrc.Current(rg, o) {
			if !r.Tracked {
				others = union(others, []page.Range{r.Range})
			}
		}
		moved = union(moved, others)
	}
	slices.SortStableFunc(differ, func(a, b *comparedPage) int { return cmp.Compare(a.page, b.page) })
	for _, p := range differ {
		c.findInHome(p)
	}
	*c.tries += pageTries * int(rg.Len())
	for i, o := range owners {
		if err := c.findOnDevice(ctx, f.holdings[o], differ, len(owners)-i); err != nil &&
			!f.lostLocked(f.holdings[o].dev, err) {
			return err
		}
	}
	c.moved = append(c.moved, moved...)
	for i, p := range differ {
		switch {
		case i == 0 || differ[i-1].page != p.page:
			c.differ = append(c.differ, p)
		case p.agreesWith(c.differ[len(c.differ)-1]):
		default:
			if err := c.joinHome(ctx, p); err != nil && !f.lostLocked(p.h.dev, err) {
				return err
			}
			if p.base == nil {
				c.lost = union(c.lost, []page.Range{p.pages()})
			}
			c.same[p.h.owner] = union(c.same[p.h.owner], []page.Range{p.pages()})
		}
	}
	return nil
}

// agreesWith reports whether two replicas of a page have the same base.
func (p *comparedPage) agreesWith(q *comparedPage) bool {
	return p.agreed == q.agreed && p.h.dev.Key() == q.h.dev.Key()
}

// joinHome brings a replica up to date that cannot use the base of the first one.
func (c *comparison) joinHome(ctx context.Context, p *comparedPage) error {
	x, off := p.h.at(p.page)
	if p.base != nil {
		patch := gpubackend.Patch{Mem: x.Memory(), Off: off, Base: p.base, Next: p.home}
		if err := p.h.dev.moves.Patch(context.WithoutCancel(ctx), mover.WriteBack,
			[]gpubackend.Patch{patch}); err != nil {
			return err
		}
	}
	p.h.rebaseLocked(p.pages(), p.home)
	return nil
}

// differing returns the pages of run whose bytes in home do not have the agreed digest.
func differing(h *holding, run page.Range, home []byte) (differ []*comparedPage) {
	sums := h.sums(home)
	h.each(run, func(x *extent, part page.Range) {
		for i, agreed := range x.agreedAt(part) {
			p := part.Start + page.Index(i)
			if at := int(p - run.Start); sums[at] != agreed {
				differ = append(differ, &comparedPage{page: p, h: h, agreed: agreed,
					home: home[at<<page.Shift:][:page.Size]})
			}
		}
	})
	return differ
}

// isBase reports whether bytes have the digest that the replica agreed on.
func (p *comparedPage) isBase(bytes []byte) bool { return p.h.sums(bytes)[0] == p.agreed }

// findInHome looks for the base of p in home's bytes up to the former end, and in a page of zeros.
func (c *comparison) findInHome(p *comparedPage) {
	for _, bytes := range [][]byte{c.withoutTail(p.page, p.home), zeroPage[:]} {
		if p.base == nil && p.isBase(bytes) {
			p.base = bytes
		}
	}
}

// withoutTail returns the bytes of a page with zeros past the former end of file. Home has newly added bytes there, and
// devices have stores that are not part of the file.
func (c *comparison) withoutTail(at page.Index, bytes []byte) []byte {
	end := max(c.f.home.Size()-at.Offset(), 0)
	if end >= page.Size {
		return bytes
	}
	bytes = slices.Clone(bytes)
	clear(bytes[end:])
	return bytes
}

// findOnDevice looks for bases in the bytes of a device. devices is how many devices are left to search, with
// this one.
func (c *comparison) findOnDevice(ctx context.Context, h *holding, pages []*comparedPage, devices int) error {
	machine := &c.f.lrc
	var from [][]*comparedPage // per page that is read: replicas of other devices may be there too
	searches := 0
	var ranges []page.Range
	for _, p := range pages {
		one := p.pages()
		if p.base != nil || len(machine.Current(one, h.owner))+len(machine.TrackedBy(one, h.owner, onHome)) == 0 {
			continue
		}
		searches++
		if n := len(from); n > 0 && from[n-1][0].page == p.page {
			from[n-1] = append(from[n-1], p)
			continue
		}
		from, ranges = append(from, []*comparedPage{p}), page.AppendRange(ranges, one)
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
	for i, replicas := range from {
		for _, p := range replicas {
			*c.tries -= c.findIn(p, buf[i<<page.Shift:][:page.Size], triesFor(*c.tries, searches*devices))
			searches--
		}
	}
	return nil
}

// findIn looks for the base of p in the bytes that a device has of the page. It makes up to most attempts, and
// returns how many it made.
func (c *comparison) findIn(p *comparedPage, mine []byte, most int) (tried int) {
	ended := c.withoutTail(p.page, mine)
	for _, bytes := range [][]byte{mine, ended} {
		if p.isBase(bytes) {
			p.base = bytes
			return 0
		}
	}
	p.base, tried = mixed(p.h.dev.Key(), p.agreed, ended, c.withoutTail(p.page, p.home), most)
	return tried
}

// keep commits the results and keeps the bases. If no base was found, home's present bytes become it.
func (c *comparison) keep() {
	f := c.f
	lost := c.lost
	for _, p := range c.differ {
		if p.base != nil {
			continue
		}
		p.base = c.withoutTail(p.page, p.home)
		lost = union(lost, []page.Range{p.pages()})
		for o, h := range f.holdings {
			for _, rg := range subtract(f.lrc.TrackedBy(p.pages(), o, onHome), c.same[o]) {
				h.rebaseLocked(rg, p.base)
			}
		}
	}
	for _, k := range c.plan.Commit(c.moved) {
		for ; !k.Range.Empty(); k.Range.Start++ {
			i, found := slices.BinarySearchFunc(c.differ, k.Range.Start,
				func(p *comparedPage, at page.Index) int { return cmp.Compare(p.page, at) })
			if found {
				f.putBasesLocked(page.Range{Start: k.Range.Start, End: k.Range.Start + 1}, k.Base,
					f.c.pages.copies(c.differ[i].base))
			}
		}
	}
	for o := range f.holdings {
		if same := intersect(c.same[o], c.moved); len(same) > 0 {
			plan := f.lrc.BeginRelieve(page.Range{Start: same[0].Start, End: same[len(same)-1].End}, o)
			f.dropBasesLocked(plan.Updated(same, true))
			plan.End()
		}
	}
	if len(lost) > 0 {
		n := pagesOf(lost)
		f.count(func(c *Counters) { c.BaselessPages.Add(n) })
		f.c.log.Warn("pages were changed directly in the backing file and stored into by a device; the device's bytes are kept",
			"file", f.Name(), "pages", n, "first", lost[0].String())
	}
}

// sums returns the digests of the pages in bytes, as the device of h computes them.
func (h *holding) sums(bytes []byte) []gpubackend.Digest {
	sums := make([]gpubackend.Digest, len(bytes)>>page.Shift)
	h.dev.Key().SumPages(bytes, sums)
	return sums
}
