package mover

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/cost"
	"github.com/gaiafs/gaiafs/pagecache/mover/schedule"
)

// Part is a range of memory that a Read copies.
type Part struct {
	Mem    gpubackend.Memory
	Off, N int64
}

// Read is a copy from a device to the host. Except for buf, err and what Device.mu protects, its fields are set by the
// end of Start.
type Read struct {
	dev   *Device
	parts []Part // immutable
	bytes int64  // of parts; immutable
	free  func() // immutable
	// urgent means that the caller waits for it, own that the caller makes the call itself. Immutable once started.
	urgent, own bool

	began time.Time
	ahead cost.Ahead // what was in progress

	// done is closed when buf has the bytes, or err is set.
	done  chan struct{}
	buf   []byte
	err   error
	ended time.Time

	id    schedule.ID // protected by Device.mu; 0 before Start
	state readState   // protected by Device.mu
	// hurried means that somebody waits who did not ask for this Read; protected by Device.mu.
	hurried bool
	// late means that somebody stopped waiting for it. Cost knows, and learns of the end. Protected by Device.mu.
	late   bool
	result *readResult

	// These are memory for a call whose first Read is r.
	result1 readResult
	piece1  [1]gpubackend.Copy
}

type readState uint8

const (
	readMade readState = iota
	readWaits
	readRuns
	readEnded
	readGivenUp // while in progress
)

// readResult is the buffer of one call, shared by several Reads.
type readResult struct {
	users    atomic.Int32
	giveBack func()
}

func (r *readResult) done() {
	if r.users.Add(-1) == 0 && r.giveBack != nil {
		r.giveBack()
	}
}

// NewRead returns a Read of parts, one after the other. free is called once, without any lock, when no call of the
// device uses the memory any more or ever will.
func (d *Device) NewRead(parts []Part, free func()) *Read {
	r := &Read{dev: d, parts: parts, free: free, done: make(chan struct{})}
	for _, p := range parts {
		r.bytes += p.N
	}
	return r
}

// Urgent, before Start, means that the caller will Wait. own means that the caller makes the device's call itself: then
// r has ended when Start returns.
func (r *Read) Urgent(own bool) { r.urgent, r.own = true, own }

// Start hands r to its device. If the Device is closed, Start reports false, and r is over.
func (r *Read) Start() bool {
	d := r.dev
	d.mu.Lock()
	if d.closed {
		r.endLocked()
		d.mu.Unlock()
		r.free()
		return false
	}
	r.began = time.Now()
	r.ahead = d.Cost.begin(r.bytes)
	q := schedule.Request{Class: r.class(), Size: r.bytes, Own: r.own}
	w := &waiter{read: r}
	if r.own {
		d.calls.Add(1)
	}
	r.state = readWaits
	r.id = d.arriveLocked(q, w).ID
	calls := d.nextLocked()
	var turn chan struct{}
	if r.own {
		turn = w.awaitLocked()
	}
	d.mu.Unlock()
	d.carryOutAll(calls)
	if r.own {
		if turn != nil {
			<-turn
		}
		d.carryOut([]*Read{r})
		d.end(r.id)
		d.calls.Done()
	}
	return true
}

// class returns the class, which depends on whether somebody waits.
func (r *Read) class() Class {
	if r.urgent || r.hurried {
		return CPURead
	}
	return Prefetch
}

// Drop is called instead of Start if r is not wanted any more.
func (r *Read) Drop() { r.free() }

// carryOut makes one call of the device for several Reads.
func (d *Device) carryOut(reads []*Read) {
	total := int64(0)
	pieces := reads[0].piece1[:0]
	for _, r := range reads {
		total += r.bytes
	}
	buf, giveBack, err := d.dev.HostBuffer(int(total))
	if err == nil {
		for _, r := range reads {
			r.buf = buf[:r.bytes:r.bytes]
			for _, p := range r.parts {
				pieces = append(pieces, gpubackend.Copy{Mem: p.Mem, Off: p.Off, Host: buf[:p.N]})
				buf = buf[p.N:]
			}
		}
		err = d.dev.CopyOut(d.ctx, pieces)
	}
	if err != nil {
		d.failed(err)
	}
	now := time.Now()
	result := &reads[0].result1
	result.giveBack = giveBack
	result.users.Store(int32(len(reads)))
	for _, r := range reads {
		r.free()
		d.mu.Lock()
		r.err, r.result, r.ended = err, result, now
		if err == nil {
			d.tally(r.class(), Out, r.bytes, r.began)
		}
		givenUp := r.state == readGivenUp
		if !r.urgent || givenUp {
			d.Cost.end(r.bytes, r.ahead, r.began, now, true, err)
		}
		d.under = slices.DeleteFunc(d.under, func(other *Read) bool { return other == r })
		r.endLocked()
		close(r.done)
		d.mu.Unlock()
		if givenUp {
			result.done()
		}
	}
}

// Done is closed when r has ended: then Buf has the bytes, or Err says why not.
func (r *Read) Done() <-chan struct{} { return r.done }

// Bytes returns how many bytes r has.
func (r *Read) Bytes() int64 { return r.bytes }

// Buf returns the bytes. It is valid after Done, until Finish.
func (r *Read) Buf() []byte { return r.buf }

// Err returns the error, after Done.
func (r *Read) Err() error { return r.err }

// Finish gives the buffer back, after Done or after a Wait that returned true.
func (r *Read) Finish() { r.result.done() }

// Wait waits for r, which is Urgent, for at most patience. If it returns false, r is given up; otherwise the caller
// must call Finish. If the caller had to sleep, the time to wake it counts as part of the copy; time before the call of
// Wait does not.
func (r *Read) Wait(patience time.Duration) (done bool) {
	place := r.dev.Cost
	select {
	case <-r.done:
		place.end(r.bytes, r.ahead, r.began, r.ended, false, r.err)
		return true
	default:
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-r.done:
		done = true
	case <-timer.C:
		done = r.giveUp()
	}
	if done {
		place.end(r.bytes, r.ahead, r.began, time.Now(), false, r.err)
	}
	return done
}

// giveUp gives r up, unless it has ended. It reports whether r has ended.
func (r *Read) giveUp() (ended bool) {
	d := r.dev
	d.mu.Lock()
	was := r.state
	switch was {
	case readWaits:
		d.withdrawLocked(r.id)
		r.endLocked()
		if len(d.under) > 0 {
			d.under[0].lateLocked() // r was waiting for the oldest Read
		}
	case readRuns:
		r.lateLocked()
		r.state = readGivenUp
	}
	calls := d.nextLocked()
	d.mu.Unlock()
	d.carryOutAll(calls)
	if was == readWaits {
		d.Cost.cancel(r.bytes)
		r.free()
	}
	return was == readEnded
}

// Hurry makes r, for which somebody waits now, go before Reads that nobody waits for. r may not be started yet.
func (r *Read) Hurry() {
	d := r.dev
	d.mu.Lock()
	r.hurried = true
	if r.state == readWaits {
		d.order.Promote(r.id)
		if w := d.waits[r.id]; w != nil {
			w.request.Class = r.class()
		}
	}
	calls := d.nextLocked()
	d.mu.Unlock()
	d.carryOutAll(calls)
}

// Late notes that somebody who waited for another caller's Read has stopped waiting. Until r ends, the device counts as
// stuck.
func (r *Read) Late() {
	r.dev.mu.Lock()
	defer r.dev.mu.Unlock()
	r.lateLocked()
}

// lateLocked is Late for callers that hold Device.mu.
func (r *Read) lateLocked() {
	if r.state != readEnded && !r.late {
		r.late = true
		r.dev.Cost.givenUp()
	}
}

// Stuck reports whether a Read of the device was given up and has not ended.
func (r *Read) Stuck() bool { return r.dev.Cost.Stuck() }

// endLocked notes that r has ended, or will never begin. Device.mu is held.
func (r *Read) endLocked() {
	r.state = readEnded
	if r.late {
		r.dev.Cost.answered()
	}
}
