package cuda

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// timing has the driver functions that only measurements need.
type timing struct {
	eventElapsedTime func(milliseconds *float32, start, end eventHandle) result
}

func bindTiming(t testing.TB) (x timing) {
	lib, err := openLibrary()
	require.NoError(t, err)
	for name, f := range map[string]any{"cuEventElapsedTime": &x.eventElapsedTime} {
		a, err := lib.symbol(name)
		require.NoError(t, err)
		purego.RegisterFunc(f, a)
	}
	return x
}

func openBench(b *testing.B, memory int64) *device {
	d, err := Open(Options{CUDA: requireGPU(b), Memory: memory})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, d.Close()) })
	return d.(*device)
}

func allocBench(b *testing.B, d *device, size int64) *memory {
	m, err := d.Alloc(size)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, m.Free()) })
	return m.(*memory)
}

// noise fills p with different words, none of them zero.
func noise(p []byte, seed uint64) {
	for i := 0; i+8 <= len(p); i += 8 {
		seed = seed*6364136223846793005 + 1442695040888963407
		putWords(p[i:], seed)
	}
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

func gigabytes(bytes int64, d time.Duration) float64 { return float64(bytes) / 1e9 / d.Seconds() }

func spread(d []time.Duration) time.Duration { return slices.Max(d) - slices.Min(d) }

// BenchmarkKernels times the digest kernels over 1 GiB, in turns with copies of 1 GiB within the GPU, by events of the
// stream. A copy counts both the bytes read and the bytes written.
func BenchmarkKernels(b *testing.B) {
	const size = 1 << 30
	const pages = size / page.Size
	x := bindTiming(b)
	d := openBench(b, 2*size)
	m, other := allocBench(b, d, size), allocBench(b, d, size)
	fill := make([]byte, size)
	noise(fill, 1)
	require.NoError(b, d.CopyIn(b.Context(), []gpubackend.Copy{{Mem: m, Host: fill}}))
	agreed := make([]gpubackend.Digest, pages)
	require.NoError(b, d.Digests(b.Context(), m, 0, agreed))
	w := d.worker
	round := []stretch{{pages: pages, base: m.base}}
	var start, end eventHandle
	timed := func(f func() error) time.Duration {
		var ms float32
		require.NoError(b, d.run(b.Context(), d.workLane, func() error {
			if start == 0 {
				if r := max(d.drv.eventCreate(&start, 0), d.drv.eventCreate(&end, 0)); r != success {
					return d.drv.check("cuEventCreate", r)
				}
			}
			d.drv.eventRecord(start, w.lane.stream)
			if err := f(); err != nil {
				return err
			}
			d.drv.eventRecord(end, w.lane.stream)
			if err := w.finish(nil); err != nil {
				return err
			}
			return d.drv.check("cuEventElapsedTime", x.eventElapsedTime(&ms, start, end))
		}))
		return time.Duration(float64(ms) * 1e6)
	}
	// The round's runs and agreed digests stay on the device.
	require.NoError(b, d.run(b.Context(), d.workLane, func() error {
		return w.compare(round, []gpubackend.Scan{{Mem: m, Agreed: agreed}}, make([][]page.Range, 1))
	}))
	blocks := w.grid(pages)
	locked, giveBack, err := d.HostBuffer(64 << 20)
	require.NoError(b, err)
	defer giveBack()
	host := hostAddress(unsafe.Pointer(&locked[0]))
	var copies, digests, scans, ins, outs []time.Duration
	for b.Loop() {
		copies = append(copies, timed(func() error {
			return d.drv.check("cuMemcpyDtoDAsync", d.drv.memcpyDtoDAsync(other.base, m.base, size, w.lane.stream))
		}))
		digests = append(digests, timed(func() error {
			return w.launch(w.digests, blocks, uint64(w.dev), 1, pages, uint64(w.dev+keyAt), uint64(w.dev+downAt))
		}))
		scans = append(scans, timed(func() error {
			return w.launch(w.modified, blocks, uint64(w.dev), 1, pages, uint64(w.dev+keyAt), uint64(w.dev+agreedAt),
				uint64(w.dev+downAt))
		}))
	}
	for range 20 {
		ins = append(ins, timed(func() error {
			return d.drv.check("cuMemcpyHtoDAsync", d.drv.memcpyHtoDAsync(m.base, host, 64<<20, w.lane.stream))
		}))
		outs = append(outs, timed(func() error {
			return d.drv.check("cuMemcpyDtoHAsync", d.drv.memcpyDtoHAsync(host, m.base, 64<<20, w.lane.stream))
		}))
	}
	b.Logf("64 MiB of page-locked memory, by events: in %v, %.1f GB/s; out %v, %.1f GB/s",
		median(ins), gigabytes(64<<20, median(ins)), median(outs), gigabytes(64<<20, median(outs)))
	c := gigabytes(2*size, median(copies))
	for name, times := range map[string][]time.Duration{"digests": digests, "modified": scans} {
		g := gigabytes(size, median(times))
		b.Logf("%s of 1 GiB: %v (spread %v), %.0f GB/s; copy within the GPU %v, %.0f GB/s read and written; ratio %.2f; %d runs",
			name, median(times), spread(times), g, median(copies), c, g/c, len(times))
		b.ReportMetric(g, name+"-GB/s")
	}
	b.ReportMetric(c, "copy-GB/s")
}

// queued calls f as if the driver had no cuMemcpyBatchAsync.
func queued(d *device, f func() error) func() error {
	return func() error {
		copyWith(d, withoutBatches(d.drv))
		defer copyWith(d, d.drv)
		return f()
	}
}

// BenchmarkCalls times whole calls. Scans are over 1 GiB.
func BenchmarkCalls(b *testing.B) {
	const size = 1 << 30
	d := openBench(b, size)
	m := allocBench(b, d, size)
	pageable := make([]byte, 256<<20)
	noise(pageable, 1)
	for off := int64(0); off < size; off += int64(len(pageable)) {
		require.NoError(b, d.CopyIn(b.Context(), []gpubackend.Copy{{Mem: m, Off: off, Host: pageable}}))
	}
	agreed := make([]gpubackend.Digest, size/page.Size)
	require.NoError(b, d.Digests(b.Context(), m, 0, agreed))
	locked, giveBack, err := d.HostBuffer(64 << 20)
	require.NoError(b, err)
	defer giveBack()
	noise(locked, 2)
	pieces := func(host []byte, piece, count int) (all []gpubackend.Copy) {
		for i := range count {
			all = append(all, gpubackend.Copy{Mem: m, Off: int64(i) * 2 * int64(piece),
				Host: host[i*piece : (i+1)*piece]})
		}
		return all
	}
	// rows are a quarter of each row of four ranks, in 31 pieces of 2 MiB of which the last row is left out.
	rows := func(host []byte, row int) (all []gpubackend.Copy) {
		const piece = 2 << 20
		count := piece/4/row - max(1, 1024/row)
		for i := range 31 {
			all = append(all, gpubackend.Copy{Mem: m, Off: int64(i) * piece / 4,
				Host: host[i*piece+140:][:(count-1)*4*row+row], Row: int64(row), Stride: int64(4 * row)})
		}
		return all
	}
	in := func(p []gpubackend.Copy) func() error { return func() error { return d.CopyIn(b.Context(), p) } }
	out := func(p []gpubackend.Copy) func() error { return func() error { return d.CopyOut(b.Context(), p) } }
	var patches []gpubackend.Patch
	for i := range 4096 {
		patches = append(patches, gpubackend.Patch{Mem: m, Off: int64(i) * page.Size, Base: pageable[:page.Size],
			Next: pageable[page.Size : 2*page.Size]})
	}
	sparse := make([]gpubackend.Patch, len(patches))
	for i, p := range patches {
		p.Base, p.Next = pageable[i*page.Size:(i+1)*page.Size], bytes.Clone(pageable[i*page.Size:(i+1)*page.Size])
		p.Next[i%page.Size]++
		p.Changed = p.Differing()
		sparse[i] = p
	}
	for _, x := range []struct {
		name  string
		bytes int64
		call  func() error
	}{
		{"Modified/1GiB-unmodified", size, func() error {
			found, err := d.Modified(b.Context(), []gpubackend.Scan{{Mem: m, Agreed: agreed}})
			if err == nil && len(found[0]) > 0 {
				err = fmt.Errorf("found %d ranges", len(found[0]))
			}
			return err
		}},
		{"Digests/1GiB", size, func() error { return d.Digests(b.Context(), m, 0, agreed) }},
		{"Zero/1GiB-second-half", size / 2, func() error { return d.Zero(b.Context(), m, size/2, size/2) }},
		{"CopyIn/locked-64MiB", 64 << 20, in(pieces(locked, 64<<20, 1))},
		{"CopyOut/locked-64MiB", 64 << 20, out(pieces(locked, 64<<20, 1))},
		{"CopyIn/locked-1024x64KiB", 64 << 20, in(pieces(locked, 64<<10, 1024))},
		{"CopyOut/locked-1024x64KiB", 64 << 20, out(pieces(locked, 64<<10, 1024))},
		{"CopyIn/locked-4096x4KiB", 16 << 20, in(pieces(locked, 4<<10, 4096))},
		{"CopyOut/locked-4096x4KiB", 16 << 20, out(pieces(locked, 4<<10, 4096))},
		{"CopyIn/locked-rows-256B", 31 * 511 << 10, in(rows(locked, 256))},
		{"CopyIn/locked-rows-512B", 31 * 511 << 10, in(rows(locked, 512))},
		{"CopyIn/locked-rows-1KiB", 31 * 511 << 10, in(rows(locked, 1<<10))},
		{"CopyIn/locked-rows-4KiB", 31 * 508 << 10, in(rows(locked, 4<<10))},
		{"CopyIn/locked-rows-16KiB", 31 * 496 << 10, in(rows(locked, 16<<10))},
		{"CopyOut/locked-rows-4KiB", 31 * 508 << 10, out(rows(locked, 4<<10))},
		{"CopyIn/locked-4KiB", 4096, in(pieces(locked, 4<<10, 1))},
		{"CopyOut/locked-4KiB", 4096, out(pieces(locked, 4<<10, 1))},
		{"CopyIn/any-256MiB", 256 << 20, in(pieces(pageable, 256<<20, 1))},
		{"CopyOut/any-256MiB", 256 << 20, out(pieces(pageable, 256<<20, 1))},
		{"CopyIn/any-4096x4KiB", 16 << 20, in(pieces(pageable, 4<<10, 4096))},
		{"CopyOut/any-4096x4KiB", 16 << 20, out(pieces(pageable, 4<<10, 4096))},
		{"CopyIn/locked-4096x4KiB-queued", 16 << 20, queued(d, in(pieces(locked, 4<<10, 4096)))},
		{"CopyOut/locked-4096x4KiB-queued", 16 << 20, queued(d, out(pieces(locked, 4<<10, 4096)))},
		{"Patch/4096-pages", 16 << 20, func() error { return d.Patch(b.Context(), patches) }},
		{"Patch/4096-pages-a-byte-of-each", 16 << 20, func() error { return d.Patch(b.Context(), sparse) }},
		{"AllocFree/2MiB", 2 << 20, nil},
	} {
		b.Run(x.name, func(b *testing.B) {
			b.SetBytes(x.bytes)
			if x.call == nil {
				small := openBench(b, 64<<20)
				x.call = func() error {
					a, err := small.Alloc(x.bytes)
					if err == nil {
						err = a.Free()
					}
					return err
				}
			}
			var times []time.Duration
			for b.Loop() {
				start := time.Now()
				if err := x.call(); err != nil {
					b.Fatal(err)
				}
				times = append(times, time.Since(start))
			}
			b.ReportMetric(gigabytes(x.bytes, median(times)), "median-GB/s")
			b.ReportMetric(float64(median(times).Microseconds()), "median-µs")
		})
	}
}
