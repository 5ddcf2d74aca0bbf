package pagecache

import (
	"context"
	"slices"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/residency"
)

// newHoldingLocked adds a holding of f on dev.
func (f *File) newHoldingLocked(dev *device) (*holding, error) {
	owner, err := f.freeOwnerLocked(dev)
	if err != nil {
		return nil, err
	}
	h := &holding{f: f, dev: dev, owner: owner}
	f.holdings[owner] = h
	if owner != dev.owner {
		f.others = append(f.others, h)
	}
	return h, nil
}

// reserve gives every page of m memory, and pins it. The caller holds no lock.
func (m *Mapping) reserve(ctx context.Context) (err error) {
	f, d := m.f, m.dev
	if err := f.mu.LockIn(ctx); err != nil {
		return err
	}
	size := residency.Size(d.info, max(f.home.Size(), m.pages.End.Offset()))
	f.mu.Unlock()
	m.pin, err = d.room.Reserve(ctx, m.h, residency.Request{Pages: m.pages, Size: size, By: m.tenant})
	if err != nil {
		f.c.lose(d, err)
		return d.fault(err)
	}
	return nil
}

// Extents returns the extents of h that overlap rg, in order.
func (h *holding) Extents(rg page.Range) (list []*residency.Extent) {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	h.each(rg, func(x *extent, _ page.Range) { list = append(list, x.Extent) })
	return list
}

// Adopt adds x to h. It returns false if h already has an extent there.
func (h *holding) Adopt(x *residency.Extent) bool {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	i, _ := h.find(x.Pages().Start)
	if i < len(h.extents) && h.extents[i].pages().Overlaps(x.Pages()) {
		return false
	}
	if _, back := h.gone[x.Pages().Start]; back {
		delete(h.gone, x.Pages().Start)
		h.f.count(func(c *Counters) { c.RoundTrips.Add(1) })
	}
	h.extents = slices.Insert(h.extents, i, &extent{Extent: x, file: h.f, h: h, dev: h.dev, littered: x.Littered()})
	return true
}

// Clean is evict with a limit on how long it waits. If the file seems stuck or ctx ends, Clean returns false, and evict
// continues in the background; the next file makes room instead. If copied is set, there is no next file: Clean then
// gives up only when the file is stuck, since its backing filesystem may be slow rather than hang.
func (h *holding) Clean(ctx context.Context, x *residency.Extent, copied bool) bool {
	f := h.f
	if f.stuck() {
		return false
	}
	givenUp := f.seemsStuck
	if copied {
		givenUp = f.stuck
	}
	evicted := make(chan bool, 1)
	f.c.lanes.work.Go(func() { evicted <- f.evict(ctx, h, x, copied) })
	tick := time.NewTicker(max(f.c.stuckAfter/impatience, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case is := <-evicted:
			return is
		case <-tick.C:
			if givenUp() {
				return false
			}
		case <-ctx.Done():
			return false
		}
	}
}

// evict takes x from h if no client maps it and its released bytes can be brought home. It refuses an extent that is
// being copied unless copied is set. The memory is free once its last copy has ended.
//
// Stores that programs made through movable mappings and did not release move to pinned host memory with the rest of
// the extent. If there is no room, they are released.
func (f *File) evict(ctx context.Context, h *holding, of *residency.Extent, copied bool) bool {
	if !h.takeBack(ctx, of) {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	x, _ := h.at(of.Pages().Start)
	if x == nil || x.Extent != of {
		return false
	}
	// Whenever File.mu was free, a bracket may have come and gone. Its client then had the memory and may have stored
	// into it.
	idle := func() bool { return h.has(x) && x.Mapped() == 0 && !x.leasedLocked() && (copied || !x.Copied()) }
	moves := idle() && f.movesLocked(x)
	if moves {
		dirty, err := f.dirtyLocked(ctx, x)
		if err != nil {
			return false
		}
		if dirty {
			if f.demoteLocked(ctx, x) {
				return true
			}
			if !f.releaseExtentLocked(ctx, x) {
				return false
			}
		}
	}
	orphan := f.orphan && !moves
	if !orphan && !h.collectOwnLocked(ctx, x.pages(), idle) {
		return false
	}
	if !idle() {
		return false
	}
	plan := f.lrc.BeginEvict(x.pages(), h.owner)
	own := func() []page.Range { return pendingOf(&f.lrc, x.pages(), h.owner) }
	if !orphan && (plan.Draining || f.collectRangesLocked(ctx, own(), x.pages().Len()) != nil || len(own()) > 0) {
		plan.Abort()
		return false
	}
	if plan.Lossy = orphan; !f.freeExtentLocked(x, plan) {
		return false
	}
	f.count(func(c *Counters) { c.Evictions.Add(1) })
	if h.gone == nil {
		h.gone = make(map[page.Index]struct{})
	}
	h.gone[x.pages().Start] = struct{}{}
	f.dropIdleLocked()
	return true
}

// collectOwnLocked brings home what h released of rg, in parts, so that requests get the lock in between. What other
// devices released of rg stays there: home may be full. It ends early when goOn reports false, and reports false itself
// if home does not take the bytes.
func (h *holding) collectOwnLocked(ctx context.Context, rg page.Range, goOn func() bool) bool {
	f := h.f
	for own := pendingOf(&f.lrc, rg, h.owner); goOn() && len(own) > 0; {
		if f.collectRangesLocked(ctx, own, holdCollect) != nil {
			return false
		}
		f.mu.Unlock()
		f.mu.Lock()
		left := pendingOf(&f.lrc, rg, h.owner)
		if slices.Equal(left, own) {
			break // they are draining
		}
		own = left
	}
	return true
}

// evictFor evicts x for a reason other than lack of room.
func (f *File) evictFor(ctx context.Context, x *extent, why residency.Why) bool {
	from := x.Placement().Tier
	if !x.h.Clean(ctx, x.Extent, true) {
		return false
	}
	x.Left(from, why)
	return true
}

// releaseExtentLocked releases what programs stored in x. It unlocks File.mu while it does.
func (f *File) releaseExtentLocked(ctx context.Context, x *extent) bool {
	x.Hold()
	f.mu.Unlock()
	_, grouped, err := f.release(ctx, x.h, x.pages())
	x.LetGo()
	f.mu.Lock()
	return err == nil && grouped == 0
}

// loseExtentLocked frees x and gives up bytes that are pending in it.
func (f *File) loseExtentLocked(x *extent) {
	plan := f.lrc.BeginEvict(x.pages(), x.h.owner)
	plan.Lossy = true
	f.freeExtentLocked(x, plan)
}

// freeExtentLocked gives the memory of x back. It refuses if a client maps x, unless the device is lost. It ends plan,
// which covers the pages of x.
func (f *File) freeExtentLocked(x *extent, plan lrc.EvictPlan) bool {
	h := x.h
	i, _ := h.find(x.pages().Start)
	if !h.has(x) || !x.Leave(x.dev.lost.Load()) {
		plan.Abort()
		return false
	}
	h.extents = slices.Delete(h.extents, i, i+1)
	x.agreed.drop()
	x.agreed = nil
	f.dropBasesLocked(plan.Commit())
	return true
}
