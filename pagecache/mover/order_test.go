package mover

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover/schedule"
)

// TestCut: however a list is cut, the calls have its bytes in order, and none exceeds the limit.
func TestCut(t *testing.T) {
	for seed := range uint64(100) {
		rnd := rand.New(rand.NewPCG(seed, 0))
		all := make([]byte, 1+rnd.IntN(100))
		for i := range all {
			all[i] = byte(i)
		}
		var list []gpubackend.Copy
		for off := 0; off < len(all); {
			n := min(1+rnd.IntN(30), len(all)-off)
			c := gpubackend.Copy{Off: int64(1000 + off), Host: all[off : off+n]}
			if row := 1 + rnd.IntN(10); rnd.IntN(2) == 0 && n > 0 { // rows, with noise between them
				stride := row + rnd.IntN(5)
				host := bytes.Repeat([]byte{255}, (n-1)/row*stride+(n-1)%row+1)
				for i := range n {
					host[i/row*stride+i%row] = all[off+i]
				}
				c.Host, c.Row, c.Stride = host, int64(row), int64(stride)
			}
			list = append(list, c)
			off += n
		}
		most := int64(rnd.IntN(40))
		var got []byte
		for _, call := range cut(list, most, copySize, splitCopy) {
			n := int64(0)
			for _, c := range call {
				require.NoError(t, c.Check())
				for off, row := range c.Rows() {
					require.EqualValues(t, 1000+len(got), off, seed)
					got = append(got, row...)
				}
				n += c.Bytes()
			}
			require.True(t, most == 0 || n <= most, seed)
			require.NotEmpty(t, call)
		}
		require.Equal(t, all, got, seed)
	}
	peers := cut([]gpubackend.PeerCopy{{Off: 1, FromOff: 5, N: 10}}, 4, peerSize, splitPeer)
	require.Equal(t, [][]gpubackend.PeerCopy{{{Off: 1, FromOff: 5, N: 4}}, {{Off: 5, FromOff: 9, N: 4}},
		{{Off: 9, FromOff: 13, N: 2}}}, peers)
	patches := cut(make([]gpubackend.Patch, 5), 2*4096, patchSize, nil)
	require.Equal(t, []int64{8192, 8192, 4096}, sizes(patches, patchSize))
}

// TestPieces: if the discipline asks for pieces, a transfer is made in several calls. If one piece fails, the transfer
// makes no more calls, and leaves nothing in the queue.
func TestPieces(t *testing.T) {
	order := &oneAtATime{piece: emulated.Granularity / 4}
	b := newBench(t, order)
	host := bytes.Repeat([]byte{7}, emulated.Granularity)
	require.NoError(t, b.In(t.Context(), Acquire, []gpubackend.Copy{{Mem: b.mem, Host: host}}))
	got := make([]byte, emulated.Granularity)
	require.NoError(t, b.Out(t.Context(), Acquire, []gpubackend.Copy{{Mem: b.mem, Host: got}}))
	require.Equal(t, host, got)
	for _, m := range b.Moved() {
		if m.Way == "out" {
			require.EqualValues(t, 4, m.Calls)
		}
	}
	b.dev.Fail(faulty.CopyOut, 1, gpubackend.ErrDeviceLost)
	calls := b.dev.Calls(faulty.CopyOut)
	require.ErrorIs(t, b.Out(t.Context(), Acquire, []gpubackend.Copy{{Mem: b.mem, Host: got}}),
		gpubackend.ErrDeviceLost)
	require.Equal(t, calls+1, b.dev.Calls(faulty.CopyOut))
	b.Device.mu.Lock()
	require.Empty(t, order.waits)
	require.False(t, order.busy)
	b.Device.mu.Unlock()
}

// TestPiecesAfterFailure: when a piece of a transfer fails, pieces that wait are withdrawn, also if it is a late one.
func TestPiecesAfterFailure(t *testing.T) {
	order := &oneAtATime{piece: emulated.Granularity / 8}
	b := newBench(t, order)
	waits := func(n int) {
		t.Helper()
		require.Eventually(t, func() bool {
			b.Device.mu.Lock()
			defer b.Device.mu.Unlock()
			return len(order.waits) == n
		}, patient, time.Millisecond)
	}
	host := make([]byte, emulated.Granularity)
	for failing := 1; failing <= 8; failing++ {
		calls := b.dev.Calls(faulty.CopyOut)
		b.dev.Fail(faulty.CopyOut, failing, gpubackend.ErrNoMemory)
		out, in := b.dev.Hold(faulty.CopyOut), b.dev.Hold(faulty.CopyIn)
		done, other := make(chan error), make(chan error)
		go func() { done <- b.Out(t.Context(), Acquire, []gpubackend.Copy{{Mem: b.mem, Host: host}}) }()
		<-out.Arrived()
		waits(schedule.InFlight/schedule.MostPiece - 1)
		go func() { other <- b.In(t.Context(), Acquire, []gpubackend.Copy{{Mem: b.mem, Host: host[:1]}}) }()
		waits(schedule.InFlight / schedule.MostPiece)
		out.Open()
		if failing > 1 { // otherwise the other transfer has its turn now, and the failed one does not wait for it
			in.Open()
		}
		require.ErrorIs(t, <-done, gpubackend.ErrNoMemory)
		require.Equal(t, calls+failing, b.dev.Calls(faulty.CopyOut))
		in.Open()
		require.NoError(t, <-other)
	}
}

// TestPiecesBeginTogether: the pieces of a transfer that have begun are all in progress on the device. One that waited
// for another would take a part of what may be in flight, and move nothing.
func TestPiecesBeginTogether(t *testing.T) {
	b := newBench(t, &schedule.Priority{Preemptive: true})
	list := make([]gpubackend.Copy, (inFlight+1)*perPiece)
	for i := range list {
		list[i] = gpubackend.Copy{Mem: b.mem, Host: make([]byte, emulated.Granularity)}
	}
	gate := b.dev.Hold(faulty.CopyOut)
	var all sync.WaitGroup
	all.Go(func() { assert.NoError(t, b.Out(t.Context(), WriteBack, list)) })
	assert.Eventually(t, func() bool { return b.dev.Calls(faulty.CopyOut) == inFlight }, patient, time.Millisecond)
	gate.Open()
	all.Wait()
	require.Equal(t, inFlight+1, b.dev.Calls(faulty.CopyOut))
	for i := range list {
		require.Equal(t, list[0].Host, list[i].Host)
		require.EqualValues(t, 5, list[i].Host[5*page.Size])
	}
}

// inFlight is how many pieces are in flight at once, perPiece how many extents are a piece.
const (
	inFlight = schedule.InFlight / schedule.MostPiece
	perPiece = schedule.MostPiece / emulated.Granularity
)

// TestTransfersOneAfterAnother: a transfer waits until the pieces of an earlier one of its class have begun, up to
// mostInTurn.
func TestTransfersOneAfterAnother(t *testing.T) {
	b := newBench(t, &schedule.Priority{Preemptive: true})
	long := make([]gpubackend.Copy, mostInTurn/emulated.Granularity+4)
	for i := range long {
		long[i] = gpubackend.Copy{Mem: b.mem, Host: make([]byte, emulated.Granularity)}
	}
	gate := b.dev.Hold(faulty.CopyOut)
	var all sync.WaitGroup
	all.Go(func() { assert.NoError(t, b.Out(t.Context(), Acquire, long)) })
	assert.Eventually(t, func() bool { return b.dev.Calls(faulty.CopyOut) == inFlight }, patient, time.Millisecond)
	outs := 0
	all.Go(func() {
		one := []gpubackend.Copy{{Mem: b.mem, Host: make([]byte, emulated.Granularity)}}
		assert.NoError(t, b.Out(t.Context(), Acquire, one))
		outs = b.dev.Calls(faulty.CopyOut) - 1 // without its own
	})
	assert.Eventually(t, func() bool {
		b.Device.mu.Lock()
		defer b.Device.mu.Unlock()
		return len(b.waits) == 1
	}, patient, time.Millisecond)
	gate.Open()
	all.Wait()
	// The other pieces in flight may have begun without having reached the device.
	require.GreaterOrEqual(t, outs, mostInTurn/schedule.MostPiece-(inFlight-1))
}

// noted is a discipline that notes after which pieces requests queue.
type noted struct {
	schedule.Priority
	after []schedule.ID
}

func (n *noted) Arrive(r schedule.Request) {
	n.after = append(n.after, r.After)
	n.Priority.Arrive(r)
}

// TestPlaceOfATransfer: the pieces of each mostInTurn bytes of a transfer queue after the first of them.
func TestPlaceOfATransfer(t *testing.T) {
	order := &noted{Priority: schedule.Priority{Preemptive: true}}
	b := newBench(t, order)
	order.after = nil
	const together = mostInTurn / schedule.MostPiece
	list := make([]gpubackend.Copy, (2*together+1)*perPiece)
	for i := range list {
		list[i] = gpubackend.Copy{Mem: b.mem, Host: make([]byte, emulated.Granularity)}
	}
	require.NoError(t, b.Out(t.Context(), Acquire, list))
	first := b.last - schedule.ID(2*together)
	for i, after := range order.after {
		if i%together == 0 {
			require.Zero(t, after, i)
		} else {
			require.Equal(t, first+schedule.ID(i/together*together), after, i)
		}
	}
	require.Len(t, order.after, 2*together+1)
}

// TestPiecesBecomeUrgent: later pieces are more urgent than the first, and none begins and then waits for the first.
func TestPiecesBecomeUrgent(t *testing.T) {
	b := newBench(t, &schedule.Priority{Preemptive: true})
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			list := make([]gpubackend.Copy, 3)
			for i := range list {
				list[i] = gpubackend.Copy{Mem: b.mem, Host: make([]byte, emulated.Granularity)}
			}
			asked := false
			ctx := Ahead(t.Context(), func() bool { defer func() { asked = true }(); return asked })
			assert.NoError(t, b.Out(ctx, Acquire, list))
		})
	}
	all.Wait()
}

// TestZeroTakesNoLink: while a device zeroes as much as may be in flight, a transfer begins.
func TestZeroTakesNoLink(t *testing.T) {
	b := newBench(t, &schedule.Priority{Preemptive: true})
	gate := b.dev.Hold(faulty.Zero)
	var zeroed sync.WaitGroup
	for range inFlight {
		zeroed.Go(func() { assert.NoError(t, b.Zero(t.Context(), Acquire, b.mem, 0, emulated.Granularity)) })
	}
	assert.Eventually(t, func() bool { return b.dev.Calls(faulty.Zero) == inFlight }, patient, time.Millisecond)
	require.NoError(t, b.In(t.Context(), Prefetch,
		[]gpubackend.Copy{{Mem: b.mem, Host: make([]byte, emulated.Granularity)}}))
	gate.Open()
	zeroed.Wait()
}

// TestAhead: transfers of an Ahead context are of class Prefetch, and what queues after somebody waits is not.
func TestAhead(t *testing.T) {
	const piece = emulated.Granularity / 8
	b := newBench(t, &oneAtATime{piece: piece})
	before := b.Moved()
	asked := 0
	ctx := Ahead(t.Context(), func() bool { asked++; return asked > 3 })
	host := make([]byte, emulated.Granularity)
	require.NoError(t, b.In(ctx, Acquire, []gpubackend.Copy{{Mem: b.mem, Host: host}}))
	require.NoError(t, b.In(Ahead(t.Context(), func() bool { return false }), WriteBack,
		[]gpubackend.Copy{{Mem: b.mem, Host: host[:piece]}}))
	require.Equal(t, []Moved{
		{"acquire", "in", before[0].Calls + 5, before[0].Bytes + 5*piece},
		{"prefetch", "in", 3, 3 * piece},
		{"write-back", "in", 1, piece},
	}, b.Moved())
}

// TestDisciplinesTakeTurns: transfers of several tenants go on while the discipline changes, and every byte is right.
func TestDisciplinesTakeTurns(t *testing.T) {
	first, err := schedule.New(schedule.Default, nil)
	require.NoError(t, err)
	b := newBench(t, first)
	const part = emulated.Granularity / 8
	var all sync.WaitGroup
	for tenant := range uint32(8) {
		all.Go(func() {
			ctx := WithTenant(t.Context(), tenant)
			for n := range 30 {
				host := bytes.Repeat([]byte{byte(tenant + uint32(n))}, part)
				at := gpubackend.Copy{Mem: b.mem, Off: int64(tenant) * part, Host: host}
				assert.NoError(t, b.In(ctx, schedule.Classes()[n%len(schedule.Classes())], []gpubackend.Copy{at}))
				at.Host = make([]byte, part)
				assert.NoError(t, b.Out(ctx, CPURead, []gpubackend.Copy{at}))
				assert.Equal(t, host, at.Host, fmt.Sprint("tenant ", tenant))
			}
		})
	}
	for n := range 60 {
		order, err := schedule.New(schedule.Names()[n%len(schedule.Names())], nil)
		require.NoError(t, err)
		b.SetOrder(order)
	}
	all.Wait()
	b.Device.mu.Lock()
	require.Empty(t, b.begun)
	b.Device.mu.Unlock()
}
