package emulated_test

import (
	"bytes"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/internal/page"
)

// BenchmarkModified finds the modified pages of 1 GiB, of which 1 % are modified. In turns with that, it compares the
// same memory with a copy by memcmp (bytes.Equal, a page at a time) on as many cores. It reports the medians of both
// and their ratio, which must stay below 1.5.
func BenchmarkModified(b *testing.B) {
	const size = 1 << 30
	const pages = size / page.Size
	d := open(b, emulated.Options{Memory: size})
	m := alloc(b, d, size)
	ctx := b.Context()
	mapAnonymous := func() []byte {
		p, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, unix.Munmap(p)) })
		return p
	}
	pristine := mapAnonymous()
	for i := range pages {
		for j := 0; j < page.Size; j += 8 {
			pristine[i*page.Size+j] = byte(i + j>>3)
		}
	}
	require.NoError(b, d.CopyIn(ctx, []gpubackend.Copy{{Mem: m, Host: pristine}}))
	agreed := make([]gpubackend.Digest, pages)
	require.NoError(b, d.Digests(ctx, m, 0, agreed))
	var changes []gpubackend.Copy
	for i := 50; i < pages; i += 100 {
		changes = append(changes, gpubackend.Copy{Mem: m, Off: int64(i)*page.Size + 2222, Host: []byte{0xee}})
	}
	require.NoError(b, d.CopyIn(ctx, changes))

	// The side of memcmp maps the device's memory as a client does.
	rw, err := m.Export(true)
	require.NoError(b, err)
	mem, err := unix.Mmap(int(rw.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, unix.Munmap(mem)) })
	memcmp := func() (found int64) {
		const piece = 256
		var next, sum atomic.Int64
		var wg sync.WaitGroup
		for range runtime.GOMAXPROCS(0) {
			wg.Go(func() {
				for {
					from := int(next.Add(piece)) - piece
					if from >= pages {
						return
					}
					n := int64(0)
					for i := from; i < from+piece; i++ {
						if !bytes.Equal(mem[i*page.Size:(i+1)*page.Size], pristine[i*page.Size:(i+1)*page.Size]) {
							n++
						}
					}
					sum.Add(n)
				}
			})
		}
		wg.Wait()
		return sum.Load()
	}
	require.Equal(b, int64(len(changes)), memcmp()) // maps every page, too

	var scans, compares []time.Duration
	for b.Loop() {
		start := time.Now()
		found, err := d.Modified(ctx, []gpubackend.Scan{{Mem: m, Agreed: agreed}})
		scans = append(scans, time.Since(start))
		require.NoError(b, err)
		require.Len(b, found[0], len(changes))
		start = time.Now()
		n := memcmp()
		compares = append(compares, time.Since(start))
		require.Equal(b, int64(len(changes)), n)
	}
	scan, compare := median(scans), median(compares)
	b.ReportMetric(scan.Seconds()*1e3, "scan-ms")
	b.ReportMetric(compare.Seconds()*1e3, "memcmp-ms")
	b.ReportMetric(scan.Seconds()/compare.Seconds(), "ratio")
	b.Logf("1 GiB, 1 %% modified, %d cores: Modified %v, memcmp %v, ratio %.2f",
		runtime.GOMAXPROCS(0), scan, compare, scan.Seconds()/compare.Seconds())
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}
