package pagecache

import (
	"context"
	"errors"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
)

// A view need not wait until home has what a device released. Where nobody else changed a page since the device last
// agreed with home, home will have exactly what the device has. So the view copies that, under File.mu: whatever
// changes the page otherwise has it brought home first. Once it is home, the page counts as changed, as any other
// that is brought home: programs on the device may have stored there since the copy.

// straight is what a view has straight from devices that released it.
type straight struct {
	releases uint64 // File.releases when it was copied: what was released later is not there
	pages    []page.Range
}

// straightLocked returns, for each holding, the pages of rg that it released and that a view may copy from its memory.
func (p *viewPart) straightLocked(rg page.Range) (of map[*holding][]page.Range, all []page.Range) {
	f := p.f
	whole := page.Range{End: page.Index(f.size >> page.Shift)} // bytes past the end are no part of the file
	pending := f.lrc.Pending(rg.Intersect(whole), false)
	if len(pending) == 0 {
		return nil, nil
	}
	of = make(map[*holding][]page.Range)
	for _, x := range pending {
		h := f.holdings[x.Owner]
		if x.Base == lrc.BaseHome && p.v.c.reaches(p.v.dev, h.dev) {
			of[h] = page.AppendRange(of[h], x.Range)
		}
	}
	for h, pages := range of {
		for o := range f.holdings { // pages that several released are merged
			if o != h.owner {
				pages = subtract(pages, f.pendingOfLocked(rg, o))
			}
		}
		pages = subtract(pages, f.doubt)
		of[h], all = pages, union(all, pages)
	}
	return of, all
}

// collectRestLocked brings home what devices released of the pages of rg up to next, but for what the view may copy
// from their memory. What it lacks of that is stale then.
func (p *viewPart) collectRestLocked(ctx context.Context,
	rg page.Range) (of map[*holding][]page.Range, next page.Index, err error) {
	f := p.f
	if err := f.landLocked(rg); err != nil {
		return nil, rg.Start, err
	}
	_, all := p.straightLocked(rg)
	if len(all) == 0 {
		next, err = f.collectSomeLocked(ctx, rg)
		return nil, next, err
	}
	next = rg.End
	var others []page.Range
	for _, x := range f.lrc.Pending(rg, false) {
		others = page.AppendRange(others, x.Range)
	}
	left := page.Index(holdCollect)
	for _, run := range subtract(others, all) {
		if page.Index(run.Len()) > left {
			run.End = run.Start + left
			next = run.End
		}
		left -= page.Index(run.Len())
		if err := f.collectLocked(ctx, run, false); err != nil {
			return nil, rg.Start, err
		}
		if next != rg.End {
			break
		}
	}
	of, all = p.straightLocked(page.Range{Start: rg.Start, End: next}) // a device may have been lost
	if p.straight.releases != f.releases {
		p.straight = straight{releases: f.releases}
	}
	for _, run := range subtract(all, p.straight.pages) {
		p.state.Mark(run)
	}
	return of, next, nil
}

// copyStraightLocked copies those of the taken pages that devices released, and returns the rest, of which home has
// everything.
func (p *viewPart) copyStraightLocked(ctx context.Context, of map[*holding][]page.Range, taken []page.Range,
	into *viewFill) ([]page.Range, error) {
	for h, pages := range of {
		mine := intersect(taken, pages)
		if len(mine) == 0 {
			continue
		}
		copies, few := p.fromExtents(h, mine, into)
		err := gpubackend.ErrNoPeer
		if few {
			err = p.copyPeer(ctx, h.dev, copies, mine)
		}
		switch {
		case err == nil:
			taken = subtract(taken, mine)
			p.straight.pages = union(p.straight.pages, mine)
		case !errors.Is(err, gpubackend.ErrNoPeer):
			return nil, err
		default:
			for _, run := range mine {
				if err := p.f.collectLocked(ctx, run, false); err != nil {
					return nil, err
				}
			}
		}
	}
	return taken, nil
}
