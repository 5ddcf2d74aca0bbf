package mover

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/pagecache/live"
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
	// fills counts the Fills that bring bytes to it.
	fills atomic.Int32
	// moved counts what was moved, live shows it to those who watch. live is immutable, and may be nil.
	moved tally
	live  *live.Feed
	// calls counts those that make calls for Reads.
	calls sync.WaitGroup

	mu    sync.Mutex
	order schedule.Discipline     // protected by mu
	last  schedule.ID             // protected by mu
	waits map[schedule.ID]*waiter // protected by mu; what has not begun
	// begun has the calls under way, by their first requests. Protected by mu.
	begun map[schedule.ID][]schedule.Request
	under []*Read // protected by mu; the Reads under way, the oldest first
	// closed says that no Read begins any more. Protected by mu.
	closed bool
}

// waiter is a request that waits: a Read, or a transfer whose caller waits for turn to be closed.
type waiter struct {
	request schedule.Request
	read    *Read
	turn    chan struct{}
}

// NewDevice returns a Device that moves the bytes of dev in the order that a discipline says. Whoever uses dev
// otherwise does not use it for moving bytes. failed is called, without any lock, when a call for Reads failed. What is
// moved is shown to watch, which may be nil.
func NewDevice(dev gpubackend.Device, order schedule.Discipline, watch *live.Feed, failed func(err error)) *Device {
	d := &Device{
		dev: dev, order: order, live: watch, failed: failed, waits: make(map[schedule.ID]*waiter),
		begun: make(map[schedule.ID][]schedule.Request),
		Cost:  NewPlace(deviceLatency, deviceBandwidth),
	}
	d.ctx, d.stop = context.WithCancel(context.Background())
	return d
}

// In copies from the host to the device. Class says what for, also in the methods that follow; ctx may end the wait and
// the call, and says for which tenant it is (WithTenant).
func (d *Device) In(ctx context.Context, class Class, pieces []gpubackend.Copy) error {
	calls := cut(pieces, d.piece(), copySize, splitCopy)
	return d.inTurn(ctx, class, In, sizes(calls, copySize), func(i int) error { return d.dev.CopyIn(ctx, calls[i]) })
}

// Out copies from the device to the host.
func (d *Device) Out(ctx context.Context, class Class, pieces []gpubackend.Copy) error {
	calls := cut(pieces, d.piece(), copySize, splitCopy)
	return d.inTurn(ctx, class, Out, sizes(calls, copySize), func(i int) error { return d.dev.CopyOut(ctx, calls[i]) })
}

// Peer copies from other devices' memory. The order is that of the device that copies; the others are not asked.
func (d *Device) Peer(ctx context.Context, class Class, pieces []gpubackend.PeerCopy) error {
	calls := cut(pieces, d.piece(), peerSize, splitPeer)
	return d.inTurn(ctx, class, Peer, sizes(calls,
		peerSize), func(i int) error { return d.dev.CopyPeer(ctx, calls[i]) })
}

// Patch brings pages up to date that programs may be storing into.
func (d *Device) Patch(ctx context.Context, class Class, patches []gpubackend.Patch) error {
	calls := cut(patches, d.piece(), patchSize, nil)
	return d.inTurn(ctx, class, In, sizes(calls, patchSize), func(i int) error { return d.dev.Patch(ctx, calls[i]) })
}

// Zero stores zeros into the n bytes of mem at byte offset off. The device does so by itself, in one call.
func (d *Device) Zero(ctx context.Context, class Class, mem gpubackend.Memory, off, n int64) error {
	return d.inTurn(ctx, class, Within, []int64{n}, func(int) error { return d.dev.Zero(ctx, mem, off, n) })
}

// inTurn makes calls of the device that move so many bytes each, one after the other, each when its turn has come.
// While one is made, the next has a place in the row already.
func (d *Device) inTurn(ctx context.Context, class Class, way Way, sizes []int64, call func(i int) error) error {
	next := d.ask(ctx, class, sizes[0])
	for i, n := range sizes {
		r := next
		if i+1 < len(sizes) {
			next = d.ask(ctx, class, sizes[i+1])
		}
		err := d.await(ctx, r)
		began := time.Now()
		if err == nil {
			err = call(i)
			d.end([]schedule.Request{r.Request})
		}
		if err != nil {
			if i+1 < len(sizes) && !d.withdraw(next.ID) {
				d.end([]schedule.Request{next.Request})
			}
			return err
		}
		d.tally(class, way, n, began)
	}
	return nil
}

// asked is an own request, whose turn is closed when it begins.
type asked struct {
	schedule.Request
	turn chan struct{}
}

// ask has an own request wait for its turn.
func (d *Device) ask(ctx context.Context, class Class, n int64) asked {
	d.mu.Lock()
	turn := make(chan struct{})
	r := d.arriveLocked(schedule.Request{Class: class, Size: n, Own: true, Tenant: tenantOf(ctx)}, &waiter{turn: turn})
	calls := d.nextLocked()
	d.mu.Unlock()
	d.carryOutAll(calls)
	return asked{r, turn}
}

// await waits until it begins. After an error it does not.
func (d *Device) await(ctx context.Context, r asked) error {
	select {
	case <-r.turn: // also where ctx has ended: the call says so itself
		return nil
	default:
	}
	select {
	case <-r.turn:
		return nil
	case <-ctx.Done():
	}
	if !d.withdraw(r.ID) {
		return nil // it was its turn
	}
	return ctx.Err()
}

// SetOrder has another discipline decide from now on: on what waits, and on what comes.
func (d *Device) SetOrder(order schedule.Discipline) {
	d.mu.Lock()
	for _, id := range slices.Sorted(maps.Keys(d.begun)) {
		order.Resume(d.begun[id])
	}
	for _, id := range slices.Sorted(maps.Keys(d.waits)) {
		order.Arrive(d.waits[id].request)
	}
	d.order = order
	calls := d.nextLocked()
	d.mu.Unlock()
	d.carryOutAll(calls)
}

// piece is the most bytes of a call, 0 for any.
func (d *Device) piece() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.order.Piece()
}

// arriveLocked gives a request its number.
func (d *Device) arriveLocked(r schedule.Request, w *waiter) schedule.Request {
	d.last++
	r.ID = d.last
	w.request = r
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
		d.begun[requests[0].ID] = requests
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
	delete(d.begun, requests[0].ID)
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
