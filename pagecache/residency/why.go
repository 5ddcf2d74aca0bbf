package residency

import (
	"cmp"
	"slices"
	"time"
)

// Why says why an extent had to leave a tier.
type Why string

// The reasons. An extent that leaves the device's own memory may move to pinned host memory.
const (
	// ForMapping and ForBracket need room in the device's own memory, ForPinned in pinned host memory.
	ForMapping Why = "mapping"
	ForBracket Why = "bracket"
	ForPinned  Why = "pinned-memory"
	// ForMaximum: the extent's tenant may own no more of the tier.
	ForMaximum Why = "maximum"
	// ForBudget: the budget of the device, or of pinned memory, became smaller.
	ForBudget Why = "budget"
	// ForSomebody: somebody asked for the eviction. ForOthers: the extent's memory may not be shared with those who
	// want the extent.
	ForSomebody Why = "asked"
	ForOthers   Why = "not-shared"
)

// Departure counts the extents that left a tier for one reason.
type Departure struct {
	Why Why `json:"why"`
	// Rule names the rule that chose the extents. It is empty if none did.
	Rule string `json:"rule,omitempty"`
	// Pinned means that they left pinned host memory; otherwise they left the device's own memory.
	Pinned  bool  `json:"pinned,omitempty"`
	Extents int64 `json:"extents"`
	Bytes   int64 `json:"bytes"`
}

// departure is the key by which Departures are counted.
type departure struct {
	why    Why
	rule   string
	pinned bool
}

// Left counts x as having left a tier. The caller made it leave.
func (x *Extent) Left(from Tier, why Why) { x.dev.departed(x, from, why, "") }

func (d *Device) departed(x *Extent, from Tier, why Why, rule string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	of := departure{why, rule, from == TierHost}
	n := d.departures[of]
	n.Extents++
	n.Bytes += x.size
	d.departures[of] = n
}

// departuresLocked returns all Departures, most bytes first. Device.mu is held.
func (d *Device) departuresLocked() []Departure {
	list := make([]Departure, 0, len(d.departures))
	for of, n := range d.departures {
		list = append(list, Departure{of.why, of.rule, of.pinned, n.Extents, n.Bytes})
	}
	slices.SortFunc(list, func(a, b Departure) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Why, b.Why), cmp.Compare(a.Rule, b.Rule))
	})
	return list
}

// OverBus counts the pinned host memory of grants that were given back. Kernels reach such memory over the bus.
type OverBus struct {
	// Brackets counts the grants that had some, Bytes what they had.
	Brackets int64 `json:"brackets"`
	Bytes    int64 `json:"bytes"`
	// Seconds is the sum of their durations. The time lost to the bus is less.
	Seconds float64 `json:"seconds"`
}

// overBusLocked counts a grant that is given back. Device.mu is held.
func (d *Device) overBusLocked(g *Grant) {
	if g.pinned == 0 {
		return
	}
	d.overBus.Brackets++
	d.overBus.Bytes += g.pinned
	d.overBus.Seconds += time.Since(g.since).Seconds()
}
