package pagecache

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
)

// slowly is the factor by which BenchmarkReadReleased is slower than a machine with a GPU. It makes waiting visible on
// a machine with few processors.
const slowly = 40

// slowHome is written at the speed of a file in host memory: by one core 4.5 GB/s, by four together 12.
type slowHome struct{ *memoryHome }

func (h slowHome) WriteParallel(runs [][]byte, off int64) bool {
	n := 0
	for _, run := range runs {
		_, _ = h.memoryHome.WriteAt(run, off+int64(n))
		n += len(run)
	}
	time.Sleep(time.Duration(slowly * n / 12))
	return true
}

func (h slowHome) WriteAt(p []byte, off int64) (int, error) {
	time.Sleep(time.Duration(slowly * len(p) * 2 / 9))
	return h.memoryHome.WriteAt(p, off)
}

type slowSource struct {
	*source
	home slowHome
}

func (s *slowSource) OpenHome(bool) (Home, error) { return s.home, nil }

// BenchmarkReadReleased reads released bytes as programs do that read 4 MiB at a time through the mount. The kernel
// asks for 1 MiB in requests of 128 KiB before the program gets to it, and copying an answer takes 60 µs. The program
// copies 3 GB/s. The reported rate is converted to a machine at full speed.
func BenchmarkReadReleased(b *testing.B) {
	const (
		size, block, window, request = 256 << 20, 4 << 20, 1 << 20, 128 << 10
	)
	for _, readers := range []int{1, 8} {
		b.Run(fmt.Sprintf("readers-%d", readers), func(b *testing.B) {
			t := &testing.T{}
			m := newMachine(t, 1, memory(2*size), hostMemory(4<<30))
			defer m.cache.Close(context.Background())
			m.cache.landPause *= slowly
			src := &slowSource{source: m.file(size)}
			src.home = slowHome{src.source.home}
			src.reader = &openHome{Home: src.home}
			mp, err := m.cache.Map(context.Background(), src, MapRequest{Len: size, Writable: true})
			require.NoError(b, err)
			p := m.attach(mp, 0, size, true)
			m.devices[0].Slow(faulty.CopyOut, slowly*100*time.Microsecond)
			took, waited := time.Duration(0), atomic.Int64{}
			round := byte(0)
			ask := func(off int64) {
				began := time.Now()
				got := make([]byte, request)
				_, fromHome, err := src.attached.Read(context.Background(), got, off, false, src.reader)
				if err != nil || !fromHome && got[0] != round {
					b.Errorf("byte %d is %d, %v", off, got[0], err)
				}
				waited.Add(int64(time.Since(began)))
				time.Sleep(slowly * 60 * time.Microsecond)
			}
			for b.Loop() {
				round++
				for i := range size / page.Size {
					p.store(i*page.Size, round)
				}
				p.release()
				began := time.Now()
				var next atomic.Int64
				var group sync.WaitGroup
				for range readers {
					group.Go(func() {
						for at := next.Add(block) - block; at < size; at = next.Add(block) - block {
							readWindows(at, at+block, window, request, ask)
						}
					})
				}
				group.Wait()
				took += time.Since(began)
				require.NoError(b, src.attached.Sync(context.Background(), nil))
			}
			b.ReportMetric(float64(b.N)*size*slowly/1e9/took.Seconds(), "GB/s")
			b.ReportMetric(float64(waited.Load())/float64(b.N)/slowly/1e6/float64(readers), "waited-ms/reader")
			flew := m.counter(func(c *Counters) *atomic.Int64 { return &c.FlightReadBytes })
			b.ReportMetric(float64(flew)/float64(b.N)/size, "from-flights")
		})
	}
}

// readWindows stands in for a read(2): while the program copies one window, the kernel asks for the next one.
func readWindows(at, end, window, request int64, ask func(off int64)) {
	begin := func(at int64) *sync.WaitGroup {
		w := new(sync.WaitGroup)
		for off := at; off < at+window && at < end; off += request {
			w.Go(func() { ask(off) })
		}
		return w
	}
	for w := begin(at); at < end; at += window {
		w.Wait()
		w = begin(at + window)
		time.Sleep(time.Duration(slowly * window / 3))
	}
}
