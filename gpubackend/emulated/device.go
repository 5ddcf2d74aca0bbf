package emulated

import (
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// Granularity is the default granularity of an emulated device: the huge page of GPUs.
const Granularity = 2 << 20

// Options describe a device.
type Options struct {
	// Ordinal is the number that clients name the device by.
	Ordinal int
	// Memory is the bytes that may be allocated in all, rounded down to a multiple of Granularity.
	Memory int64
	// Granularity is a power of two and at least the page size of the machine and of package page; 0 means the
	// constant of that name.
	Granularity int64
	// Poison fills memory with a pattern in Alloc and Free, and host buffers when they are given back. So a test
	// notices uses of unfilled or freed memory. Memory is then touched as soon as it is allocated.
	Poison bool
	// CopyEngines makes the device claim copy engines, so that it is used like a GPU. It has none.
	CopyEngines bool
	// WritableExports lets processes store into memory that was exported for reading, as with GPUs.
	WritableExports bool
	// Taken, if it is not nil, returns how many bytes of the device other programs use. The device then has Total
	// bytes, including Memory. If Taken is nil, there are no other programs, and Free goes by the host's memory.
	Taken func() int64
	Total int64
	// Key is the key of the digests; nil stands for gpubackend.SharedKey.
	Key *gpubackend.DigestKey
}

type device struct {
	// immutable
	info    gpubackend.Info
	key     *gpubackend.DigestKey
	zero    gpubackend.Digest // of a page of zeros
	poison  bool
	buffers buffers
	// writableExports is immutable.
	writableExports bool
	// taken and total are Options.Taken and Total; immutable.
	taken func() int64
	total int64

	mu       sync.Mutex
	budget   int64 // protected by mu
	used     int64 // protected by mu; that of lingering included
	memories int   // protected by mu; Memory and locks of LockHost that are not freed
	closed   bool  // protected by mu
	// lingering has memory that was freed and that other processes still have. Protected by mu.
	lingering []*memory
}

// New returns a device. It takes only some kilobytes of the host's memory, and starts nothing. It fails if the options
// make no sense, or if no key can be drawn.
func New(o Options) (gpubackend.Device, error) {
	if o.Granularity == 0 {
		o.Granularity = Granularity
	}
	least := int64(max(page.Size, unix.Getpagesize()))
	if o.Granularity < least || o.Granularity&(o.Granularity-1) != 0 {
		return nil, fmt.Errorf("emulated device %d: granularity of %d bytes is not a power of two of at least %d",
			o.Ordinal, o.Granularity, least)
	}
	if o.Memory < o.Granularity {
		return nil, fmt.Errorf("emulated device %d: memory of %d bytes is less than one allocation (%d)",
			o.Ordinal, o.Memory, o.Granularity)
	}
	if o.Ordinal < 0 {
		return nil, fmt.Errorf("emulated device %d: negative ordinal", o.Ordinal)
	}
	if o.Key == nil {
		k, err := gpubackend.SharedKey()
		if err != nil {
			return nil, fmt.Errorf("emulated device %d: %w", o.Ordinal, err)
		}
		o.Key = k
	}
	return &device{
		info: gpubackend.Info{
			Ordinal:     o.Ordinal,
			Kind:        gpubackend.KindEmulated,
			Name:        fmt.Sprintf("Emulated device %d", o.Ordinal),
			Memory:      o.Memory &^ (o.Granularity - 1),
			Granularity: o.Granularity,
			CopyEngines: o.CopyEngines,

			ReadOnlyExports: !o.WritableExports,
		},
		budget:          o.Memory &^ (o.Granularity - 1),
		writableExports: o.WritableExports,
		taken:           o.Taken,
		total:           o.Total,

		key:     o.Key,
		zero:    o.Key.Sum(make([]byte, page.Size)),
		poison:  o.Poison,
		buffers: buffers{poison: o.Poison},
	}, nil
}

func (d *device) Info() gpubackend.Info { return d.info }

func (d *device) Key() *gpubackend.DigestKey { return d.key }

func (d *device) Used() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.reapLocked()
	return d.used
}

func (d *device) SetBudget(bytes int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.budget = bytes
}

// Free returns the host's memory minus what the device uses. It does not subtract what other programs use: the kernel
// manages the host's memory, and its use changes by the second.
func (d *device) Free() (int64, error) {
	if d.taken != nil {
		return max(d.total-d.taken()-d.Used(), 0), nil
	}
	var host unix.Sysinfo_t
	if err := unix.Sysinfo(&host); err != nil {
		return 0, fmt.Errorf("sysinfo: %w", err)
	}
	return int64(host.Totalram)*int64(host.Unit) - d.Used(), nil
}

// linger counts freed memory as used until no other process has it.
func (d *device) linger(m *memory) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.memories--
	d.lingering = append(d.lingering, m)
	if d.closed {
		d.letGoLocked()
	}
}

// reapLocked stops counting freed memory that no process has any more.
func (d *device) reapLocked() {
	d.lingering = slices.DeleteFunc(d.lingering, func(m *memory) bool {
		held, _ := heldByOthers(m.file)
		if !held {
			d.dropLocked(m)
		}
		return !held
	})
}

func (d *device) dropLocked(m *memory) {
	_ = m.file.Close() // nothing was written by it
	d.used -= m.size
}

// letGoLocked stops counting all lingering memory.
func (d *device) letGoLocked() {
	for _, m := range d.lingering {
		d.dropLocked(m)
	}
	d.lingering = nil
}

func (d *device) Alloc(size int64) (gpubackend.Memory, error) {
	return d.make(&memory{dev: d, size: size, counted: size})
}

func (d *device) AllocStaging(size int64) (gpubackend.Memory, error) {
	return d.make(&memory{dev: d, size: size})
}

func (d *device) AllocHost(size int64) (gpubackend.Memory, error) {
	return d.make(&memory{dev: d, size: size, host: true})
}

// make counts and creates m.
func (d *device) make(m *memory) (gpubackend.Memory, error) {
	if err := d.info.CheckSize(m.size); err != nil {
		return nil, err
	}
	if err := d.reserve(m.counted); err != nil {
		return nil, err
	}
	if err := m.create(); err != nil {
		d.giveBack(m.counted)
		return nil, err
	}
	return m, nil
}

// reserve counts a Memory, and takes size bytes off the budget before the host is asked for them, so that concurrent
// calls cannot exceed it. Of 0 bytes, it takes nothing.
func (d *device) reserve(size int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return gpubackend.ErrClosed
	}
	if size > 0 {
		if err := d.fitLocked(size); err != nil {
			return err
		}
	}
	d.used += size
	d.memories++
	return nil
}

// fitLocked returns ErrNoMemory unless size more bytes fit.
func (d *device) fitLocked(size int64) error {
	if size > d.budget-d.used {
		d.reapLocked()
	}
	if size > d.budget-d.used {
		return fmt.Errorf("%w: %d of %d bytes in use, %d more requested",
			gpubackend.ErrNoMemory, d.used, d.budget, size)
	}
	if d.taken != nil && size > d.total-d.taken()-d.used {
		return fmt.Errorf("%w: other programs have the memory", gpubackend.ErrNoMemory)
	}
	return nil
}

func (d *device) giveBack(size int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.used -= size
	d.memories--
}

func (d *device) HostBuffer(n int) ([]byte, func(), error) {
	if n < 0 {
		return nil, nil, fmt.Errorf("%w: host buffer of %d bytes", gpubackend.ErrRange, n)
	}
	if d.isClosed() {
		return nil, nil, gpubackend.ErrClosed
	}
	buf, giveBack := d.buffers.get(n)
	return buf, giveBack, nil
}

// LockHost locks nothing: the host's processors copy from any memory alike.
func (d *device) LockHost(mem []byte) (unlock func() error, err error) {
	if err := gpubackend.CheckHostPages(mem); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, gpubackend.ErrClosed
	}
	d.memories++
	return func() error { d.giveBack(0); return nil }, nil
}

func (d *device) isClosed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.closed
}

func (d *device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return gpubackend.ErrClosed
	}
	if d.memories > 0 {
		return fmt.Errorf("%w: %d bytes in %d allocations of %s", gpubackend.ErrInUse, d.used, d.memories, d.info.Name)
	}
	d.closed = true
	d.letGoLocked()
	return nil
}
