package pagecache

import (
	"context"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// Views of one file that are filled at the same time, like those of all ranks of a model, read it together: each read
// goes to all views that want bytes of it. Each view goes through the file from the start, and skips pages that another
// view has begun to read for it. So a view that comes later gets the pages that the others have yet to read, and itself
// reads the pages that they had read before.
//
// A page goes to a view only if its fill took it under File.mu, to bring it from home (viewPart.begin), and then only
// if it was claimed for that view before its read began (view.State), under fileViews.mu. So the bytes that arrive are
// those that home had when the page was taken, or newer ones. Home then lacked nothing of the page.

// fromHome brings pages from home, together with pages that other views of the file want. It calls ready once these
// views may share its reads. If it returns nil, pages that did not come are still marked as coming, and nobody brings
// them.
func (t *viewFill) fromHome(ctx context.Context, pages []page.Range, ready func()) error {
	p, read := t.p, bridged(pages)
	all := page.Range{Start: pages[0].Start, End: pages[len(pages)-1].End}
	update := func(i int) mover.Update { return mover.Update{Pages: read[i]} }
	t.fill = &mover.Fill{
		Device: p.v.dev.moves,
		Class:  mover.Acquire,
		From:   t.home,
		Into:   t,
		Pieces: mover.Pieces(len(read), update, []mover.Run{{Pages: all}}, nil),
		Reads:  new(mover.Reads),
		Ready:  t.ready,
	}
	var giveBack func()
	t.fill.Relays, giveBack = p.v.c.relays(p.v.dev, sizeOf(pages))
	defer giveBack()
	t.fill.Reads.Enter()
	defer t.fill.Reads.Leave()
	if t.home.Locked != nil { // every view copies what it wants from there
		ready()
		t.fill.Pieces = mover.PiecesInPlace(t.home.Size, sizeOf(read)/p.v.layout.Size(), len(read), update)
		return t.fill.Run(ctx, nil)
	}
	t.home.Ask(pages[0].Start)
	p.f.views.mu.Lock()
	p.shares = t
	p.f.views.mu.Unlock()
	ready()
	p.f.views.gather(ctx, p.v.c.gather(sizeOf(read)))
	return t.fill.Run(ctx, nil)
}

// Claim implements mover.Sharer.
func (t *viewFill) Claim(pieces [][]page.Range) []mover.Claim {
	f := t.p.f
	claims := make([]mover.Claim, len(pieces))
	if t.home.Locked != nil { // no other view brings pages to this one, or gets any
		for i := range pieces {
			claims[i].Pages = t.p.claim(pieces[i])
		}
		return claims
	}
	f.views.mu.Lock()
	defer f.views.mu.Unlock()
	var others []*viewPart
	for _, o := range f.views.parts {
		if o != t.p && o.shares != nil && o.shares.reads(t.home) && !o.follows(t.p) {
			others = append(others, o)
		}
	}
	for i := range pieces {
		c := &claims[i]
		if c.Pages = t.p.claim(pieces[i]); len(c.Pages) == 0 {
			continue
		}
		for _, o := range others {
			if s, ok := o.shares.fill.Offer(func() []page.Range { return o.claim(c.Pages) }); ok {
				c.Shares = append(c.Shares, s)
			}
		}
	}
	return claims
}

func (p *viewPart) claim(pages []page.Range) (claimed []page.Range) {
	for _, rg := range pages {
		claimed = append(claimed, p.state.Claim(rg, bridgePages)...)
	}
	return claimed
}

// reads reports whether t would read the same bytes from its own source. A file that was replaced or grew has another
// source.
func (t *viewFill) reads(from *mover.Source) bool {
	return t.home.Home == from.Home && t.home.Direct == from.Direct && t.home.Size == from.Size
}

// Return implements mover.Sharer.
func (t *viewFill) Return(pages []page.Range) {
	for _, rg := range pages {
		t.p.state.Return(rg)
	}
}

// Close implements mover.Sharer.
func (t *viewFill) Close() {
	t.p.f.views.mu.Lock()
	defer t.p.f.views.mu.Unlock()
	t.p.shares = nil
}
