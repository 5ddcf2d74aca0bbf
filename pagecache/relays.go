package pagecache

import (
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// A view of much is filled over the links of other devices, too, while these have nothing to do (mover.Relay). Each of
// them lends staging memory until the fill has ended, where it has plenty that nobody uses.

const (
	// leastRelayed is the least that is filled so, 256 MiB: less takes no longer than to find out who is idle.
	leastRelayed = 256 << 20
	// relaySpare is how many times the staging memory a device has free that lends some.
	relaySpare = 8
)

// relays returns what a fill of so many bytes may use besides the device's own link, and what gives it back.
func (c *Cache) relays(dev *device, bytes int64) (list []*mover.Relay, giveBack func()) {
	if !c.neighbourLinks || bytes < c.leastRelayed {
		return nil, func() {}
	}
	for _, o := range c.devices {
		g := o.info.Granularity
		size := (mover.RelayBytes + g - 1) / g * g
		if o == dev || !c.reaches(dev, o) || !o.moves.Idle() || o.info.Memory-o.Used() < relaySpare*size {
			continue
		}
		mem, err := o.Alloc(size)
		if err != nil {
			continue // others took it meanwhile
		}
		list = append(list, &mover.Relay{Device: o.moves, Memory: mem, Failed: func(err error) {
			if !c.noteWay(dev, o, err) {
				c.log.Warn("a neighbour's link fails; its bytes go over others", "device", o.info.Ordinal, "to",
					dev.info.Ordinal,
					"error", err)
			}
		}})
	}
	lent := append([]*mover.Relay(nil), list...) // the fill keeps its own order
	return list, func() {
		for _, r := range lent {
			_ = r.Memory.Free() // of a lost device it fails
		}
	}
}
