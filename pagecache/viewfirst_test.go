package pagecache

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/residency"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

// eightExtents requests a view of 64 MiB, for a device of 128 MiB. It has eight extents. The first half of them is more
// than what the first call brings.
func eightExtents() ViewRequest {
	return withAlignment(ViewRequest{Segments: []view.Segment{bytesOf(100, 64<<20-100)}})
}

// open opens a view in another goroutine.
func (m *machine) open(ctx context.Context, src *source, req ViewRequest) <-chan opened {
	done := make(chan opened, 1)
	go func() {
		vm, err := m.cache.OpenView(ctx, []Source{src}, req)
		done <- opened{&viewer{vm, m, []*source{src}}, err}
	}()
	return done
}

type opened struct {
	*viewer
	err error
}

// TestFirstBytesBeforeTheLastZeros: bytes come to the first extents while the others wait to be zeroed.
func TestFirstBytesBeforeTheLastZeros(t *testing.T) {
	m := newMachine(t, 1, memory(128<<20))
	d, src := m.devices[0], m.noisyFile(64<<20)
	zeros := d.HoldAfter(faulty.Zero, 4)
	t.Cleanup(zeros.Open)
	done := m.open(t.Context(), src, eightExtents())
	<-zeros.Arrived()
	require.Eventually(t, func() bool { return d.Calls(faulty.CopyIn) > 0 }, time.Minute, time.Millisecond)
	require.Equal(t, 8, d.Calls(faulty.Alloc))
	require.LessOrEqual(t, d.Calls(faulty.Export), 4, "memory with old bytes was exported")
	zeros.Open()
	v := <-done
	require.NoError(t, v.err)
	require.NoError(t, v.Fill(t.Context()))
	v.check()
	require.Equal(t, 8, d.Calls(faulty.Zero), "each extent once")
}

// TestZerosDoNotOverwriteBytes fills views while zeroing takes long, from wherever bytes can come.
func TestZerosDoNotOverwriteBytes(t *testing.T) {
	const size = 8 << 20
	req := withAlignment(ViewRequest{Segments: []view.Segment{bytesOf(100, 3<<20), bytesOf(5<<20+1, 3<<20-1)}})
	for name, prepare := range map[string]func(m *machine, src *source){
		"home":          func(*machine, *source) {},
		"locked pages":  func(m *machine, src *source) { m.lock(src) },
		"a mapping":     func(m *machine, src *source) { m.run(src, 0, 0, size, false) },
		"another GPU's": func(m *machine, src *source) { m.run(src, 1, 0, size, false) },
		"another view":  func(m *machine, src *source) { r := req; r.Device = 1; m.view(r, src) },
		"a release": func(m *machine, src *source) {
			p := m.run(src, 1, 0, size, true)
			for at := 0; at < size; at += page.Size {
				p.add(at)
			}
			p.release()
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, 2, pinnedMemory(4*leastLocked))
			m.cache.leastPeer = 1
			src := m.noisyFile(size)
			prepare(m, src)
			m.devices[0].Slow(faulty.Zero, 5*time.Millisecond)
			var both sync.WaitGroup
			var views [2]*viewer
			var errs [2]error
			for i := range views {
				both.Go(func() { views[i], errs[i] = m.tryView(req, src) })
			}
			both.Wait()
			require.NoError(t, errors.Join(errs[:]...))
			require.Greater(t, len(views[0].Extents()), 2)
			views[0].check()
		})
	}
}

// requireNoOldBytes checks that each byte of the view is zero or as wanted.
func (v *viewer) requireNoOldBytes() {
	v.m.t.Helper()
	requireNoOldBytes(v.m.t, v.want(), v.all())
}

func requireNoOldBytes(t *testing.T, want, got []byte) {
	t.Helper()
	for i, b := range got {
		if b != 0 && b != want[i] {
			require.Fail(t, "old bytes", "byte %d is %d, not 0 or %d", i, b, want[i])
		}
	}
}

// TestNobodySeesOldBytes: memory is zeros when it is exported, and where a fill that fails brought nothing.
func TestNobodySeesOldBytes(t *testing.T) {
	m := newMachine(t, 1)
	const size = 24 << 20 // more than one call brings
	d, src := m.devices[0], m.noisyFile(size)
	exports, copies := d.Hold(faulty.Export), d.HoldAfter(faulty.CopyIn, 1)
	t.Cleanup(exports.Open)
	t.Cleanup(copies.Open)
	d.Fail(faulty.CopyIn, 2, errors.New("the bus is broken"))
	done := m.open(t.Context(), src, withAlignment(ViewRequest{Segments: []view.Segment{bytesOf(0, size)}}))
	<-exports.Arrived()
	<-copies.Arrived()
	var first *residency.Extent
	for _, v := range m.cache.viewsByKey {
		first = v.Extents(page.Range{End: 1})[0]
	}
	mem := make([]byte, first.Size())
	gpu, inner := d.Inner(first.Memory())
	require.NoError(t, gpu.CopyOut(t.Context(), []gpubackend.Copy{{Mem: inner, Host: mem}}))
	requireNoOldBytes(t, src.home.bytes(0, len(mem)), mem)
	exports.Open()
	v := <-done
	require.NoError(t, v.err)
	v.requireNoOldBytes()
	copies.Open()
	require.ErrorContains(t, v.Fill(t.Context()), "the bus is broken")
	v.requireNoOldBytes()
	require.NoError(t, v.Fill(t.Context()))
	v.check()
}

// TestViewWithoutMemoryOrZeros: the request fails with the device's error, as if the fill had not begun. The next one
// succeeds, and the memory can be had by others.
func TestViewWithoutMemoryOrZeros(t *testing.T) {
	for _, op := range []faulty.Op{faulty.Alloc, faulty.Zero} {
		t.Run(op.String(), func(t *testing.T) {
			m := newMachine(t, 1)
			d, src := m.devices[0], m.noisyFile(16<<20)
			for n := 1; n <= 8; n++ {
				for k := n; k <= 16; k++ { // whoever zeroes meets the error
					d.Fail(op, k, errors.New("injected"))
				}
				req := ViewRequest{Segments: []view.Segment{bytesOf(int64(n), 15<<20)}}
				_, err := m.tryView(req, src)
				require.ErrorContains(t, err, "injected", "call %d", n)
				require.True(t, m.cache.devices[0].moves.Idle(), "the fill has ended")
				for k := 1; k <= 16; k++ {
					d.Fail(op, k, nil)
				}
				v := m.view(req, src)
				v.check()
				v.unmap()
			}
			m.run(src, 0, 0, 16<<20, false).unmap()
			m.run(m.file(64<<20), 0, 0, 64<<20, false)
		})
	}
}

// TestViewIsGivenUpWhileItIsZeroed: a client that ends, and one that waits for what another one zeroes, wait no longer.
func TestViewIsGivenUpWhileItIsZeroed(t *testing.T) {
	m := newMachine(t, 1)
	d, src := m.devices[0], m.noisyFile(16<<20)
	req := withAlignment(ViewRequest{Segments: []view.Segment{bytesOf(0, 16<<20)}})
	zeros := d.HoldAfter(faulty.Zero, 1)
	t.Cleanup(zeros.Open)
	ctx, end := context.WithCancel(t.Context())
	first := m.open(ctx, src, req)
	<-zeros.Arrived()
	other, endOther := context.WithCancel(t.Context())
	second := m.open(other, src, req)
	require.Eventually(t, func() bool {
		f := m.cache.Lookup(src.id)
		return len(f.views.snapshot()) == 1 && len(f.views.snapshot()[0].snapshotMappings()) == 2
	}, time.Minute, time.Millisecond)
	endOther()
	require.ErrorIs(t, (<-second).err, context.Canceled)
	end()
	require.ErrorIs(t, (<-first).err, context.Canceled)
	zeros.Open()
	m.view(req, src).check()
}

// TestDeviceIsLostWhileItZeroes: the client hears of it, and nothing stays in use.
func TestDeviceIsLostWhileItZeroes(t *testing.T) {
	m := newMachine(t, 2)
	d, src := m.devices[0], m.noisyFile(16<<20)
	req := withAlignment(ViewRequest{Segments: []view.Segment{bytesOf(0, 16<<20)}})
	zeros := d.HoldAfter(faulty.Zero, 1)
	t.Cleanup(zeros.Open)
	done := m.open(t.Context(), src, req)
	<-zeros.Arrived()
	d.Lose()
	zeros.Open()
	require.ErrorIs(t, (<-done).err, syscall.ENODEV)
	require.Eventually(t, func() bool { return m.used() == 0 }, time.Minute, time.Millisecond)
	req.Device = 1
	m.view(req, src).check()
}

// TestViewsThatEvictEachOther opens views of files with different bytes while memory is short, fills fail and clients
// end. From its export on, a view has only bytes of its own file, and after the fill all of them.
func TestViewsThatEvictEachOther(t *testing.T) {
	const size = 6 << 20
	m := newMachine(t, 2, memory(3*size+size/2))
	m.cache.leastPeer = 1
	var sources []*source
	for i := range 4 {
		src := m.file(size)
		for k := range src.home.data {
			src.home.data[k] = byte(i + 1)
		}
		sources = append(sources, src)
	}
	seed := time.Now().UnixNano() // what the goroutines do is random, too: a seed does not repeat all of it
	t.Logf("seed %d", seed)
	planned := errors.New("planned")
	var clients sync.WaitGroup
	for c := range 4 {
		rng := rand.New(rand.NewPCG(uint64(seed), uint64(c)))
		clients.Go(func() {
			for range 25 {
				src, dev := sources[rng.IntN(len(sources))], rng.IntN(2)
				req := withAlignment(ViewRequest{Device: dev, Lazy: rng.IntN(6) == 0, Segments: []view.Segment{
					bytesOf(int64(rng.IntN(2)), 2<<20), bytesOf(3<<20, 3<<20+int64(rng.IntN(2))*100)}})
				if rng.IntN(4) == 0 {
					of := []faulty.Op{faulty.CopyIn, faulty.CopyPeer, faulty.Zero}[rng.IntN(3)]
					m.devices[dev].Fail(of, 1+rng.IntN(3), planned)
				}
				ctx, end := context.WithCancel(t.Context())
				if rng.IntN(4) == 0 {
					time.AfterFunc(time.Duration(rng.IntN(3000))*time.Microsecond, end)
				}
				v := <-m.open(ctx, src, req)
				if v.err == nil {
					v.requireNoOldBytes()
					if v.Fill(ctx) == nil {
						v.check()
					}
					v.requireNoOldBytes()
					v.unmap()
				}
				end()
			}
		})
	}
	clients.Wait()
	for _, d := range m.devices {
		for k := 1; k <= 3; k++ {
			for _, op := range []faulty.Op{faulty.CopyIn, faulty.CopyPeer, faulty.Zero} {
				d.Fail(op, k, nil)
			}
		}
	}
	for i, src := range sources {
		m.view(withAlignment(ViewRequest{Device: i % 2, Segments: []view.Segment{bytesOf(0, size)}}), src).check()
	}
}

// timedDevice takes as long as an H200 to make and to zero an extent of 1 GiB, and notes when the first bytes come.
type timedDevice struct {
	*faulty.Device
	first atomic.Pointer[time.Time]
}

func spin(n time.Duration) {
	for began := time.Now(); time.Since(began) < n; {
	}
}

func (d *timedDevice) Alloc(size int64) (gpubackend.Memory, error) {
	spin(130 * time.Microsecond)
	return d.Device.Alloc(size)
}

func (d *timedDevice) Zero(ctx context.Context, mem gpubackend.Memory, off, n int64) error {
	spin(270 * time.Microsecond)
	return d.Device.Zero(ctx, mem, off, n)
}

func (d *timedDevice) CopyIn(ctx context.Context, pieces []gpubackend.Copy) error {
	now := time.Now()
	d.first.CompareAndSwap(nil, &now)
	return d.Device.CopyIn(ctx, pieces)
}

// BenchmarkFirstBytes measures the time from the request for a new view of eight extents until its first bytes are
// given to the device.
func BenchmarkFirstBytes(b *testing.B) {
	const granule = 8 << 20 // much more than the first call for the device
	const size = 8 * granule
	inner, err := emulated.New(emulated.Options{Memory: 2 * size, Granularity: granule, CopyEngines: true})
	require.NoError(b, err)
	d := &timedDevice{Device: faulty.Wrap(inner)}
	d.OldBytes()
	c, err := New(Options{Devices: []gpubackend.Device{d}, WriteBackInterval: time.Hour, pinTick: time.Hour})
	require.NoError(b, err)
	defer c.Close(context.Background())
	src := (&machine{}).noisyFile(size)
	req := withAlignment(ViewRequest{Segments: []view.Segment{bytesOf(0, size)}})
	first := time.Duration(0)
	for b.Loop() {
		d.first.Store(nil)
		began := time.Now()
		v, err := c.mapView(context.Background(), []Source{src}, req)
		require.NoError(b, err)
		first += d.first.Load().Sub(began)
		require.Len(b, v.Extents(), 8)
		require.NoError(b, v.Unmap(context.Background()))
		v.v.drop()
	}
	b.ReportMetric(first.Seconds()*1e3/float64(b.N), "ms-to-first-bytes")
}
