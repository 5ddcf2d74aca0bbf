package mover

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover/schedule"
)

// patient is longer than anything takes.
const patient = time.Minute

// bench is a Device whose memory has bytes k in page k.
type bench struct {
	*Device
	t      *testing.T
	dev    *faulty.Device
	mem    gpubackend.Memory
	mu     sync.Mutex
	failed []error // protected by mu
	freed  []int   // protected by mu; first pages of Reads
}

func newBench(t *testing.T, order schedule.Discipline) *bench {
	d, err := emulated.New(emulated.Options{Memory: emulated.Granularity, CopyEngines: true})
	require.NoError(t, err)
	b := &bench{t: t, dev: faulty.Wrap(d)}
	b.mem, err = b.dev.Alloc(emulated.Granularity)
	require.NoError(t, err)
	b.Device = NewDevice(b.dev, order, nil, func(err error) {
		b.mu.Lock() // deadlocks if the caller holds a lock that the test holds
		defer b.mu.Unlock()
		b.failed = append(b.failed, err)
	})
	for k := range 256 {
		host := bytes.Repeat([]byte{byte(k)}, page.Size)
		require.NoError(t, b.In(t.Context(), Acquire,
			[]gpubackend.Copy{{Mem: b.mem, Off: int64(k * page.Size), Host: host}}))
	}
	t.Cleanup(func() {
		b.Close()
		b.Wait()
		b.Device.mu.Lock()
		require.Empty(t, b.waits)
		require.Empty(t, b.under)
		b.Device.mu.Unlock()
		require.Zero(t, b.Cost.Estimate().Queued)
		require.False(t, b.Cost.Stuck())
		require.NoError(t, b.mem.Free())
		require.NoError(t, b.dev.Close())
	})
	return b
}

// read makes a Read of pages, each of which is a Part.
func (b *bench) read(pages ...int) *Read {
	var parts []Part
	for _, k := range pages {
		parts = append(parts, Part{Mem: b.mem, Off: int64(k * page.Size), N: page.Size})
	}
	return b.NewRead(parts, func() {
		b.Device.mu.Lock() // nobody holds it
		defer b.Device.mu.Unlock()
		b.mu.Lock()
		defer b.mu.Unlock()
		b.freed = append(b.freed, pages[0])
	})
}

// freedSorted returns what was freed so far, sorted.
func (b *bench) freedSorted() []int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Sorted(slices.Values(b.freed))
}

// has checks the outcome of a Read, and finishes it.
func (b *bench) has(r *Read, pages ...int) {
	b.t.Helper()
	<-r.Done()
	require.NoError(b.t, r.Err())
	for i, k := range pages {
		require.Equal(b.t, bytes.Repeat([]byte{byte(k)}, page.Size), r.Buf()[i*page.Size:(i+1)*page.Size])
	}
	r.Finish()
}

// TestReadsOfOneCall: while four calls are in progress, arriving Reads are collected for one call. Those that somebody
// waits for go first, even if that was known before Start.
func TestReadsOfOneCall(t *testing.T) {
	b := newBench(t, new(schedule.FCFS))
	gate := b.dev.Hold(faulty.CopyOut)
	var first []*Read
	for k := range schedule.MostCalls {
		first = append(first, b.read(k))
		require.True(t, first[k].Start())
	}
	calls := func() int { return b.dev.Calls(faulty.CopyOut) }
	require.Eventually(t, func() bool { return calls() == schedule.MostCalls }, patient, time.Millisecond)
	var rest []*Read
	for k := range 3 {
		rest = append(rest, b.read(10+k, 20+k))
	}
	rest[2].Hurry()
	for _, r := range rest {
		require.True(t, r.Start())
	}
	rest[1].Hurry()
	b.Device.mu.Lock()
	next := b.order.(*schedule.FCFS)
	b.Device.mu.Unlock()
	require.Empty(t, next.Next(), "no call may begin")
	gate.Open()
	for k, r := range first {
		b.has(r, k)
	}
	for k, r := range rest {
		b.has(r, 10+k, 20+k)
	}
	b.Wait()
	require.LessOrEqual(t, calls(), schedule.MostCalls+2)
	require.Equal(t, []int{0, 1, 2, 3, 10, 11, 12}, b.freedSorted())
}

// TestGivenUp: Wait lasts no longer than its patience. The memory of a Read that has not begun is freed at once; that
// of a Read in progress is freed when its call has ended.
func TestGivenUp(t *testing.T) {
	b := newBench(t, new(schedule.FCFS))
	gate := b.dev.Hold(faulty.CopyOut)
	var first []*Read
	for k := range schedule.MostCalls {
		r := b.read(k)
		r.Urgent(false)
		first = append(first, r)
		require.True(t, r.Start())
	}
	waits := b.read(9)
	waits.Urgent(false)
	require.True(t, waits.Start())
	require.False(t, waits.Wait(0))
	require.Equal(t, []int{9}, b.freedSorted())
	require.True(t, first[0].Stuck(), "the Read that gave up was waiting for the oldest one")
	require.False(t, first[1].Wait(0))
	require.Equal(t, []int{9}, b.freedSorted())
	gate.Open()
	for _, k := range []int{0, 2, 3} {
		require.True(t, first[k].Wait(patient))
		b.has(first[k], k)
	}
	b.Wait()
	require.Equal(t, []int{0, 1, 2, 3, 9}, b.freedSorted())
	require.False(t, first[0].Stuck())
}

// TestOwnReads: a Read whose caller makes the call has ended when Start returns, whatever else is in progress.
func TestOwnReads(t *testing.T) {
	b := newBench(t, new(schedule.FCFS))
	r := b.read(7)
	r.Urgent(true)
	require.True(t, r.Start())
	select {
	case <-r.Done():
	default:
		t.Fatal("the Read has not ended")
	}
	require.True(t, r.Wait(0))
	b.has(r, 7)
}

// TestFailedReads: the waiting caller learns of the error, and so does the owner of the device.
func TestFailedReads(t *testing.T) {
	b := newBench(t, new(schedule.FCFS))
	for _, op := range []faulty.Op{faulty.CopyOut, faulty.HostBuffer} {
		b.dev.Fail(op, 1, gpubackend.ErrDeviceLost)
		r := b.read(3)
		r.Urgent(false)
		require.True(t, r.Start())
		require.True(t, r.Wait(patient))
		require.ErrorIs(t, r.Err(), gpubackend.ErrDeviceLost)
		r.Finish()
	}
	b.Wait()
	require.Len(t, b.failed, 2)
	require.Equal(t, []int{3, 3}, b.freedSorted())
}

// TestClosed: after Close no Read begins, and one in progress is asked to stop. The other methods still work.
func TestClosed(t *testing.T) {
	b := newBench(t, new(schedule.FCFS))
	gate := b.dev.Hold(faulty.CopyOut)
	defer gate.Open()
	r := b.read(1)
	require.True(t, r.Start())
	<-gate.Arrived()
	b.Close()
	<-r.Done()
	require.ErrorIs(t, r.Err(), context.Canceled)
	r.Finish()
	late := b.read(2)
	require.False(t, late.Start())
	b.Wait()
	require.Equal(t, []int{1, 2}, b.freedSorted())
	require.NoError(t, b.Zero(t.Context(), WriteBack, b.mem, 0, page.Size))
	b.read(3).Drop()
	require.Equal(t, []int{1, 2, 3}, b.freedSorted())
}

// oneAtATime is a discipline that lets nothing begin while something is in progress.
type oneAtATime struct {
	waits []schedule.Request
	busy  bool
	piece int64
}

func (o *oneAtATime) Arrive(r schedule.Request) { o.waits = append(o.waits, r) }
func (o *oneAtATime) Promote(schedule.ID)       {}
func (o *oneAtATime) Withdraw(id schedule.ID) bool {
	n := len(o.waits)
	o.waits = slices.DeleteFunc(o.waits, func(r schedule.Request) bool { return r.ID == id })
	return len(o.waits) < n
}

func (o *oneAtATime) Next() []schedule.Request {
	if o.busy || len(o.waits) == 0 {
		return nil
	}
	o.busy = true
	defer func() { o.waits = o.waits[1:] }()
	return o.waits[:1:1]
}

func (o *oneAtATime) End([]schedule.Request)    { o.busy = false }
func (o *oneAtATime) Resume([]schedule.Request) { o.busy = true }
func (o *oneAtATime) Piece() int64              { return o.piece }

// TestTurns: a transfer waits for its turn. If its context ends before that, no byte has moved and the device was not
// called. If it ends later, the outcome is that of the device's call.
func TestTurns(t *testing.T) {
	b := newBench(t, new(oneAtATime))
	gate := b.dev.Hold(faulty.CopyIn)
	in := []gpubackend.Copy{{Mem: b.mem, Host: make([]byte, page.Size)}}
	ctx, cancel := context.WithCancel(t.Context())
	under := make(chan error)
	go func() { under <- b.In(ctx, WriteBack, in) }()
	<-gate.Arrived()

	r := b.read(5) // after it, before the next
	require.True(t, r.Start())
	waiting, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- b.Patch(waiting, Acquire, nil) }()
	require.Eventually(t, func() bool {
		b.Device.mu.Lock()
		defer b.Device.mu.Unlock()
		return len(b.waits) == 2
	}, patient, time.Millisecond)
	stop()
	require.ErrorIs(t, <-ended, context.Canceled)
	require.Zero(t, b.dev.Calls(faulty.Patch))

	cancel()
	require.ErrorIs(t, <-under, context.Canceled)
	b.has(r, 5)
	gate.Open()
	require.NoError(t, b.In(t.Context(), WriteBack, in))
	host := []byte{1}
	require.NoError(t, b.Out(t.Context(), CPURead, []gpubackend.Copy{{Mem: b.mem, Host: host}}))
	require.Zero(t, host[0])
	err := b.Peer(t.Context(), Acquire,
		[]gpubackend.PeerCopy{{Mem: b.mem, From: b.mem, FromOff: page.Size, N: page.Size}})
	require.False(t, errors.Is(err, context.Canceled), "the call was made")
	b.Wait()
}

// TestIdleBut: a neighbour is free for a Fill that uses some of its relays if nobody else has transfers there.
func TestIdleBut(t *testing.T) {
	b := newBench(t, new(oneAtATime))
	require.True(t, b.Idle())
	gate := b.dev.Hold(faulty.CopyIn)
	defer gate.Open()
	done := make(chan error)
	for n := range 3 {
		require.True(t, b.idleBut(n))
		go func() {
			done <- b.In(t.Context(), Acquire, []gpubackend.Copy{{Mem: b.mem, Host: make([]byte, page.Size)}})
		}()
		require.Eventually(t, func() bool { return !b.idleBut(n) }, 10*time.Second, time.Millisecond)
		require.False(t, b.Idle())
	}
	gate.Open()
	for range 3 {
		require.NoError(t, <-done)
	}
	require.True(t, b.Idle())
	b.fills.Add(1)
	require.False(t, b.idleBut(1), "a Fill may begin a transfer at any time")
	b.fills.Add(-1)
}

// TestReadersForIdleNeighbours: a Fill has more readers for relays only while their neighbours are idle.
func TestReadersForIdleNeighbours(t *testing.T) {
	own, neighbour := newBench(t, new(oneAtATime)), newBench(t, new(oneAtATime))
	p := &Fill{Device: own.Device, Relays: []*Relay{{Device: neighbour.Device}, {Device: neighbour.Device}}}
	readers := func() int {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.goroutinesLocked()
	}
	alone := goroutinesOf(1)
	require.Equal(t, goroutinesWith(alone, 2), readers())
	p.mu.Lock()
	require.NotNil(t, p.takeRelayLocked())
	p.mu.Unlock()
	require.Equal(t, goroutinesWith(alone, 2), readers(), "a relay in use counts, too")
	neighbour.fills.Add(1)
	require.Equal(t, goroutinesWith(alone, 1), readers())
	neighbour.fills.Add(-1)
	p.Relays[0].broken = true
	require.Equal(t, goroutinesWith(alone, 1), readers())
}
