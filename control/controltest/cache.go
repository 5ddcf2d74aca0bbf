package controltest

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

// ExtentSize is the default of Cache.Extent.
const ExtentSize = 2 << 20

// maxMapping bounds the length of a mapping.
const maxMapping = 64 << 20

// Cache is a small page cache. Its exported fields are set before the first use.
type Cache struct {
	// Devices is the number of devices, 0 to Devices-1.
	Devices int
	// Kind is the kind of their memory; 0 means 1, emulated.
	Kind uint8
	// UUIDs has the devices' UUIDs, if they have any.
	UUIDs []gpubackend.UUID
	// Extent is the size of extents; 0 means ExtentSize.
	Extent int64
	// Gate, if not nil, is called by a mapping's Acquire and a view's Fill, and may block until its context ends.
	Gate func(ctx context.Context) error
	// MapGate is the same for Map.
	MapGate func(ctx context.Context) error
	// Advised, if not nil, receives every advice.
	Advised func(off, n int64, a pagecache.Advice)
	// PastEnd is what the next TakePastEnd of a mapping returns.
	PastEnd atomic.Int64
	// Abandoned counts the mappings that were abandoned.
	Abandoned atomic.Int64
	// DoneGate, if not nil, is called at the end of each bracket, and may block.
	DoneGate func()
	// UnmapGate, if not nil, is called when an Unmap begins, and may block.
	UnmapGate func()
	// MapError, if not nil, is the error of Map.
	MapError error

	version atomic.Uint64 // of the last group

	mu      sync.Mutex
	copies  map[copyKey]*replica // guarded by mu
	mapped  int                  // live mappings; guarded by mu
	unmaps  int                  // mappings that ended; guarded by mu
	changed chan struct{}        // closed when mapped changes; guarded by mu
}

type copyKey struct {
	id     pagecache.FileID
	device int
}

// replica is what a device holds of a file.
type replica struct {
	mu      sync.Mutex
	home    pagecache.Home
	extents map[int64]*extent // by number
}

type extent struct {
	memfd, readOnly *os.File
	mem, base       []byte
}

// Map makes a mapping and fetches its pages.
func (c *Cache) Map(ctx context.Context, src pagecache.Source, req pagecache.MapRequest) (control.Mapping, error) {
	if c.MapError != nil {
		return nil, c.MapError
	}
	if c.MapGate != nil {
		if err := c.MapGate(ctx); err != nil {
			return nil, err
		}
	}
	if (req.UUID != gpubackend.UUID{}) {
		req.Device = slices.Index(c.UUIDs, req.UUID)
	}
	if req.Device < 0 || req.Device >= c.Devices {
		return nil, fmt.Errorf("there is no device %d: %w", req.Device, syscall.ENODEV)
	}
	if req.Len > maxMapping {
		return nil, fmt.Errorf("%d bytes are more than a mapping may have: %w", req.Len, syscall.ENOMEM)
	}
	c.mu.Lock()
	key := copyKey{src.ID(), req.Device}
	r := c.copies[key]
	if r == nil {
		h, err := src.OpenHome(src.Writable())
		if err != nil {
			c.mu.Unlock()
			return nil, err
		}
		r = &replica{home: h, extents: make(map[int64]*extent)}
		if c.copies == nil {
			c.copies = make(map[copyKey]*replica)
		}
		c.copies[key] = r
	}
	c.countLocked(1)
	c.mu.Unlock()
	m := &Mapping{cache: c, replica: r, req: req}
	if err := m.populate(src); err != nil {
		m.ended()
		return nil, err
	}
	return m, nil
}

// Use begins a bracket that does nothing.
func (c *Cache) Use(context.Context, []control.Use, pagecache.UseOptions) (control.Bracket, error) {
	return bracket{c}, nil
}

type bracket struct{ cache *Cache }

func (b bracket) Done() {
	if b.cache.DoneGate != nil {
		b.cache.DoneGate()
	}
}

func (bracket) Kept() bool { return false }

func (bracket) Used(uint32) {}

func (c *Cache) kind() uint8 { return max(c.Kind, 1) }

// Kinds has the bit of the cache's one kind.
func (c *Cache) Kinds() uint32 { return 1 << (c.kind() - 1) }

func (c *Cache) countLocked(d int) {
	c.mapped += d
	if d < 0 {
		c.unmaps++
	}
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}

// Mapped returns the numbers of live and of ended mappings.
func (c *Cache) Mapped() (live, ended int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mapped, c.unmaps
}

// WaitMapped waits until n mappings are live.
func (c *Cache) WaitMapped(ctx context.Context, n int) error {
	for {
		c.mu.Lock()
		got := c.mapped
		if c.changed == nil {
			c.changed = make(chan struct{})
		}
		changed := c.changed
		c.mu.Unlock()
		if got == n {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%d mappings live, not %d: %w", got, n, ctx.Err())
		}
	}
}

// Close frees all memory. No mapping may be live.
func (c *Cache) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.copies {
		for _, e := range r.extents {
			e.free()
		}
		r.home.Close()
	}
	c.copies = nil
	return nil
}

// Mapping is a client's window. It implements control.Mapping.
type Mapping struct {
	cache   *Cache
	replica *replica
	req     pagecache.MapRequest
	list    []pagecache.Extent
}

func (m *Mapping) populate(src pagecache.Source) error {
	size := m.cache.Extent
	if size == 0 {
		size = ExtentSize
	}
	r := m.replica
	r.mu.Lock()
	defer r.mu.Unlock()
	if m.req.Writable && !r.home.Writable() {
		h, err := src.OpenHome(true)
		if err != nil {
			return err
		}
		r.home.Close()
		r.home = h
	}
	for k := m.req.Off / size; k*size < m.req.Off+m.req.Len; k++ {
		e := r.extents[k]
		if e == nil {
			var err error
			if e, err = newExtent(size); err != nil {
				return err
			}
			r.extents[k] = e
		}
		f := e.readOnly
		if m.req.Writable {
			f = e.memfd
		}
		m.list = append(m.list, pagecache.Extent{Offset: k * size, Size: size, Descriptor: f})
	}
	if m.req.Lazy {
		return nil
	}
	_, err := r.refresh(m.req.Off, m.req.Len, size)
	return err
}

func newExtent(size int64) (*extent, error) {
	fd, err := unix.MemfdCreate("controltest", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	e := &extent{memfd: os.NewFile(uintptr(fd), "memfd"), base: make([]byte, size)}
	if err := e.memfd.Truncate(size); err != nil {
		return nil, err
	}
	if e.readOnly, err = os.OpenFile(procPath(e.memfd), os.O_RDONLY, 0); err != nil {
		return nil, err
	}
	e.mem, err = unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return e, err
}

func (e *extent) free() {
	unix.Munmap(e.mem)
	e.memfd.Close()
	e.readOnly.Close()
}

func procPath(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// pages calls do for every page of the range, with the device's bytes and the base.
func (r *replica) pages(off, n, size int64, do func(at int64, mem, base []byte) (bool,
	error)) (count int64, err error) {
	for p := range page.Covering(off, n).Len() {
		at := page.Covering(off, n).Offset() + p*page.Size
		e := r.extents[at/size]
		in := at % size
		did, err := do(at, e.mem[in:in+page.Size], e.base[in:in+page.Size])
		if err != nil {
			return count, err
		}
		if did {
			count++
		}
	}
	return count, nil
}

// refresh merges home into the device's pages.
func (r *replica) refresh(off, n, size int64) (int64, error) {
	now := make([]byte, page.Size)
	return r.pages(off, n, size, func(at int64, mem, base []byte) (bool, error) {
		clear(now)
		if _, err := r.home.ReadAt(now, at); err != nil {
			return false, err
		}
		if bytes.Equal(now, base) {
			return false, nil
		}
		for i := range now {
			if now[i] != base[i] && mem[i] == base[i] {
				mem[i] = now[i]
			}
		}
		copy(base, now)
		return true, nil
	})
}

// collect writes the device's stores home.
func (r *replica) collect(off, n, size int64) (int64, error) {
	sig, err := r.home.Signature()
	if err != nil {
		return 0, err
	}
	return r.pages(off, n, size, func(at int64, mem, base []byte) (bool, error) {
		if bytes.Equal(mem, base) {
			return false, nil
		}
		for i := range mem {
			if b := mem[i]; b != base[i] && at+int64(i) < sig.Size {
				if _, err := r.home.WriteAt([]byte{b}, at+int64(i)); err != nil {
					return false, err
				}
				base[i] = b
			}
		}
		return true, nil
	})
}

func (m *Mapping) extentSize() int64 { return m.list[0].Size }

// Device describes where the memory is.
func (m *Mapping) Device() control.Device {
	d := control.Device{Ordinal: m.req.Device, Kind: m.cache.kind()}
	if m.req.Device < len(m.cache.UUIDs) {
		d.UUID = m.cache.UUIDs[m.req.Device]
	}
	return d
}

// Movable is false, because nothing moves here.
func (m *Mapping) Movable() bool { return false }

// Extents returns the extents that cover the mapping.
func (m *Mapping) Extents() []pagecache.Extent { return m.list }

// Acquire merges home into the device.
func (m *Mapping) Acquire(ctx context.Context, off, n int64, launder bool) (int64, error) {
	if m.cache.Gate != nil {
		if err := m.cache.Gate(ctx); err != nil {
			return 0, err
		}
	}
	m.replica.mu.Lock()
	defer m.replica.mu.Unlock()
	return m.replica.refresh(m.req.Off+off, n, m.extentSize())
}

// Release writes the device's stores home.
func (m *Mapping) Release(ctx context.Context, off, n int64) (int64, error) {
	m.replica.mu.Lock()
	defer m.replica.mu.Unlock()
	return m.replica.collect(m.req.Off+off, n, m.extentSize())
}

// TakePastEnd returns the cache's PastEnd, once.
func (m *Mapping) TakePastEnd() int64 { return m.cache.PastEnd.Swap(0) }

// Sync is Release and fsync.
func (m *Mapping) Sync(ctx context.Context, off, n int64, durable bool) error {
	if m.req.Writable {
		if _, err := m.Release(ctx, off, n); err != nil {
			return err
		}
	}
	if !durable {
		return nil
	}
	return m.replica.home.Sync()
}

// Advise sends the advice to Advised.
func (m *Mapping) Advise(ctx context.Context, off, n int64, a pagecache.Advice) error {
	if m.cache.Advised != nil {
		m.cache.Advised(off, n, a)
	}
	return nil
}

// Abandon counts the mapping as abandoned.
func (m *Mapping) Abandon() { m.cache.Abandoned.Add(1) }

// Unmap releases everything and ends the mapping.
func (m *Mapping) Unmap(ctx context.Context) error {
	defer m.ended()
	if m.cache.UnmapGate != nil {
		m.cache.UnmapGate()
	}
	if !m.req.Writable {
		return nil
	}
	_, err := m.Release(ctx, 0, m.req.Len)
	return err
}

func (m *Mapping) ended() {
	m.cache.mu.Lock()
	defer m.cache.mu.Unlock()
	m.cache.countLocked(-1)
}
