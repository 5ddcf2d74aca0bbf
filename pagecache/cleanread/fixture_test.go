package cleanread

import (
	"bytes"
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/pagecache/mover/schedule"
)

// file is an Executor. One device has all of home's bytes, in one extent.
type file struct {
	*File
	t      testing.TB
	device *faulty.Device
	counters
	reads, asked atomic.Int64 // reads of home, and calls that take the lock

	mu      sync.Mutex
	home    []byte
	tracked []page.Range // pages that programs may be storing into
	pending bool
	nothing bool // nothing is on the device
	extent  *extent
	changes atomic.Uint64
	// pushed are the bytes that the kernel got. pushing is called at the beginning of each push, if it is not nil.
	// Protected by mu.
	pushed  []pushed
	pushing func()
}

type pushed struct {
	off   int64
	bytes []byte
}

type counters struct{ all Counters }

func (c *counters) Count(fn func(c *Counters)) { fn(&c.all) }

// extent is memory that is freed when its last user goes.
type extent struct {
	pages page.Range
	mem   gpubackend.Memory
	users atomic.Int32
}

func (x *extent) Pages() page.Range         { return x.pages }
func (x *extent) Memory() gpubackend.Memory { return x.mem }
func (x *extent) TryHold() bool {
	for {
		n := x.users.Load()
		if n == 0 || x.users.CompareAndSwap(n, n+1) {
			return n > 0
		}
	}
}

func (x *extent) LetGo() {
	if x.users.Add(-1) == 0 {
		_ = x.mem.Free()
	}
}

// newFile makes a file of size bytes that is all on a device. tune may change the options.
func newFile(t testing.TB, size int64, tune func(o *Options)) *file {
	t.Helper()
	memory := (size + 2<<20 - 1) &^ (2<<20 - 1)
	d, err := emulated.New(emulated.Options{Memory: memory, CopyEngines: true})
	require.NoError(t, err)
	f := &file{t: t, device: faulty.Wrap(d), home: make([]byte, size)}
	rnd := rand.NewChaCha8([32]byte{})
	_, _ = rnd.Read(f.home)
	moves := mover.NewDevice(f.device, new(schedule.FCFS), nil, func(error) {})
	o := Options{
		When: Always, Limit: 4 << 20, Charge: func(int64) {}, Fits: func() bool { return true },
		Devices: []*Device{{Moves: moves, Key: d.Key(), Engines: true, Lost: func() bool { return false }}},
	}
	if tune != nil {
		tune(&o)
	}
	c, err := New(o)
	require.NoError(t, err)
	c.WaitForDevicesForTesting() // most tests are not about slow devices, and run on busy machines
	f.File = c.NewFile(1, f)
	mem, err := d.Alloc(memory)
	require.NoError(t, err)
	require.NoError(t, d.CopyIn(t.Context(), []gpubackend.Copy{{Mem: mem, Host: f.home}}))
	f.extent = &extent{pages: page.Range{End: page.Count(memory)}, mem: mem}
	f.extent.users.Store(1)
	t.Cleanup(func() {
		c.Stop()
		moves.Close()
		moves.Wait()
		c.Wait()
		c.Close()
		f.extent.LetGo()
		require.Zero(t, d.Used())
		require.NoError(t, d.Close())
	})
	return f
}

func (f *file) Facts(_ context.Context, rg page.Range) *Facts {
	f.asked.Add(1)
	f.mu.Lock()
	defer f.mu.Unlock()
	haves := f.Haves(rg)
	for i := range haves {
		for _, t := range haves[i].Tracked {
			sums := make([]gpubackend.Digest, t.Len())
			buf := make([]byte, t.Bytes())
			copy(buf, f.home[min(t.Offset(), int64(len(f.home))):])
			f.c.Devices[0].Key.SumPages(buf, sums)
			haves[i].Agreed = append(haves[i].Agreed, sums...)
		}
	}
	return f.File.Facts(rg, int64(len(f.home)), haves)
}

func (f *file) NothingPending(page.Range, bool) bool { return !f.pending }

func (f *file) Haves(rg page.Range) []Have {
	if f.nothing {
		return nil
	}
	return []Have{{
		Device: f.c.Devices[0], Pages: []page.Range{rg}, Tracked: intersect(nil, f.tracked, rg),
		Extents: []Extent{f.extent},
	}}
}

func (f *file) BorrowHome() (func(p []byte, off int64) (int, error), func()) {
	return f.ReadAt, func() {}
}

func (f *file) ReadAt(p []byte, off int64) (int, error) {
	f.reads.Add(1)
	return copy(p, f.home[min(off, int64(len(f.home))):]), nil
}

func (f *file) Push(off int64, p []byte, current func() bool) bool {
	f.mu.Lock()
	hook := f.pushing
	f.mu.Unlock()
	if hook != nil {
		hook()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !current() {
		return false
	}
	f.pushed = append(f.pushed, pushed{off, bytes.Clone(p)})
	return true
}

func (f *file) ReadCached([]byte, int64) (int, error) { return 0, nil }
func (f *file) Cached(int64, int64) bool              { return false }
func (f *file) Look() (uint64, error)                 { return f.changes.Load(), nil }

// read reads as package pagecache does, and compares with home.
func (f *file) read(off, n int64, direct bool) {
	f.t.Helper()
	rg := page.Covering(off, n)
	size, ok := f.File.NothingPending(rg, direct, f)
	if !ok {
		f.publish(rg, direct)
		size = int64(len(f.home))
	}
	p := make([]byte, min(n, size-off))
	m, err := f.Serve(context.Background(), p, off, size, f, direct)
	require.NoError(f.t, err)
	require.Equal(f.t, f.home[off:off+int64(len(p))], p[:m])
}

// publish does what a locked read does that found nothing pending.
func (f *file) publish(rg page.Range, direct bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.Publish(rg, direct, State{Size: int64(len(f.home)), Serves: true, Changes: f.changes.Load()})
}

// write changes home, and not the device.
func (f *file) write(off int64, b []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.Changed(page.Covering(off, int64(len(b))))
	copy(f.home[off:], b)
	f.Changed(page.Covering(off, int64(len(b))))
}

// quiet waits until nothing is on its way.
func (f *file) quiet() {
	f.c.Devices[0].Moves.Wait()
	f.c.Wait()
}
