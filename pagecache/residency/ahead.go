package residency

import (
	"context"
	"errors"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// Pinning memory takes long: 17.5 ms for 64 MiB on an H200. So once brackets of a device use pinned memory, or are
// about to, spares are made ahead of need. The pool keeps spares of the size that was last asked for: 1/aheadPart of
// its limit, and mostAhead at most. They count in the limit. So that they take nothing from others, one is made only
// if as much as all spares may take stays free, and it is freed as soon as somebody needs the room. For a device that
// takes no pinned memory, none is made, and Trim gives back those that are there.

const (
	// 1/aheadPart of the limit may be spares that were made ahead of need.
	aheadPart = 8
	mostAhead = 256 << 20
	// aheadAgain is how long nothing is made for a device after the host refused.
	aheadAgain = time.Minute
)

// ahead is what a device wants made ahead of need.
type ahead struct {
	wanted  chan struct{} // has an element when Ahead has work
	size    int64         // of an extent, 0: nothing is wanted. Protected by Pinned.mu
	refused time.Time     // when the host refused last; zero: never. Protected by Pinned.mu
}

// Expect says that brackets may soon need extents of this size in pinned memory. It does not block.
func (d *Device) Expect(size int64) {
	p := d.pinned
	p.mu.Lock()
	defer p.mu.Unlock()
	d.ahead.size = size
	if p.lacksLocked(d) {
		select {
		case d.ahead.wanted <- struct{}{}:
		default:
		}
	}
}

// Expected has an element when there is work for Ahead.
func (d *Device) Expected() <-chan struct{} { return d.ahead.wanted }

// Ahead makes the spares that the device lacks, one after another, until ctx ends. It blocks on the device. Calls for
// one device must not overlap, and none may run when the device is closed.
func (d *Device) Ahead(ctx context.Context) {
	for ctx.Err() == nil && d.pinned.makeSpare(d) {
	}
}

// lacksLocked reports whether one more spare should be made for d. p.mu is held.
func (p *Pinned) lacksLocked(d *Device) bool {
	size, most := d.ahead.size, min(p.limit/aheadPart, mostAhead)
	if size == 0 || !d.ahead.refused.IsZero() && time.Since(d.ahead.refused) < aheadAgain ||
		p.used+size > p.limit-most {
		return false
	}
	spares := size
	for _, s := range p.spares {
		spares += s.mem.Size()
	}
	for _, n := range p.working {
		spares += n
	}
	return spares <= most
}

// makeSpare makes a spare for d, if it lacks one. It reports whether it did.
func (p *Pinned) makeSpare(d *Device) bool {
	p.mu.Lock()
	size := d.ahead.size
	if !p.lacksLocked(d) {
		p.mu.Unlock()
		return false
	}
	p.used += size
	end := p.begin(size)
	p.mu.Unlock()
	mem, err := d.backend.AllocHost(size)
	p.mu.Lock()
	if err == nil {
		p.spares = append(p.spares, spare{dev: d, mem: mem, since: time.Now(), fresh: true})
	} else {
		p.used -= size
	}
	p.mu.Unlock()
	end() // a spare that room cannot see yet is still being made
	p.notify()
	if err != nil {
		p.refuse(d, err)
		return false
	}
	_ = p.room(0, nil) // the limit may be lower now
	return true
}

// refuse notes that the host refused to pin memory for d, and logs it the first time.
func (p *Pinned) refuse(d *Device, err error) {
	p.mu.Lock()
	first := d.ahead.refused.IsZero()
	d.ahead.refused = time.Now()
	p.mu.Unlock()
	if first && !errors.Is(err, gpubackend.ErrDeviceLost) && !errors.Is(err, gpubackend.ErrClosed) {
		d.options.Log.Warn("no pinned memory can be made ahead of need; brackets still ask for it when they need it",
			"device", d.info.Ordinal, "error", err)
	}
}
