package faulty

import (
	"context"
	"os"
	"sync"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// Op is a method of Device or Memory that can fail.
type Op uint8

// The methods of Device and Memory.
const (
	Alloc Op = iota
	AllocHost
	CopyIn
	CopyOut
	CopyPeer
	Zero
	Patch
	Digests
	Modified
	HostBuffer
	LockHost
	Export
	Free
	ops
)

func (o Op) String() string {
	return [...]string{
		"Alloc", "AllocHost", "CopyIn", "CopyOut", "CopyPeer", "Zero", "Patch", "Digests", "Modified", "HostBuffer",
		"LockHost", "Export", "Free",
	}[o]
}

// Device is a gpubackend.Device that fails when a test tells it to.
type Device struct {
	inner gpubackend.Device // immutable

	mu    sync.Mutex
	lost  bool               // protected by mu
	calls [ops]int           // protected by mu; calls so far
	fail  [ops]map[int]error // protected by mu; by the number of the call
	gates [ops]*Gate         // protected by mu; nil where calls pass
	slow  [ops]time.Duration // protected by mu
	total int64              // protected by mu; 0: as the wrapped device has it
	old   bool               // protected by mu; set by OldBytes
	sizes map[int]int        // protected by mu; of HostBuffer, with how often each was asked for
}

var _ gpubackend.Device = (*Device)(nil)

// Wrap returns a Device that passes everything on to d, which then belongs to it.
func Wrap(d gpubackend.Device) *Device { return &Device{inner: d} }

// Fail makes the nth call of op from now on fail with err; the next call is the first. Other calls are not affected.
// Fail panics if n is less than 1.
func (d *Device) Fail(op Op, n int, err error) {
	if n < 1 {
		panic("faulty: calls are counted from 1")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fail[op] == nil {
		d.fail[op] = make(map[int]error)
	}
	d.fail[op][d.calls[op]+n] = err
}

// Lose makes every call from now on fail with ErrDeviceLost, including calls that wait behind a Gate. Free, Close,
// Info, Key and Used work as before, so the host's resources of a lost device are given back as usual.
func (d *Device) Lose() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lost = true
}

// OldBytes makes Zeroed of every Memory false, as on a GPU.
func (d *Device) OldBytes() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.old = true
}

// Calls returns the number of calls of op so far, failed and waiting ones included.
func (d *Device) Calls(op Op) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.calls[op]
}

// Hold makes every call of op from now on wait until the Gate is opened or the call's context ends. It panics while an
// earlier Gate of op is not open.
func (d *Device) Hold(op Op) *Gate { return d.HoldAfter(op, 0) }

// HoldAfter is Hold, but lets n calls pass first.
func (d *Device) HoldAfter(op Op, n int) *Gate {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gates[op] != nil {
		panic("faulty: " + op.String() + " is held already")
	}
	g := &Gate{dev: d, op: op, after: d.calls[op] + n, arrived: make(chan struct{}), open: make(chan struct{})}
	d.gates[op] = g
	return g
}

// Slow makes every call of op from now on take longer by that time.
func (d *Device) Slow(op Op, by time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.slow[op] = by
}

// Gate holds up the calls of one Op: a slow device, for as long as a test wants.
type Gate struct {
	dev     *Device
	op      Op
	after   int // the number of the last call that passes; immutable
	once    sync.Once
	arrived chan struct{} // closed by the first call that waits
	open    chan struct{} // closed by Open
}

// Arrived is closed once a call waits behind the Gate.
func (g *Gate) Arrived() <-chan struct{} { return g.arrived }

// Open lets the waiting calls and all later ones pass. Only the first Open has an effect.
func (g *Gate) Open() {
	g.dev.mu.Lock()
	defer g.dev.mu.Unlock()
	if g.dev.gates[g.op] == g {
		g.dev.gates[g.op] = nil
		close(g.open)
	}
}

// enter is the first step of each call of op. The call is passed on only if enter returns nil.
func (d *Device) enter(ctx context.Context, op Op) error {
	d.mu.Lock()
	d.calls[op]++
	err := d.fail[op][d.calls[op]]
	delete(d.fail[op], d.calls[op])
	gate, slow := d.gates[op], d.slow[op]
	if gate != nil && d.calls[op] <= gate.after {
		gate = nil
	}
	d.mu.Unlock()
	if slow > 0 {
		time.Sleep(slow)
	}
	if gate != nil {
		gate.once.Do(func() { close(gate.arrived) })
		select {
		case <-gate.open:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.lost && op != Free {
		return gpubackend.ErrDeviceLost
	}
	return err
}

// Info returns the Info of the wrapped device.
func (d *Device) Info() gpubackend.Info { return d.inner.Info() }

// Key returns the key of the wrapped device.
func (d *Device) Key() *gpubackend.DigestKey { return d.inner.Key() }

// Used returns the used bytes of the wrapped device.
func (d *Device) Used() int64 { return d.inner.Used() }

// SetBudget sets the budget of the wrapped device.
func (d *Device) SetBudget(bytes int64) { d.inner.SetBudget(bytes) }

// SetFree makes Free return total minus what the wrapped device uses, as if other programs had the rest.
func (d *Device) SetFree(total int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.total = total
}

// Free returns the free bytes of the wrapped device, or those that follow from SetFree.
func (d *Device) Free() (int64, error) {
	d.mu.Lock()
	total := d.total
	d.mu.Unlock()
	if total == 0 {
		return d.inner.Free()
	}
	return max(total-d.inner.Used(), 0), nil
}

// Close closes the wrapped device. It never fails on its own.
func (d *Device) Close() error { return d.inner.Close() }

// Alloc is the Op of that name.
func (d *Device) Alloc(size int64) (gpubackend.Memory, error) {
	if err := d.enter(context.Background(), Alloc); err != nil {
		return nil, err
	}
	m, err := d.inner.Alloc(size)
	if err != nil {
		return nil, err
	}
	return &memory{d, m}, nil
}

// AllocStaging is the Op Alloc, too.
func (d *Device) AllocStaging(size int64) (gpubackend.Memory, error) {
	if err := d.enter(context.Background(), Alloc); err != nil {
		return nil, err
	}
	m, err := d.inner.AllocStaging(size)
	if err != nil {
		return nil, err
	}
	return &memory{d, m}, nil
}

// AllocHost is the Op of that name.
func (d *Device) AllocHost(size int64) (gpubackend.Memory, error) {
	if err := d.enter(context.Background(), AllocHost); err != nil {
		return nil, err
	}
	m, err := d.inner.AllocHost(size)
	if err != nil {
		return nil, err
	}
	return &memory{d, m}, nil
}

// CopyIn is the Op of that name.
func (d *Device) CopyIn(ctx context.Context, pieces []gpubackend.Copy) error {
	if err := d.enter(ctx, CopyIn); err != nil {
		return err
	}
	return d.inner.CopyIn(ctx, d.unwrapCopies(pieces))
}

// CopyOut is the Op of that name.
func (d *Device) CopyOut(ctx context.Context, pieces []gpubackend.Copy) error {
	if err := d.enter(ctx, CopyOut); err != nil {
		return err
	}
	return d.inner.CopyOut(ctx, d.unwrapCopies(pieces))
}

// CopyPeer is the Op of that name. The sources may be memory of another Device of this package.
func (d *Device) CopyPeer(ctx context.Context, pieces []gpubackend.PeerCopy) error {
	if err := d.enter(ctx, CopyPeer); err != nil {
		return err
	}
	inner := make([]gpubackend.PeerCopy, len(pieces))
	for i, p := range pieces {
		p.Mem = d.unwrap(p.Mem)
		if from, ok := p.From.(*memory); ok {
			p.From = from.inner
		}
		inner[i] = p
	}
	return d.inner.CopyPeer(ctx, inner)
}

// Zero is the Op of that name.
func (d *Device) Zero(ctx context.Context, mem gpubackend.Memory, off, n int64) error {
	if err := d.enter(ctx, Zero); err != nil {
		return err
	}
	return d.inner.Zero(ctx, d.unwrap(mem), off, n)
}

// Patch is the Op of that name.
func (d *Device) Patch(ctx context.Context, patches []gpubackend.Patch) error {
	if err := d.enter(ctx, Patch); err != nil {
		return err
	}
	inner := make([]gpubackend.Patch, len(patches))
	for i, p := range patches {
		p.Mem = d.unwrap(p.Mem)
		inner[i] = p
	}
	return d.inner.Patch(ctx, inner)
}

// Inner returns the wrapped device, and its own Memory for mem. Accesses of client programs go there, because faults
// and gates are only for users of the Device.
func (d *Device) Inner(mem gpubackend.Memory) (gpubackend.Device, gpubackend.Memory) {
	return d.inner, d.unwrap(mem)
}

// Digests is the Op of that name.
func (d *Device) Digests(ctx context.Context, mem gpubackend.Memory, off int64, out []gpubackend.Digest) error {
	if err := d.enter(ctx, Digests); err != nil {
		return err
	}
	return d.inner.Digests(ctx, d.unwrap(mem), off, out)
}

// Modified is the Op of that name.
func (d *Device) Modified(ctx context.Context, scans []gpubackend.Scan) ([][]page.Range, error) {
	if err := d.enter(ctx, Modified); err != nil {
		return nil, err
	}
	inner := make([]gpubackend.Scan, len(scans))
	for i, s := range scans {
		s.Mem = d.unwrap(s.Mem)
		inner[i] = s
	}
	return d.inner.Modified(ctx, inner)
}

// HostBuffer is the Op of that name.
func (d *Device) HostBuffer(n int) (buf []byte, giveBack func(), err error) {
	if err := d.enter(context.Background(), HostBuffer); err != nil {
		return nil, nil, err
	}
	d.mu.Lock()
	if d.sizes == nil {
		d.sizes = make(map[int]int)
	}
	d.sizes[n]++
	d.mu.Unlock()
	return d.inner.HostBuffer(n)
}

// LockHost is the Op of that name.
func (d *Device) LockHost(mem []byte) (unlock func() error, err error) {
	if err := d.enter(context.Background(), LockHost); err != nil {
		return nil, err
	}
	return d.inner.LockHost(mem)
}

// BufferSizes returns the sizes that HostBuffer was asked for since the last call, and how often.
func (d *Device) BufferSizes() (sizes map[int]int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	sizes, d.sizes = d.sizes, nil
	return sizes
}

func (d *Device) unwrapCopies(pieces []gpubackend.Copy) []gpubackend.Copy {
	inner := make([]gpubackend.Copy, len(pieces))
	for i, p := range pieces {
		p.Mem = d.unwrap(p.Mem)
		inner[i] = p
	}
	return inner
}

// unwrap returns the wrapped device's own Memory for m. It returns memory of other devices unchanged.
func (d *Device) unwrap(m gpubackend.Memory) gpubackend.Memory {
	if own, ok := m.(*memory); ok && own.dev == d {
		return own.inner
	}
	return m
}

type memory struct {
	dev   *Device
	inner gpubackend.Memory
}

func (m *memory) Size() int64 { return m.inner.Size() }

func (m *memory) Zeroed() bool {
	m.dev.mu.Lock()
	defer m.dev.mu.Unlock()
	return !m.dev.old && m.inner.Zeroed()
}

func (m *memory) Export(writable bool) (*os.File, error) {
	if err := m.dev.enter(context.Background(), Export); err != nil {
		return nil, err
	}
	return m.inner.Export(writable)
}

func (m *memory) Held() bool { return m.inner.Held() }

func (m *memory) Free() error {
	if err := m.dev.enter(context.Background(), Free); err != nil {
		return err
	}
	return m.inner.Free()
}
