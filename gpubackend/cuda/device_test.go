package cuda

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/conformance"
	"github.com/gaiafs/gaiafs/internal/page"
)

// fakeEnv tells peers that their descriptors are of a fake.
const fakeEnv = "GAIAFS_TEST_FAKE_GPU"

// TestConformanceOfFake runs the conformance suite on a fake driver, so that it finds bugs of the device without a GPU.
func TestConformanceOfFake(t *testing.T) {
	t.Setenv(fakeEnv, "1")
	for name, batches := range map[string]bool{"Batches": true, "PieceByCopy": false} {
		t.Run(name, func(t *testing.T) {
			drivers := map[*testing.T]*driver{}
			fakes := map[*testing.T]*fake{}
			conformance.Run(t, func(t *testing.T) gpubackend.Device {
				g := fakes[t]
				if g == nil {
					g = newFake()
					g.count, g.linked = 2, true
					fakes[t], drivers[t] = g, g.driver()
					if !batches {
						drivers[t] = withoutBatches(drivers[t])
					}
					t.Cleanup(func() { require.Zero(t, g.left(), "given back to the driver") })
				}
				// A test's second device is the second GPU.
				d, err := open(drivers[t], Options{Ordinal: 3, CUDA: min(int(g.retained), 1), Memory: 64<<20 + 5},
					kernelsPTX)
				require.NoError(t, err)
				return d
			}, conformance.ReadOnlyIsAdvice, conformance.ImportersAreUnknown)
		})
	}
}

// TestNoPeer: CopyPeer fails with ErrNoPeer if the GPUs cannot reach each other, if the peer is lost, or if the driver
// refuses.
func TestNoPeer(t *testing.T) {
	for name, prepare := range map[string]func(g *fake, source *device){
		"NoLink":  func(g *fake, _ *device) { g.linked = false },
		"Refused": func(g *fake, _ *device) { g.setFail("cuMemSetAccess", invalidValue) },
		"Lost": func(_ *fake, source *device) {
			err := gpubackend.ErrDeviceLost
			source.loss.Store(&err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := newFake()
			g.count, g.linked = 2, true
			drv := g.driver()
			var devices []*device
			var memories []gpubackend.Memory
			for i := range 2 {
				d, err := open(drv, Options{Ordinal: i, CUDA: i, Memory: 32 << 20}, kernelsPTX)
				require.NoError(t, err)
				m, err := d.Alloc(2 << 20)
				require.NoError(t, err)
				devices, memories = append(devices, d), append(memories, m)
			}
			copies := []gpubackend.PeerCopy{{Mem: memories[0], From: memories[1], N: page.Size}}
			prepare(g, devices[1])
			require.ErrorIs(t, devices[0].CopyPeer(t.Context(), copies), gpubackend.ErrNoPeer)
			for i, d := range devices {
				require.NoError(t, memories[i].Free())
				require.NoError(t, d.Close())
			}
			require.Zero(t, g.left())
		})
	}
}

func openFake(t testing.TB, memory int64, batches bool) (*device, *fake) {
	g := newFake()
	drv := g.driver()
	if !batches {
		drv = withoutBatches(drv)
	}
	d, err := open(drv, Options{Ordinal: 3, Memory: memory}, kernelsPTX)
	require.NoError(t, err)
	return d, g
}

// importFake is the Import for a fake's memory.
func importFake(f *os.File, size int64, writable bool) (conformance.View, error) {
	v, err := conformance.MapShared(f, size, writable)
	if err != nil || writable {
		return v, err
	}
	return readOnlyView{v}, nil
}

type readOnlyView struct{ conformance.View }

func (readOnlyView) Store([]byte, int64) error { return errors.New("view for reading") }

// TestOpenUnwinds makes each driver call of Open fail once: nothing stays allocated, and the error says what failed.
func TestOpenUnwinds(t *testing.T) {
	defer goleak.VerifyNone(t)
	const copiers = inCopiers + outCopiers + peerCopiers
	for call, times := range map[string]int{
		"cuDevicePrimaryCtxRetain": 1, "cuCtxSetCurrent": 1, "cuStreamCreate": 3 + copiers, "cuModuleLoadDataEx": 1,
		"cuModuleGetFunction": 6, "cuEventCreate": 3 + copiers*chunks, "cuMemAlloc": 1,
		"cuMemHostAlloc": 1 + (inCopiers+outCopiers)*chunks, "cuMemcpyHtoDAsync": 1,
	} {
		for after := range times {
			g := newFake()
			g.fail[call], g.after[call] = outOfMemory, after
			_, err := open(g.driver(), Options{Memory: 32 << 20}, kernelsPTX)
			require.ErrorIs(t, err, gpubackend.ErrNoMemory, "%s %d", call, after)
			require.ErrorContains(t, err, call)
			require.ErrorContains(t, err, "what the driver says (CUDA error 2)")
			require.Zero(t, g.left(), "%s %d", call, after)
		}
	}
}

func TestFullGPU(t *testing.T) {
	g := newFake()
	g.total = 60 << 20
	_, err := open(g.driver(), Options{}, kernelsPTX)
	require.ErrorIs(t, err, gpubackend.ErrNoMemory)
	require.ErrorContains(t, err, "at least 64 MiB are needed, and 59 of the 60 MiB of Fake GPU (CUDA device 0) are free")
	require.Zero(t, g.left())
}

func TestOpenOptions(t *testing.T) {
	drv := newFake().driver()
	for want, o := range map[string]Options{
		"1 such devices":                        {CUDA: 1},
		"negative":                              {Ordinal: -1},
		"less than one":                         {Memory: 2<<20 - 1},
		"2048 MiB requested, Fake GPU has 1024": {Memory: 2 << 30},
		"at least 1024 MiB are needed, and 1023 of the 1024 MiB of Fake GPU (CUDA device 0) are free": {Memory: 1 << 30},
		"numbered from 0": {CUDA: -1},
		"(-5)":            {Memory: -5},
	} {
		_, err := open(drv, o, kernelsPTX)
		require.ErrorContains(t, err, want)
	}
	d, err := open(drv, Options{}, kernelsPTX)
	require.NoError(t, err)
	require.Equal(t, int64(1<<30/4*3-2<<20), d.info.Memory, "three quarters of what is free, in whole allocations")
	require.Equal(t, "Fake GPU (CUDA device 0)", d.info.Name)
	require.NoError(t, d.Close())
}

// TestAllocUnwinds makes each step of an allocation fail: the budget and the driver are as before.
func TestAllocUnwinds(t *testing.T) {
	d, g := openFake(t, 64<<20, true)
	before := g.left()
	for _, call := range []string{"cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"} {
		g.setFail(call, outOfMemory)
		_, err := d.Alloc(2 << 20)
		require.ErrorIs(t, err, gpubackend.ErrNoMemory)
		require.ErrorContains(t, err, call)
		g.setFail(call, success)
		require.Zero(t, d.Used())
		require.Equal(t, before, g.left(), call)
	}
	m, err := d.Alloc(64 << 20)
	require.NoError(t, err, "the device is as good as before")
	require.NoError(t, m.Free())
	require.NoError(t, d.Close())
	require.Zero(t, g.left())
}

// TestLoss makes each kind of call meet the loss of the device: that call and every later one report it, and Free and
// Close give back what the host holds.
func TestLoss(t *testing.T) {
	defer goleak.VerifyNone(t)
	for _, lost := range []result{deviceUnavailable, eccUncorrectable, illegalAddress, launchFailed, unknown} {
		for name, call := range map[string]string{
			"Alloc": "cuMemCreate", "Export": "cuMemExportToShareableHandle", "CopyIn": "cuEventRecord",
			"CopyOut": "cuMemcpyDtoHAsync",
			"Zero":    "cuMemsetD8Async", "Patch": "cuLaunchKernel", "Digests": "cuEventQuery",
			"Modified":   "cuMemcpyHtoDAsync",
			"HostBuffer": "cuMemHostAlloc",
		} {
			d, g := openFake(t, 64<<20, true)
			m, err := d.Alloc(2 << 20)
			require.NoError(t, err)
			p, sums := make([]byte, page.Size), make([]gpubackend.Digest, 1)
			ctx := t.Context()
			uses := map[string]func() error{
				"Alloc":   func() error { _, err := d.Alloc(2 << 20); return err },
				"Export":  func() error { _, err := m.Export(false); return err },
				"CopyIn":  func() error { return d.CopyIn(ctx, []gpubackend.Copy{{Mem: m, Host: p}}) },
				"CopyOut": func() error { return d.CopyOut(ctx, []gpubackend.Copy{{Mem: m, Host: p}}) },
				"Zero":    func() error { return d.Zero(ctx, m, 0, page.Size) },
				"Patch": func() error {
					return d.Patch(ctx, []gpubackend.Patch{{Mem: m, Base: p, Next: bytes.Repeat([]byte{1}, page.Size)}})
				},
				"Digests": func() error { return d.Digests(ctx, m, 0, sums) },
				"Modified": func() error {
					_, err := d.Modified(ctx,
						[]gpubackend.Scan{{Mem: m, Agreed: sums}})
					return err
				},
				"HostBuffer": func() error { _, _, err := d.HostBuffer(1); return err },
			}
			g.setFail(call, lost)
			err = uses[name]()
			require.ErrorIs(t, err, gpubackend.ErrDeviceLost, "%s %d", name, lost)
			require.ErrorContains(t, err, call)
			g.setFail(call, success)
			for later, use := range uses {
				require.ErrorIs(t, use(), gpubackend.ErrDeviceLost, "%s after %s", later, name)
			}
			for _, call := range []string{"cuMemUnmap", "cuMemRelease", "cuMemAddressFree", "cuMemFreeHost",
				"cuEventDestroy"} {
				g.setFail(call, lost)
			}
			require.NoError(t, m.Free())
			require.Zero(t, d.Used())
			require.NoError(t, d.Close())
			require.Zero(t, g.retained)
		}
	}
}

// TestErrorsThatAreNoLoss: the device stays usable after a call that merely failed.
func TestErrorsThatAreNoLoss(t *testing.T) {
	d, g := openFake(t, 64<<20, true)
	m, err := d.Alloc(4 << 20)
	require.NoError(t, err)
	want := bytes.Repeat([]byte("gaiafs! "), 1<<19)
	ctx := t.Context()
	for _, call := range []string{"cuMemsetD8Async", "cuMemcpyHtoDAsync", "cuEventRecord"} {
		g.setFail(call, invalidValue)
		err := errors.Join(d.Zero(ctx, m, 0, 4<<20), d.CopyIn(ctx, []gpubackend.Copy{{Mem: m, Host: want}}))
		require.ErrorContains(t, err, "CUDA error 1")
		require.NotErrorIs(t, err, gpubackend.ErrDeviceLost)
		g.setFail(call, success)
		require.NoError(t, d.CopyIn(ctx, []gpubackend.Copy{{Mem: m, Host: want}}))
		got := make([]byte, len(want))
		require.NoError(t, d.CopyOut(ctx, []gpubackend.Copy{{Mem: m, Host: got}}))
		require.True(t, bytes.Equal(want, got))
	}
	require.NoError(t, m.Free())
	require.NoError(t, d.Close())
	require.Zero(t, g.left())
}

// TestBuffersOutliveDevice closes a device whose buffers are in use: the last one that comes back frees the device's
// resources.
func TestBuffersOutliveDevice(t *testing.T) {
	defer goleak.VerifyNone(t)
	d, g := openFake(t, 64<<20, true)
	a, giveBackA, err := d.HostBuffer(100)
	require.NoError(t, err)
	b, giveBackB, err := d.HostBuffer(200 << 20)
	require.NoError(t, err)
	_, giveBackC, err := d.HostBuffer(5 << 20)
	require.NoError(t, err)
	giveBackC()
	require.NoError(t, d.Close())
	require.Equal(t, 2+(inCopiers+outCopiers)*chunks+1, len(g.host), "those in use, and the lanes' own")
	copy(a, "still there")
	b[len(b)-1] = 1
	giveBackA()
	require.NotZero(t, g.left())
	giveBackB()
	require.Zero(t, g.left())
}

// TestPinnedIsKnown looks up slices inside, at and across the edges of buffers.
func TestPinnedIsKnown(t *testing.T) {
	d, _ := openFake(t, 64<<20, true)
	var kept [][]byte
	for range 5 {
		p, giveBack, err := d.HostBuffer(100_000)
		require.NoError(t, err)
		defer giveBack()
		kept = append(kept, p)
	}
	seen := make(map[pinned]bool)
	for _, p := range kept {
		of, ok := locked.holds(p)
		require.True(t, ok)
		seen[of] = true
		for _, part := range [][]byte{p[99_999:], p[:1]} {
			same, ok := locked.holds(part)
			require.True(t, ok)
			require.Equal(t, of, same)
		}
	}
	require.Len(t, seen, 5)
	for _, p := range [][]byte{make([]byte, 10), nil} {
		_, ok := locked.holds(p)
		require.False(t, ok)
	}
	require.NoError(t, d.Close())
}

// TestIdleBuffersAreGivenBack: idle buffers are freed, and buffers in use are not.
func TestIdleBuffersAreGivenBack(t *testing.T) {
	d, _ := openFake(t, 64<<20, true)
	used, giveBackUsed, err := d.HostBuffer(100_000)
	require.NoError(t, err)
	idle, giveBack, err := d.HostBuffer(100_000)
	require.NoError(t, err)
	giveBack()
	_, ok := locked.holds(idle)
	require.True(t, ok, "kept for the next caller")
	d.trimBuffers()
	require.Zero(t, d.buffers.kept)
	_, ok = locked.holds(used)
	require.True(t, ok)
	giveBackUsed()
	require.NotZero(t, d.buffers.kept)
	require.NoError(t, d.Close())
	d.trimBuffers() // the timer may come late
}

// TestIdleBuffersMakeRoomForOthers: buffers of a class that was used long ago make room for buffers that are used now.
func TestIdleBuffersMakeRoomForOthers(t *testing.T) {
	const large, small = 1 << maxBufferShift, 2 << 20
	var b buffers
	wanted := func(size int) (ok bool) {
		_, ok, err := b.take(size)
		require.NoError(t, err)
		return ok
	}
	for range idleBytes / large {
		require.False(t, wanted(large))
	}
	for range idleBytes / large {
		require.Empty(t, b.keep(pinned{size: large}))
	}
	require.False(t, wanted(small))
	require.Equal(t, []pinned{{size: large}}, b.keep(pinned{size: small}))
	require.True(t, wanted(small))
	require.Equal(t, idleBytes-large, b.kept)
}

func TestRoundsHoldEveryPageOnce(t *testing.T) {
	counts := []int{0, 1, roundPages - 1, 3, 0, 2*roundPages + 5, 7}
	for range roundRuns + 3 {
		counts = append(counts, 1)
	}
	base := func(i int) address { return address(i) << 40 }
	seen := make([]int, len(counts))
	for _, round := range rounds(len(counts), func(i int) int { return counts[i] }, base) {
		pages := 0
		for _, s := range round {
			require.Equal(t, seen[s.scan], s.from)
			require.Equal(t, base(s.scan)+address(s.from)*pageSize, s.base)
			require.Positive(t, s.pages)
			seen[s.scan] += s.pages
			pages += s.pages
		}
		require.LessOrEqual(t, pages, roundPages)
		require.LessOrEqual(t, len(round), roundRuns)
	}
	require.Equal(t, counts, seen)
	require.LessOrEqual(t, agreedAt+8*roundPages, upSize)
	require.Zero(t, patchSize%16, "the kernel loads 16 bytes")
	require.Zero(t, pagesAt%16, "likewise")
	require.LessOrEqual(t, 8*roundScatter, pagesAt)
}
