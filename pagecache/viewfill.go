package pagecache

import (
	"context"
	"slices"
	"sync"
	"syscall"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/pagecache/residency"
)

// viewPages is the most pages that one transfer to a view brings, 4 GiB.
const viewPages = 1 << 20

// name is that of the first file, for people.
func (v *View) name() string { return v.parts[0].f.Name() }

// acquire brings bytes of the view up to date, and returns the number of pages of the files that were copied. The caller's
// mapping pins the memory.
func (v *View) acquire(ctx context.Context, b page.Bytes, launder bool) (pages int64, err error) {
	select {
	case v.filling <- struct{}{}:
		defer func() { <-v.filling }()
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	for _, p := range v.parts {
		if pages, err = p.acquire(ctx, p.sources(b), launder, pages); err != nil {
			v.c.lose(v.dev, err)
			return pages, v.dev.fault(err)
		}
	}
	return pages, nil
}

// sources returns the pages of the file that bytes of the view come from, ascending. It may return others that lie between.
func (p *viewPart) sources(b page.Bytes) (list []page.Range) {
	v := p.v
	if b.Len() == v.layout.Size() {
		return []page.Range{p.of.Span().Pages()}
	}
	for i, from := range v.layout.Sources(b) {
		if i == p.of.Number() {
			list = append(list, from.Pages())
		}
	}
	slices.SortFunc(list, func(a, b page.Range) int { return int(a.Start - b.Start) })
	n := 0
	for _, rg := range list {
		if n > 0 && rg.Start <= list[n-1].End {
			list[n-1].End = max(list[n-1].End, rg.End)
			continue
		}
		list[n] = rg
		n++
	}
	return list[:n]
}

// acquire brings the pages of list up to date, and adds those that were not to pages.
func (p *viewPart) acquire(ctx context.Context, list []page.Range, launder bool, pages int64) (int64, error) {
	if len(list) == 0 {
		return pages, nil
	}
	f := p.f
	if launder {
		f.mu.Lock()
		kernel := f.kernel
		f.mu.Unlock()
		from := page.Range{Start: list[0].Start, End: list[len(list)-1].End}
		if err := kernel.Invalidate(from.Offset(), from.Bytes()); err != nil && err != syscall.ENOENT {
			return pages, err
		}
	}
	if err := f.checkHome(ctx); err != nil {
		return pages, err
	}
	for _, rest := range list {
		for !rest.Empty() {
			n, next, err := p.fill(ctx, rest)
			if pages += n; err != nil {
				return pages, err
			}
			rest.Start = next
		}
	}
	return pages, nil
}

// fill brings the stale pages of rg, up to next.
func (p *viewPart) fill(ctx context.Context, rg page.Range) (pages int64, next page.Index, err error) {
	stale, next, fill, err := p.begin(ctx, rg)
	if err != nil || fill == nil {
		return 0, next, err
	}
	defer p.f.endRead()
	if err = fill.Run(ctx, nil); err != nil {
		for _, rg := range stale {
			p.stale.Mark(rg)
		}
		return 0, next, err
	}
	for _, rg := range stale {
		pages += rg.Len()
	}
	from := fill.Into.(*viewFill).from
	p.f.count(func(c *Counters) {
		c.ViewPages.Add(pages)
		c.CachedPages.Add(from.Cached)
		c.DirectPages.Add(from.Direct)
		c.BufferedPages.Add(from.Buffered)
	})
	return pages, next, nil
}

// begin, which comes before a read of home that endRead ends where there is a fill, takes the stale pages of rg up to next, after what devices released of them was brought home. Where there are some,
// fill brings them.
func (p *viewPart) begin(ctx context.Context, rg page.Range) (stale []page.Range, next page.Index, fill *mover.Fill, err error) {
	f := p.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, rg.Start, nil, err
	}
	if next, err = f.collectSomeLocked(ctx, rg); err != nil {
		return nil, rg.Start, nil, err
	}
	stale, next = p.stale.Take(page.Range{Start: rg.Start, End: next}, viewPages)
	if len(stale) == 0 {
		return nil, next, nil, nil
	}
	f.beginRead()
	into := &viewFill{p: p}
	p.v.mu.Lock()
	into.extents = slices.Clone(p.v.extents)
	p.v.mu.Unlock()
	return stale, next, &mover.Fill{
		Device: p.v.dev.moves,
		Class:  mover.Acquire,
		From:   f.sourceLocked(),
		Into:   into,
		Pieces: mover.Pieces(len(stale), func(i int) mover.Update { return mover.Update{Pages: stale[i]} },
			[]mover.Run{{Pages: page.From(0).Pages()}}, nil),
		Reads: new(mover.Reads),
	}, nil
}

// viewFill is the mover.Target of a fill.
type viewFill struct {
	p       *viewPart
	extents []*residency.Extent // all that the view has

	mu   sync.Mutex
	from mover.Ways // protected by mu
}

// Placer implements mover.Target.
func (t *viewFill) Placer() mover.Placer { return t }

// AppendCopies implements mover.Placer: each run of the view's segments goes to its place.
func (t *viewFill) AppendCopies(list []gpubackend.Copy, pages page.Range, buf []byte) []gpubackend.Copy {
	for r := range t.p.of.Runs(pages.Span()) {
		from := buf[r.Off-pages.Offset():][:r.Len]
		i, _ := slices.BinarySearchFunc(t.extents, r.View, func(x *residency.Extent, at int64) int {
			if x.Pages().End.Offset() <= at {
				return -1
			}
			return 1
		})
		for at := r.View; len(from) > 0; i++ {
			x := t.extents[i]
			off := at - x.Pages().Offset()
			n := min(int64(len(from)), x.Size()-off)
			list = append(list, gpubackend.Copy{Mem: x.Memory(), Off: off, Host: from[:n]})
			from, at = from[n:], at+n
		}
	}
	return list
}

// AppendPatches implements mover.Placer. Nobody stores into a view, so nothing is patched.
func (t *viewFill) AppendPatches([]gpubackend.Patch, *mover.Step, []byte, []gpubackend.Digest) ([]gpubackend.Patch, error) {
	panic("pagecache: a patch of a view")
}

// Settle implements mover.Target.
func (t *viewFill) Settle(pieces []*mover.Piece) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, x := range pieces {
		t.from.Add(x.Ways)
	}
}
