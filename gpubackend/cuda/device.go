package cuda

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// Options say which GPU a device uses, and how much of it.
type Options struct {
	// Ordinal is the number that clients name the device by.
	Ordinal int
	// CUDA is the driver's number of the GPU in this process: Found.CUDA.
	CUDA int
	// Memory is the bytes that may be allocated in all, rounded down to a multiple of the GPU's granularity. 0 means
	// three quarters of what is free when the device is opened; more than what is free is refused. It is a limit, not a
	// reservation: if other programs take the GPU's memory, Alloc fails earlier.
	Memory int64
	// Key is the key of the digests; nil stands for gpubackend.SharedKey.
	Key *gpubackend.DigestKey
}

type device struct {
	// immutable
	info   gpubackend.Info
	key    *gpubackend.DigestKey
	drv    *driver
	handle deviceHandle

	in, out copiers
	peer    copiers // from other GPUs' memory
	worker  *worker // used by jobs of its lane only
	// hostLane pins host memory, so that nobody else waits for that.
	workLane, allocLane, hostLane *lane
	buffers                       buffers
	loss                          atomic.Pointer[error] // the error by which the device was lost

	peersMu sync.Mutex
	peers   map[deviceHandle]error // protected by peersMu; why a GPU's memory cannot be reached, nil if it can

	mu       sync.Mutex
	budget   int64 // protected by mu
	used     int64 // protected by mu
	memories int   // protected by mu; Memory and locks of LockHost that are not freed, or being made
	closed   bool  // protected by mu
}

// Open returns a GPU as a device. It fails with ErrUnavailable if there is no such GPU or if the GPU lacks something
// that gaiafs needs, and with ErrNoMemory if the GPU or the host is full. The device takes some hundred megabytes of
// the GPU for its context, which it shares with other uses of the GPU by this process, about 10 MiB for its kernels,
// and 106 MiB of page-locked host memory. Open blocks for up to a second, longer if the driver compiles the kernels for
// the first time.
func Open(o Options) (gpubackend.Device, error) {
	drv, err := loadedDriver()
	if err != nil {
		return nil, fmt.Errorf("CUDA device %d: %w", o.CUDA, err)
	}
	d, err := open(drv, o, kernelsPTX)
	if err != nil {
		return nil, fmt.Errorf("CUDA device %d: %w", o.CUDA, err)
	}
	return d, nil
}

func open(drv *driver, o Options, ptx []byte) (*device, error) {
	found, err := drv.probe()
	if err != nil {
		return nil, err
	}
	if o.CUDA < 0 || o.CUDA >= len(found) {
		return nil, fmt.Errorf("%w: the machine has %d such devices, numbered from 0", ErrUnavailable, len(found))
	}
	if o.Ordinal < 0 || o.Memory < 0 {
		return nil, fmt.Errorf("negative ordinal (%d) or memory (%d)", o.Ordinal, o.Memory)
	}
	f := found[o.CUDA]
	if f.Unusable != nil {
		return nil, f.Unusable
	}
	if o.Memory > f.Memory {
		return nil, fmt.Errorf("%w: %d MiB requested, %s has %d", gpubackend.ErrNoMemory, o.Memory>>20, f.Name,
			f.Memory>>20)
	}
	if o.Key == nil {
		if o.Key, err = gpubackend.SharedKey(); err != nil {
			return nil, err
		}
	}
	d := &device{key: o.Key, drv: drv, info: gpubackend.Info{
		Ordinal: o.Ordinal, Kind: gpubackend.KindCUDA, UUID: f.UUID,
		Name: fmt.Sprintf("%s (CUDA device %d)", f.Name, o.CUDA), Memory: o.Memory,
		CopyEngines: true,
	}}
	if d.handle, err = drv.device(o.CUDA); err != nil {
		return nil, err
	}
	var ctx contextHandle
	if err := drv.check("cuDevicePrimaryCtxRetain", drv.devicePrimaryCtxRetain(&ctx, d.handle)); err != nil {
		return nil, err
	}
	if err := d.start(ctx, f, ptx); err != nil {
		d.tearDown()
		return nil, err
	}
	return d, nil
}

// start makes the lanes and their resources. After an error tearDown frees them.
func (d *device) start(ctx contextHandle, f Found, ptx []byte) (err error) {
	for _, l := range []**lane{&d.allocLane, &d.workLane, &d.hostLane} {
		if *l, err = startLane(d.drv, ctx); err != nil {
			return err
		}
	}
	background := context.Background()
	if err := d.allocLane.do(background, d.measure); err != nil {
		return err
	}
	if d.info.Memory < d.info.Granularity {
		return fmt.Errorf("%w: %d bytes are less than one allocation (%d)", gpubackend.ErrNoMemory, d.info.Memory,
			d.info.Granularity)
	}
	if err := d.workLane.do(background, func() (err error) {
		d.worker, err = newWorker(d.workLane, d.handle, d.key, ptx)
		return err
	}); err != nil {
		return err
	}
	if d.in, err = newCopiers(inCopiers, d.drv, ctx, false, chunkSize); err != nil {
		return err
	}
	if d.out, err = newCopiers(outCopiers, d.drv, ctx, true, chunkSize); err != nil {
		return err
	}
	d.peer, err = newCopiers(peerCopiers, d.drv, ctx, false, 0)
	return err
}

// leastMemory is what has to be free if no budget was given.
const leastMemory = 64 << 20

// measure asks the driver for the granularity, and for free memory, which limits the budget.
func (d *device) measure() error {
	prop := d.prop()
	var granularity uintptr
	err := d.drv.check("cuMemGetAllocationGranularity", d.drv.memGetGranularity(&granularity, &prop,
		granularityMinimum))
	if err != nil {
		return err
	}
	d.info.Granularity = int64(granularity)
	var free, total uint64
	if err := d.drv.check("cuMemGetInfo", d.drv.memGetInfo(&free, &total)); err != nil {
		return err
	}
	asked := d.info.Memory
	if asked == 0 {
		d.info.Memory = int64(free / 4 * 3)
		asked = leastMemory
	}
	if max(asked, d.info.Memory) > int64(free) {
		return fmt.Errorf("%w: at least %d MiB are needed, and %d of the %d MiB of %s are free: other programs have the rest (nvidia-smi lists them)",
			gpubackend.ErrNoMemory, asked>>20, free>>20, total>>20, d.info.Name)
	}
	d.info.Memory &^= d.info.Granularity - 1
	d.budget = d.info.Memory
	return nil
}

func (d *device) prop() allocationProp {
	return allocationProp{kind: 1, handleTypes: handlePOSIX, location: onDevice(d.handle)}
}

// tearDown frees everything except Memory and buffers, in lanes while there are lanes. It fails only if the device is
// lost.
func (d *device) tearDown() {
	background := context.Background()
	d.in.free()
	d.out.free()
	d.peer.free()
	if d.worker != nil {
		_ = d.workLane.do(background, d.worker.free)
	}
	for _, l := range []*lane{d.workLane, d.allocLane, d.hostLane} {
		if l != nil {
			l.stop()
		}
	}
	_ = d.drv.devicePrimaryCtxRelease(d.handle)
}

func (d *device) Info() gpubackend.Info { return d.info }

func (d *device) Key() *gpubackend.DigestKey { return d.key }

func (d *device) Used() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.used
}

func (d *device) SetBudget(bytes int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.budget = bytes
}

// Free asks the driver, which counts the memory of all processes.
func (d *device) Free() (int64, error) {
	var free, total uint64
	err := d.run(context.Background(), d.allocLane, func() error {
		return d.drv.check("cuMemGetInfo", d.drv.memGetInfo(&free, &total))
	})
	return int64(free), err
}

func (d *device) Alloc(size int64) (gpubackend.Memory, error) {
	return d.make(&memory{dev: d, size: size, counted: size})
}

func (d *device) AllocStaging(size int64) (gpubackend.Memory, error) {
	return d.make(&memory{dev: d, size: size})
}

// AllocHost pins memory of the GPU's NUMA node. The driver zeroes and pins it at some 4 GB/s.
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
	if err := d.run(context.Background(), m.lane(), m.create); err != nil {
		d.giveBack(m.counted)
		return nil, err
	}
	return m, nil
}

// hostNode returns the host's NUMA node of the GPU; 0 if the driver does not know it.
func (d *device) hostNode() int32 {
	node, err := d.drv.attribute(d.handle, attrHostNUMA)
	if err != nil {
		return 0
	}
	return max(node, 0)
}

// reserve counts memory, and takes size bytes off the budget before the driver is asked, so that concurrent calls
// cannot exceed it. Of 0 bytes, it takes nothing. giveBack ends that.
func (d *device) reserve(size int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return gpubackend.ErrClosed
	}
	if size > 0 && size > d.budget-d.used {
		return fmt.Errorf("%w: %d of %d bytes in use, %d more requested", gpubackend.ErrNoMemory, d.used, d.budget,
			size)
	}
	d.used += size
	d.memories++
	return nil
}

func (d *device) giveBack(size int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.used -= size
	d.memories--
}

func (d *device) isClosed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.closed
}

// Close ends the lanes and waits for them. While buffers of HostBuffer are handed out, the last one that comes back
// does that instead.
func (d *device) Close() error {
	d.mu.Lock()
	if d.closed || d.memories > 0 {
		defer d.mu.Unlock()
		if d.closed {
			return gpubackend.ErrClosed
		}
		return fmt.Errorf("%w: %d bytes in %d allocations of %s", gpubackend.ErrInUse, d.used, d.memories, d.info.Name)
	}
	d.closed = true
	d.mu.Unlock()
	idle, waits := d.buffers.close(d.tearDown)
	for _, p := range idle {
		d.unpin(p)
	}
	if !waits {
		d.tearDown()
	}
	return nil
}

// use lets a call into the memories that own returns for 0 to n-1. The call must end with done.
func (d *device) use(n int, own func(i int) (*memory, error)) (done func(), err error) {
	if d.isClosed() {
		return nil, gpubackend.ErrClosed
	}
	used := make(map[*memory]struct{})
	done = func() {
		for m := range used {
			m.users.End()
		}
	}
	var last *memory
	for i := range n {
		m, err := own(i)
		if err == nil && m != last {
			if _, in := used[m]; !in {
				if err = m.users.Begin(); err == nil {
					used[m] = struct{}{}
				}
			}
			last = m
		}
		if err != nil {
			done()
			return nil, err
		}
	}
	return done, nil
}

// own returns the device's own type of mem, after checking that the n bytes at off lie in it.
func (d *device) own(mem gpubackend.Memory, off, n int64) (*memory, error) {
	m, ok := mem.(*memory)
	if !ok || m.dev != d {
		return nil, fmt.Errorf("%w: memory of another device", gpubackend.ErrRange)
	}
	if off < 0 || n < 0 || off > m.size || n > m.size-off {
		return nil, fmt.Errorf("%w: %d bytes at %d of %d", gpubackend.ErrRange, n, off, m.size)
	}
	return m, nil
}

// ownPages is own for n pages, of which the first begins at off.
func (d *device) ownPages(mem gpubackend.Memory, off int64, n int) (*memory, error) {
	if off&(pageSize-1) != 0 {
		return nil, fmt.Errorf("%w: offset %d is not at the start of a page", gpubackend.ErrRange, off)
	}
	return d.own(mem, off, int64(n)*pageSize)
}
