package pagecache

import (
	"context"
	"errors"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
)

// A view need not wait until home has the released bytes of a device. If nobody else changed a page since the device
// last agreed with home, home will get exactly the device's bytes. So the view copies them, under File.mu: every other
// change of the page brings it home first. Once the page is home it counts as changed, like any other page that comes
// home, because programs on the device may have stored into it since the copy.

// straight is the set of pages that a view copied straight from the devices that released them.
type straight struct {
	releases uint64 // File.releases at the copy: later releases are not included
	pages    []page.Range
}

// straightLocked returns, for each holding, the pages of rg that it released and that the view may copy from its
// memory.
func (p *viewPart) straightLocked(rg page.Range) (of map[*holding][]page.Range, all []page.Range) {
	f := p.f
	whole := page.Range{End: page.Index(f.home.Size() >> page.Shift)} // bytes past the end are no part of the file
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
		for o := range f.holdings { // pages released by several owners have to be merged
			if o != h.owner {
				pages = subtract(pages, pendingOf(&f.lrc, rg, o))
			}
		}
		pages = subtract(pages, f.doubt)
		of[h], all = pages, union(all, pages)
	}
	return of, all
}

// collectRestLocked brings the flights and the released pages of rg home, up to next, except those that the view may
// copy from devices. Of these it marks the ones that the view lacks as stale. All other pages before next are home
// then.
func (p *viewPart) collectRestLocked(ctx context.Context,
	rg page.Range) (of map[*holding][]page.Range, next page.Index, err error) {
	f := p.f
	if err := f.landLocked(rg); err != nil {
		return nil, rg.Start, err
	}
	var all []page.Range
	for left := page.Index(holdCollect); ; {
		if of, all = p.straightLocked(rg); len(all) == 0 {
			next, err = f.collectSomeLocked(ctx, rg)
			return nil, next, err
		}
		var others []page.Range
		for _, x := range f.lrc.Pending(rg, false) {
			others = page.AppendRange(others, x.Range)
		}
		if others = subtract(others, all); len(others) == 0 {
			break
		}
		for _, run := range others {
			if run.Len() > int64(left) {
				run.End = run.Start + left
				rg.End = run.End
			}
			left -= page.Index(run.Len())
			if err := f.collectLocked(ctx, run, false); err != nil {
				return nil, rg.Start, err
			}
			if rg.End == run.End {
				break
			}
		}
		// Look again: home may have been found changed, or a device lost. Then fewer pages may be copied from devices.
	}
	if p.straight.releases != f.releases {
		p.straight = straight{releases: f.releases}
	}
	for _, run := range subtract(all, p.straight.pages) {
		p.state.Mark(run)
	}
	return of, rg.End, nil
}

// copyStraightLocked copies the taken pages that devices released. It returns the rest; home has all of those.
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
			err = into.copyPeer(ctx, h.dev, copies, mine)
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
