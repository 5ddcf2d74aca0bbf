package pagecache

import (
	"context"
	"errors"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/pagecache/residency"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
	"github.com/gaiafs/gaiafs/prefetch"
)

// MapRequest is a client's request for a mapping.
type MapRequest struct {
	// Device is the ordinal of a device. It is ignored if UUID is not zero; then UUID names the device.
	Device int
	UUID   gpubackend.UUID
	// Kind is a gpubackend.Kind: Device counts among the devices of this kind. 0: among all devices.
	Kind uint8
	// Off is a multiple of page.Size, Len is positive. They are bytes of the file; the end may lie past end of file.
	Off, Len int64
	Writable bool
	// Lazy leaves the pages to Acquire and Advise; otherwise Map acquires the whole range.
	Lazy bool
	// Launder makes Map flush the kernel's dirty pages of the range. Clients that flushed with sync_file_range leave it
	// false.
	Launder bool
	// Process is the kernel's number of the client, for recordings.
	Process uint32
	// User is the client's user, who is charged for the memory. Limited says that Options.UserShare applies to this
	// user.
	User    uint32
	Limited bool
	// Cgroup returns the cgroup of the process as in /proc/PID/cgroup; "" if there is none. It may be nil. If it fails
	// and its result matters, the request fails with EACCES.
	Cgroup func() (string, error)
	// Tenant is the tenant name that the process gives, "" for none.
	Tenant string
	// Client, if not nil, makes the mapping movable: it gets memory when a bracket uses it (Cache.Use), and Moves tell
	// the client which. Map then fetches nothing.
	Client Client
	// IfLarger makes the mapping movable only if the range is larger than the device's memory.
	IfLarger bool
	// held says that the client is given no memory: see Warm.
	held bool
}

// Extent is a piece of device memory that a client maps.
type Extent struct {
	// Offset is the file offset of the extent's first byte.
	Offset int64
	// Size is in bytes.
	Size int64
	// Descriptor belongs to the cache; send it before the Mapping ends.
	Descriptor *os.File
}

// Mapping is a client's window on what a device holds of a file. Its methods may be called from any goroutine.
type Mapping struct {
	f        *File
	h        *holding
	dev      *device
	pages    page.Range // pages of the file
	off, len int64      // bytes of the file
	writable bool
	lazy     bool
	process  uint32
	user     uint32
	tenant   residency.Tenant // who is charged; immutable
	// intruder says that the client will be able to store into the memory although it may not change the file.
	intruder bool
	extents  []Extent       // immutable once Map returned
	pin      *residency.Pin // pins the extents; immutable once they are reserved
	// exported says that the client was given the memory, so its programs may be using it. Protected by File.mu.
	exported bool
	// groups has the open groups that the mapping is in; nil until it begins the first one. Protected by File.mu.
	groups map[*Group]struct{}
	// held says that the client never gets the memory. Immutable.
	held bool
	// filled is the number of pages that Map brought up to date; immutable once Map returned.
	filled int64

	advice atomic.Uint32
	// readAhead predicts what a lazy mapping acquires next; nil for others. queue has predicted ranges that nobody
	// fetches yet, fetching says that a goroutine fetches one. Protected by readAheadMu.
	readAheadMu sync.Mutex
	readAhead   *prefetch.Device
	queue       []page.Range
	fetching    bool

	movable
	whole *Mapping // the movable mapping that this is a part of, for a bracket; else nil. Immutable

	lifetime
	// unmapErr is the result of the implicit release. Written once, before ended is done.
	unmapErr error
}

// Map maps a range of a file on a device for a client. Unless the request is lazy or movable, the whole range is up to
// date on the device when Map returns. It blocks on home, on the device, and on evictions. Errors: EINVAL (range),
// EOVERFLOW (the largest extent that a file can have), ENODEV (device), EACCES (the descriptor does not allow it),
// ENOMEM (budget; the error names it), ESHUTDOWN, and errors of home.
func (c *Cache) Map(ctx context.Context, src Source, req MapRequest) (*Mapping, error) {
	dev, err := c.device(gpubackend.Kind(req.Kind), req.Device, req.UUID)
	if err != nil {
		return nil, err
	}
	if err := req.check(src); err != nil {
		return nil, err
	}
	if req.Launder {
		if err := src.Kernel().Invalidate(req.Off, req.Len); err != nil && err != syscall.ENOENT {
			return nil, err
		}
	}
	f, done, err := c.open(ctx, src, req.Writable)
	if err != nil {
		return nil, err
	}
	defer done()
	if err := f.checkHome(ctx); err != nil {
		return nil, err
	}
	who := tenants.Process{User: req.User, Cgroup: req.Cgroup, Name: req.Tenant, Files: []string{src.Name()}}
	tenant, err := dev.tenant(who, req.Process, req.Limited)
	if err != nil {
		return nil, err
	}
	m := &Mapping{
		f: f, dev: dev,
		pages:    page.Covering(req.Off, req.Len),
		off:      req.Off,
		len:      req.Len,
		writable: req.Writable,
		lazy:     req.Lazy,
		process:  req.Process,
		user:     req.User,
		tenant:   tenant,
		held:     req.held,
	}
	if m.client = req.Client; req.IfLarger && m.pages.Bytes() <= dev.room.Budget() {
		m.client = nil
	}
	if m.client == nil && req.Lazy {
		m.readAhead = prefetch.NewDevice()
		m.readAhead.Resize(m.pages.End)
	}
	c.publications.start(&m.lifetime, m.files())
	ctx = mover.WithTenant(ctx, req.User)
	for tries := 0; ; tries++ {
		if err = m.begin(ctx, src); err == nil {
			break
		}
		if !errors.Is(err, errNotShared) || tries == mostBegins || ctx.Err() != nil {
			m.ended.Do(func() { m.end(); m.gone.Store(true) })
			return nil, err
		}
	}
	f.count(func(c *Counters) { c.Maps.Add(1) })
	return m, nil
}

// check refuses a request that the source does not allow.
func (req *MapRequest) check(src Source) error {
	switch {
	case req.Off < 0 || req.Off%page.Size != 0:
		return fail(syscall.EINVAL, "the offset %d is not a multiple of %d", req.Off, page.Size)
	case req.Len <= 0:
		return fail(syscall.EINVAL, "the length %d is not positive", req.Len)
	case req.Len > math.MaxInt64-req.Off:
		return fail(syscall.EINVAL, "the range ends past the largest file offset")
	case !src.Readable():
		return fail(syscall.EACCES, "the descriptor is not open for reading")
	case req.Writable && !src.Writable():
		return fail(syscall.EACCES, "a writable mapping needs a descriptor open for reading and writing")
	}
	return nil
}

// mostBegins is how often Map tries again because a user who must not share the memory was given it in between. Map
// does not try again once its ctx has ended: the undoing of begin's work may still be to come.
const mostBegins = 16

// begin finds memory for the mapping, brings it up to date and exports it. After an error the mapping has no memory.
func (m *Mapping) begin(ctx context.Context, src Source) (err error) {
	if m.h, err = m.f.choose(ctx, m, src.Writable()); err != nil {
		return err
	}
	f, c := m.f, m.f.c
	switch {
	case m.client == nil:
		if err := m.reserve(ctx); err != nil {
			return err
		}
	case m.pages.Bytes() > m.dev.room.Budget(): // its brackets may need pinned memory
		m.dev.room.Expect(movableSize(m.dev.info, m.pages))
	}
	if err := f.mu.LockIn(ctx); err != nil {
		if m.pin != nil {
			m.pin.Free()
		}
		return err
	}
	f.mappings[m] = struct{}{}
	kernel, size := f.kernel.Pages(), f.home.Size()
	f.mu.Unlock()
	c.beginMapping()
	if f.kernel.CachesWrites() && m.writable && f.ReachesPast(size) {
		// From now on the kernel asks before it writes.
		if err = kernel.Invalidate(-1, -1); err == nil {
			err = f.kernel.SendGrowth(ctx)
		}
	}
	if err == nil && !m.lazy && m.client == nil {
		began := time.Now()
		acquire := func() (int64, error) { return f.acquire(ctx, m.h, m.pages) }
		if _, m.filled, err = c.atOneVersion(ctx, []*File{f}, acquire); err == nil {
			m.pin.Accessed(m.pages)
			m.record(m.off, m.len, began)
		}
	}
	if err == nil && !m.held && m.client == nil {
		err = m.export(ctx)
	}
	if err != nil {
		f.whenFree(ctx, m.unpinLocked)
	}
	return err
}

// beginMapping counts a mapping of a file or of a view. endMapping takes the count back.
func (c *Cache) beginMapping() { c.mapped.Add(1) }

func (c *Cache) endMapping() {
	if c.mapped.Add(-1) == 0 {
		select {
		case c.idle <- struct{}{}:
		default:
		}
	}
}

// checkHome refreshes replicas and the kernel's pages if the file was changed directly in SOURCE.
func (f *File) checkHome(ctx context.Context) error {
	changed, kernel, err := f.checkedIn(ctx)
	if !changed {
		return err
	}
	if kerr := kernel.Invalidate(0, -1); err == nil && kerr != syscall.ENOENT {
		err = kerr
	}
	return err
}

// kernelIn returns the kernel's pages of the file.
func (f *File) kernelIn(ctx context.Context) (KernelPages, error) {
	if err := f.mu.LockIn(ctx); err != nil {
		return nil, err
	}
	defer f.mu.Unlock()
	return f.kernel.Pages(), nil
}

// Movable reports whether the mapping gets its memory from brackets, and the memory moves.
func (m *Mapping) Movable() bool { return m.client != nil }

// Device returns the device's description.
func (m *Mapping) Device() gpubackend.Info { return m.dev.info }

// Extents returns the extents that cover the mapping, in order. The descriptors of a read-only mapping do not allow
// writing.
func (m *Mapping) Extents() []Extent { return m.extents }

// export makes the bytes of the extents safe to show, and fills in m.extents. The mapping pins the extents.
func (m *Mapping) export(ctx context.Context) error {
	if err := m.f.refreshExposed(ctx, m); err != nil {
		return err
	}
	if err := m.f.mu.LockIn(ctx); err != nil {
		return err
	}
	defer m.f.mu.Unlock()
	err := m.revealLocked(ctx)
	if err != nil {
		return err
	}
	// Extents that a client maps do not move, so Watch calls the function once for each.
	m.pin.Watch(func(x *residency.Extent, at residency.Placement) {
		var d *os.File
		if err == nil {
			d, err = at.Memory.Export(m.writable)
		}
		m.extents = append(m.extents, Extent{Offset: x.Pages().Offset(), Size: x.Size(), Descriptor: d})
	})
	if err != nil {
		m.f.lostLocked(m.dev, err)
		return m.dev.fault(err)
	}
	return nil
}

// revealLocked prepares all of the memory for the client and notes that the client is given it.
func (m *Mapping) revealLocked(ctx context.Context) error {
	if err := m.dev.gone(); err != nil {
		m.f.letGoLocked(m.dev)
		return err
	}
	if err := m.f.exposeLocked(ctx, m); err != nil {
		return err
	}
	if !m.f.giveLocked(m) {
		return errNotShared
	}
	m.exported = true
	if m.writable || m.intruder {
		m.h.each(m.pages, func(x *extent, _ page.Range) {
			x.writable = true
			m.f.changed(x.pages()) // from now on programs may store into them, also outside their mappings
		})
	}
	return nil
}

// at returns the pages of the file that hold the n bytes at off of the mapping.
func (m *Mapping) at(off, n int64) (page.Range, error) {
	if off < 0 || n <= 0 || off > m.len || n > m.pages.Bytes()-off {
		return page.Range{}, fail(syscall.EINVAL, "%d bytes at %d are not inside the mapping of %d bytes", n, off,
			m.len)
	}
	return page.Covering(m.off+off, n), nil
}

// Acquire brings the n bytes at off (counted from the start of the mapping) up to date on the device. It returns the
// number of pages that were not up to date. With launder, it first flushes the kernel's dirty pages of the range.
// EINVAL outside the mapping.
func (m *Mapping) Acquire(ctx context.Context, off, n int64, launder bool) (pages int64, err error) {
	_, pages, err = m.f.c.AcquireAll(ctx, []AcquireRange{{m, off, n}}, launder)
	return pages, err
}

func (m *Mapping) files() []*File { return []*File{m.f} }

func (m *Mapping) lifeOf() *lifetime { return &m.lifetime }

func (m *Mapping) check(off, n int64) error {
	_, err := m.at(off, n)
	return err
}

// bring carries out one turn of an acquire.
func (m *Mapping) bring(ctx context.Context, off, n int64, launder bool) (pages int64, err error) {
	rg, err := m.at(off, n)
	if err != nil {
		return 0, err
	}
	if err := m.enter(m.dev); err != nil {
		return 0, err
	}
	defer m.calls.Done()
	ctx = mover.WithTenant(ctx, m.user)
	if launder {
		kernel, err := m.f.kernelIn(ctx)
		if err != nil {
			return 0, err
		}
		if err := kernel.Invalidate(rg.Offset(), rg.Bytes()); err != nil && err != syscall.ENOENT {
			return 0, err
		}
	}
	if err := m.f.checkHome(ctx); err != nil {
		return 0, err
	}
	m.f.count(func(c *Counters) { c.Acquires.Add(1) })
	began := time.Now()
	if pages, err = m.acquire(ctx, rg); err != nil {
		return pages, err
	}
	m.record(m.off+off, n, began)
	if m.readAhead != nil {
		m.predict(rg)
	}
	return pages, nil
}

// Release makes the stores of the device's programs into the n bytes at off visible to everyone. It returns the number
// of pages modified since the last agreement. Bytes that programs store at the same time are released now or later.
// EINVAL outside the mapping. EBUSY if it left out stores into pages of open groups.
func (m *Mapping) Release(ctx context.Context, off, n int64) (pages int64, err error) {
	rg, err := m.at(off, n)
	if err != nil || !m.writable {
		return 0, err
	}
	if err := m.enter(m.dev); err != nil {
		return 0, err
	}
	defer m.calls.Done()
	pages, grouped, err := m.release(ctx, rg)
	if err == nil && grouped > 0 {
		err = fail(syscall.EBUSY, "%d pages of %s are in an open group on device %d: only the release of the group publishes their stores", grouped,
			m.f.Name(), m.dev.info.Ordinal)
	}
	return pages, err
}

// release calls File.release for the stores of the mapping's programs.
func (m *Mapping) release(ctx context.Context, rg page.Range) (pages, grouped int64, err error) {
	began, pin := time.Now(), m.pin
	if m.client != nil { // extents that moved out were released before
		pin = m.dev.room.Keep(m.h, rg)
		defer pin.Free()
	}
	modified, grouped, err := m.f.release(ctx, m.h, rg)
	m.changed(pin, modified, began)
	return pagesOf(modified), grouped, err
}

// changed reports a release: modified pages of pin's extents to the eviction rule, and to a recording.
func (m *Mapping) changed(pin *residency.Pin, modified []page.Range, began time.Time) {
	pin.Changed(modified)
	if m.f.c.Recording() != nil {
		var list []Access
		for _, run := range modified {
			list = append(list, Access{Off: run.Offset(), Len: run.Bytes(), Began: began, Write: true})
		}
		m.recordAll(list...)
	}
}

// Sync releases the range, then waits until the bytes are home and, if durable, on stable storage.
func (m *Mapping) Sync(ctx context.Context, off, n int64, durable bool) error {
	if _, err := m.Release(ctx, off, n); err != nil {
		return err
	}
	if err := m.enter(m.dev); err != nil {
		return err
	}
	defer m.calls.Done()
	if !durable {
		return m.f.Sync(ctx, nil)
	}
	return m.f.Sync(ctx, func() error {
		if err := m.f.mu.LockIn(ctx); err != nil {
			return err
		}
		home := m.f.home.Backing()
		m.f.mu.Unlock()
		return home.Sync()
	})
}

// TakePastEnd returns how many pages were found with stores past the end of the file on the mapping's device, and
// resets the count. Such stores are not kept.
func (m *Mapping) TakePastEnd() int64 { return m.h.pastEnd.Swap(0) }

// Unmap releases the whole mapping implicitly and ends it. It first aborts the groups that the mapping is in. It waits
// for calls in progress. It is idempotent: every call returns the result of the first one.
func (m *Mapping) Unmap(ctx context.Context) error {
	m.ended.Do(func() {
		m.finish()
		m.abortGroups()
		if m.writable {
			_, _, m.unmapErr = m.release(context.WithoutCancel(ctx), m.pages)
		}
		m.leave()
	})
	return m.unmapErr
}

// leave takes the mapping out of the file.
func (m *Mapping) leave() {
	m.end()
	m.gone.Store(true)
	if m.client != nil {
		m.endLeases()
	}
	m.f.whenFree(context.Background(), m.unpinLocked)
}

// unpinLocked undoes begin.
func (m *Mapping) unpinLocked() {
	delete(m.f.mappings, m)
	m.f.c.endMapping()
	if m.pin != nil {
		if m.abandoned.Load() {
			m.pin.Abandon()
		}
		m.pin.Free()
	}
	if m.dev.lost.Load() {
		m.f.letGoLocked(m.dev) // also what it got after the others had let go
	}
	m.f.dropIdleLocked()
}

// Names returns the name of the file.
func (m *Mapping) Names() []string { return []string{m.f.Name()} }
