package pagecache

import (
	"github.com/gaiafs/gaiafs/pagecache/mover/schedule"
	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
)

// DefaultEviction is the rule that says which extent goes first, where nobody asks for another one.
const DefaultEviction = policy.Default

// EvictionNames returns the names of the rules that say which extent goes first when a device is full.
func EvictionNames() []string { return policy.Names() }

// AboutEviction says in one line which extent a rule has go first.
func AboutEviction(name string) string { return policy.About(name) }

// SetEviction changes the rule by which extents go, for all devices, from now on. It fails where there is none
// of the name.
func (c *Cache) SetEviction(name string) error {
	for _, d := range c.devices {
		if err := d.room.SetEviction(name); err != nil {
			return err
		}
	}
	return nil
}

// DefaultTransfers is the discipline of transfers where nobody asks for another one.
const DefaultTransfers = schedule.Default

// TransferNames returns the names of the disciplines that say which transfer of a device begins next.
func TransferNames() []string { return schedule.Names() }

// AboutTransfers says in one line what a discipline does.
func AboutTransfers(name string) string { return schedule.About(name) }

// SetTransfers changes the discipline of the transfers of all devices, from now on. It fails where there is none of the
// name.
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
