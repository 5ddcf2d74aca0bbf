package faulty_test

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/conformance"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
)

func TestMain(m *testing.M) { os.Exit(conformance.Main(m, conformance.MapShared)) }

func wrap(t *testing.T) *faulty.Device {
	d, err := emulated.New(emulated.Options{Memory: 64 << 20})
	require.NoError(t, err)
	return faulty.Wrap(d)
}

// TestConformance shows that a Device without faults behaves like the device that it wraps.
func TestConformance(t *testing.T) {
	conformance.Run(t, func(t *testing.T) gpubackend.Device { return wrap(t) })
}

// calls makes each call once, with a new Memory for Free.
func calls(t *testing.T, d *faulty.Device, m gpubackend.Memory) map[faulty.Op]func(ctx context.Context) error {
	p, sums := make([]byte, page.Size), make([]gpubackend.Digest, 1)
	return map[faulty.Op]func(ctx context.Context) error{
		faulty.Alloc: func(context.Context) error {
			x, err := d.Alloc(2 << 20)
			if err == nil {
				require.NoError(t, x.Free())
			}
			return err
		},
		faulty.AllocHost: func(context.Context) error {
			x, err := d.AllocHost(2 << 20)
			if err == nil {
				require.NoError(t, x.Free())
			}
			return err
		},
		faulty.CopyIn:  func(ctx context.Context) error { return d.CopyIn(ctx, []gpubackend.Copy{{Mem: m, Host: p}}) },
		faulty.CopyOut: func(ctx context.Context) error { return d.CopyOut(ctx, []gpubackend.Copy{{Mem: m, Host: p}}) },
		faulty.CopyPeer: func(ctx context.Context) error {
			return d.CopyPeer(ctx, []gpubackend.PeerCopy{{Mem: m, From: m, FromOff: page.Size, N: page.Size}})
		},
		faulty.Zero: func(ctx context.Context) error { return d.Zero(ctx, m, 0, 1) },
		faulty.Patch: func(ctx context.Context) error {
			return d.Patch(ctx, []gpubackend.Patch{{Mem: m, Base: p, Next: p}})
		},
		faulty.Digests: func(ctx context.Context) error { return d.Digests(ctx, m, 0, sums) },
		faulty.Modified: func(ctx context.Context) error {
			_, err := d.Modified(ctx, []gpubackend.Scan{{Mem: m, Agreed: sums}})
			return err
		},
		faulty.HostBuffer: func(context.Context) error {
			_, giveBack, err := d.HostBuffer(1)
			if err == nil {
				giveBack()
			}
			return err
		},
		faulty.Export: func(context.Context) error { _, err := m.Export(true); return err },
	}
}

func TestFail(t *testing.T) {
	d := wrap(t)
	m, err := d.Alloc(2 << 20)
	require.NoError(t, err)
	planned := errors.New("planned")
	for op, call := range calls(t, d, m) {
		require.NoError(t, call(t.Context()), op)
		before := d.Calls(op)
		d.Fail(op, 2, planned)
		require.NoError(t, call(t.Context()), "the first %v", op)
		require.ErrorIs(t, call(t.Context()), planned, "the second %v", op)
		require.NoError(t, call(t.Context()), "the third %v", op)
		require.Equal(t, before+3, d.Calls(op))
	}
	d.Fail(faulty.Free, 1, planned)
	require.ErrorIs(t, m.Free(), planned)
	require.Equal(t, int64(2<<20), d.Used(), "the failed call was not passed on")
	require.NoError(t, m.Free())
	require.NoError(t, d.Close())
	require.Panics(t, func() { d.Fail(faulty.Free, 0, planned) })
}

func TestLose(t *testing.T) {
	d := wrap(t)
	m, err := d.Alloc(2 << 20)
	require.NoError(t, err)
	all := calls(t, d, m)
	d.Lose()
	for op, call := range all {
		require.ErrorIs(t, call(t.Context()), gpubackend.ErrDeviceLost, op)
	}
	require.NoError(t, m.Free())
	require.Zero(t, d.Used())
	require.NoError(t, d.Close())
}

func TestSlow(t *testing.T) {
	d := wrap(t)
	m, err := d.Alloc(2 << 20)
	require.NoError(t, err)
	const by = 5 * time.Millisecond
	d.Slow(faulty.CopyOut, by)
	call := calls(t, d, m)[faulty.CopyOut]
	began := time.Now()
	require.NoError(t, call(t.Context()))
	require.GreaterOrEqual(t, time.Since(began), by)
	d.Slow(faulty.CopyOut, 0)
	require.NoError(t, call(t.Context()))
	require.NoError(t, m.Free())
	require.NoError(t, d.Close())
}

func TestOldBytes(t *testing.T) {
	d := wrap(t)
	m, err := d.Alloc(2 << 20)
	require.NoError(t, err)
	require.True(t, m.Zeroed())
	d.OldBytes()
	require.False(t, m.Zeroed())
	require.NoError(t, m.Free())
	require.NoError(t, d.Close())
}

func TestHold(t *testing.T) {
	d := wrap(t)
	m, err := d.Alloc(2 << 20)
	require.NoError(t, err)
	for op, call := range calls(t, d, m) {
		gate := d.Hold(op)
		require.Panics(t, func() { d.Hold(op) }, "held already")
		result := make(chan error, 1)
		go func() { result <- call(t.Context()) }()
		<-gate.Arrived()
		select {
		case err := <-result:
			t.Fatalf("%v passed a closed gate: %v", op, err)
		default:
		}
		gate.Open()
		gate.Open() // does nothing
		require.NoError(t, <-result, op)
		require.NoError(t, call(t.Context()), "%v after the gate was opened", op)
	}
	gate := d.HoldAfter(faulty.Zero, 1)
	require.NoError(t, d.Zero(t.Context(), m, 0, 1), "the first one passes")
	held := make(chan error, 1)
	go func() { held <- d.Zero(t.Context(), m, 0, 1) }()
	<-gate.Arrived()
	gate.Open()
	require.NoError(t, <-held)
	// A call gives up waiting when its context ends, and finds the device lost meanwhile.
	ctx, cancel := context.WithCancel(t.Context())
	all := calls(t, d, m)
	gate = d.Hold(faulty.Digests)
	result := make(chan error, 1)
	go func() { result <- all[faulty.Digests](ctx) }()
	<-gate.Arrived()
	cancel()
	require.ErrorIs(t, <-result, context.Canceled)
	go func() { result <- all[faulty.Digests](t.Context()) }()
	d.Lose()
	gate.Open()
	require.ErrorIs(t, <-result, gpubackend.ErrDeviceLost)
	require.NoError(t, m.Free())
	require.NoError(t, d.Close())
}
