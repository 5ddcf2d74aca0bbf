package conformance

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

func testInfo(f *fixture) {
	g := f.info.Granularity
	require.Positive(f, g)
	require.Zero(f, g&(g-1), "a power of two")
	require.Zero(f, g%page.Size)
	require.GreaterOrEqual(f, f.info.Memory, 16*g)
	require.GreaterOrEqual(f, f.info.Memory, int64(32<<20), "memory that these tests need")
	require.GreaterOrEqual(f, f.info.Ordinal, 0)
	require.NotEqual(f, "unknown", f.info.Kind.String())
	require.NotEmpty(f, f.info.Name)
	require.Equal(f, !slices.Contains(f.allowed, ReadOnlyIsAdvice), f.info.ReadOnlyExports)
	require.NotNil(f, f.dev.Key())
	f.alloc(g)
	require.Equal(f, f.info, f.dev.Info(), "it never changes")
	require.Same(f, f.dev.Key(), f.dev.Key())
}

func testAllocSizes(f *fixture) {
	g := f.info.Granularity
	for _, size := range []int64{0, -1, -g, 1, g - 1, g + 1, g / 2, page.Size - 1} {
		_, err := f.dev.Alloc(size)
		require.ErrorIs(f, err, gpubackend.ErrRange, "%d bytes", size)
	}
	require.Zero(f, f.dev.Used(), "failed calls take nothing")
	var sum int64
	for _, n := range []int64{1, 2, 3, 1} {
		require.Equal(f, n*g, f.alloc(n*g).Size())
		sum += n * g
		require.Equal(f, sum, f.dev.Used())
	}
}

func testBudget(f *fixture) {
	g := f.info.Granularity
	whole := f.info.Memory / g * g
	_, err := f.dev.Alloc(whole + g)
	require.ErrorIs(f, err, gpubackend.ErrNoMemory)
	_, err = f.dev.Alloc(1 << 62)
	require.ErrorIs(f, err, gpubackend.ErrNoMemory, "no overflow")
	big := f.alloc(whole - 2*g)
	a, b := f.alloc(g), f.alloc(g)
	require.Equal(f, whole, f.dev.Used())
	for _, size := range []int64{g, g, -g & (1<<63 - 1)} { // the last one more than a sum can hold
		_, err = f.dev.Alloc(size)
		require.ErrorIs(f, err, gpubackend.ErrNoMemory)
		require.Equal(f, whole, f.dev.Used())
	}
	require.NoError(f, a.Free())
	require.Equal(f, whole-g, f.dev.Used())
	_, err = f.dev.Alloc(2 * g)
	require.ErrorIs(f, err, gpubackend.ErrNoMemory)
	require.NoError(f, b.Free())
	f.alloc(2 * g)
	require.NoError(f, big.Free())
	require.Equal(f, 2*g, f.dev.Used())

	free, err := f.dev.Free()
	require.NoError(f, err)
	require.Positive(f, free)
	f.dev.SetBudget(3 * g)
	defer f.dev.SetBudget(f.info.Memory)
	_, err = f.dev.Alloc(2 * g)
	require.ErrorIs(f, err, gpubackend.ErrNoMemory)
	more := f.alloc(g)
	f.dev.SetBudget(g)
	require.Equal(f, 3*g, f.dev.Used(), "what was handed out stays")
	require.NoError(f, more.Free())
	_, err = f.dev.Alloc(g)
	require.ErrorIs(f, err, gpubackend.ErrNoMemory)
	f.dev.SetBudget(whole + g)
	require.Equal(f, f.info, f.dev.Info())
	require.NoError(f, f.alloc(g).Free())
}

// testStagingMemory: staging memory works like other memory of the device, and takes nothing of its budget.
func testStagingMemory(f *fixture) {
	g := f.info.Granularity
	_, err := f.dev.AllocStaging(g + 1)
	require.ErrorIs(f, err, gpubackend.ErrRange)
	f.dev.SetBudget(g)
	m, err := f.dev.AllocStaging(2 * g)
	require.NoError(f, err)
	require.Equal(f, 2*g, m.Size())
	require.Zero(f, f.dev.Used())
	own, bytes := f.alloc(g), f.random(g)
	f.write(m, g, bytes)
	require.NoError(f, f.dev.CopyPeer(f.ctx, []gpubackend.PeerCopy{{Mem: own, From: m, FromOff: g, N: g}}))
	require.Equal(f, bytes, f.read(own, 0, g))
	require.NoError(f, own.Free())
	require.ErrorIs(f, f.dev.Close(), gpubackend.ErrInUse)
	require.NoError(f, m.Free())
	require.Zero(f, f.dev.Used())
	require.NoError(f, f.alloc(g).Free())
}

// testHostMemory: memory of the host works like the device's own, and takes nothing of its budget.
func testHostMemory(f *fixture) {
	g := f.info.Granularity
	for _, size := range []int64{0, -g, g + 1, g / 2} {
		_, err := f.dev.AllocHost(size)
		require.ErrorIs(f, err, gpubackend.ErrRange, "%d bytes", size)
	}
	m, err := f.dev.AllocHost(2 * g)
	require.NoError(f, err)
	require.Equal(f, 2*g, m.Size())
	require.Zero(f, f.dev.Used())
	if m.Zeroed() {
		require.Equal(f, make([]byte, 2*g), f.read(m, 0, 2*g))
	}
	own, bytes := f.alloc(2*g), f.random(2*g)
	f.write(own, 0, bytes)
	require.NoError(f, f.dev.CopyPeer(f.ctx, []gpubackend.PeerCopy{{Mem: m, From: own, N: 2 * g}}))
	require.Equal(f, bytes, f.read(m, 0, 2*g))
	sums, same := make([]gpubackend.Digest, 2*g/page.Size), make([]gpubackend.Digest, 2*g/page.Size)
	require.NoError(f, f.dev.Digests(f.ctx, own, 0, sums))
	require.NoError(f, f.dev.Digests(f.ctx, m, 0, same))
	require.Equal(f, sums, same)
	require.NoError(f, f.dev.Zero(f.ctx, m, g, g))
	require.NoError(f, f.dev.CopyPeer(f.ctx, []gpubackend.PeerCopy{{Mem: own, From: m, N: 2 * g}}))
	require.Equal(f, append(bytes[:g:g], make([]byte, g)...), f.read(own, 0, 2*g))
	_, err = m.Export(true)
	require.NoError(f, err)
	require.ErrorIs(f, f.dev.Close(), gpubackend.ErrInUse)
	require.NoError(f, m.Free())
	require.ErrorIs(f, m.Free(), gpubackend.ErrFreed)
	require.Equal(f, 2*g, f.dev.Used())
}

// testBudgetAtOnce has more callers than the memory suffices for: as many succeed as fit.
func testBudgetAtOnce(f *fixture) {
	g := f.info.Granularity
	rest := 8*g + f.info.Memory%g
	f.alloc(f.info.Memory - rest)
	var got [24]gpubackend.Memory
	var errs [24]error
	var wg sync.WaitGroup
	for i := range got {
		wg.Go(func() { got[i], errs[i] = f.dev.Alloc(g) })
	}
	wg.Wait()
	succeeded := 0
	for i := range got {
		if errs[i] != nil {
			require.ErrorIs(f, errs[i], gpubackend.ErrNoMemory)
			continue
		}
		succeeded++
		require.NoError(f, got[i].Free())
	}
	require.Equal(f, 8, succeeded)
}

func testBudgetUnderChurn(f *fixture) {
	g := f.info.Granularity
	f.alloc(f.info.Memory/g*g - 4*g) // room for four
	var held atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 40 {
				m, err := f.dev.Alloc(g)
				if err != nil {
					if !errorIs(f, err, gpubackend.ErrNoMemory) {
						return
					}
					continue
				}
				if n := held.Add(1); n > 4 {
					f.Errorf("%d allocations where 4 fit", n)
				}
				if u := f.dev.Used(); u > f.info.Memory {
					f.Errorf("%d of %d bytes used", u, f.info.Memory)
				}
				held.Add(-1)
				if err := m.Free(); err != nil {
					f.Errorf("free: %v", err)
				}
			}
		})
	}
	wg.Wait()
	require.Equal(f, f.info.Memory/g*g-4*g, f.dev.Used())
}

// testZeroed uses all memory up and allocates again: memory that claims to be zeros is zeros.
func testZeroed(f *fixture) {
	g := f.info.Granularity
	zeros := make([]byte, g)
	secret := f.random(g)
	for range 4 {
		m := f.alloc(g)
		if m.Zeroed() {
			require.Equal(f, zeros, f.read(m, 0, g))
		}
		f.write(m, 0, secret)
		require.NoError(f, m.Free())
	}
	a, b := f.alloc(g), f.alloc(g)
	was := a.Zeroed()
	f.write(a, 0, secret)
	require.Equal(f, was, a.Zeroed(), "it speaks of when Alloc returned")
	if b.Zeroed() {
		require.Equal(f, zeros, f.read(b, 0, g), "another's stores do not show")
	}
}

// uses makes every call that takes a Memory.
func (f *fixture) uses(m gpubackend.Memory) map[string]error {
	p, sums := make([]byte, page.Size), make([]gpubackend.Digest, 1)
	_, ro := m.Export(false)
	_, rw := m.Export(true)
	_, modified := f.dev.Modified(f.ctx, []gpubackend.Scan{{Mem: m, Agreed: sums}})
	return map[string]error{
		"Export(false)": ro,
		"Export(true)":  rw,
		"CopyIn":        f.dev.CopyIn(f.ctx, []gpubackend.Copy{{Mem: m, Host: p}}),
		"CopyOut":       f.dev.CopyOut(f.ctx, []gpubackend.Copy{{Mem: m, Host: p}}),
		"Zero":          f.dev.Zero(f.ctx, m, 0, page.Size),
		"Patch":         f.dev.Patch(f.ctx, []gpubackend.Patch{{Mem: m, Base: p, Next: p}}),
		"Digests":       f.dev.Digests(f.ctx, m, 0, sums),
		"Modified":      modified,
	}
}

func testFreed(f *fixture) {
	m, other := f.alloc(f.info.Granularity), f.alloc(f.info.Granularity)
	for name, err := range f.uses(m) {
		require.NoError(f, err, name)
	}
	require.NoError(f, m.Free())
	for name, err := range f.uses(m) {
		require.ErrorIs(f, err, gpubackend.ErrFreed, name)
	}
	require.ErrorIs(f, m.Free(), gpubackend.ErrFreed)
	require.Equal(f, other.Size(), f.dev.Used(), "the second Free gave nothing back")
	for name, err := range f.uses(other) {
		require.NoError(f, err, name)
	}
	// If one of its memories is freed, a call does nothing at all.
	f.write(other, 0, []byte("before"))
	after := []byte("after!")
	err := f.dev.CopyIn(f.ctx, []gpubackend.Copy{{Mem: other, Host: after}, {Mem: m, Host: after}})
	require.ErrorIs(f, err, gpubackend.ErrFreed)
	require.Equal(f, "before", string(f.read(other, 0, 6)))
}

// testFreeBesideCalls frees memory that calls are using: the calls succeed or fail with ErrFreed.
func testFreeBesideCalls(f *fixture) {
	for range 8 {
		m := f.alloc(2 << 20)
		var wg, busy sync.WaitGroup
		busy.Add(3)
		for range 3 {
			wg.Go(func() {
				ready := sync.OnceFunc(busy.Done)
				defer ready()
				buf := make([]byte, m.Size())
				sums := make([]gpubackend.Digest, m.Size()/page.Size)
				for {
					err := f.dev.CopyIn(f.ctx, []gpubackend.Copy{{Mem: m, Host: buf}})
					if err == nil {
						err = f.dev.Digests(f.ctx, m, 0, sums)
					}
					if err != nil {
						errorIs(f, err, gpubackend.ErrFreed)
						return
					}
					ready()
				}
			})
		}
		busy.Wait() // all three go from call to call
		require.NoError(f, m.Free())
		wg.Wait()
	}
	require.Zero(f, f.dev.Used())
}

func testClose(f *fixture) {
	m := f.alloc(f.info.Granularity)
	f.write(m, 0, []byte("kept"))
	require.ErrorIs(f, f.dev.Close(), gpubackend.ErrInUse)
	require.Equal(f, "kept", string(f.read(m, 0, 4)), "a refused Close changes nothing")
	require.NoError(f, m.Free())
	require.NoError(f, f.dev.Close())
	require.ErrorIs(f, f.dev.Close(), gpubackend.ErrClosed)
	_, err := f.dev.Alloc(f.info.Granularity)
	require.ErrorIs(f, err, gpubackend.ErrClosed)
	_, _, err = f.dev.HostBuffer(1)
	require.ErrorIs(f, err, gpubackend.ErrClosed)
	require.Equal(f, f.info, f.dev.Info())
	require.Zero(f, f.dev.Used())
	require.NotNil(f, f.dev.Key())
}

func testHostBuffer(f *fixture) {
	_, _, err := f.dev.HostBuffer(-1)
	require.ErrorIs(f, err, gpubackend.ErrRange)
	m := f.alloc(4 << 20)
	for _, n := range []int{0, 1, page.Size, page.Size + 1, 1 << 20, 4 << 20} {
		a, releaseA, err := f.dev.HostBuffer(n)
		require.NoError(f, err)
		b, releaseB, err := f.dev.HostBuffer(n)
		require.NoError(f, err)
		require.Len(f, a, n)
		require.Len(f, b, n)
		copy(a, f.random(int64(n)))
		f.write(m, 0, a)
		require.NoError(f, f.dev.CopyOut(f.ctx, []gpubackend.Copy{{Mem: m, Host: b}}))
		require.Equal(f, a, b, "two buffers at once are two")
		releaseA()
		releaseA() // does nothing
		c, releaseC, err := f.dev.HostBuffer(n)
		require.NoError(f, err)
		d, releaseD, err := f.dev.HostBuffer(n)
		require.NoError(f, err)
		want := f.random(int64(n))
		copy(c, want)
		clear(d)
		require.Equal(f, want, append([]byte{}, c...), "a buffer given back twice is handed out once")
		releaseB()
		releaseC()
		releaseD()
	}
}
