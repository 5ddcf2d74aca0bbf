package pagecache

import (
	"sync"
	"time"

	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// A large view is also filled over the links of other devices while they are idle (mover.Relay). Each of these devices
// lends staging memory for the fill if it has plenty of unused memory. The first copy out of such memory takes a
// millisecond longer, because the driver maps it for the other device. So it is kept for the next fill, for a while.

const (
	// leastRelayed is the smallest such fill, 256 MiB. A smaller one takes no longer than finding idle devices.
	leastRelayed = 256 << 20
	// relaySpare says how much memory a lending device must have free: this many times the staging memory.
	relaySpare = 8
	// relaysEach is how many relays a neighbour has.
	relaysEach = 2
)

// idleRelays has the relays that no fill uses.
type idleRelays struct {
	mu   sync.Mutex
	list map[devicePair][]idleRelay // the longest unused first; protected by mu
}

type idleRelay struct {
	relay *mover.Relay
	since time.Time
}

// take takes all idle relays of a pair.
func (i *idleRelays) take(pair devicePair) (list []*mover.Relay) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, x := range i.list[pair] {
		list = append(list, x.relay)
	}
	delete(i.list, pair)
	return list
}

// put keeps a relay. It frees the memory of one that failed, and of one too many, which another fill brought back.
func (i *idleRelays) put(pair devicePair, r *mover.Relay) {
	i.mu.Lock()
	kept := r.Reset() && len(i.list[pair]) < relaysEach
	if kept {
		if i.list == nil {
			i.list = make(map[devicePair][]idleRelay)
		}
		i.list[pair] = append(i.list[pair], idleRelay{r, time.Now()})
	}
	i.mu.Unlock()
	if !kept {
		_ = r.Memory.Free() // it fails for a lost device
	}
}

// trim frees the memory of relays that have not been used for the given time.
func (i *idleRelays) trim(unused time.Duration) {
	var gone []idleRelay
	i.mu.Lock()
	for pair, list := range i.list {
		n := 0
		for n < len(list) && time.Since(list[n].since) >= unused {
			n++
		}
		if gone = append(gone, list[:n]...); n == len(list) {
			delete(i.list, pair)
		} else {
			i.list[pair] = list[n:]
		}
	}
	i.mu.Unlock()
	for _, x := range gone {
		_ = x.relay.Memory.Free()
	}
}

// relays returns the relays for a fill of so many bytes, and a function that gives them back.
func (c *Cache) relays(dev *device, bytes int64) (list []*mover.Relay, giveBack func()) {
	if !c.neighbourLinks || bytes < c.leastRelayed {
		return nil, func() {}
	}
	lent := make(map[devicePair][]*mover.Relay)
	for _, o := range c.devices {
		if o == dev || !c.reaches(dev, o) || !o.moves.Idle() {
			continue
		}
		pair := devicePair{dev.owner, o.owner}
		lent[pair] = c.newRelays(dev, o, c.idleRelays.take(pair))
		list = append(list, lent[pair]...)
	}
	return list, func() {
		for pair, relays := range lent { // the fill keeps its own order of list
			for _, r := range relays {
				c.idleRelays.put(pair, r)
			}
		}
	}
}

// newRelays appends relays to list until dev has relaysEach through o, if o has plenty of memory.
func (c *Cache) newRelays(dev, o *device, list []*mover.Relay) []*mover.Relay {
	g := o.info.Granularity
	size := (mover.RelayBytes + g - 1) / g * g
	for len(list) < relaysEach {
		if free, err := o.Free(); err != nil || free < relaySpare*int64(relaysEach-len(list))*size {
			return list
		}
		mem, err := o.AllocStaging(size)
		if err != nil {
			return list // others took the memory
		}
		list = append(list, &mover.Relay{Device: o.moves, Memory: mem, Failed: func(err error) {
			if !c.noteWay(dev, o, err) {
				c.log.Warn("a neighbour's link fails; its bytes take other links", "device", o.info.Ordinal, "to",
					dev.info.Ordinal, "error", err)
			}
		}})
	}
	return list
}
