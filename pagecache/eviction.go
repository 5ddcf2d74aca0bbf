package pagecache

import (
	"github.com/gaiafs/gaiafs/pagecache/mover/schedule"
	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
)

// DefaultEviction is the rule for eviction if the user chooses none.
const DefaultEviction = policy.Default

// EvictionNames returns the names of the rules that say which extent goes first when a device is full.
func EvictionNames() []string { return policy.Names() }

// AboutEviction describes a rule in one line.
func AboutEviction(name string) string { return policy.About(name) }

// SetEviction changes the eviction rule of all devices. It fails if there is no rule of that name.
func (c *Cache) SetEviction(name string) error {
	for _, d := range c.devices {
		if err := d.room.SetEviction(name); err != nil {
			return err
		}
	}
	return nil
}

// DefaultTransfers is the discipline of transfers if the user chooses none.
const DefaultTransfers = schedule.Default

// TransferNames returns the names of the disciplines that say which transfer of a device begins next.
func TransferNames() []string { return schedule.Names() }

// AboutTransfers describes a discipline in one line.
func AboutTransfers(name string) string { return schedule.About(name) }

// SetTransfers changes the discipline of all devices. It fails if there is no discipline of that name.
func (c *Cache) SetTransfers(name string) error {
	for _, d := range c.devices {
		order, err := schedule.New(name, nil)
		if err != nil {
			return err
		}
		d.moves.SetOrder(order)
		d.transfers.Store(&name)
	}
	return nil
}
