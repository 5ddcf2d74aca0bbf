package cuda

import (
	"context"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// Page-locked memory is pooled in classes of powers of two, because locking pages is slow: 2 MiB take 1.5 ms and 64 MiB
// 25 ms on the host of an H200. Buffers larger than the largest class are made and freed each time.
const (
	minBufferShift = 16
	maxBufferShift = 26
	// idleBytes is the most that the pool of a device keeps of unused memory. It suffices for loads of several files
	// (mover.Stage), and for released bytes that readers have not read yet.
	idleBytes = 512 << 20
	// idleFor is how long the pool keeps unused memory: a program may load a model minutes after it was mounted.
	idleFor = 15 * time.Minute
)

// pinned is page-locked memory: of the driver, or of a file.
type pinned struct {
	base unsafe.Pointer
	size int
	file bool
}

func (p pinned) bytes() []byte { return unsafe.Slice((*byte)(p.base), p.size) }

// at returns the device's address of byte off: with unified addressing it is the host's address.
func (p pinned) at(off int) address { return address(uintptr(p.base)) + address(off) }

func (d *driver) pin(n int) (p pinned, err error) {
	p.size = n
	return p, d.check("cuMemHostAlloc", d.memHostAlloc(&p.base, uintptr(n), hostPortable))
}

// locked has the page-locked memory of HostBuffer and LockHost of all devices. Each device copies from the others'
// memory as from its own (hostPortable).
var locked lockedMemory

// lockedMemory is a list of allocations of page-locked memory.
type lockedMemory struct {
	mu  sync.Mutex
	all []pinned // protected by mu; idle or handed out, ascending by address
}

// buffers is the pool of page-locked memory of HostBuffer of one device.
type buffers struct {
	mu     sync.Mutex
	idle   [maxBufferShift - minBufferShift + 1][]pinned // protected by mu
	kept   int                                           // protected by mu; bytes in idle
	taken  int64                                         // protected by mu; counts calls of take
	used   [maxBufferShift - minBufferShift + 1]int64    // protected by mu; taken when a class was wanted last
	out    int                                           // protected by mu; buffers handed out or being made
	closed bool                                          // protected by mu
	trim   *time.Timer                                   // protected by mu; frees what nobody has used for idleFor
	last   func()                                        // protected by mu; called once closed and out is 0
}

func bufferClass(n int) int {
	return max(bits.Len(uint(max(n, 1)-1)), minBufferShift) - minBufferShift
}

// take returns an idle buffer of n bytes or more. If ok is false, the caller makes one and calls add. In both cases the
// caller calls done at the end.
func (b *buffers) take(n int) (p pinned, ok bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return p, false, gpubackend.ErrClosed
	}
	b.out++
	class := bufferClass(n)
	if class >= len(b.idle) {
		return p, false, nil
	}
	b.taken++
	if b.used[class] = b.taken; len(b.idle[class]) == 0 {
		return p, false, nil
	}
	free := &b.idle[class]
	p = (*free)[len(*free)-1]
	*free = (*free)[:len(*free)-1]
	b.kept -= p.size
	return p, true, nil
}

// add makes a new buffer known to copies.
func (b *lockedMemory) add(p pinned) {
	b.mu.Lock()
	defer b.mu.Unlock()
	i, _ := slices.BinarySearchFunc(b.all, p.base, byBase)
	b.all = slices.Insert(b.all, i, p)
}

func byBase(p pinned, base unsafe.Pointer) int {
	switch a, b := uintptr(p.base), uintptr(base); {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// keep keeps a buffer for the next caller, if there is a class for it. If the pool becomes too large, it removes
// buffers of the class that was not used for longest. It returns the buffers that the caller must free.
func (b *buffers) keep(p pinned) (free []pinned) {
	b.mu.Lock()
	defer b.mu.Unlock()
	class := bufferClass(p.size)
	if b.closed || class >= len(b.idle) {
		locked.forget(p)
		return []pinned{p}
	}
	b.idle[class] = append(b.idle[class], p)
	for b.kept += p.size; b.kept > idleBytes; {
		x := b.removeLocked()
		locked.forget(x)
		free = append(free, x)
	}
	return free
}

// removeLocked takes a buffer out of idle, of the class that was not used for longest.
func (b *buffers) removeLocked() (p pinned) {
	least := -1
	for i := range b.idle {
		if len(b.idle[i]) > 0 && (least < 0 || b.used[i] < b.used[least]) {
			least = i
		}
	}
	p, b.idle[least] = b.idle[least][0], b.idle[least][1:]
	b.kept -= p.size
	return p
}

// done ends what take began. The caller must call last unless it is nil.
func (b *buffers) done() (last func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.out--
	if b.closed && b.out == 0 {
		return b.last
	}
	return nil
}

func (b *lockedMemory) forget(p pinned) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if i, ok := slices.BinarySearchFunc(b.all, p.base, byBase); ok {
		b.all = slices.Delete(b.all, i, i+1)
	}
}

// trimLater makes a timer call free when no buffer has come back for a while.
func (b *buffers) trimLater(free func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.closed:
	case b.trim == nil:
		b.trim = time.AfterFunc(idleFor, free)
	default:
		b.trim.Reset(idleFor)
	}
}

// takeIdle returns the idle buffers. The caller frees them and then calls done. ok is false after close.
func (b *buffers) takeIdle() (free []pinned, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, false
	}
	b.out++
	return b.emptyLocked(), true
}

func (b *buffers) emptyLocked() (free []pinned) {
	for i := range b.idle {
		for _, p := range b.idle[i] {
			locked.forget(p)
			free = append(free, p)
		}
		b.idle[i] = nil
	}
	b.kept = 0
	return free
}

// close ends the pool: take fails from now on. It returns the buffers to free. If buffers are still handed out, waits
// is true, and last is called after the last of them came back.
func (b *buffers) close(last func()) (free []pinned, waits bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed, b.last = true, last
	if b.trim != nil {
		b.trim.Stop()
	}
	return b.emptyLocked(), b.out > 0
}

// holds returns the allocation of page-locked memory that contains all of p, if there is one.
func (b *lockedMemory) holds(p []byte) (allocation pinned, ok bool) {
	start := unsafe.Pointer(unsafe.SliceData(p))
	b.mu.Lock()
	defer b.mu.Unlock()
	i, exact := slices.BinarySearchFunc(b.all, start, byBase)
	if !exact {
		i--
	}
	if i < 0 || !b.all[i].has(p) {
		return pinned{}, false
	}
	return b.all[i], true
}

// has reports whether p contains all of b.
func (p pinned) has(b []byte) bool {
	start, base := uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(p.base)
	return start >= base && start-base <= uintptr(p.size) && uintptr(len(b)) <= uintptr(p.size)-(start-base)
}

// lookup finds out whether slices of host memory are page-locked, once for neighbouring slices. It is for one call of
// the device, during which the caller keeps the buffers.
type lookup struct{ last pinned }

// leastOfFile is the smallest copy that is made from where a file's pages are locked. The driver reads less than 32 KiB
// with the CPU, which ends the process if the file has become shorter.
const leastOfFile = 64 << 10

// holds is lockedMemory.holds, but returns the address of the allocation. It does not find what must be staged.
func (l *lookup) holds(p []byte) (allocation address, ok bool) {
	if l.last.base == nil || !l.last.has(p) {
		last, ok := locked.holds(p)
		if !ok {
			return 0, false
		}
		l.last = last
	}
	if l.last.file && len(p) < leastOfFile {
		return 0, false
	}
	return l.last.at(0), true
}

// HostBuffer returns page-locked memory with arbitrary contents. The garbage collector does not own it: it must not be
// used after giveBack. A buffer that comes back after Close is freed then, and the last one frees the device's
// remaining resources.
func (d *device) HostBuffer(n int) ([]byte, func(), error) {
	if n < 0 {
		return nil, nil, fmt.Errorf("%w: host buffer of %d bytes", gpubackend.ErrRange, n)
	}
	p, ok, err := d.buffers.take(n)
	if err != nil {
		return nil, nil, err
	}
	if !ok {
		size := max(n, 1<<minBufferShift)
		if class := bufferClass(n); class <= maxBufferShift-minBufferShift {
			size = 1 << (class + minBufferShift)
		}
		err := d.run(context.Background(), d.allocLane, func() (err error) {
			p, err = d.drv.pin(size)
			return err
		})
		if err != nil {
			d.returnBuffer(pinned{})
			return nil, nil, err
		}
		locked.add(p)
	}
	return p.bytes()[:n:n], sync.OnceFunc(func() { d.returnBuffer(p) }), nil
}

// returnBuffer ends what take began; p is zero if no buffer could be made.
func (d *device) returnBuffer(p pinned) {
	if p.size > 0 {
		for _, x := range d.buffers.keep(p) {
			d.unpin(x)
		}
		d.buffers.trimLater(d.trimBuffers)
	}
	d.buffersDone()
}

// trimBuffers frees the idle buffers.
func (d *device) trimBuffers() {
	free, ok := d.buffers.takeIdle()
	if !ok {
		return
	}
	for _, p := range free {
		d.unpin(p)
	}
	d.buffersDone()
}

// buffersDone ends what take or takeIdle began.
func (d *device) buffersDone() {
	if last := d.buffers.done(); last != nil {
		last()
	}
}

// unpin frees page-locked memory. If the device is lost, this fails, and nothing can be done about it.
func (d *device) unpin(p pinned) {
	_ = d.allocLane.do(context.Background(), func() error {
		return d.drv.check("cuMemFreeHost", d.drv.memFreeHost(p.base))
	})
}
