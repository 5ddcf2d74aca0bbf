package residency

import (
	"context"
	"errors"
	"math"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// With a policy.Threshold, an extent that is not in the device's own memory moves there only once it was accessed often
// enough (Ganguly). Until then brackets use it in pinned memory. An access is a bracket that uses the extent, an
// acquire, or a release that changed it. A client that keeps a bracket says at its end how many more there were. Nobody
// sees a store before it is released, so an extent that was changed since its last bracket counts as written to by the
// next one, and moves with it.
//
// The history of an extent belongs to the first page of it, for one Key. It outlives the extent, and ends with Forget.

// Delay says when extents move to the device's own memory. The zero Delay is eager: with the first bracket.
type Delay struct {
	// Threshold makes extents move when policy.Threshold says so. Static and Penalty are its fields.
	Threshold       bool
	Static, Penalty uint64
}

// Delayed counts what brackets had in pinned memory because the threshold was not reached.
type Delayed struct {
	Brackets int64 `json:"brackets"`
	Extents  int64 `json:"extents"`
	Bytes    int64 `json:"bytes"`
}

// spot is where an extent is in a Key, also while it has no memory.
type spot struct {
	key   Key
	start page.Index
}

// delayed has the spots of a grant whose extents do not move to the device's own memory yet. nil: there are none.
type delayed map[spot]struct{}

func (s delayed) has(key Key, pages page.Range) bool {
	_, ok := s[spot{key, pages.Start}]
	return ok
}

// leastSpots is how many spots are remembered at least.
const leastSpots = 1 << 16

// delays remembers accesses to extents. Device.mu protects it.
type delays struct {
	threshold policy.Threshold
	of        map[Key]map[page.Index]*history // by the first page
	spots     int                             // in of
	named     policy.ID                       // the last ID given
}

type history struct {
	id      policy.ID // in threshold
	written bool      // since its last bracket
}

// SetDelay changes when extents move to the device's own memory. What is known of accesses stays known as long as there
// is a threshold.
func (d *Device) SetDelay(to Delay) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !to.Threshold {
		d.delays = nil
		return
	}
	if d.delays == nil {
		d.delays = &delays{of: make(map[Key]map[page.Index]*history)}
	}
	d.delays.threshold.Static, d.delays.threshold.Penalty = to.Static, to.Penalty
}

// Forget forgets the accesses to all extents of a Key that is not used any more.
func (d *Device) Forget(key Key) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.delays == nil {
		return
	}
	for start := range d.delays.of[key] {
		d.delays.forget(spot{key, start})
	}
}

// RememberedForTesting returns of how many extents accesses are known.
func (d *Device) RememberedForTesting() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.delays == nil {
		return 0
	}
	return d.delays.spots
}

func (ds *delays) at(p spot) *history { return ds.of[p.key][p.start] }

func (ds *delays) forget(p spot) {
	of := ds.of[p.key]
	ds.threshold.Forget(of[p.start].id)
	if delete(of, p.start); len(of) == 0 {
		delete(ds.of, p.key)
	}
	ds.spots--
}

// historyLocked returns the history of a spot, and begins it if necessary. If there are too many, it forgets those of
// extents without memory. Device.mu is held.
func (d *Device) historyLocked(at spot) *history {
	ds := d.delays
	if h := ds.at(at); h != nil {
		return h
	}
	if ds.spots >= max(leastSpots, 2*len(d.extents)) {
		there := make(map[spot]bool, len(d.extents))
		for _, x := range d.extents {
			there[x.spot()] = true
		}
		for key, of := range ds.of {
			for start := range of {
				if old := (spot{key, start}); !there[old] {
					ds.forget(old)
				}
			}
		}
	}
	ds.named++
	ds.spots++
	h := &history{id: ds.named}
	if ds.of[at.key] == nil {
		ds.of[at.key] = make(map[page.Index]*history)
	}
	ds.of[at.key][at.start] = h
	return h
}

func (x *Extent) spot() spot { return spot{x.key, x.pages.Start} }

// delay counts a bracket that uses wants. It returns which of its extents should be in pinned memory.
func (d *Device) delay(wants []Want, by tenants.ID) (stay delayed) {
	d.mu.Lock()
	off := d.delays == nil
	d.mu.Unlock()
	if off {
		return nil
	}
	pieces := make([][]piece, len(wants))
	for i, w := range wants {
		pieces[i], _ = plan(w.Key.Extents(Aligned(w.Pages, w.Size)), w.Pages, w.Size, d.info.Granularity, math.MaxInt64)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.delays == nil {
		return nil
	}
	stay = make(delayed)
	brings := int64(0) // what the bracket brings to the device so far
	for i, w := range wants {
		for _, of := range pieces[i] {
			here := of.x != nil && of.x.Placement().Tier == TierVRAM
			h := d.historyLocked(spot{w.Key, of.pages.Start})
			moves := d.delays.threshold.Access(h.id, h.written, d.taken+brings, d.budget,
				d.fitsOwnLocked(by, brings+of.bytes()))
			h.written = false
			switch {
			case here:
			case moves:
				brings += of.bytes()
			default:
				stay[spot{w.Key, of.pages.Start}] = struct{}{}
			}
		}
	}
	return stay
}

// fitsOwnLocked reports whether a tenant can have so many more bytes of the device's own memory although no extent
// leaves. Device.mu is held.
func (d *Device) fitsOwnLocked(id tenants.ID, bytes int64) bool {
	return d.taken+d.promised+bytes <= d.budget && d.ledger.May(id, bytes)
}

// accessedLocked counts an acquire of x, or a release that changed it. Device.mu is held.
func (d *Device) accessedLocked(x *Extent, write bool) {
	if d.delays == nil {
		return
	}
	if h := d.delays.at(x.spot()); h != nil {
		d.delays.threshold.Access(h.id, write, d.taken, d.budget, true)
		h.written = h.written || write
	}
}

// claimedLocked counts n more brackets that used x, as a program says. Device.mu is held.
func (d *Device) claimedLocked(x *Extent, n uint32) {
	if d.delays == nil {
		return
	}
	if h := d.delays.at(x.spot()); h != nil {
		d.delays.threshold.Claim(h.id, n)
	}
}

// leftOwnLocked counts that x left the device's own memory. Device.mu is held.
func (d *Device) leftOwnLocked(x *Extent) {
	if d.delays == nil {
		return
	}
	if h := d.delays.at(x.spot()); h != nil {
		d.delays.threshold.Left(h.id)
	}
}

// isDelayedLocked reports whether x, in pinned memory, was not accessed often enough to move by itself. Device.mu is
// held.
func (d *Device) isDelayedLocked(x *Extent) bool {
	if d.delays == nil {
		return false
	}
	h := d.delays.at(x.spot())
	return h == nil || !h.written &&
		!d.delays.threshold.Reached(h.id, d.taken, d.budget, d.fitsOwnLocked(x.owner, x.size))
}

// moveIn moves extents of wants from pinned memory to the device's own that have reached the threshold, and makes room
// for them. What wants have of the device's own memory stays meanwhile.
func (d *Device) moveIn(ctx context.Context, wants []Want, a *Asking) error {
	if a.stay == nil {
		return nil
	}
	keep := &Pin{dev: d, keeps: true}
	defer keep.Free()
	for _, w := range wants {
		for _, x := range w.Key.Extents(w.Pages) {
			keep.keepOwn(x)
		}
	}
	for _, w := range wants {
		if w.Key.Preference().OnHost {
			continue
		}
		for _, x := range w.Key.Extents(w.Pages) {
			if x.Placement().Tier != TierHost || x.Mapped() > 0 || a.stay.has(x.key, x.pages) {
				continue
			}
			if ok, err := d.swapIn(ctx, x, a.By.id()); !ok || err != nil {
				return err
			}
			keep.keepOwn(x)
		}
	}
	return nil
}

// swapIn moves x from pinned memory to the device's own, and makes room for it. It reports false if there is none. A
// tenant that may own no more of the device gives other extents for this one.
func (d *Device) swapIn(ctx context.Context, x *Extent, id tenants.ID) (bool, error) {
	mine, _, err := d.turn(ctx)
	if err != nil {
		return false, err
	}
	defer d.yield(mine)
	d.mu.Lock()
	d.ledger.Add(id, x.size) // while victims are chosen, also beyond the maximum
	d.mu.Unlock()
	defer d.unclaim(id, x.size)
	for d.room() < x.size || d.over(id, x.size) {
		ok, err := d.evict(ctx, TierVRAM, id, ForBracket, sparing{copied: true}, x.size-d.room())
		if !ok || err != nil {
			return false, err
		}
	}
	d.bring(ctx, x)
	return true, nil
}

// keepOwn pins x if it is in the device's own memory. Nobody is charged.
func (p *Pin) keepOwn(x *Extent) {
	p.dev.mu.Lock()
	defer p.dev.mu.Unlock()
	if x.state == held && !x.moving && x.Placement().Tier == TierVRAM {
		p.dev.pinLocked(x, p)
	}
}

// delayedLocked counts the extents of a grant that are in pinned memory because of the threshold. Device.mu is held.
func (d *Device) delayedLocked(g *Grant, stay delayed) {
	extents, bytes := int64(0), int64(0)
	for _, p := range g.pins {
		for _, x := range p.extents {
			if x.Placement().Tier == TierHost && stay.has(x.key, x.pages) {
				extents++
				bytes += x.size
			}
		}
	}
	if extents == 0 {
		return
	}
	d.delayed.Brackets++
	d.delayed.Extents += extents
	d.delayed.Bytes += bytes
}

// allocateUnasked is the allocator of a grant that needs no room. Only an extent that stays in pinned memory gets
// memory, if some is free and nobody waits for it.
func (s delayed) allocateUnasked(d *Device) allocator {
	return func(_ context.Context, key Key, pages page.Range, by Tenant, _ func() bool) (found, error) {
		if !s.has(key, pages) || d.inLine() > 0 {
			return found{}, errFull
		}
		size := piece{pages: pages}.bytes()
		d.pinned.own(by.id(), size)
		if !d.pinned.overdrawn(by.id()) {
			mem, littered, err := d.allocHost(size, by.User)
			if err == nil {
				return found{TierHost, mem, littered}, nil
			}
			if errors.Is(err, gpubackend.ErrDeviceLost) {
				d.pinned.own(by.id(), -size)
				return found{}, err
			}
		}
		d.pinned.own(by.id(), -size)
		return found{}, errFull
	}
}
