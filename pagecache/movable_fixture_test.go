package pagecache

import (
	"context"
	"crypto/rand"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/internal/testdevice"
)

// brick is the size of extents in these tests, in bytes, brickPages in pages.
const (
	brick      = 64 << 10
	brickPages = brick / page.Size
)

// newMovingMachine makes a machine whose devices have room for so many extents each, and for so many in pinned memory.
// The clients are this process and map the descriptors they get, which only emulated devices allow.
func newMovingMachine(t *testing.T, devices, extents, pinned int, change ...func(*emulated.Options)) *machine {
	t.Helper()
	testdevice.Emulated(t, "clients map memory in this process")
	key, err := gpubackend.NewDigestKey(rand.Reader)
	require.NoError(t, err)
	m := &machine{t: t}
	o := Options{WriteBackInterval: time.Hour, pinTick: time.Hour, PinnedMemory: int64(pinned) * brick}
	for i := range devices {
		of := emulated.Options{
			Ordinal: i, Memory: int64(extents) * brick, Granularity: brick, Poison: true, CopyEngines: true, Key: key,
		}
		for _, f := range change {
			f(&of)
		}
		d, err := emulated.New(of)
		require.NoError(t, err)
		m.devices = append(m.devices, faulty.Wrap(d))
		o.Devices = append(o.Devices, m.devices[i])
	}
	m.cache, err = New(o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.cache.Close(context.Background())) })
	return m
}

// traveller is a client whose memory moves.
type traveller struct {
	*Mapping
	t    *testing.T
	m    *machine
	host []byte

	moves   chan travel
	stopped sync.Mutex // held while the client is stopped
	refuses atomic.Int64
	silent  atomic.Bool // Attends returns false
	clings  atomic.Bool // a fault: it keeps its first memory, and answers that it moved
	// before, if not nil, is called with each Move before the client follows it. An error is the client's answer.
	// gaveBack, if not nil, is called by the taker of memory that the client gave back.
	before   func(m Move) error
	gaveBack func()
	mu       sync.Mutex
	has      map[int64]uint64 // generations by offset; protected by mu
	moved    int              // protected by mu
	ended    sync.Once
	thread   sync.WaitGroup
}

type travel struct {
	Move
	answer chan error
}

// travel maps a whole file on a device with memory that moves.
func (m *machine) travel(src *source, device int, writable bool) *traveller {
	m.t.Helper()
	return m.travelAs(src, device, MapRequest{Writable: writable, Len: int64(len(src.home.data))})
}

func (m *machine) travelAs(src *source, device int, req MapRequest) *traveller {
	m.t.Helper()
	c := &traveller{t: m.t, m: m, moves: make(chan travel, 1000), has: make(map[int64]uint64)}
	req.Device, req.Client = device, c
	length := page.Covering(req.Off, req.Len).Bytes()
	base, err := unix.MmapPtr(-1, 0, nil, uintptr(length), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(m.t, err)
	c.host = bytesAt(base, int(length))
	c.thread.Go(c.serve)
	c.Mapping, err = m.cache.Map(context.Background(), src, req)
	require.NoError(m.t, err)
	m.t.Cleanup(func() {
		c.end()
		_ = unix.MunmapPtr(base, uintptr(length))
	})
	return c
}

// end unmaps, like the end of a client.
func (c *traveller) end() {
	c.ended.Do(func() {
		c.mu.Lock()
		c.has = nil
		c.hole(0, int64(len(c.host)))
		c.mu.Unlock()
		require.NoError(c.t, c.Unmap(context.Background()))
		close(c.moves)
		c.thread.Wait()
	})
}

// hole unmaps the memory at a range of addresses.
func (c *traveller) hole(off, n int64) {
	_, err := unix.MmapPtr(-1, 0, unsafe.Pointer(&c.host[off]), uintptr(n), unix.PROT_NONE,
		unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_FIXED)
	if err != nil {
		panic(err)
	}
}

func (c *traveller) Attends() bool { return !c.silent.Load() }

func (c *traveller) Move(m Move) (func(ctx context.Context) error, error) {
	answer := make(chan error, 1)
	c.moves <- travel{m, answer}
	return func(ctx context.Context) error {
		select {
		case err := <-answer:
			answer <- err
			if m.Tier == TierNone && c.gaveBack != nil {
				c.gaveBack()
			}
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}, nil
}

// serve is the client's service thread.
func (c *traveller) serve() {
	for m := range c.moves {
		if c.before != nil {
			if err := c.before(m.Move); err != nil {
				m.answer <- err
				continue
			}
		}
		c.stopped.Lock()
		m.answer <- c.follow(m.Move)
		c.stopped.Unlock()
	}
}

func (c *traveller) follow(m Move) error {
	if m.Descriptor != nil {
		defer m.Descriptor.Close()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.has == nil {
		return syscall.ENOENT
	}
	if _, has := c.has[m.Offset]; has && c.clings.Load() {
		return nil
	}
	begin := c.Mapping.off
	lo, hi := max(m.Offset, begin), min(m.Offset+m.Size, begin+int64(len(c.host)))
	c.hole(lo-begin, hi-lo)
	delete(c.has, m.Offset)
	if m.Tier == TierNone {
		return nil
	}
	if c.refuses.Add(-1) >= 0 {
		return syscall.ENOMEM
	}
	prot := unix.PROT_READ
	if c.writable {
		prot |= unix.PROT_WRITE
	}
	_, err := unix.MmapPtr(int(m.Descriptor.Fd()), lo-m.Offset, unsafe.Pointer(&c.host[lo-begin]), uintptr(hi-lo), prot,
		unix.MAP_SHARED|unix.MAP_FIXED)
	c.has[m.Offset] = m.Generation
	c.moved++
	return err
}

// mapped returns the number of extents at the client's addresses.
func (c *traveller) mapped() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.has)
}

// try begins a bracket over extents [from, to) of the mapping, without waiting for others.
func (c *traveller) try(from, to int) (*Bracket, error) {
	return c.m.cache.Use(context.Background(), []Use{c.over(from, to)},
		UseOptions{Nested: true})
}

func (c *traveller) over(from, to int) Use {
	return Use{c.Mapping, int64(from) * brick, min(int64(to)*brick, c.len) - int64(from)*brick}
}

// use begins a bracket and waits for it.
func (c *traveller) use(from, to int) *Bracket {
	c.t.Helper()
	b, err := c.m.cache.Use(context.Background(), []Use{c.over(from, to)}, UseOptions{Patience: time.Minute})
	require.NoError(c.t, err)
	return b
}

// stores stores a byte, in a bracket of its own.
func (c *traveller) stores(at int, b byte) {
	c.t.Helper()
	u := c.use(at/brick, at/brick+1)
	c.host[at] = b
	u.Done()
}

// loads returns a byte, in a bracket of its own.
func (c *traveller) loads(at int) byte {
	c.t.Helper()
	u := c.use(at/brick, at/brick+1)
	defer u.Done()
	return c.host[at]
}

func (c *traveller) releases() int64 {
	c.t.Helper()
	n, err := c.Release(context.Background(), 0, c.len)
	require.NoError(c.t, err)
	return n
}

// tiers returns the number of the holding's extents in each tier.
func (c *traveller) tiers() (device, host int) {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	for _, x := range c.h.extents {
		switch x.Placement().Tier {
		case TierDevice:
			device++
		case TierHost:
			host++
		}
	}
	return device, host
}

// crowd uses every extent of another file, one after another, so that idle extents have to go.
func (m *machine) crowd(device, extents int) {
	m.t.Helper()
	c := m.travel(m.noisyFile(extents*brick), device, false)
	for i := range extents {
		c.use(i, i+1).Done()
	}
	c.end()
}
