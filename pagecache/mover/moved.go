package mover

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/gaiafs/gaiafs/pagecache/live"
	"github.com/gaiafs/gaiafs/pagecache/mover/schedule"
)

// Way is where the bytes of a transfer go.
type Way uint8

const (
	// In is from the host to the device, Out from the device to the host, Peer from another device, Within is zeroing.
	// Through is from the host to another device over this device's link; it counts as In, too.
	In Way = iota
	Out
	Peer
	Within
	Through
)

var wayNames = [...]string{"in", "out", "peer", "within", "through"}

// Moved is what a Device has moved of one class in one way. Failed transfers do not count.
type Moved struct {
	Class string `json:"class"`
	Way   string `json:"way"`
	Calls int64  `json:"calls"`
	Bytes int64  `json:"bytes"`
}

// tally counts transfers by class and way.
type tally [schedule.Eviction + 1][Through + 1]struct{ calls, bytes atomic.Int64 }

func (t *tally) add(class Class, way Way, n int64) {
	t[class][way].calls.Add(1)
	t[class][way].bytes.Add(n)
}

// tally counts a transfer, and shows it to watchers. It takes only locks of package live.
func (d *Device) tally(class Class, way Way, n int64, began time.Time) {
	d.moved.add(class, way, n)
	if d.live.On() {
		d.live.Send(live.Event{At: began, Micros: float64(time.Since(began)) / 1e3, Kind: "transfer", Bytes: n,
			Device: fmt.Sprint("gpu", d.dev.Info().Ordinal), Detail: class.String() + " " + wayNames[way]}, nil)
	}
}

// Moved returns what was moved so far, by class and way, without empty entries. A Read counts as one call.
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
