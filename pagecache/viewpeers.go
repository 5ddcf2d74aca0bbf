package pagecache

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/pagecache/residency"
)

// If one device has pages of a file, another one need not read them from home again. The link between the devices is
// faster, and the link to the host stays free for pages that no device has. So a view takes pages
//
//   - from the extents that mappings have on a device, its own device first, if they match home and no program can have
//     stored into them, as fromPeersLocked does; and
//   - from views of the same segments on other devices, page by page as they arrive there. When processes on all
//     devices ask for the same weights at once, one device is filled from home, and the others follow it.
//
// A view waits only for pages that were taken before its own (State.Split), so no two views wait for each other. Views
// of different users do not copy from each other: a program may be able to store into a view of its own user.

const (
	// peerBatch is the most pages of one copy from another view, 256 MiB. Views that follow this one learn of them only
	// after the copy.
	peerBatch = 1 << 16
	// leastFollow is the least number of pages of a copy while more are coming, 32 MiB.
	leastFollow = 1 << 13
	// peerRuns is the most runs of bytes that are copied from mappings under one hold of File.mu. Each run is a copy of
	// its own, so a file with many short rows comes from home.
	peerRuns = 1 << 16
)

// extentSourcesLocked returns what the view may copy pages of rg from, its own device's first.
func (p *viewPart) extentSourcesLocked(rg page.Range) (list []extentSource) {
	f, dev := p.f, p.v.dev
	for h := range f.holdersLocked() {
		if h.empty() || !p.v.c.reaches(dev, h.dev) {
			continue
		}
		unwritten, _ := f.sourcesLocked(h, h, rg)
		x := extentSource{h, subtract(unwritten, f.doubt)} // pages in doubt may differ from home
		switch {
		case len(atLeast(x.pages, f.c.leastPeer)) == 0:
		case h.dev == dev:
			list = slices.Insert(list, 0, x)
		default:
			list = append(list, x)
		}
	}
	return list
}

// extentSource is a mapping's memory, and the pages of which it has home's bytes.
type extentSource struct {
	h     *holding
	pages []page.Range
}

// fromExtentsLocked copies pages from the extents of mappings on devices, and returns the rest.
func (p *viewPart) fromExtentsLocked(ctx context.Context, pages []page.Range,
	into *viewFill) (rest []page.Range, err error) {
	for _, s := range p.extentSourcesLocked(page.Range{Start: pages[0].Start, End: pages[len(pages)-1].End}) {
		h := s.h
		take := atLeast(intersect(pages, s.pages), p.f.c.leastPeer)
		if len(take) == 0 {
			continue
		}
		copies, few := p.fromExtents(h, take, into)
		if !few {
			continue
		}
		if err := into.copyPeer(ctx, h.dev, copies, take); err != nil {
			if errors.Is(err, gpubackend.ErrNoPeer) {
				continue
			}
			return nil, err
		}
		if pages = subtract(pages, take); len(pages) == 0 {
			break
		}
	}
	return pages, nil
}

// fromExtents returns the copies of pages from the extents of h. few is false if there are too many.
func (p *viewPart) fromExtents(h *holding, pages []page.Range,
	into *viewFill) (copies []gpubackend.PeerCopy, few bool) {
	for _, rg := range pages {
		h.each(rg, func(x *extent, part page.Range) {
			for r := range p.of.Runs(part.Span()) {
				if len(copies) > peerRuns {
					return
				}
				copies = into.appendPeer(copies, x.Memory(), x.offset(r.Off), page.Span(r.View, r.Len))
			}
		})
	}
	return copies, len(copies) <= peerRuns
}

// copyPeer copies pages from another device and notes that they have arrived.
func (t *viewFill) copyPeer(ctx context.Context, from *device, copies []gpubackend.PeerCopy, pages []page.Range) error {
	p, dev := t.p, t.p.v.dev
	if err := t.zero(ctx, len(copies), func(i int) gpubackend.Memory { return copies[i].Mem }); err != nil {
		return err
	}
	err := dev.moves.Peer(ctx, mover.Acquire, copies)
	p.v.c.noteWay(dev, from, err)
	if from != dev && errors.Is(err, gpubackend.ErrDeviceLost) {
		// Either device may be the lost one. If it is this one, the copy from home fails, too.
		return fmt.Errorf("%w: %v", gpubackend.ErrNoPeer, err)
	}
	if err != nil {
		return err
	}
	for _, rg := range pages {
		p.state.Arrived(rg)
	}
	n := pagesOf(pages)
	p.f.count(func(c *Counters) {
		c.PeerCopies.Add(1)
		c.PeerCopyPages.Add(n)
		c.ViewPages.Add(n)
	})
	return nil
}

// siblings returns the parts of the same file in views of the same segments and the same user, on devices that can be
// copied from.
func (p *viewPart) siblings() (list []*viewPart) {
	p.f.views.mu.Lock()
	defer p.f.views.mu.Unlock()
	for _, o := range p.f.views.parts {
		if p.follows(o) {
			list = append(list, o)
		}
	}
	return list
}

// follows reports whether p may copy from o.
func (p *viewPart) follows(o *viewPart) bool {
	same := o.v.key.what == p.v.key.what && o.v.key.user == p.v.key.user && o.of.Number() == p.of.Number()
	return same && o.v.dev != p.v.dev && p.v.c.reaches(p.v.dev, o.v.dev)
}

// fromViews copies pages from views on other devices that have them or are getting them. It returns the rest.
func (p *viewPart) fromViews(ctx context.Context, pages []page.Range, into *viewFill) (rest []page.Range, err error) {
	for _, o := range p.siblings() {
		pages, err = p.follow(ctx, o, pages, into)
		if err != nil && !errors.Is(err, gpubackend.ErrNoPeer) || len(pages) == 0 {
			return nil, err
		}
	}
	return pages, nil
}

// follow copies pages from another view as they arrive there. It returns the pages that it did not copy, also after an
// error.
func (p *viewPart) follow(ctx context.Context, from *viewPart, pages []page.Range,
	into *viewFill) (rest []page.Range, err error) {
	var arrived []page.Range
	for left := pages; err == nil && len(left) > 0; {
		// Hold the memory before asking which pages are there: an eviction marks pages as stale before it takes memory.
		extents := from.v.hold()
		there, coming, _, moved := from.state.Split(left, into.turn)
		if !from.v.has(extents) { // the extents may have changed before Split
			letGo(extents)
			continue
		}
		there = atLeast(there, p.v.c.leastPeer)
		for copied := false; len(there) > 0 && err == nil; copied = true {
			if !copied && len(coming) > 0 && pagesOf(there) < leastFollow {
				break // wait for more: such a small copy is not worth it
			}
			batch, _ := limit(there, peerBatch)
			if err = p.copyFrom(ctx, from.v.dev, extents, batch, into); err == nil {
				arrived, there = union(arrived, batch), subtract(there, batch)
			}
		}
		letGo(extents)
		if left = union(there, coming); len(coming) == 0 {
			break
		}
		select {
		case <-moved:
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	return subtract(pages, arrived), err
}

// hold returns the extents of a view. The caller may copy from them until it calls letGo.
func (v *View) hold() []*residency.Extent {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, x := range v.extents {
		x.Hold()
	}
	return slices.Clone(v.extents)
}

// letGo undoes hold.
func letGo(extents []*residency.Extent) {
	for _, x := range extents {
		x.LetGo()
	}
}

// has reports whether the view still has exactly these extents.
func (v *View) has(extents []*residency.Extent) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Equal(v.extents, extents)
}

// copyFrom copies pages from the extents of the same view on another device.
func (p *viewPart) copyFrom(ctx context.Context, dev *device, extents []*residency.Extent, pages []page.Range,
	into *viewFill) error {
	var copies []gpubackend.PeerCopy
	var run page.Bytes // of the view; earlier runs are in copies
	flush := func() {
		for x, part := range pieces(extents, run) {
			copies = into.appendPeer(copies, x.Memory(), part.Off-x.Pages().Offset(), part)
		}
	}
	for _, rg := range pages {
		for r := range p.of.Runs(rg.Span()) {
			if r.View != run.End || run.Empty() {
				flush()
				run.Off = r.View
			}
			run.End = r.View + r.Len
		}
	}
	flush()
	return into.copyPeer(ctx, dev, copies, pages)
}
