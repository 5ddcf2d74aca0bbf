package pagecache

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/pagecache/mover"
)

// The benchmarks run on emulated devices, or on the GPUs that GAIAFS_TEST_GPUS names ("cuda:0", "cuda:0,1"). Their
// files are in GAIAFS_BENCH_DIR, or in the directory for temporary files. GAIAFS_BENCH_FILE is the number of bytes that
// fills move, GAIAFS_BENCH_RANGE that of the ranges of other calls.

// diskHome is a backing file as in package fs.
type diskHome struct {
	*memoryHome // everything but reads, writes and the size
	file        *os.File
	direct      *os.File // opened with O_DIRECT; nil if that is not possible
}

func (h *diskHome) ReadAt(p []byte, off int64) (int, error) {
	done := 0
	for done < len(p) {
		n, err := unix.Pread(int(h.file.Fd()), p[done:], off+int64(done))
		if n <= 0 || err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}

func (h *diskHome) ReadCached(p []byte, off int64) (int, error) {
	n, err := unix.Preadv2(int(h.file.Fd()), [][]byte{p}, off, unix.RWF_NOWAIT)
	if err == unix.EAGAIN || err == unix.EOPNOTSUPP {
		return 0, nil
	}
	return n, err
}

func (h *diskHome) WillNeed(off, n int64) {
	for end := off + n; off < end; off += 128 << 10 {
		_ = unix.Fadvise(int(h.file.Fd()), off, 128<<10, unix.FADV_WILLNEED)
	}
}

func (h *diskHome) Drop(off, n int64) { _ = unix.Fadvise(int(h.file.Fd()), off, n, unix.FADV_DONTNEED) }

func (h *diskHome) Cached(off, n int64) (int64, error) {
	if h.direct == nil {
		return 0, &NoDirect{Reason: "no O_DIRECT"}
	}
	var found unix.Cachestat_t
	if err := unix.Cachestat(uint(h.file.Fd()), &unix.CachestatRange{Off: uint64(off), Len: uint64(n)}, &found,
		0); err != nil {
		return 0, &NoDirect{Reason: err.Error()}
	}
	return int64(found.Cache) << page.Shift, nil
}

func (h *diskHome) ReadDirect(p []byte, off int64) (int, error) {
	done := 0
	for done < len(p) {
		n, err := unix.Pread(int(h.direct.Fd()), p[done:], off+int64(done))
		if n <= 0 || err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}

func (h *diskHome) WriteAt(p []byte, off int64) (int, error) { return h.file.WriteAt(p, off) }

func (h *diskHome) Signature() (Signature, error) {
	st, err := h.file.Stat()
	if err != nil {
		return Signature{}, err
	}
	return Signature{Size: st.Size()}, nil
}

type diskSource struct {
	*source
	home *diskHome
}

func (s *diskSource) OpenHome(bool) (Home, error) { return s.home, nil }

var _ DirectReader = (*diskHome)(nil)

// rig is the environment of a benchmark.
type rig struct {
	*testing.B
	cache *Cache
	gpu   bool
	ctx   context.Context
}

func newRig(b *testing.B, devices int) *rig {
	b.Helper()
	r := &rig{B: b, ctx: context.Background()}
	key, err := gpubackend.NewDigestKey(rand.Reader)
	require.NoError(b, err)
	o := Options{WriteBackInterval: time.Hour, HostMemory: 4 << 30}
	testdevice.Require(b)
	if n := testdevice.Count(devices); n < devices {
		b.Skipf("%d devices are needed, and there are %d GPUs", devices, n)
	}
	for i := range devices {
		// Memory of 0 stands for most of a GPU's memory, but an emulated device would have none.
		d, err := testdevice.Open(emulated.Options{Ordinal: i, Key: key})
		if err != nil {
			d, err = testdevice.Open(emulated.Options{Ordinal: i, Memory: 64 << 30, Key: key})
		}
		require.NoError(b, err)
		r.gpu = d.Info().Kind == gpubackend.KindCUDA
		o.Devices = append(o.Devices, d)
	}
	r.cache, err = New(o)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, r.cache.Close(r.ctx)) })
	return r
}

// size returns the bytes in an environment variable, or the default for the kind of device.
func (r *rig) size(name string, gpu, emulated int64) int64 {
	if text := os.Getenv(name); text != "" {
		n, err := strconv.ParseInt(text, 10, 64)
		require.NoError(r, err, name)
		return n &^ (page.Size - 1)
	}
	if r.gpu {
		return gpu
	}
	return emulated
}

func (r *rig) fileBytes() int64  { return r.size("GAIAFS_BENCH_FILE", 10<<30, 256<<20) }
func (r *rig) rangeBytes() int64 { return r.size("GAIAFS_BENCH_RANGE", 1<<30, 128<<20) }

// file makes a file of n bytes, with all of it in the host's page cache.
func (r *rig) file(n int64) *diskSource {
	dir := os.Getenv("GAIAFS_BENCH_DIR")
	if dir == "" {
		dir = r.TempDir()
	}
	path := filepath.Join(dir, "gaiafs-bench")
	f, err := os.Create(path)
	require.NoError(r, err)
	direct, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		direct = nil
	}
	r.Cleanup(func() {
		require.NoError(r, r.cache.Close(r.ctx)) // released bytes go home before the file is closed
		_ = f.Close()
		_ = direct.Close() // an error if it is nil
		_ = os.Remove(path)
	})
	block := make([]byte, 8<<20)
	_, _ = rand.Read(block)
	for off := int64(0); off < n; off += int64(len(block)) {
		copy(block, strconv.FormatInt(off, 10))
		_, err := f.WriteAt(block[:min(int64(len(block)), n-off)], off)
		require.NoError(r, err)
	}
	return &diskSource{&source{id: FileID{1, 1}, kernel: &testKernel{}}, &diskHome{newHome(0), f, direct}}
}

// evict drops the file from the host's page cache.
func (s *diskSource) evict(b *testing.B) {
	require.NoError(b, s.home.file.Sync())
	require.NoError(b, unix.Fadvise(int(s.home.file.Fd()), 0, 0, unix.FADV_DONTNEED))
}

func (r *rig) mapAll(s Source, device int, n int64, writable bool) *Mapping {
	m, err := r.cache.Map(r.ctx, s, MapRequest{Device: device, Len: n, Writable: writable})
	require.NoError(r, err)
	return m
}

// store changes a word in each of pages on the device, as a program does. Each device has its own word.
func (r *rig) store(m *Mapping, pages []page.Index, value uint64) {
	var copies []gpubackend.Copy
	word := binary.LittleEndian.AppendUint64(nil, value)
	for _, p := range pages {
		x, off := m.h.at(p)
		copies = append(copies, gpubackend.Copy{Mem: x.Memory(), Off: off + 104 + 8*int64(m.dev.info.Ordinal),
			Host: word})
	}
	require.NoError(r, m.dev.moves.In(r.ctx, mover.Acquire, copies))
}

// verify compares pages of the mapping with home: the given ones, or a thousand.
func (r *rig) verify(m *Mapping, s *diskSource, pages []page.Index) {
	r.Helper()
	if pages == nil {
		pages = scattered(m.len, max(page.Count(m.len)/1000, 1))
	}
	got, want := make([]byte, len(pages)*page.Size), make([]byte, page.Size)
	var copies []gpubackend.Copy
	for i, p := range pages {
		x, off := m.h.at(p)
		copies = append(copies, gpubackend.Copy{Mem: x.Memory(), Off: off, Host: got[i*page.Size : (i+1)*page.Size]})
	}
	require.NoError(r, m.dev.moves.Out(r.ctx, mover.CPURead, copies))
	for i, p := range pages {
		_, err := s.home.ReadAt(want, p.Offset())
		require.NoError(r, err)
		require.True(r, bytes.Equal(want, got[i*page.Size:(i+1)*page.Size]), "page %d differs from home", p)
	}
}

// cpuTime returns the processor time of the process.
func cpuTime(b *testing.B) time.Duration {
	var u unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// timed runs do. It reports the medians of the time and of the processor time, and the rate of n bytes in the former.
func (r *rig) timed(n int64, before, do, after func()) {
	var times, cpu []time.Duration
	for r.Loop() {
		r.StopTimer()
		if before != nil {
			before()
		}
		r.StartTimer()
		start, used := time.Now(), cpuTime(r.B)
		do()
		times = append(times, time.Since(start))
		cpu = append(cpu, cpuTime(r.B)-used)
		r.StopTimer()
		if after != nil {
			after()
		}
		r.StartTimer()
	}
	slices.Sort(times)
	slices.Sort(cpu)
	median := times[len(times)/2]
	r.ReportMetric(cpu[len(cpu)/2].Seconds()*1e3, "cpu-ms")
	r.ReportMetric(median.Seconds()*1e3, "median-ms")
	r.ReportMetric((times[len(times)-1]-times[0]).Seconds()*1e3, "spread-ms")
	if n > 0 {
		r.ReportMetric(float64(n)/1e9/median.Seconds(), "GB/s")
	}
}

// BenchmarkFill maps a whole file that no device has: from the host's page cache, for reading and for writing, and from
// the disk. "program" does the same as a program would on its own, with as many readers, page-locked buffers and no
// gaiafs. "raw" reads the disk past the host's page cache.
func BenchmarkFill(b *testing.B) {
	for _, x := range []struct {
		name           string
		writable, cold bool
	}{{"warm", false, false}, {"warm-writable", true, false}, {"cold", false, true}} {
		b.Run(x.name, func(b *testing.B) {
			r := newRig(b, 1)
			n := r.fileBytes()
			s := r.file(n)
			var m *Mapping
			r.timed(n, func() {
				if x.cold {
					s.evict(b)
				}
			}, func() { m = r.mapAll(s, 0, n, x.writable) }, func() {
				r.verify(m, s, nil)
				require.NoError(b, m.Unmap(r.ctx))
				r.cache.Forget(s.id)
			})
		})
	}
	b.Run("program", func(b *testing.B) {
		r := newRig(b, 1)
		n := r.fileBytes()
		s := r.file(n)
		dev := r.cache.devices[0].deviceMemory.(gpubackend.Device)
		size := max(dev.Info().Granularity, n/8&^(dev.Info().Granularity-1))
		var mems []gpubackend.Memory
		for range (n + size - 1) / size {
			mem, err := dev.Alloc(size)
			require.NoError(b, err)
			defer func() { require.NoError(b, mem.Free()) }()
			mems = append(mems, mem)
		}
		const part = 4 << 20
		r.timed(n, nil, func() {
			var next atomic.Int64
			var group sync.WaitGroup
			for range mover.Readers() {
				group.Go(func() {
					buf, release, err := dev.HostBuffer(part)
					if err != nil {
						b.Error(err)
						return
					}
					defer release()
					for {
						off := next.Add(part) - part
						if off >= n {
							return
						}
						k, err := s.home.ReadAt(buf[:min(part, n-off, size-off%size)], off)
						if err == nil {
							err = dev.CopyIn(r.ctx, []gpubackend.Copy{{Mem: mems[off/size], Off: off % size,
								Host: buf[:k]}})
						}
						if err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			group.Wait()
		}, nil)
	})
	b.Run("raw", func(b *testing.B) {
		r := newRig(b, 1)
		n := r.fileBytes()
		s := r.file(n)
		direct, err := os.OpenFile(s.home.file.Name(), os.O_RDONLY|unix.O_DIRECT, 0)
		if err != nil {
			b.Skipf("no O_DIRECT here: %v", err)
		}
		defer func() { require.NoError(b, direct.Close()) }()
		const part = 4 << 20
		r.timed(n, func() { s.evict(b) }, func() {
			var next atomic.Int64
			var group sync.WaitGroup
			for range 8 {
				group.Go(func() {
					space := make([]byte, part+page.Size)
					skip := -int(uintptr(unsafe.Pointer(&space[0]))) & (page.Size - 1) // O_DIRECT needs aligned memory
					buf := space[skip:][:part]
					for {
						off := next.Add(part) - part
						if off >= n {
							return
						}
						if _, err := unix.Pread(int(direct.Fd()), buf, off); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			group.Wait()
		}, nil)
	})
}

// BenchmarkSecondMap maps all of a file that is already on the device, as a second process does.
func BenchmarkSecondMap(b *testing.B) {
	r := newRig(b, 1)
	n := r.fileBytes()
	s := r.file(n)
	first := r.mapAll(s, 0, n, true)
	var second *Mapping
	r.timed(0, nil, func() { second = r.mapAll(s, 0, n, true) }, func() {
		r.cache.Lookup(s.id).mu.Lock()
		delete(r.cache.Lookup(s.id).mappings, second) // Unmap would release
		second.pin.Free()
		r.cache.Lookup(s.id).mu.Unlock()
	})
	r.ReportMetric(float64(len(first.Extents())), "extents")
}

// scattered returns every hundredth page of n bytes.
func scattered(n int64, every page.Index) (pages []page.Index) {
	for p := page.Index(0); p < page.Count(n); p += every {
		pages = append(pages, p)
	}
	return pages
}

// BenchmarkAcquire acquires a range in which the CPU changed nothing, or 1 % of the pages: scattered pages with a byte
// each, or a contiguous part at the start. "fragmented" is a range whose pages were brought up to date one by one, in
// scattered places.
func BenchmarkAcquire(b *testing.B) {
	for _, x := range []struct {
		name       string
		writable   bool
		every      page.Index // of the pages changed, 0 for none
		fragmented bool
	}{
		{"unchanged", true, 0, false}, {"unchanged-fragmented", true, 0, true},
		{"scattered-1%-read", false, 100, false}, {"contiguous-1%-read", false, 1, false},
		{"contiguous-1%-read-fragmented", false, 1, true},
		{"scattered-1%-written", true, 100, false}, {"contiguous-1%-written", true, 1, false},
		{"contiguous-1%-written-fragmented", true, 1, true},
	} {
		b.Run(x.name, func(b *testing.B) {
			r := newRig(b, 1)
			n := r.rangeBytes()
			s := r.file(n)
			m := r.mapAll(s, 0, n, x.writable)
			f := r.cache.Lookup(s.id)
			round := byte(0)
			write := func(pages []page.Index, size int64) {
				round++
				p := bytes.Repeat([]byte{round}, int(size))
				for _, at := range pages {
					require.NoError(b, f.ChangeHome(context.Background(), Change{Off: at.Offset(), Len: size},
						func(off, _ int64) error {
							_, err := s.home.WriteAt(p, off)
							return err
						}))
				}
			}
			acquire := func(want int) {
				got, err := m.Acquire(r.ctx, 0, n, false)
				require.NoError(b, err)
				require.EqualValues(b, want, got)
			}
			if x.fragmented {
				write(scattered(n, 100), 1)
				acquire(len(scattered(n, 100)))
			}
			var pages []page.Index
			size := int64(1)
			if x.every > 0 {
				pages = scattered(n, 100)
			}
			if x.every == 1 {
				pages, size = scattered(int64(len(pages))*page.Size, 1), page.Size
			}
			r.timed(0, func() { write(pages, size) }, func() { acquire(len(pages)) }, func() { r.verify(m, s, pages) })
		})
	}
}

// BenchmarkRelease releases a range in which a program modified scattered pages.
func BenchmarkRelease(b *testing.B) { benchmarkRelease(b, false) }

// BenchmarkCollect brings home what such a release published.
func BenchmarkCollect(b *testing.B) { benchmarkRelease(b, true) }

func benchmarkRelease(b *testing.B, collect bool) {
	for percent, every := range map[int]page.Index{0: 0, 1: 100, 50: 2, 100: 1} {
		if collect && percent == 0 {
			continue
		}
		b.Run(fmt.Sprintf("%d%%", percent), func(b *testing.B) {
			r := newRig(b, 1)
			n := r.rangeBytes()
			s := r.file(n)
			m := r.mapAll(s, 0, n, true)
			f := r.cache.Lookup(s.id)
			var pages []page.Index
			if every > 0 {
				pages = scattered(n, every)
			}
			round := uint64(0)
			store := func() {
				round++
				r.store(m, pages, round)
			}
			release := func() {
				got, err := m.Release(r.ctx, 0, n)
				require.NoError(b, err)
				require.EqualValues(b, len(pages), got)
			}
			home := func() { require.NoError(b, f.collectAll(r.ctx, nil)) }
			defer func() {
				home()
				r.verify(m, s, pages)
			}()
			if collect {
				r.timed(int64(len(pages))*page.Size, func() { store(); release() }, home, nil)
			} else {
				r.timed(0, store, release, home)
			}
		})
	}
}

// BenchmarkMerge brings home what two devices stored into each page of a range: the full cost of false sharing after
// the stores have ended.
func BenchmarkMerge(b *testing.B) {
	for _, x := range []struct {
		name string
		tile page.Index // pages that one device stores into before the other gets its turn; 0: both store into all
	}{{"same-pages", 0}, {"tiles", 24}} {
		b.Run(x.name, func(b *testing.B) {
			r := newRig(b, 2)
			n := r.rangeBytes()
			s := r.file(n)
			both := []*Mapping{r.mapAll(s, 0, n, true), r.mapAll(s, 1, n, true)}
			f := r.cache.Lookup(s.id)
			all := scattered(n, 1)
			mine := [][]page.Index{all, all}
			if x.tile > 0 {
				mine = make([][]page.Index, 2)
				for _, p := range all {
					k := p / x.tile % 2
					mine[k] = append(mine[k], p)
				}
			}
			round := uint64(0)
			r.timed(n, func() {
				round++
				for i, m := range both {
					r.store(m, mine[i], round)
				}
				for i, m := range both {
					got, err := m.Release(r.ctx, 0, n)
					require.NoError(b, err)
					require.EqualValues(b, len(mine[i]), got)
				}
			}, func() { require.NoError(b, f.collectAll(r.ctx, nil)) }, func() {
				for _, m := range both {
					_, err := m.Acquire(r.ctx, 0, n, false)
					require.NoError(b, err)
					r.verify(m, s, all)
				}
			})
		})
	}
}

// BenchmarkPeer maps a file on a second device while the first one has it.
func BenchmarkPeer(b *testing.B) {
	for name, writable := range map[string]bool{"source-read": false, "source-written": true} {
		b.Run(name, func(b *testing.B) {
			r := newRig(b, 2)
			n := r.rangeBytes()
			s := r.file(n)
			r.mapAll(s, 0, n, writable)
			f := r.cache.Lookup(s.id)
			var m *Mapping
			r.timed(n, nil, func() { m = r.mapAll(s, 1, n, false) }, func() {
				r.verify(m, s, nil)
				require.NoError(b, m.Unmap(r.ctx))
				f.mu.Lock()
				for _, x := range m.h.sorted() {
					f.loseExtentLocked(x)
				}
				f.mu.Unlock()
			})
			r.ReportMetric(float64(f.counters.PeerCopyPages.Load()*page.Size)/float64(n), "files-by-peer-copies")
		})
	}
}

// BenchmarkLazy reads a lazy mapping of a file on disk as a program that acquires 256 KiB before it uses them: from
// start to end, backward, or by four programs in turns. The program works 20 µs on 256 KiB.
func BenchmarkLazy(b *testing.B) {
	const step = 256 << 10
	orders := []struct {
		name string
		at   func(k, steps int64) int64
	}{
		{"forward", func(k, _ int64) int64 { return k }},
		{"backward", func(k, steps int64) int64 { return steps - 1 - k }},
		{"four", func(k, steps int64) int64 { return k%4*(steps/4) + k/4 }},
	}
	for _, order := range orders {
		b.Run(order.name, func(b *testing.B) {
			r := newRig(b, 1)
			n := r.rangeBytes() &^ (4*step - 1)
			s := r.file(n)
			var m *Mapping
			r.timed(n, func() {
				var err error
				m, err = r.cache.Map(r.ctx, s, MapRequest{Len: n, Lazy: true})
				require.NoError(b, err)
				s.evict(b)
			}, func() {
				for k := range n / step {
					_, err := m.Acquire(r.ctx, order.at(k, n/step)*step, step, false)
					require.NoError(b, err)
					for end := time.Now().Add(20 * time.Microsecond); time.Now().Before(end); {
					}
				}
			}, func() {
				r.verify(m, s, nil)
				require.NoError(b, m.Advise(r.ctx, 0, n, AdviceDontNeed))
				require.NoError(b, m.Unmap(r.ctx))
			})
		})
	}
}
