package mover

import (
	"context"
	"sync"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover/schedule"
)

// Device moves bytes to, from and within a gpubackend.Device. Its methods may be called from any goroutine.
type Device struct {
	dev gpubackend.Device // immutable
	// Cost is what Reads take.
	Cost *Place
	// failed is called with what a call for Reads failed with. Immutable.
	failed func(err error)
	// ctx is that of the calls for Reads; stop ends it.
	ctx  context.Context
	stop context.CancelFunc
	// moved counts what was moved.
	moved tally
	// calls counts those that make calls for Reads.
	calls sync.WaitGroup

	mu    sync.Mutex
	order schedule.Discipline     // protected by mu
	last  schedule.ID             // protected by mu
	waits map[schedule.ID]*waiter // protected by mu; what has not begun
	under []*Read                 // protected by mu; the Reads under way, the oldest first
	// closed says that no Read begins any more. Protected by mu.
	closed bool
}

// waiter is a request that waits: a Read, or a transfer whose caller waits for turn to be closed.
type waiter struct {
	read *Read
	turn chan struct{}
}

// NewDevice returns a Device that moves the bytes of dev in the order that a discipline says. Whoever uses dev
// otherwise does not use it for moving bytes. failed is called, without any lock, when a call for Reads failed.
func NewDevice(dev gpubackend.Device, order schedule.Discipline, failed func(err error)) *Device {
	d := &Device{
		dev: dev, order: order, failed: failed, waits: make(map[schedule.ID]*waiter),
		Cost: NewPlace(deviceLatency, deviceBandwidth),
	}
	d.ctx, d.stop = context.WithCancel(context.Background())
	return d
}

// In copies from the host to the device. Class says what for, also in the methods that follow; ctx may end the wait and
// the call.
func (d *Device) In(ctx context.Context, class Class, pieces []gpubackend.Copy) error {
	return d.inTurn(ctx, class, In, sizeOf(pieces), func() error { return d.dev.CopyIn(ctx, pieces) })
}

// Out copies from the device to the host.
func (d *Device) Out(ctx context.Context, class Class, pieces []gpubackend.Copy) error {
	return d.inTurn(ctx, class, Out, sizeOf(pieces), func() error { return d.dev.CopyOut(ctx, pieces) })
}

// Peer copies from other devices' memory. The order is that of the device that copies; the others are not asked.
func (d *Device) Peer(ctx context.Context, class Class, pieces []gpubackend.PeerCopy) error {
	n := int64(0)
	for _, p := range pieces {
		n += p.N
	}
	return d.inTurn(ctx, class, Peer, n, func() error { return d.dev.CopyPeer(ctx, pieces) })
}

// Patch brings pages up to date that programs may be storing into.
func (d *Device) Patch(ctx context.Context, class Class, patches []gpubackend.Patch) error {
	n := int64(len(patches)) << page.Shift
	return d.inTurn(ctx, class, In, n, func() error { return d.dev.Patch(ctx, patches) })
}

// Zero stores zeros into the n bytes of mem at byte offset off.
func (d *Device) Zero(ctx context.Context, class Class, mem gpubackend.Memory, off, n int64) error {
	return d.inTurn(ctx, class, Within, n, func() error { return d.dev.Zero(ctx, mem, off, n) })
}

func sizeOf(pieces []gpubackend.Copy) (n int64) {
	for i := range pieces {
		n += int64(len(pieces[i].Host))
	}
	return n
}

// inTurn makes a call of the device when its turn has come.
func (d *Device) inTurn(ctx context.Context, class Class, way Way, n int64, call func() error) error {
	r, err := d.turn(ctx, class, n)
	if err != nil {
		return err
	}
	defer d.end([]schedule.Request{r})
	if err := call(); err != nil {
		return err
	}
	d.moved.add(class, way, n)
	return nil
}

// turn waits until an own request may begin. After an error it does not.
func (d *Device) turn(ctx context.Context, class Class, n int64) (schedule.Request, error) {
	d.mu.Lock()
	w := &waiter{turn: make(chan struct{})}
	r := d.arriveLocked(schedule.Request{Class: class, Size: n, Own: true}, w)
	calls := d.nextLocked()
	d.mu.Unlock()
	d.carryOutAll(calls)
	select {
	case <-w.turn: // also where ctx has ended: the call says so itself
		return r, nil
	default:
	}
	select {
	case <-w.turn:
		return r, nil
	case <-ctx.Done():
	}
	if !d.withdraw(r.ID) {
		return r, nil // it was its turn
	}
	return r, ctx.Err()
}

// arriveLocked gives a request its number.
func (d *Device) arriveLocked(r schedule.Request, w *waiter) schedule.Request {
	d.last++
	r.ID = d.last
	d.waits[r.ID] = w
	d.order.Arrive(r)
	return r
}

// withdraw takes back a request that waits, and reports whether it did.
func (d *Device) withdraw(id schedule.ID) bool {
	d.mu.Lock()
	done := d.withdrawLocked(id)
	calls := d.nextLocked()
	d.mu.Unlock()
	d.carryOutAll(calls)
	return done
}

func (d *Device) withdrawLocked(id schedule.ID) bool {
	if !d.order.Withdraw(id) {
		return false
	}
	delete(d.waits, id)
	return true
}

// call is what Reads begin together.
type call struct {
	requests []schedule.Request
	reads    []*Read
}

// nextLocked has begin what may. It returns the calls for Reads, which are to be carried out without mu.
func (d *Device) nextLocked() (calls []call) {
	for {
		requests := d.order.Next()
		if len(requests) == 0 {
			return calls
		}
		c := call{requests: requests}
		for _, r := range requests {
			w := d.waits[r.ID]
			delete(d.waits, r.ID)
			if w.turn != nil {
				close(w.turn)
			}
			if w.read != nil {
				w.read.state = readRuns
				d.under = append(d.under, w.read)
				c.reads = append(c.reads, w.read)
			}
		}
		if c.reads != nil && !requests[0].Own {
			d.calls.Add(1)
			calls = append(calls, c)
		}
	}
}

// carryOutAll carries out calls, each in a goroutine.
func (d *Device) carryOutAll(calls []call) {
	for _, c := range calls {
		go d.work(c)
	}
}

// work carries out calls until none may begin.
func (d *Device) work(c call) {
	defer d.calls.Done()
	for {
		d.carryOut(c.reads)
		calls := d.endNext(c.requests)
		if len(calls) == 0 {
			return
		}
		c = calls[0]
		d.calls.Done() // one of the two is this goroutine's
		d.carryOutAll(calls[1:])
	}
}

// end says that a call has ended.
func (d *Device) end(requests []schedule.Request) { d.carryOutAll(d.endNext(requests)) }

func (d *Device) endNext(requests []schedule.Request) []call {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.order.End(requests)
	return d.nextLocked()
}

// Close lets no more Reads begin, and asks those that are under way to stop. The other methods go on.
func (d *Device) Close() {
	d.stop()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
}

// Wait waits for the Reads under way.
func (d *Device) Wait() { d.calls.Wait() }
