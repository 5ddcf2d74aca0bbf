package cleanread

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
)

// slowHome takes its time for each read, and serves some reads at once.
type slowHome struct {
	*file
	takes  time.Duration
	atOnce chan struct{}
}

func (h slowHome) ReadAt(p []byte, off int64) (int, error) {
	h.atOnce <- struct{}{}
	time.Sleep(h.takes)
	<-h.atOnce
	return h.file.ReadAt(p, off)
}

// random makes jobs read so many random pieces of n bytes, past the kernel's page cache, and returns the time.
func (f *file) random(jobs, reads int, n int64, home Home) time.Duration {
	began := time.Now()
	var all sync.WaitGroup
	for j := range jobs {
		all.Go(func() {
			rnd, p := rand.New(rand.NewPCG(uint64(j), 5)), make([]byte, n)
			for range reads / jobs {
				at := rnd.Int64N(int64(len(f.home))-n) &^ (page.Size - 1)
				if _, err := f.Serve(context.Background(), p, at, int64(len(f.home)), home, true); err != nil {
					f.t.Error(err)
				}
			}
		})
	}
	all.Wait()
	return time.Since(began)
}

// TestSlowerDeviceIsLeftAlone: if a device is slower than home, reads go to home, except for trials.
func TestSlowerDeviceIsLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFile(t, 16<<20, func(o *Options) { o.When = Auto })
		f.device.Slow(faulty.CopyOut, 50*time.Millisecond)
		home := slowHome{f, time.Millisecond, make(chan struct{}, 4)}
		f.random(1, 100, 64<<10, home)
		before := f.all.DeviceReads.Load()
		f.random(1, 200, 64<<10, home)
		require.Less(t, f.all.DeviceReads.Load()-before, int64(50), "of 200")
	})
}

// BenchmarkChoice reads at random from a file that home and a device both have. It reports the time relative to the
// better one of the two alone: below 1 the choice gains.
func BenchmarkChoice(b *testing.B) {
	const size, reads, n, disk = 32 << 20, 400, 64 << 10, 2 * time.Millisecond
	for _, c := range []struct {
		name   string
		jobs   int
		device time.Duration
	}{
		{"1 job, the device is slower", 1, 4 * time.Millisecond},
		{"1 job, the device is faster", 1, time.Millisecond},
		{"16 jobs", 16, 2 * time.Millisecond},
	} {
		b.Run(c.name, func(b *testing.B) {
			run := func(when When) time.Duration {
				f := newFile(b, size, func(o *Options) { o.When = when })
				f.device.Slow(faulty.CopyOut, c.device)
				home := slowHome{f, disk, make(chan struct{}, 4)}
				f.random(c.jobs, reads/4, n, home)
				return f.random(c.jobs, reads, n, home)
			}
			var took, alone time.Duration
			for b.Loop() {
				took += run(Auto)
				home := slowHome{nil, disk, make(chan struct{}, 4)}
				alone += min(run(Always), homeAlone(b, home, c.jobs, reads))
			}
			b.ReportMetric(float64(took)/float64(alone), "of-better")
		})
	}
}

// homeAlone is random with no pages on any device.
func homeAlone(b *testing.B, home slowHome, jobs, reads int) time.Duration {
	f := newFile(b, 32<<20, nil)
	home.file = f
	f.nothing = true
	return f.random(jobs, reads, 64<<10, home)
}
