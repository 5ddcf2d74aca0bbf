package mover

import (
	"sync/atomic"

	"github.com/gaiafs/gaiafs/pagecache/mover/schedule"
)

// Way is where the bytes of a transfer go.
type Way uint8

const (
	// In is from the host to the device, Out from the device to the host, Peer from another device. Within is within the
	// device: zeros.
	In Way = iota
	Out
	Peer
	Within
)

var wayNames = [...]string{"in", "out", "peer", "within"}

// Moved is what a Device has moved of one class one way. Transfers that failed do not count.
type Moved struct {
	Class string `json:"class"`
	Way   string `json:"way"`
	Calls int64  `json:"calls"`
	Bytes int64  `json:"bytes"`
}

// tally counts transfers by class and way.
type tally [schedule.Eviction + 1][Within + 1]struct{ calls, bytes atomic.Int64 }

func (t *tally) add(class Class, way Way, n int64) {
	t[class][way].calls.Add(1)
	t[class][way].bytes.Add(n)
}

// Moved returns what was moved so far, by class and way, without those that moved nothing. A Read counts as one call.
func (d *Device) Moved() []Moved {
	all := []Moved{}
	for _, class := range schedule.Classes() {
		for way, name := range wayNames {
			c := &d.moved[class][way]
			if n := c.calls.Load(); n > 0 {
				all = append(all, Moved{class.String(), name, n, c.bytes.Load()})
			}
		}
	}
	return all
}
