package fs

import (
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/pagecache"
)

// BenchmarkColdFill fills an emulated device with a file of 512 MiB that is only on the disk: past the page cache, and
// through it. It also reads the disk directly, with 16 concurrent requests of 4 MiB. The three take turns. It reports
// the medians of the ratios within each round, and how many pages came into the page cache. All fills use the memory of
// the first one, so no allocation is timed.
func BenchmarkColdFill(b *testing.B) {
	const size = 512 << 20
	type side struct {
		cache *pagecache.Cache
		m     *pagecache.Mapping
	}
	var sides [2]side
	var path string
	for i := range sides {
		d, err := emulated.New(emulated.Options{Memory: size})
		require.NoError(b, err)
		cache, err := pagecache.New(pagecache.Options{Devices: []gpubackend.Device{d}, BufferedReads: i == 1})
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, cache.Close(context.Background())) })
		n := &notary{socket: "/s"}
		s := mount(b, func(o *Options) { o.Cache, o.Granter = cache, n })
		if i == 0 {
			path = filepath.Join(s.source, "f")
			writeNoise(b, path, size)
		} else {
			require.NoError(b, os.Link(path, filepath.Join(s.source, "f")))
		}
		f, err := os.Open(filepath.Join(s.mnt, "f"))
		require.NoError(b, err)
		require.NoError(b, askGrant(f, make([]byte, GrantSize)))
		m, err := cache.Map(context.Background(), n.last(), pagecache.MapRequest{Len: size, Lazy: true})
		require.NoError(b, err)
		require.NoError(b, f.Close())
		_, err = m.Acquire(context.Background(), 0, size, false)
		require.NoError(b, err)
		sides[i] = side{cache, m}
		b.Cleanup(func() { require.NoError(b, m.Unmap(context.Background())) })
	}
	backing, err := os.Open(path)
	require.NoError(b, err)
	defer backing.Close()
	var ofDisk, ofBuffered []float64
	grown := int64(0)
	for b.Loop() {
		var took [3]time.Duration
		for _, i := range rand.Perm(3) {
			require.NoError(b, unix.Fadvise(int(backing.Fd()), 0, 0, unix.FADV_DONTNEED))
			if i < len(sides) {
				require.NoError(b, sides[i].m.Advise(context.Background(), 0, size, pagecache.AdviceDontNeed))
			}
			start := time.Now()
			if i == len(sides) {
				readRaw(b, path, size)
			} else {
				_, err := sides[i].m.Acquire(context.Background(), 0, size, false)
				require.NoError(b, err)
			}
			took[i] = time.Since(start)
			time.Sleep(100 * time.Millisecond) // what the fill brought there is dropped in the background
			if i == 0 {
				grown += cachedPages(b, backing, 0, size)
			}
		}
		ofDisk = append(ofDisk, took[2].Seconds()/took[0].Seconds())
		ofBuffered = append(ofBuffered, took[1].Seconds()/took[0].Seconds())
	}
	median := func(v []float64) float64 { slices.Sort(v); return v[len(v)/2] }
	b.ReportMetric(median(ofDisk), "x-disk")
	b.ReportMetric(median(ofBuffered), "x-buffered")
	b.ReportMetric(float64(grown)/float64(len(ofDisk)), "pages-cached")
}

func writeNoise(b *testing.B, path string, size int64) {
	b.Helper()
	f, err := os.Create(path)
	require.NoError(b, err)
	defer f.Close()
	rnd := rand.NewChaCha8([32]byte{1})
	p := make([]byte, 4<<20)
	for at := int64(0); at < size; at += int64(len(p)) {
		_, _ = rnd.Read(p)
		_, err := f.WriteAt(p, at)
		require.NoError(b, err)
	}
	require.NoError(b, f.Sync())
}

// readRaw reads a file past the page cache.
func readRaw(b *testing.B, path string, size int64) {
	b.Helper()
	const request, atOnce = 4 << 20, 16
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECT, 0)
	require.NoError(b, err)
	defer unix.Close(fd)
	var next atomic.Int64
	var group sync.WaitGroup
	for range atOnce {
		group.Go(func() {
			p, err := unix.Mmap(-1, 0, request, unix.PROT_READ|unix.PROT_WRITE,
				unix.MAP_ANON|unix.MAP_PRIVATE|unix.MAP_POPULATE)
			if err != nil {
				b.Error(err)
				return
			}
			defer unix.Munmap(p)
			for at := next.Add(request) - request; at < size; at = next.Add(request) - request {
				if _, err := unix.Pread(fd, p, at); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	group.Wait()
}
