package conformance

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// errorIs is require.ErrorIs for goroutines that are not the test's own: it goes on.
func errorIs(t testing.TB, err, target error) bool {
	if !errors.Is(err, target) {
		t.Errorf("error %v, want %v", err, target)
		return false
	}
	return true
}

// testCopies copies pieces of any size and alignment in both directions, and compares them with a model of the memory.
func testCopies(f *fixture) {
	size := 2 * f.info.Granularity
	mems := []gpubackend.Memory{f.alloc(size), f.alloc(size), f.alloc(size)}
	twins := make([][]byte, len(mems))
	for i, m := range mems {
		twins[i] = f.random(size)
		f.write(m, 0, twins[i])
	}
	for range 30 {
		var pieces []gpubackend.Copy
		for range f.rnd.IntN(40) {
			// In disjoint slots, because pieces of one call may be copied in any order.
			slot := int64(len(pieces)) * (size / 40)
			off := slot + f.rnd.Int64N(size/80)
			n := f.rnd.Int64N(size / 80)
			if f.rnd.IntN(4) == 0 {
				n = f.rnd.Int64N(20)
			}
			i := f.rnd.IntN(len(mems))
			p := f.random(n)
			copy(twins[i][off:], p)
			pieces = append(pieces, gpubackend.Copy{Mem: mems[i], Off: off, Host: p})
		}
		require.NoError(f, f.dev.CopyIn(f.ctx, pieces))
		for k := range pieces {
			pieces[k].Host = make([]byte, len(pieces[k].Host))
		}
		require.NoError(f, f.dev.CopyOut(f.ctx, pieces))
		for _, p := range pieces {
			i := slices.Index(mems, p.Mem)
			require.True(f, bytes.Equal(twins[i][p.Off:p.Off+int64(len(p.Host))], p.Host), "%d bytes at %d",
				len(p.Host), p.Off)
		}
	}
	for i, m := range mems {
		require.True(f, bytes.Equal(twins[i], f.read(m, 0, size)), "nothing else changed")
	}
	require.NoError(f, f.dev.CopyIn(f.ctx, nil))
	require.NoError(f, f.dev.CopyOut(f.ctx, []gpubackend.Copy{{Mem: mems[0], Off: size}}), "nothing at the very end")
}

// testCopiesAcrossBatches has one large piece, and many small ones in one call.
func testCopiesAcrossBatches(f *fixture) {
	const size = 12 << 20
	m := f.alloc(size)
	want := f.random(size - 4097)
	f.write(m, 4095, want)
	require.True(f, bytes.Equal(want, f.read(m, 4095, int64(len(want)))))

	const small, count = 61, 20_000
	many := make([]gpubackend.Copy, count)
	for i := range many {
		many[i] = gpubackend.Copy{Mem: m, Off: int64(i * 600), Host: f.random(small)}
	}
	require.NoError(f, f.dev.CopyIn(f.ctx, many))
	whole := f.read(m, 0, size)
	back := make([]gpubackend.Copy, count)
	for i, c := range many {
		require.True(f, bytes.Equal(c.Host, whole[c.Off:c.Off+small]), "piece %d", i)
		back[i] = gpubackend.Copy{Mem: m, Off: c.Off, Host: make([]byte, small)}
	}
	require.NoError(f, f.dev.CopyOut(f.ctx, back))
	for i := range back {
		require.True(f, bytes.Equal(many[i].Host, back[i].Host), "piece %d", i)
	}
}

func testZero(f *fixture) {
	size := max(3<<20, f.info.Granularity)
	m := f.alloc(size)
	want := f.random(size)
	f.write(m, 0, want)
	for _, r := range [][2]int64{{0, 0}, {1, 1}, {4095, 2}, {8192, 4096}, {100_001, 1<<20 + 3}, {size - 5, 5},
		{size, 0}} {
		require.NoError(f, f.dev.Zero(f.ctx, m, r[0], r[1]))
		clear(want[r[0] : r[0]+r[1]])
		require.True(f, bytes.Equal(want, f.read(m, 0, size)), "%d bytes at %d", r[1], r[0])
	}
	require.NoError(f, f.dev.Zero(f.ctx, m, 0, size))
	require.True(f, bytes.Equal(make([]byte, size), f.read(m, 0, size)))
}

// testFaultyArguments checks that a call with one wrong argument touches nothing.
func testFaultyArguments(f *fixture) {
	g := f.info.Granularity
	m := f.alloc(g)
	want := f.random(g)
	f.write(m, 0, want)
	stranger, err := f.openDevice().Alloc(g)
	require.NoError(f, err)
	defer func() { require.NoError(f, stranger.Free()) }()

	good := gpubackend.Copy{Mem: m, Host: f.random(page.Size)}
	p := make([]byte, page.Size)
	for name, bad := range map[string]gpubackend.Copy{
		"before the start": {Mem: m, Off: -1, Host: p},
		"over the end":     {Mem: m, Off: g - page.Size + 1, Host: p},
		"after the end":    {Mem: m, Off: g + 1},
		"far away":         {Mem: m, Off: 1<<63 - 1, Host: p},
		"another device's": {Mem: stranger, Host: p},
		"no memory":        {Host: p},
	} {
		require.ErrorIs(f, f.dev.CopyIn(f.ctx, []gpubackend.Copy{good, bad}), gpubackend.ErrRange, name)
		require.ErrorIs(f, f.dev.CopyOut(f.ctx, []gpubackend.Copy{bad}), gpubackend.ErrRange, name)
		require.ErrorIs(f, f.dev.Zero(f.ctx, bad.Mem, bad.Off, max(int64(len(bad.Host)), 1)), gpubackend.ErrRange, name)
		patches := []gpubackend.Patch{
			{Mem: m, Base: want[:page.Size], Next: p},
			{Mem: bad.Mem, Off: bad.Off, Base: p, Next: p},
		}
		require.ErrorIs(f, f.dev.Patch(f.ctx, patches), gpubackend.ErrRange, name)
		sums := make([]gpubackend.Digest, 1)
		require.ErrorIs(f, f.dev.Digests(f.ctx, bad.Mem, bad.Off, sums), gpubackend.ErrRange, name)
		_, err := f.dev.Modified(f.ctx, []gpubackend.Scan{{Mem: m, Agreed: sums},
			{Mem: bad.Mem, Off: bad.Off, Agreed: sums}})
		require.ErrorIs(f, err, gpubackend.ErrRange, name)
	}
	require.ErrorIs(f, f.dev.Zero(f.ctx, m, 0, -1), gpubackend.ErrRange)
	for _, off := range []int64{1, 8, page.Size - 1} {
		require.ErrorIs(f, f.dev.Patch(f.ctx, []gpubackend.Patch{{Mem: m, Off: off, Base: p, Next: p}}),
			gpubackend.ErrRange)
		require.ErrorIs(f, f.dev.Digests(f.ctx, m, off, make([]gpubackend.Digest, 1)), gpubackend.ErrRange)
	}
	for _, n := range []int{0, page.Size - 1, page.Size + 1} {
		part := make([]byte, n)
		require.ErrorIs(f, f.dev.Patch(f.ctx, []gpubackend.Patch{{Mem: m, Base: part, Next: p}}), gpubackend.ErrRange)
		require.ErrorIs(f, f.dev.Patch(f.ctx, []gpubackend.Patch{{Mem: m, Base: p, Next: part}}), gpubackend.ErrRange)
	}
	require.ErrorIs(f, f.dev.Digests(f.ctx, m, 0, make([]gpubackend.Digest, g/page.Size+1)), gpubackend.ErrRange)
	require.True(f, bytes.Equal(want, f.read(m, 0, g)), "memory as it was")
}

func testContext(f *fixture) {
	m := f.alloc(4 << 20)
	ctx, cancel := context.WithCancel(f.ctx)
	cancel()
	p := make([]byte, 4<<20)
	sums := make([]gpubackend.Digest, len(p)/page.Size)
	require.ErrorIs(f, f.dev.CopyIn(ctx, []gpubackend.Copy{{Mem: m, Host: p}}), context.Canceled)
	require.ErrorIs(f, f.dev.CopyOut(ctx, []gpubackend.Copy{{Mem: m, Host: p}}), context.Canceled)
	require.ErrorIs(f, f.dev.Zero(ctx, m, 0, int64(len(p))), context.Canceled)
	require.ErrorIs(f, f.dev.Patch(ctx, []gpubackend.Patch{{Mem: m, Base: p[:page.Size], Next: p[:page.Size]}}),
		context.Canceled)
	require.ErrorIs(f, f.dev.Digests(ctx, m, 0, sums), context.Canceled)
	_, err := f.dev.Modified(ctx, []gpubackend.Scan{{Mem: m, Agreed: sums}})
	require.ErrorIs(f, err, context.Canceled)
	require.NoError(f, m.Free(), "an abandoned call holds nothing")
}

// testParallelUse runs goroutines that each work on their own pages of one memory, with every call.
func testParallelUse(f *fixture) {
	const workers, pages = 8, 64
	m := f.alloc(workers * pages * page.Size)
	var wg sync.WaitGroup
	for w := range workers {
		data := f.random(4 * pages * page.Size)
		wg.Go(func() {
			off := int64(w * pages * page.Size)
			sums, got := make([]gpubackend.Digest, pages), make([]byte, pages*page.Size)
			for r := range 4 {
				want := data[r*len(got) : (r+1)*len(got)]
				base := data[(r+3)%4*len(got):][:len(got)]
				err := errors.Join(
					f.dev.Zero(f.ctx, m, off, int64(len(got))),
					f.dev.CopyIn(f.ctx, []gpubackend.Copy{{Mem: m, Off: off, Host: base}}))
				var patches []gpubackend.Patch
				for i := range pages {
					at := off + int64(i*page.Size)
					patches = append(patches, gpubackend.Patch{Mem: m, Off: at, Base: pageAt(base, i),
						Next: pageAt(want, i)})
				}
				err = errors.Join(err, f.dev.Patch(f.ctx, patches),
					f.dev.CopyOut(f.ctx, []gpubackend.Copy{{Mem: m, Off: off, Host: got}}))
				f.dev.Key().SumPages(want, sums)
				modified, merr := f.dev.Modified(f.ctx, []gpubackend.Scan{{Mem: m, Off: off, Agreed: sums}})
				if err = errors.Join(err, merr); err != nil || !bytes.Equal(want, got) || len(modified[0]) > 0 {
					f.Errorf("worker %d: error %v, modified %v", w, err, modified)
					return
				}
			}
		})
	}
	wg.Wait()
}

// testCopiesOfManyBuffers copies between one run of device memory and host buffers in the order of their addresses. The
// buffers are often adjacent, but are separate allocations.
func testCopiesOfManyBuffers(f *fixture) {
	const n = 1 << 20
	size := max(f.info.Granularity, 8*n)
	mem := f.alloc(size)
	buffers := make([][]byte, size/n)
	for i := range buffers {
		b, giveBack, err := f.dev.HostBuffer(n)
		require.NoError(f, err)
		defer giveBack()
		buffers[i] = b
	}
	slices.SortFunc(buffers, func(a, b []byte) int {
		return cmp.Compare(uintptr(unsafe.Pointer(unsafe.SliceData(a))), uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	})
	whole := f.random(size)
	var pieces []gpubackend.Copy
	for i, b := range buffers {
		copy(b, whole[i*n:])
		pieces = append(pieces, gpubackend.Copy{Mem: mem, Off: int64(i) * n, Host: b})
	}
	require.NoError(f, f.dev.CopyIn(f.ctx, pieces))
	for _, b := range buffers {
		clear(b)
	}
	require.NoError(f, f.dev.CopyOut(f.ctx, pieces))
	for i, b := range buffers {
		require.True(f, bytes.Equal(whole[i*n:(i+1)*n], b), "buffer %d", i)
	}
}

// testScatteredPages copies many single pages, and small runs of pages, between scattered places on the device and both
// kinds of host memory, alone and together with large and odd pieces.
func testScatteredPages(f *fixture) {
	const count, size = 2600, 12 << 20
	mems := []gpubackend.Memory{f.alloc(size), f.alloc(size), f.alloc(4 << 20)}
	twins := [][]byte{f.random(size), f.random(size), f.random(4 << 20)}
	for i, m := range mems {
		f.write(m, 0, twins[i])
	}
	buffer, giveBack, err := f.dev.HostBuffer(count * page.Size)
	require.NoError(f, err)
	defer giveBack()
	other := make([]byte, count*page.Size)
	for _, host := range [][]byte{buffer, other, nil} {
		var pieces []gpubackend.Copy
		places := f.rnd.Perm(size / page.Size)
		for i := 0; i < count; {
			n := 1 + f.rnd.IntN(2)
			from := host
			if from == nil { // of both kinds, in turns
				from = buffer
				if i/7%2 == 0 {
					from = other
				}
			}
			n = min(n, count-i)
			at, which := places[len(pieces)], 0
			if at >= len(places)/2 {
				at, which = at-len(places)/2, 1
			}
			pieces = append(pieces, gpubackend.Copy{Mem: mems[which], Off: int64(at) * 2 * page.Size,
				Host: from[i*page.Size : (i+n)*page.Size]})
			i += n
		}
		if host == nil {
			for _, x := range [][2]int{{0, 50 * page.Size}, {1 << 20, 1<<20 + 17}, {3<<20 - 3, 5}, {3 << 20, 0},
				{3<<20 + 5, page.Size}} {
				pieces = append(pieces, gpubackend.Copy{Mem: mems[2], Off: int64(x[0]), Host: make([]byte, x[1])})
			}
			f.rnd.Shuffle(len(pieces), func(a, b int) { pieces[a], pieces[b] = pieces[b], pieces[a] })
		}
		for _, p := range pieces {
			copy(p.Host, f.random(int64(len(p.Host))))
			copy(twins[slices.Index(mems, p.Mem)][p.Off:], p.Host)
		}
		require.NoError(f, f.dev.CopyIn(f.ctx, pieces))
		for i, m := range mems {
			require.True(f, bytes.Equal(twins[i], f.read(m, 0, int64(len(twins[i])))),
				"exactly what was named was stored")
		}
		for _, p := range pieces {
			clear(p.Host)
		}
		require.NoError(f, f.dev.CopyOut(f.ctx, pieces))
		for i, p := range pieces {
			require.True(f, bytes.Equal(twins[slices.Index(mems, p.Mem)][p.Off:][:len(p.Host)], p.Host), "piece %d", i)
		}
	}
}
