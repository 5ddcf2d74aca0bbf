package mover

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/pagecache/mover/schedule"
)

// mostRandom is the largest transfer of TestRandomTransfers.
const mostRandom = mostInTurn + 5<<20

// errInjected is how calls fail in TestRandomTransfers.
var errInjected = errors.New("injected")

// TestRandomTransfers: transfers of several tenants bring the right bytes and use no memory once they have ended, while
// contexts end, calls fail, read-ahead becomes urgent, and the discipline changes.
func TestRandomTransfers(t *testing.T) {
	first, err := schedule.New(schedule.Default, nil)
	require.NoError(t, err)
	b := newBench(t, first)
	until := time.Now().Add(300 * time.Millisecond)
	const tenants = 6
	b.dev.SetBudget(emulated.Granularity + tenants*(mostRandom+emulated.Granularity))
	var all sync.WaitGroup
	for tenant := range uint32(tenants) {
		mem, err := b.dev.Alloc((mostRandom/emulated.Granularity + 1) * emulated.Granularity)
		require.NoError(t, err)
		defer func() { require.NoError(t, mem.Free()) }()
		all.Go(func() {
			rnd := rand.New(rand.NewPCG(rand.Uint64(), 0))
			host := make([]byte, mostRandom)
			for time.Now().Before(until) {
				b.random(WithTenant(t.Context(), tenant), mem, host, rnd)
			}
		})
	}
	for time.Now().Before(until) {
		order, err := schedule.New(schedule.Names()[rand.IntN(len(schedule.Names()))], nil)
		require.NoError(t, err)
		b.SetOrder(order)
		if rand.IntN(3) == 0 {
			b.dev.Fail([]faulty.Op{faulty.CopyIn, faulty.CopyOut}[rand.IntN(2)], 1+rand.IntN(5), errInjected)
		}
		time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond)
	}
	all.Wait()
	b.Device.mu.Lock()
	defer b.Device.mu.Unlock()
	require.Empty(t, b.begun)
}

// random brings random bytes to mem and back. It overwrites host after each transfer, so that the race detector finds
// calls that still use it.
func (b *bench) random(ctx context.Context, mem gpubackend.Memory, host []byte, rnd *rand.Rand) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if rnd.IntN(2) == 0 {
		urgent := time.Now().Add(time.Duration(rnd.IntN(3)) * time.Millisecond)
		ctx = Ahead(ctx, func() bool { return time.Now().After(urgent) })
	}
	if rnd.IntN(3) == 0 {
		time.AfterFunc(time.Duration(rnd.IntN(2000))*time.Microsecond, cancel)
	}
	class := schedule.Classes()[rnd.IntN(len(schedule.Classes()))]
	host = host[:[]int{4096, 64 << 10, 2 << 20, 5<<20 + 4096, mostRandom}[rnd.IntN(5)]]
	set := func(c byte) {
		for i := range host {
			host[i] = c
		}
	}
	value := byte(rnd.IntN(200))
	set(value)
	var list []gpubackend.Copy
	for off := 0; off < len(host); {
		n := min(len(host)-off, 4096*(1+rnd.IntN(700)))
		list = append(list, gpubackend.Copy{Mem: mem, Off: int64(off), Host: host[off : off+n]})
		off += n
	}
	err := b.In(ctx, class, list)
	set(201)
	if err == nil {
		if err = b.Out(ctx, class, list); err == nil {
			assert.Equal(b.t, len(host), bytes.Count(host, []byte{value}))
		}
		set(202)
	}
	assert.True(b.t, err == nil || errors.Is(err, context.Canceled) || errors.Is(err, errInjected), err)
}
