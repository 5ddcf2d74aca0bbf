package pagecache

import (
	"context"
	"slices"
	"time"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
	"github.com/gaiafs/gaiafs/pagecache/residency"
)

// newHoldingLocked makes one more holding of a device.
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

// reserve sees to it that every page of m has memory, and pins it. The caller holds no lock.
func (m *Mapping) reserve(ctx context.Context) (err error) {
	f, d := m.f, m.dev
	if err := f.mu.LockIn(ctx); err != nil {
		return err
	}
	size := residency.Size(d.info, max(f.size, m.pages.End.Offset()))
	f.mu.Unlock()
	m.pin, err = d.room.Reserve(ctx, m.h, residency.Request{Pages: m.pages, Size: size, By: m.tenant})
	if err != nil {
		f.c.lose(d, err)
		return d.fault(err)
	}
	return nil
}

// Extents returns those of h that overlap rg, in order.
func (h *holding) Extents(rg page.Range) (list []*residency.Extent) {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	h.each(rg, func(x *extent, _ page.Range) { list = append(list, x.Extent) })
	return list
}

// Adopt makes x one of h's, unless there is one in its place.
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

// Clean is evict of a file that answers. Where it turns out that the file does not, or ctx ends, evict goes on by
// itself and the answer is false: the next file makes room instead. Whoever takes x although it is copied from has no
// next one, and gives up on the file only when it is stuck: its backing filesystem may be slow rather than hang.
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

// evict takes x from h if nobody maps it, what it holds can be brought home and, unless copied says otherwise, no copy
// of it is under way. The memory is free once there is none.
//
// What programs stored through movable mappings and did not release goes to pinned memory of the host instead, with the
// rest of the extent, where there is room; otherwise it is released.
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
	// A bracket may have come and gone whenever File.mu was free: its client has the memory then, and stored there.
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
	// Most of it comes home a part at a time, so that requests get in between.
	for rest := x.pages(); idle() && !orphan && !rest.Empty(); {
		var err error
		if rest.Start, err = f.collectSomeLocked(ctx, rest); err != nil {
			return false
		}
		f.mu.Unlock()
		f.mu.Lock()
	}
	if !idle() {
		return false
	}
	plan := f.lrc.BeginEvict(x.pages(), h.owner)
	if !orphan && (plan.Draining || f.collectLocked(ctx, x.pages(), false) != nil) {
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

// evictFor is Clean for another reason than that there is no room.
func (f *File) evictFor(ctx context.Context, x *extent, why residency.Why) bool {
	from := x.Placement().Tier
	if !x.h.Clean(ctx, x.Extent, true) {
		return false
	}
	x.Left(from, why)
	return true
}

// releaseExtentLocked releases what programs stored in x. It lets go of File.mu meanwhile.
func (f *File) releaseExtentLocked(ctx context.Context, x *extent) bool {
	x.Hold()
	f.mu.Unlock()
	_, grouped, err := f.release(ctx, x.h, x.pages())
	x.LetGo()
	f.mu.Lock()
	return err == nil && grouped == 0
}

// loseExtentLocked is freeExtentLocked that does without what is pending in x.
func (f *File) loseExtentLocked(x *extent) {
	plan := f.lrc.BeginEvict(x.pages(), x.h.owner)
	plan.Lossy = true
	f.freeExtentLocked(x, plan)
}

// freeExtentLocked gives the memory of x back, unless somebody maps it and the device is not lost. plan is for its
// pages, and ends.
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
