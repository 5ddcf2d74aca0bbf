package pagecache

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/internal/page"
)

// BenchmarkHeuristics runs a suitable workload with and without each heuristic, in turns. It reports the ratio of the
// times: below 1 the heuristic is a gain.
func BenchmarkHeuristics(b *testing.B) {
	const size = 128 << 20
	newSource := func(b *testing.B) (*Cache, *source, *openHome) {
		d, err := emulated.New(emulated.Options{Memory: size, CopyEngines: true})
		require.NoError(b, err)
		c, err := New(Options{Devices: []gpubackend.Device{d}, HostMemory: 8 << 20, DeviceReads: DeviceReadsAlways})
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, c.Close(context.Background())) })
		src := &source{id: FileID{1, 1}, home: newHome(size), kernel: &testKernel{}}
		_, err = c.Map(b.Context(), src, MapRequest{Len: size})
		require.NoError(b, err)
		return c, src, &openHome{Home: src.home}
	}
	compare := func(b *testing.B, with, without func() time.Duration) {
		var a, c []time.Duration
		for b.Loop() {
			a, c = append(a, with()), append(c, without())
		}
		slices.Sort(a)
		slices.Sort(c)
		b.ReportMetric(float64(a[len(a)/2])/float64(c[len(c)/2]), "with/without")
		b.ReportMetric(float64(a[len(a)/2].Microseconds()), "with-µs")
	}
	read := func(b *testing.B, f *File, home HomeReader, p []byte, off int, direct bool) {
		_, _, err := f.Read(context.Background(), p, int64(off), direct, home)
		require.NoError(b, err)
	}

	// Small random reads of a file. Little of it fits into the memory for surrounding pages.
	b.Run("debt", func(b *testing.B) {
		run := func(forget bool) func() time.Duration {
			_, src, home := newSource(b)
			f, p, rnd := src.attached, make([]byte, page.Size), rand.New(rand.NewPCG(1, 2))
			return func() time.Duration {
				begin := time.Now()
				for range 2000 {
					if forget {
						f.clean.ForgiveForTesting()
					}
					read(b, f, home, p, rnd.IntN(size>>page.Shift)<<page.Shift, true)
				}
				return time.Since(begin)
			}
		}
		compare(b, run(false), run(true))
	})

	// A program continues to read in order. Other programs began many streams and ended them a second ago.
	b.Run("age", func(b *testing.B) {
		run := func(age time.Duration) func() time.Duration {
			c, src, home := newSource(b)
			c.clean.Age = age
			f, p, rnd := src.attached, make([]byte, 64<<10), rand.New(rand.NewPCG(1, 2))
			return func() time.Duration {
				for range 40 {
					at := rnd.IntN(96) << 20
					for i := range 3 {
						read(b, f, home, p, at+i*len(p), false)
					}
				}
				begin, at := time.Now(), (100+rnd.IntN(20))<<20
				for i := range 100 {
					read(b, f, home, p, at+i*len(p), false)
				}
				return time.Since(begin)
			}
		}
		compare(b, run(0), run(time.Hour))
	})
}
