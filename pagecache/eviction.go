package pagecache

import "github.com/gaiafs/gaiafs/pagecache/residency/policy"

// DefaultEviction is the rule that says which extent goes first, where nobody asks for another one.
const DefaultEviction = policy.Default

// EvictionNames returns the names of the rules that say which extent goes first when a device is full.
func EvictionNames() []string { return policy.Names() }

// AboutEviction says in one line which extent a rule has go first.
func AboutEviction(name string) string { return policy.About(name) }

// SetEviction changes the rule by which extents go, for all devices, from now on. EINVAL where there is none of the name.
func (c *Cache) SetEviction(name string) error {
	for _, d := range c.devices {
		if err := d.room.SetEviction(name); err != nil {
			return err
		}
	}
	return nil
}
