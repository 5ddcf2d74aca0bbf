package mover

import (
	"cmp"
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
	// Cost is the measured cost of Reads.
	Cost *Place
	// failed is called with the error of a call for Reads. Immutable.
	failed func(err error)
	// ctx is the context of calls for Reads; stop ends it.
	ctx  context.Context
	stop context.CancelFunc
	// fills counts the Fills that bring bytes to this device.
	fills atomic.Int32
	// moved counts transfers; live shows them to watchers. live is immutable, and may be nil.
	moved tally
	live  *live.Feed
	// calls counts the goroutines that carry out Reads.
	calls sync.WaitGroup

	mu    sync.Mutex
	order schedule.Discipline     // protected by mu
	last  schedule.ID             // protected by mu
	waits map[schedule.ID]*waiter // protected by mu; requests that have not begun
	// begun has the calls in progress, by their first requests. Protected by mu.
	begun map[schedule.ID][]schedule.Request
	under []*Read // protected by mu; the Reads in progress, the oldest first
	// closed means that no more Reads begin. Protected by mu.
	closed bool
}

// waiter is a request that waits: a Read, or a transfer whose caller waits until turn is closed.
type waiter struct {
	request schedule.Request
	read    *Read
	begun   bool
	turn    chan struct{} // nil unless somebody waits for it
}

// awaitLocked returns turn, for a caller that is about to wait; nil if the request has begun.
func (w *waiter) awaitLocked() chan struct{} {
	if !w.begun {
		w.turn = make(chan struct{})
	}
	return w.turn
}

// NewDevice returns a Device that moves bytes of dev in the order of a discipline. Other users of dev must not move
// bytes. failed is called without any lock when a call for Reads has failed. watch gets all transfers, and may be nil.
func NewDevice(dev gpubackend.Device, order schedule.Discipline, watch *live.Feed, failed func(err error)) *Device {
	d := &Device{
		dev: dev, order: order, live: watch, failed: failed, waits: make(map[schedule.ID]*waiter),
		begun: make(map[schedule.ID][]schedule.Request),
		Cost:  NewPlace(deviceLatency, deviceBandwidth),
	}
	d.ctx, d.stop = context.WithCancel(context.Background())
	return d
}

// In copies from the host to the device. This and the following methods wait for their turn (except Zero) and for the
// call. class is the purpose. ctx names the tenant (WithTenant), may mark read-ahead (Ahead), and can end the wait and
// the call.
func (d *Device) In(ctx context.Context, class Class, pieces []gpubackend.Copy) error {
	calls := cut(pieces, d.piece(), copySize, splitCopy)
	return d.inTurn(ctx, class, In, sizes(calls, copySize), func(i int) error { return d.dev.CopyIn(ctx, calls[i]) })
}

// Out copies from the device to the host.
func (d *Device) Out(ctx context.Context, class Class, pieces []gpubackend.Copy) error {
	calls := cut(pieces, d.piece(), copySize, splitCopy)
	return d.inTurn(ctx, class, Out, sizes(calls, copySize), func(i int) error { return d.dev.CopyOut(ctx, calls[i]) })
}

// Peer copies from other devices' memory. The discipline of the copying device applies; the others are not asked.
func (d *Device) Peer(ctx context.Context, class Class, pieces []gpubackend.PeerCopy) error {
	calls := cut(pieces, d.piece(), peerSize, splitPeer)
	return d.inTurn(ctx, class, Peer, sizes(calls,
		peerSize), func(i int) error { return d.dev.CopyPeer(ctx, calls[i]) })
}

// Patch updates pages that programs may be storing into.
func (d *Device) Patch(ctx context.Context, class Class, patches []gpubackend.Patch) error {
	calls := cut(patches, d.piece(), patchSize, nil)
	return d.inTurn(ctx, class, In, sizes(calls, patchSize), func(i int) error { return d.dev.Patch(ctx, calls[i]) })
}

// Zero stores zeros into the n bytes of mem at byte offset off. It does not use the link, so it waits for no turn.
func (d *Device) Zero(ctx context.Context, class Class, mem gpubackend.Memory, off, n int64) error {
	began := time.Now()
	err := d.dev.Zero(ctx, mem, off, n)
	if err == nil {
		d.tally(classIn(ctx, class), Within, n, began)
	}
	return err
}

// mostInTurn is how many bytes a transfer may move before a later one of its class has its turn.
const mostInTurn = 16 << 20

// inTurn makes calls that move so many bytes each, each when its turn has come. As many of them queue or are in
// progress at once as there may be pieces in flight, so the most urgent transfer can have all of that. When one fails,
// those that wait are withdrawn.
func (d *Device) inTurn(ctx context.Context, class Class, way Way, sizes []int64, call func(i int) error) error {
	t := &transfer{d: d, ctx: ctx, waits: ctx, stop: func() {}, class: class, way: way, sizes: sizes, call: call}
	if len(sizes) > 1 {
		t.waits, t.stop = context.WithCancel(ctx)
		defer t.stop()
	}
	var others sync.WaitGroup
	for range min(schedule.InFlight/schedule.MostPiece, len(sizes)) - 1 {
		others.Go(t.work)
	}
	t.work()
	others.Wait()
	return t.failed
}

// transfer is a transfer in turn. The fields before mu are immutable.
type transfer struct {
	d     *Device
	ctx   context.Context
	waits context.Context // ends with ctx, and with stop
	stop  context.CancelFunc
	class Class
	way   Way
	sizes []int64
	call  func(i int) error

	mu     sync.Mutex
	queued int         // how many pieces have queued; protected by mu
	failed error       // the first error; protected by mu until all pieces have ended
	first  schedule.ID // the piece after which others queue, 0 for none; protected by mu
	left   int64       // how many more bytes do; protected by mu
}

// next notes the outcome of a piece, ends it unless its ID is 0, and queues the next one. ok is false if there is none,
// or if a piece failed.
func (t *transfer) next(ended schedule.ID, err error) (i int, r asked, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.failed == nil && err != nil {
		t.failed = err
		t.stop()
	}
	if i = t.queued; i == len(t.sizes) || t.failed != nil {
		if ended != 0 {
			t.d.end(ended)
		}
		return i, r, false
	}
	t.queued++
	if t.left -= t.sizes[i]; t.left < 0 {
		t.first, t.left = 0, mostInTurn-t.sizes[i]
	}
	r = t.d.endAndAsk(t.ctx, ended, schedule.Request{Class: t.class, Size: t.sizes[i], After: t.first})
	t.first = cmp.Or(t.first, r.ID)
	return i, r, true
}

// goesOn reports whether no piece has failed.
func (t *transfer) goesOn() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.failed == nil
}

// work makes calls, one after the other, until there are no more.
func (t *transfer) work() {
	for i, r, ok := t.next(0, nil); ok; {
		err, begun := t.d.await(t.waits, r), schedule.ID(0)
		if err == nil {
			begun = r.ID
		}
		if err == nil && t.goesOn() {
			began := time.Now()
			if err = t.call(i); err == nil {
				t.d.tally(r.Class, t.way, t.sizes[i], began)
			}
		}
		i, r, ok = t.next(begun, err)
	}
}

// asked is an Own request. turn is closed when it begins; nil if it has begun.
type asked struct {
	schedule.Request
	turn chan struct{}
}

// endAndAsk ends a call, unless its ID is 0, and queues an Own request, before another one begins.
func (d *Device) endAndAsk(ctx context.Context, ended schedule.ID, r schedule.Request) asked {
	w := &waiter{}
	r.Class, r.Own, r.Tenant = classIn(ctx, r.Class), true, tenantOf(ctx)
	d.mu.Lock()
	if ended != 0 {
		d.endLocked(ended)
	}
	r = d.arriveLocked(r, w)
	calls := d.nextLocked()
	turn := w.awaitLocked()
	d.mu.Unlock()
	d.carryOutAll(calls)
	return asked{r, turn}
}

// await waits until r begins. After an error, r does not begin.
func (d *Device) await(ctx context.Context, r asked) error {
	if r.turn == nil {
		return nil // even if ctx has ended: the call reports that itself
	}
	select {
	case <-r.turn: // likewise
		return nil
	default:
	}
	select {
	case <-r.turn:
		return nil
	case <-ctx.Done():
	}
	if !d.withdraw(r.ID) {
		return nil // its turn had come
	}
	return ctx.Err()
}

// SetOrder makes another discipline decide from now on, also about requests that wait.
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

// piece returns the largest size of a call in bytes; 0 means no limit.
func (d *Device) piece() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.order.Piece()
}

// arriveLocked numbers and queues a request.
func (d *Device) arriveLocked(r schedule.Request, w *waiter) schedule.Request {
	d.last++
	r.ID = d.last
	w.request = r
	d.waits[r.ID] = w
	d.order.Arrive(r)
	return r
}

// withdraw takes back a waiting request, and reports whether it could.
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

// call is one call of the device, with the Reads that it serves.
type call struct {
	requests []schedule.Request
	reads    []*Read
}

// nextLocked begins every request that may begin. It returns the calls for Reads; the caller carries them out without
// mu.
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
			w.begun = true
			if w.turn != nil {
				close(w.turn)
			}
			if w.read != nil {
				w.read.state = readRuns
				d.under = append(d.under, w.read)
			}
			if w.read != nil && !r.Own {
				c.reads = append(c.reads, w.read)
			}
		}
		if c.reads != nil {
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

// work carries out c, and then calls that may begin after it, until there are none.
func (d *Device) work(c call) {
	defer d.calls.Done()
	for {
		d.carryOut(c.reads)
		calls := d.endNext(c.requests[0].ID)
		if len(calls) == 0 {
			return
		}
		c = calls[0]
		d.calls.Done() // work counts c already
		d.carryOutAll(calls[1:])
	}
}

// end ends a call, named by its first request.
func (d *Device) end(first schedule.ID) { d.carryOutAll(d.endNext(first)) }

func (d *Device) endNext(first schedule.ID) []call {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.endLocked(first)
	return d.nextLocked()
}

func (d *Device) endLocked(first schedule.ID) {
	requests := d.begun[first]
	delete(d.begun, first)
	d.order.End(requests)
}

// Close prevents new Reads, and asks those in progress to stop. The other methods still work.
func (d *Device) Close() {
	d.stop()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
}

// Wait waits for the Reads in progress.
func (d *Device) Wait() { d.calls.Wait() }
