package residency

import (
	"context"
	"syscall"

	humanize "github.com/dustin/go-humanize"

	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// Budget returns how many bytes of the device's own memory may be used.
func (d *Device) Budget() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.budget
}

// CheckBudget returns an error if the device cannot have a budget of so many bytes. It asks the device.
func (d *Device) CheckBudget(bytes int64) error {
	if bytes < d.info.Granularity {
		return refuse(syscall.EINVAL, "device %d: a budget of %s is less than one allocation, of %s", d.info.Ordinal,
			humanize.IBytes(uint64(max(bytes, 0))), humanize.IBytes(uint64(d.info.Granularity)))
	}
	d.mu.Lock()
	list := d.options.Tenants
	d.mu.Unlock()
	if err := tenants.CheckFor(bytes&^(d.info.Granularity-1), list); err != nil {
		return refuse(syscall.EINVAL, "device %d: %v", d.info.Ordinal, err)
	}
	free, err := d.backend.Free()
	if err != nil {
		return err
	}
	if most := d.backend.Used() + free; bytes > max(most, d.Budget()) {
		return refuse(syscall.ENOMEM, "device %d: a budget of %s is more than the device has: %s are used here, and %s are free",
			d.info.Ordinal, humanize.IBytes(uint64(bytes)), humanize.IBytes(uint64(d.backend.Used())),
			humanize.IBytes(uint64(free)))
	}
	return nil
}

// SetBudget changes how much of the device's own memory may be used, rounded down to whole allocations. If more is in
// use, extents that nobody maps are evicted, those first that no program changed since they were placed. Mapped extents
// stay until they are unmapped. SetBudget ends a live budget. It blocks as Reserve does. why tells people where the
// budget comes from.
func (d *Device) SetBudget(ctx context.Context, bytes int64, why string) error {
	d.budgeting.Lock()
	d.mu.Lock()
	d.live, d.why = nil, why
	d.mu.Unlock()
	d.resize(bytes &^ (d.info.Granularity - 1))
	d.budgeting.Unlock()
	return d.shrink(ctx, TierVRAM, d.overBudget)
}

// resize sets a budget. Device.budgeting is held.
func (d *Device) resize(bytes int64) {
	d.mu.Lock()
	d.budget = bytes
	d.ledger.Resize(bytes)
	d.mu.Unlock()
	d.backend.SetBudget(bytes)
	d.wake()
	d.pinned.notify()
}

func (d *Device) overBudget() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.taken > d.budget
}

// Trim evicts extents, of any device, from pinned memory while more of it is used than its limit.
func (d *Device) Trim(ctx context.Context) error {
	return d.shrink(ctx, TierHost, d.pinned.Over)
}

// shrink evicts extents from a tier while over reports true and some extent can leave.
func (d *Device) shrink(ctx context.Context, from Tier, over func() bool) error {
	for _, unwritten := range []bool{true, false} {
		for over() {
			left, err := d.shrinkOnce(ctx, from, unwritten)
			if err != nil {
				return err
			}
			if !left {
				break
			}
		}
	}
	return nil
}

// shrinkOnce evicts one extent, in a turn of its own, so that others get turns in between.
func (d *Device) shrinkOnce(ctx context.Context, from Tier, unwritten bool) (bool, error) {
	mine, _, err := d.turn(ctx)
	if err != nil {
		return false, err
	}
	defer d.yield(mine)
	return d.evict(ctx, from, tenants.Nobody, ForBudget, sparing{copied: true, written: unwritten}, 0)
}

// shareLocked returns the bytes that a limited Tenant may map, in whole allocations. Device.mu is held.
func (d *Device) shareLocked() int64 {
	return min(d.whole(int64(float64(d.budget)*d.share)), d.budget)
}

// SetShare changes Options.Share. Mapped extents stay.
func (d *Device) SetShare(share float64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.share = share
}
