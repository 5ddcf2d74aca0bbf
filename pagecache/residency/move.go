package residency

import (
	"context"
	"math"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// moving is what Extent.users counts from while x moves. It is so low that TryHold fails.
const moving = math.MinInt32 / 2

// Move moves x to mem, memory of another tier and of x's size. fill copies the bytes. The Key calls Move with its lock
// held, so that nobody stores into x. Move reports false if somebody maps x or copies from it, or if fill fails. Then x
// stays where it is, and the caller keeps mem.
func (x *Extent) Move(tier Tier, mem gpubackend.Memory, fill func(from gpubackend.Memory) error) (bool, error) {
	d := x.dev
	d.mu.Lock()
	// While x moves, those who hold memory without the Key's lock see it as unused.
	if x.state != held || x.mapped > 0 || !x.users.CompareAndSwap(1, moving) {
		d.mu.Unlock()
		return false, nil
	}
	x.moving = true
	was := x.Placement()
	d.mu.Unlock()
	defer func() {
		d.mu.Lock()
		x.users.Add(1 - moving)
		x.moving = false
		d.mu.Unlock()
	}()
	err := fill(was.Memory)
	if err != nil {
		return false, err
	}
	x.place(tier, mem)
	d.mu.Lock()
	had := x.had
	x.had = nil
	d.takenLocked(was.Tier, -x.size)
	d.takenLocked(tier, x.size)
	d.countLocked(x, tier)
	if tier == TierHost {
		d.leftOwnLocked(x)
		d.movedOut += x.size
	} else {
		d.movedIn += x.size
	}
	d.mu.Unlock()
	d.free(was, had)
	d.wake()
	return true, nil
}

// Demote Moves x to pinned memory, if some is free and its owner may have more of it. fill copies x's bytes. Demote
// waits for nobody's memory.
func (x *Extent) Demote(ctx context.Context, fill func(from, to gpubackend.Memory) error) bool {
	d := x.dev
	d.mu.Lock()
	owner := x.owner
	d.mu.Unlock()
	d.pinned.own(owner, x.size)
	defer d.pinned.own(owner, -x.size) // Move counts it
	if d.pinned.overdrawn(owner) {
		return false
	}
	mem, _, err := d.pinned.take(d, x.size, nobody)
	if err != nil {
		return false
	}
	moved, err := x.Move(TierHost, mem, func(from gpubackend.Memory) error { return fill(from, mem) })
	if err != nil && ctx.Err() == nil { // a client that ended is no fault of the device
		d.options.Log.Warn("moving an extent to pinned memory", "device", d.info.Ordinal, "error", err)
	}
	if !moved {
		d.pinned.put(d, mem, nil)
	}
	return moved
}

// promote moves x from pinned memory to the device's own, if there is room, the tenant who asks may own that, and the
// threshold does not keep x there. It evicts nothing.
func (p *Pin) promote(ctx context.Context, x *Extent) {
	d, asks := p.dev, p.by.id()
	if x.Placement().Tier != TierHost || p.stay.has(x.key, x.pages) || x.key.Preference().OnHost || x.Mapped() > 0 ||
		!d.spare(x.size) || !d.claim(asks, x.size) {
		return
	}
	defer d.unclaim(asks, x.size)
	d.bring(ctx, x)
}
