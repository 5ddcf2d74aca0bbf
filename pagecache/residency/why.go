package residency

import (
	"cmp"
	"slices"
	"time"
)

// Why says for what an extent had to leave a tier.
type Why string

// The reasons. An extent that leaves the device's own memory may be in pinned memory of the host then.
const (
	// ForMapping and ForBracket are about room in the device's own memory, ForPinned in pinned memory of the host.
	ForMapping Why = "mapping"
	ForBracket Why = "bracket"
	ForPinned  Why = "pinned-memory"
	// ForMaximum says that its tenant may own no more of the tier.
	ForMaximum Why = "maximum"
	// ForBudget says that the device's budget became less, or pinned memory.
	ForBudget Why = "budget"
	// ForSomebody says that somebody asked for it, ForOthers that it may not be shared with those who want it.
	ForSomebody Why = "asked"
	ForOthers   Why = "not-shared"
)

// Departure is what left a tier for one reason.
type Departure struct {
	Why Why `json:"why"`
	// Rule is the one by which the extents were chosen, empty where nobody chose.
	Rule string `json:"rule,omitempty"`
	// Pinned says that they left pinned memory of the host. Else they left the device's own.
	Pinned  bool  `json:"pinned,omitempty"`
	Extents int64 `json:"extents"`
	Bytes   int64 `json:"bytes"`
}

// departure is what tells Departures apart.
type departure struct {
	why    Why
	rule   string
	pinned bool
}

// Left counts that x left a tier since the device was made. The caller had it leave.
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

// departuresLocked returns them, the most bytes first, with Device.mu held.
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

// OverBus is what grants that were given back had in pinned memory of the host, which kernels reach over the bus.
type OverBus struct {
	// Brackets are those that had some there, Bytes what they had there.
	Brackets int64 `json:"brackets"`
	Bytes    int64 `json:"bytes"`
	// Seconds is how long they lasted, one added to the other. Less of it was lost to the bus.
	Seconds float64 `json:"seconds"`
}

// overBusLocked counts a grant that is given back, with Device.mu held.
func (d *Device) overBusLocked(g *Grant) {
	if g.pinned == 0 {
		return
	}
	d.overBus.Brackets++
	d.overBus.Bytes += g.pinned
	d.overBus.Seconds += time.Since(g.since).Seconds()
}
