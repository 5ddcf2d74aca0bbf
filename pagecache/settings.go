package pagecache

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/pagecache/residency"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// These functions change Options of a Cache that is in use.

// CheckBudget returns an error if a device cannot have a budget of so many bytes. It asks the devices.
func (c *Cache) CheckBudget(bytes int64) error {
	for _, d := range c.devices {
		if err := d.room.CheckBudget(bytes); err != nil {
			return err
		}
	}
	return nil
}

// SetBudget changes how much of each device's own memory the cache may use. It changes nothing if a device cannot have
// as much. If more is in use, it blocks until unmapped extents have left; mapped ones stay until programs unmap them.
// why tells people where the budget comes from. Errors: EINVAL, ENOMEM, and those of ctx and of devices.
func (c *Cache) SetBudget(ctx context.Context, bytes int64, why string) error {
	if err := c.CheckBudget(bytes); err != nil {
		return err
	}
	var errs []error
	for _, d := range c.devices {
		errs = append(errs, d.room.SetBudget(ctx, bytes, why))
	}
	return errors.Join(errs...)
}

// SetLiveBudget makes the budgets follow what other programs take of the devices, as Options.LiveBudget does. SetBudget
// ends that.
func (c *Cache) SetLiveBudget() {
	for _, d := range c.devices {
		d.room.SetLive()
	}
}

// tendTick is the interval between looks at a device. A live budget leaves a floor free. What other programs allocate
// between two looks has to fit into it.
const tendTick = 250 * time.Millisecond

// attend starts the goroutines of a device. They end with ctx, and Close waits for them.
func (c *Cache) attend(ctx context.Context, d *device) {
	c.background.Go(func() { c.tend(ctx, d) })
	c.background.Go(func() { c.pinAhead(ctx, d) })
}

// tend adjusts a device's live budget and moves extents back into memory that becomes free, until ctx ends.
func (c *Cache) tend(ctx context.Context, d *device) {
	tick := time.NewTicker(tendTick)
	defer tick.Stop()
	for !d.lost.Load() {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			if err := d.room.Follow(ctx, now); err != nil && ctx.Err() == nil {
				c.log.Debug("the live budget of a device was not adjusted", "device", d.info.Ordinal, "error", err)
			}
			_ = d.room.Back(ctx, now)
		}
	}
}

// pinAhead makes pinned memory for a device ahead of need, until ctx ends.
func (c *Cache) pinAhead(ctx context.Context, d *device) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-d.room.Expected():
			d.room.Ahead(ctx)
		}
	}
}

// SetPinnedMemory changes Options.PinnedMemory. If more is in use, it blocks until the extents that no bracket uses
// have left.
func (c *Cache) SetPinnedMemory(ctx context.Context, bytes int64) error {
	if bytes < 0 {
		return fail(syscall.EINVAL, "the pinned memory must not be negative")
	}
	c.pinned.SetLimit(bytes)
	var errs []error
	for _, d := range c.devices {
		errs = append(errs, d.room.Trim(ctx))
	}
	return errors.Join(append(errs, c.unlockFor(ctx))...)
}

// SetUserShare changes Options.UserShare. Existing mappings stay.
func (c *Cache) SetUserShare(share float64) error {
	if !(share > 0 && share <= 1) {
		return fail(syscall.EINVAL, "the share of a user must be more than 0 and at most 1")
	}
	for _, d := range c.devices {
		d.room.SetShare(share)
	}
	c.pinned.SetShare(share)
	return nil
}

// Tenant owns memory of devices and has a share of it.
type Tenant = tenants.Tenant

// TenantID names a Tenant.
type TenantID = tenants.ID

// UserTenant names the tenant of a user, CgroupTenant that of the processes in a cgroup and those below it, NamedTenant
// that of processes which give this name.
func UserTenant(user uint32) TenantID { return tenants.User(user) }

// CgroupTenant is described at UserTenant.
func CgroupTenant(path string) TenantID { return tenants.Cgroup(path) }

// DirectoryTenant names the tenant that owns the files below a directory, whose path is relative to the mountpoint.
func DirectoryTenant(path string) TenantID { return tenants.Directory(path) }

// NamedTenant is described at UserTenant.
func NamedTenant(name string) TenantID { return tenants.Named(name) }

// CheckTenants returns an error if a list of tenants is invalid for any device.
func CheckTenants(list []Tenant) error { return tenants.Check(list) }

// CheckTenants returns an error if a list of tenants is invalid for these devices. EINVAL.
func (c *Cache) CheckTenants(list []Tenant) error {
	for _, d := range c.devices {
		if err := d.room.CheckTenants(list); err != nil {
			return err
		}
	}
	return nil
}

// SetTenants replaces Options.Tenants for future mappings. Tenants keep what they own until others need it, or until
// they ask for more. It changes nothing if CheckTenants fails.
func (c *Cache) SetTenants(list []Tenant) error {
	var rooms []*residency.Device
	for _, d := range c.devices {
		rooms = append(rooms, d.room)
	}
	return residency.SetTenants(rooms, list)
}

// tenant returns who is charged for the mappings of a process, whose number is for messages. EACCES if the process may
// not be the tenant that it names.
func (d *device) tenant(p tenants.Process, number uint32, limited bool) (residency.Tenant, error) {
	account, err := d.room.Account(p)
	return residency.Tenant{User: p.User, Limited: limited, Process: number, Account: account}, err
}
