package pagecache

import (
	"context"
	"iter"
	"slices"
	"sync"
	"syscall"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/pagecache/residency"
)

const (
	// viewPages is the most pages of one transfer to a view, 64 GiB. viewRuns is the most runs of pages; a list of them
	// takes 8 MiB. At the end of a transfer a view waits for its device, and nothing moves for milliseconds. Other
	// views that read meanwhile do not read for it, so it reads the same pages again. So most views should be one
	// transfer.
	viewPages = 1 << 24
	viewRuns  = 1 << 19
	// heldRuns is the most runs if some may be copied under one hold of File.mu.
	heldRuns = holdPeer / 16
)

// name returns the name of the first file, for messages.
func (v *View) name() string { return v.parts[0].f.Name() }

// acquire brings bytes of the view up to date and returns the number of file pages that were copied. The caller's
// mapping pins the memory. acquire calls begun once other views know that it is about to read the first file, and also
// before it waits for another acquire of this view: that one must not wait for it.
func (v *View) acquire(ctx context.Context, b page.Bytes, launder bool, begun func()) (pages int64, err error) {
	select {
	case v.filling <- struct{}{}:
	default:
		begun()
		select {
		case v.filling <- struct{}{}:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	defer func() { <-v.filling }()
	sources := v.sources(b)
	for i, p := range v.parts {
		p.f.views.expect(1)
		if i == 0 {
			begun()
		}
		pages, err = p.acquire(ctx, sources[p.of.Number()], launder, pages)
		p.f.views.expect(-1)
		if err != nil {
			v.c.lose(v.dev, err)
			return pages, v.dev.fault(err)
		}
	}
	return pages, nil
}

// sources returns the pages of each file, by file number, that bytes of the view come from, ascending. They may include
// pages in between that are not needed.
func (v *View) sources(b page.Bytes) map[int][]page.Range {
	of := make(map[int][]page.Range, len(v.parts))
	if b.Len() == v.layout.Size() {
		for _, p := range v.parts {
			of[p.of.Number()] = []page.Range{p.of.Span().Pages()}
		}
		return of
	}
	for i, from := range v.layout.Sources(b) {
		of[i] = append(of[i], from.Pages())
	}
	for i, list := range of {
		slices.SortFunc(list, func(a, b page.Range) int { return int(a.Start - b.Start) })
		of[i] = joined(list)
	}
	return of
}

// acquire brings the pages of list up to date and adds the number of those that were stale to pages.
func (p *viewPart) acquire(ctx context.Context, list []page.Range, launder bool, pages int64) (int64, error) {
	if len(list) == 0 {
		return pages, nil
	}
	f := p.f
	if launder {
		if err := f.mu.LockIn(ctx); err != nil {
			return pages, err
		}
		kernel := f.kernel.Pages()
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
	t, next, err := p.begin(ctx, rg)
	if err != nil || t == nil {
		return 0, next, err
	}
	defer p.f.home.EndRead()
	if err := t.run(ctx); err != nil {
		p.state.GaveUp()
		return 0, next, err
	}
	return t.taken, next, nil
}

// viewFill is one transfer to a view, and the mover.Target of what comes from home.
type viewFill struct {
	p       *viewPart
	extents []*residency.Extent // all extents of the view
	home    *mover.Source
	turn    uint64       // of the Take that took the pages
	taken   int64        // pages
	rest    []page.Range // pages that did not come from the extents of mappings
	fill    *mover.Fill  // the part from home; set before others see it

	mu   sync.Mutex
	from mover.Ways // protected by mu
}

// begin takes the stale pages of rg up to next. It copies what it can from the extents of mappings. Released pages that
// cannot be copied straight from a device are brought home first. It returns nil if nothing is stale; otherwise the
// caller must call endRead.
func (p *viewPart) begin(ctx context.Context, rg page.Range) (t *viewFill, next page.Index, err error) {
	f := p.f
	if err := f.mu.LockIn(ctx); err != nil {
		return nil, rg.Start, err
	}
	defer f.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, rg.Start, err
	}
	released, next, err := p.collectRestLocked(ctx, rg)
	if err != nil {
		return nil, rg.Start, err
	}
	f.views.turn++
	taken, pages, next := p.takeLocked(page.Range{Start: rg.Start, End: next}, len(released) > 0)
	if pages == 0 {
		return nil, next, nil
	}
	t = &viewFill{p: p, turn: f.views.turn, taken: pages}
	p.v.mu.Lock()
	t.extents = slices.Clone(p.v.extents)
	p.v.mu.Unlock()
	if t.rest, err = p.copyStraightLocked(ctx, released, taken, t); err == nil && len(t.rest) > 0 {
		t.rest, err = p.fromExtentsLocked(ctx, t.rest, t)
	}
	if err != nil {
		p.state.GaveUp()
		return nil, rg.Start, err
	}
	t.home = f.home.Source(f.locking.pages())
	f.home.BeginRead()
	return t, next, nil
}

// takeLocked takes the stale pages of rg for one transfer, up to next. straight says whether some may be copied
// straight from the devices that released them.
func (p *viewPart) takeLocked(rg page.Range, straight bool) (taken []page.Range, pages int64, next page.Index) {
	f := p.f
	if len(f.holdings) > 0 {
		// What is copied from mappings is copied under this hold of File.mu, so the transfer is short.
		taken, pages, next = p.state.Take(rg, holdPeer, heldRuns, 0, f.views.turn)
		if next == rg.End || straight || len(p.extentSourcesLocked(rg)) > 0 {
			return taken, pages, next
		}
		rg.Start = next
	}
	gap := int64(bridgePages) // what comes from home is read along with gaps
	if straight || len(p.siblings()) > 0 {
		gap = 0
	}
	more, n, next := p.state.Take(rg, viewPages, viewRuns, gap, f.views.turn)
	return append(taken, more...), pages + n, next
}

// run brings the rest: from views on other devices, and what they lack from home.
func (t *viewFill) run(ctx context.Context) error {
	p := t.p
	ready := sync.OnceFunc(func() { p.f.views.expect(-1) })
	defer p.f.views.expect(1)
	defer ready()
	if len(p.siblings()) > 0 {
		ready() // it may be long until this view reads home
	}
	rest, err := p.fromViews(ctx, t.rest, t)
	pages := pagesOf(rest)
	for err == nil && len(rest) > 0 {
		err = t.fromHome(ctx, rest, ready)
		rest = p.state.Coming() // others claimed these for this view and did not bring them
	}
	if err != nil {
		return err
	}
	p.f.count(func(c *Counters) { c.ViewPages.Add(pages) })
	p.f.countWays(t.from)
	return nil
}

// bridgePages is the widest gap between runs of pages that is read along with them, if the view has no bytes of it.
// Reading it costs less than another call.
const bridgePages = 4

// bridged returns ascending ranges with small gaps between them filled.
func bridged(ranges []page.Range) (out []page.Range) {
	for _, rg := range ranges {
		if n := len(out); n > 0 && rg.Start-out[n-1].End <= bridgePages {
			out[n-1].End = rg.End
		} else {
			out = append(out, rg)
		}
	}
	return out
}

// Placer implements mover.Target.
func (t *viewFill) Placer() mover.Placer { return t }

// AppendCopies implements mover.Placer. Rows go to their place together, so there is no work for each of them. Only
// short rows are gathered first.
func (t *viewFill) AppendCopies(list []gpubackend.Copy, pages page.Range, buf []byte) []gpubackend.Copy {
	short := gatherer{t: t, list: list}
	for r := range t.p.of.Rows(pages.Span()) {
		from := buf[r.Off-pages.Offset():][:r.Span().Len()]
		if r.Count > 1 && r.Len >= leastRow {
			short.flush()
			short.list = t.place(short.list, r.View, gpubackend.Copy{Host: from, Row: r.Len, Stride: r.Stride})
			continue
		}
		for k := range r.Count {
			short.add(r.View+k*r.Len, from[k*r.Stride:][:r.Len])
		}
	}
	short.flush()
	return short.list
}

// place appends the copies that bring c to the view's bytes from at on.
func (t *viewFill) place(list []gpubackend.Copy, at int64, c gpubackend.Copy) []gpubackend.Copy {
	for x, part := range pieces(t.extents, page.Span(at, c.Bytes())) {
		n := len(list)
		list = c.AppendPart(list, part.Off-at, part.Len())
		for k := n; k < len(list); k++ {
			list[k].Mem, list[k].Off = x.Memory(), list[k].Off+at-x.Pages().Offset()
		}
	}
	return list
}

// gatherer appends runs of a view to list. It gathers short runs that are adjacent in the view.
type gatherer struct {
	t        *viewFill
	list     []gpubackend.Copy
	run      page.Bytes // of the view; earlier runs are in list
	from     []byte     // its bytes
	gathered bool       // from is a copy, not part of the caller's buffer
}

func (g *gatherer) flush() {
	g.list = g.t.place(g.list, g.run.Off, gpubackend.Copy{Host: g.from})
	g.run, g.from = page.Bytes{}, nil
}

// add appends a run that goes to the view's bytes from at on.
func (g *gatherer) add(at int64, row []byte) {
	n := int64(len(row))
	if at != g.run.End || n >= leastRow || len(g.from) >= mostGathered || g.run.Len() >= leastRow && !g.gathered {
		g.flush()
		g.run, g.from, g.gathered = page.Span(at, n), row, false
		return
	}
	if !g.gathered {
		g.from, g.gathered = append(make([]byte, 0, leastRow), g.from...), true
	}
	g.run.End, g.from = g.run.End+n, append(g.from, row...)
}

const (
	// leastRow is the size in bytes from which a row is copied from where it was read. Shorter rows are gathered first:
	// devices take longer for each of them than for its bytes.
	leastRow = 256
	// mostGathered is roughly the most bytes that are gathered into one copy.
	mostGathered = 1 << 20
)

// AppendPatches implements mover.Placer. Nobody stores into a view, so it has no patches.
func (t *viewFill) AppendPatches([]gpubackend.Patch, *mover.Step, []byte,
	[]gpubackend.Digest) ([]gpubackend.Patch, error) {
	panic("pagecache: a patch of a view")
}

// Sent implements mover.Target. Other views may be waiting to copy the pieces.
func (t *viewFill) Sent(pieces []*mover.Piece) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, x := range pieces {
		t.from.Add(x.Ways)
		for _, s := range x.Steps {
			t.p.state.Arrived(s.Pages)
		}
	}
}

// Arrived implements mover.Target.
func (t *viewFill) Arrived([]*mover.Piece) {}

// ready zeroes the extents that copies go to, or waits until that is done.
func (t *viewFill) ready(ctx context.Context, copies []gpubackend.Copy) error {
	return t.zero(ctx, len(copies), func(i int) gpubackend.Memory { return copies[i].Mem })
}

// zero zeroes the extents that have the memory mem(0) to mem(n-1), or waits until that is done.
func (t *viewFill) zero(ctx context.Context, n int, mem func(i int) gpubackend.Memory) error {
	var last gpubackend.Memory
	for i := range n {
		if mem(i) == last {
			continue
		}
		last = mem(i)
		for _, x := range t.extents {
			if x.Memory() != last {
				continue
			}
			if err := x.Zero(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// appendPeer appends copies into bytes of the view from memory, where the bytes begin at off.
func (t *viewFill) appendPeer(list []gpubackend.PeerCopy, from gpubackend.Memory, off int64,
	into page.Bytes) []gpubackend.PeerCopy {
	for x, part := range pieces(t.extents, into) {
		list = append(list, gpubackend.PeerCopy{
			Mem: x.Memory(), Off: part.Off - x.Pages().Offset(),
			From: from, FromOff: off + part.Off - into.Off, N: part.Len(),
		})
	}
	return list
}

// pieces yields the extents that hold bytes of a view, each with its part of the bytes.
func pieces(extents []*residency.Extent, b page.Bytes) iter.Seq2[*residency.Extent, page.Bytes] {
	return func(yield func(*residency.Extent, page.Bytes) bool) {
		i, _ := slices.BinarySearchFunc(extents, b.Off, func(x *residency.Extent, at int64) int {
			if x.Pages().End.Offset() <= at {
				return -1
			}
			return 1
		})
		for ; i < len(extents); i++ {
			part := b.Intersect(page.Span(extents[i].Pages().Offset(), extents[i].Size()))
			if part.Empty() || !yield(extents[i], part) {
				return
			}
		}
	}
}
