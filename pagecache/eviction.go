package pagecache

import (
	"slices"
	"strings"
	"syscall"

	"github.com/gaiafs/gaiafs/pagecache/mover/schedule"
	"github.com/gaiafs/gaiafs/pagecache/residency"
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

// The placement policies: when an extent that a bracket uses moves to the device's own memory.
const (
	// PlaceEagerly moves it with the first bracket, if there is room or others can make some.
	PlaceEagerly = "eager"
	// PlaceByThreshold moves it once it was accessed often enough, as policy.Threshold says.
	PlaceByThreshold = "threshold"
)

// PlacementNames returns the names of the placement policies, the default first.
func PlacementNames() []string { return []string{PlaceEagerly, PlaceByThreshold} }

// The default numbers of PlaceByThreshold.
const (
	DefaultPlacementThreshold = policy.DefaultStatic
	DefaultPlacementPenalty   = policy.DefaultPenalty
)

// PlacementPolicy says when extents that brackets use move to the device's own memory.
type PlacementPolicy struct {
	// Name is one of PlacementNames. "" stands for the first one.
	Name string
	// Threshold and Penalty are the numbers of PlaceByThreshold. 0 stands for the default.
	Threshold, Penalty uint64
}

// delay returns p as package residency knows it. EINVAL if there is no placement policy of that name.
func (p PlacementPolicy) delay() (residency.Delay, error) {
	if p.Name != "" && !slices.Contains(PlacementNames(), p.Name) {
		return residency.Delay{}, fail(syscall.EINVAL, "there is no placement %q; there are %s", p.Name,
			strings.Join(PlacementNames(), ", "))
	}
	return residency.Delay{Threshold: p.Name == PlaceByThreshold, Static: p.Threshold, Penalty: p.Penalty}, nil
}

// SetPlacement changes Options.Placement. Extents stay where they are until a bracket uses them.
func (c *Cache) SetPlacement(p PlacementPolicy) error {
	delay, err := p.delay()
	if err != nil {
		return err
	}
	for _, d := range c.devices {
		d.room.SetDelay(delay)
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
