package mover

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// A large Fill may use the links of other devices, its neighbours, while they are idle. If its own link is busy, a call
// goes into staging memory of a neighbour, and from there to the device. The own link and the relays take calls from
// the same queue, so each gets as much as it can carry. What a relay fails to bring goes over the own link. A neighbour
// may have several relays: while one sends to the device, the next one uses the link.

// Relay is a neighbour's link, and staging memory, for one Fill.
type Relay struct {
	// Device is the neighbour. Memory is at least RelayBytes of its memory, which the Fill uses until Run has returned.
	Device *Device
	Memory gpubackend.Memory
	// Failed is called without any lock with the neighbour's error. The relay is not used again.
	Failed func(err error)

	// speed is in bytes per second, 0 before the first call. Only the sender that has the relay uses speed and broken.
	speed  float64
	broken bool
}

// Reset prepares the relay for another Fill, when Run has returned. It reports false if the relay has failed.
func (r *Relay) Reset() bool {
	r.speed = 0
	return !r.broken
}

// RelayBytes is the staging memory that a Relay needs.
const RelayBytes = callBytes + PieceBytes

// slowRelay is how many times as slow as the own link a relay may be, because its last call is waited for.
const slowRelay = 3

// takeRelayLocked takes an unused relay whose neighbour is idle, or returns nil.
func (p *Fill) takeRelayLocked() *Relay {
	for i, r := range p.Relays {
		slow := r.speed > 0 && p.speed > slowRelay*r.speed
		if r.broken || slow || !p.isFree(r) {
			continue
		}
		if p.relaying == nil {
			p.relaying = make(map[*Device]int)
		}
		p.relaying[r.Device]++
		p.Relays = append(p.Relays[:i], p.Relays[i+1:]...)
		return r
	}
	return nil
}

// carry brings copies to a device through the neighbour. After an error any of the bytes may be there.
func (r *Relay) carry(ctx context.Context, class Class, to *Device, copies []gpubackend.Copy) error {
	start := time.Now()
	in, out := make([]gpubackend.Copy, len(copies)), make([]gpubackend.PeerCopy, len(copies))
	at := int64(0)
	for i, c := range copies {
		n := c.Bytes()
		in[i] = c
		in[i].Mem, in[i].Off = r.Memory, at
		out[i] = gpubackend.PeerCopy{Mem: c.Mem, Off: c.Off, From: r.Memory, FromOff: at, N: n}
		at += n
	}
	if err := r.Device.In(ctx, class, in); err != nil {
		return fmt.Errorf("to the neighbour: %w", err)
	}
	if err := to.Peer(ctx, class, out); err != nil {
		return fmt.Errorf("from the neighbour: %w", err)
	}
	r.speed = float64(at) / time.Since(start).Seconds()
	r.Device.moved.add(class, Through, at)
	return nil
}

// fits reports whether the staging memory has room for copies.
func (r *Relay) fits(copies []gpubackend.Copy) bool {
	return copySizes(copies) <= min(r.Memory.Size(), RelayBytes)
}

// in brings copies to the device: through a relay, if there is one and it does not fail, or over the own link.
func (p *Fill) in(copies []gpubackend.Copy, through *Relay) error {
	if through != nil && through.fits(copies) {
		err := through.carry(p.ctx, p.Class, p.Device, copies)
		if err == nil || p.ctx.Err() != nil || errors.Is(err, gpubackend.ErrHostGone) {
			return err
		}
		through.broken = true
		through.Failed(err)
	}
	return p.Device.In(p.ctx, p.Class, copies)
}

// relaysLocked is how many relays are in use, or could be: their neighbours are idle.
func (p *Fill) relaysLocked() (n int) {
	for _, used := range p.relaying {
		n += used
	}
	for _, r := range p.Relays {
		if !r.broken && p.isFree(r) {
			n++
		}
	}
	return n
}

// isFree reports whether nobody but this Fill uses the neighbour of r. mu is held.
func (p *Fill) isFree(r *Relay) bool { return r.Device.idleBut(p.relaying[r.Device]) }

// Idle reports whether the device has no transfers, in progress or waiting, and no Fills.
func (d *Device) Idle() bool { return d.idleBut(0) }

// idleBut is Idle, but allows n transfers.
func (d *Device) idleBut(n int) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.fills.Load() == 0 && len(d.waits)+len(d.begun) <= n
}
