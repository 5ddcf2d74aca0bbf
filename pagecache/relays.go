package pagecache

import (
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// A large view is also filled over the links of other devices while they are idle (mover.Relay). Each of these devices
// lends staging memory for the fill if it has plenty of unused memory.

const (
	// leastRelayed is the smallest such fill, 256 MiB. A smaller one takes no longer than finding idle devices.
	leastRelayed = 256 << 20
	// relaySpare says how much memory a lending device must have free: this many times the staging memory.
	relaySpare = 8
	// relaysEach is how many relays a neighbour has.
	relaysEach = 2
)

// relays returns the relays for a fill of so many bytes, and a function that frees their memory.
func (c *Cache) relays(dev *device, bytes int64) (list []*mover.Relay, giveBack func()) {
	if !c.neighbourLinks || bytes < c.leastRelayed {
		return nil, func() {}
	}
	for _, o := range c.devices {
		g := o.info.Granularity
		size := (mover.RelayBytes + g - 1) / g * g
		if o == dev || !c.reaches(dev, o) || !o.moves.Idle() {
			continue
		}
		if free, err := o.Free(); err != nil || free < relaySpare*relaysEach*size {
			continue
		}
		failed := func(err error) {
			if !c.noteWay(dev, o, err) {
				c.log.Warn("a neighbour's link fails; its bytes take other links", "device", o.info.Ordinal, "to",
					dev.info.Ordinal, "error", err)
			}
		}
		for range relaysEach {
			mem, err := o.AllocStaging(size)
			if err != nil {
				break // others took the memory
			}
			list = append(list, &mover.Relay{Device: o.moves, Memory: mem, Failed: failed})
		}
	}
	lent := append([]*mover.Relay(nil), list...) // the fill keeps its own order
	return list, func() {
		for _, r := range lent {
			_ = r.Memory.Free() // it fails for a lost device
		}
	}
}
