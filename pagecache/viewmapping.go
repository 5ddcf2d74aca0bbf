package pagecache

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"syscall"

	humanize "github.com/dustin/go-humanize"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/residency"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

// ViewRequest is a client's request for a view. Device, UUID, Kind, Process, User and Limited are as in MapRequest.
type ViewRequest struct {
	Device    int
	UUID      gpubackend.UUID
	Kind      uint8
	Segments  []view.Segment // files are numbered as the sources. OpenView keeps the slice
	Alignment int64          // of each segment in the view
	Lazy      bool           // nobody will call Fill
	Launder   bool           // the fill first flushes the kernel's dirty pages of the files
	Process   uint32         // as in MapRequest
	User      uint32
	Limited   bool
	// Cgroup is as in MapRequest.
	Cgroup func() (string, error)
	// Tenant is as in MapRequest.
	Tenant string
}

// ViewMapping is a client's window on a View. Its methods may be called from any goroutine, Fill from one at a time.
type ViewMapping struct {
	v       *View
	pin     *residency.Pin
	extents []Extent    // immutable once OpenView returned
	req     ViewRequest // immutable
	// begun ends the wait of the first file's other views for this one.
	begun func()
	// firstFill gets the result of the fill that OpenView began; nil if the view is lazy, or once Fill has it.
	firstFill chan error
	// unneeded says that the view's memory goes with this mapping, if it is the last one: see Advise.
	unneeded atomic.Bool

	lifetime
}

// OpenView maps a view of files on a device for a client. Unless the request is lazy, it begins to bring the bytes, and
// the caller calls Fill next. Meanwhile the memory is exported, and the client imports it. Both take milliseconds for
// large views. It blocks on homes, on the device, and on evictions. Errors: EINVAL (segments, alignment), EOVERFLOW
// (past the largest file), EACCES (a descriptor does not allow reading), ENODEV, ENOMEM (budget, or host memory for the
// list of segments), ESHUTDOWN, and errors of homes.
func (c *Cache) OpenView(ctx context.Context, sources []Source, req ViewRequest) (*ViewMapping, error) {
	dev, err := c.device(gpubackend.Kind(req.Kind), req.Device, req.UUID)
	if err != nil {
		return nil, err
	}
	layout, err := req.layout(dev, sources)
	if err != nil {
		return nil, err
	}
	files := make([]*File, len(sources))
	for i, src := range sources {
		f, done, err := c.open(ctx, src, false)
		if err != nil {
			return nil, err
		}
		defer done()
		files[i] = f
	}
	names := make([]string, len(sources))
	for i, src := range sources {
		names[i] = src.Name()
	}
	by, err := dev.tenant(tenants.Process{User: req.User, Cgroup: req.Cgroup, Name: req.Tenant, Files: names},
		req.Process, req.Limited)
	if err != nil {
		return nil, err
	}
	key, err := newViewKey(ctx, c, dev, req, files)
	if err != nil {
		return nil, err
	}
	v, err := c.joinView(dev, key, req.User, files, layout)
	if err != nil {
		return nil, err
	}
	m := &ViewMapping{v: v, req: req}
	m.req.Segments = nil // the View has them
	c.publications.start(&m.lifetime, m.files())
	m.calls.Add(1) // Close may Unmap it from now on, and waits
	err = m.begin(ctx, req, by)
	m.calls.Done()
	if err != nil {
		m.ended.Do(func() { m.leave(ctx) })
		return nil, err
	}
	for _, p := range v.parts {
		p.f.counters.Maps.Add(1)
	}
	c.counters.Maps.Add(1)
	return m, nil
}

// layout returns the layout of the view, unless it is too large for the device or may not be read.
func (req *ViewRequest) layout(dev *device, sources []Source) (*view.Layout, error) {
	layout, err := view.New(len(sources), req.Segments, req.Alignment)
	switch {
	case errors.Is(err, view.ErrTooFar):
		return nil, fail(syscall.EOVERFLOW, "%v", err)
	case err != nil:
		return nil, fail(syscall.EINVAL, "%v", err)
	case layout.Size() > dev.room.Budget(): // checked before host memory is used
		return nil, fail(syscall.ENOMEM,
			"the view needs %s on device %d, whose budget is %s; map less, or raise gpu-memory with 'gaiafs set'",
			humanize.IBytes(uint64(layout.Size())), dev.info.Ordinal, humanize.IBytes(uint64(dev.room.Budget())))
	}
	for _, src := range sources {
		if !src.Readable() {
			return nil, fail(syscall.EACCES, "the descriptor of %s is not open for reading", src.Name())
		}
	}
	return layout, nil
}

// begin gets memory for the view, begins to fill it, and exports it. Each extent is zeroed by the first who needs it:
// the fill, before bytes go there, or the export. So the fill need not wait until all memory is zeros, and if it fails,
// clients find no old bytes.
func (m *ViewMapping) begin(ctx context.Context, req ViewRequest, by residency.Tenant) (err error) {
	v := m.v
	v.c.beginMapping()
	v.mu.Lock()
	v.mappings[m] = struct{}{}
	v.mu.Unlock()
	m.begun = func() {}
	if firstFile := v.parts[0].f; !req.Lazy {
		firstFile.views.expect(1)
		m.begun = sync.OnceFunc(func() { firstFile.views.expect(-1) })
	}
	m.pin, err = v.dev.room.Reserve(ctx, v, residency.Request{
		Pages: page.Range{End: page.Count(v.layout.Size())},
		Size:  residency.ViewSize(v.dev.info, v.layout.Size()),
		Ends:  true,
		By:    by,

		Unzeroed: true,
	})
	if err != nil {
		return m.deviceError(err)
	}
	stop := func() {}
	if !req.Lazy {
		stop = m.beginFill(ctx)
	}
	if err = m.export(ctx); err != nil {
		stop()
	}
	return err
}

// deviceError reports an error of the device, and returns it as a client sees it. err may be nil.
func (m *ViewMapping) deviceError(err error) error {
	if err != nil {
		m.v.c.lose(m.v.dev, err)
		err = m.v.dev.fault(err)
	}
	return err
}

// export makes the descriptors of the extents, which it zeroes first.
func (m *ViewMapping) export(ctx context.Context) (err error) {
	m.pin.Watch(func(x *residency.Extent, at residency.Placement) {
		e := Extent{Offset: x.Pages().Offset(), Size: x.Size()}
		if err == nil {
			err = x.Zero(ctx)
		}
		if err == nil {
			e.Descriptor, err = at.Memory.Export(false)
		}
		m.extents = append(m.extents, e)
	})
	return m.deviceError(err)
}

// Fill brings the view up to date for the first time, or waits until OpenView has done so. It blocks on homes and on
// the device. If it fails, it may be called again. Errors: EINVAL after Unmap, ENODEV, ENOMEM (host memory for copies),
// and errors of homes.
func (m *ViewMapping) Fill(ctx context.Context) error {
	first := m.firstFill
	if first == nil {
		return m.fill(ctx)
	}
	m.firstFill = nil
	select {
	case err := <-first:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// beginFill begins to fill the view. stop ends that, and waits for its end.
func (m *ViewMapping) beginFill(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	ended := context.AfterFunc(m.life, cancel)
	first := make(chan error, 1)
	m.firstFill = first
	go func() {
		defer cancel()
		defer ended()
		first <- m.fill(ctx)
	}()
	return func() {
		cancel()
		<-first
	}
}

func (m *ViewMapping) fill(ctx context.Context) error {
	defer m.begun()
	if err := m.enter(m.v.dev); err != nil {
		return err
	}
	defer m.calls.Done()
	v := m.v
	_, _, err := v.c.atOneVersion(ctx, v.files, func() (int64, error) {
		return v.acquire(ctx, page.Span(0, v.layout.Size()), m.req.Launder, m.begun)
	})
	return err
}

// leave ends the mapping.
func (m *ViewMapping) leave(ctx context.Context) {
	m.begun()
	m.end()
	m.gone.Store(true)
	if m.pin != nil {
		if m.abandoned.Load() {
			m.pin.Abandon()
		}
		m.pin.Free()
	}
	m.v.mu.Lock()
	delete(m.v.mappings, m)
	m.v.mu.Unlock()
	m.v.c.endMapping()
	m.v.leave(ctx, m.unneeded.Load())
}

// Device returns the device's description.
func (m *ViewMapping) Device() gpubackend.Info { return m.v.dev.info }

// Names returns the names of the files that the view has bytes of.
func (m *ViewMapping) Names() (names []string) {
	for _, f := range m.v.files {
		names = append(names, f.Name())
	}
	return names
}

// Extents returns the extents that cover the view, in order; their offsets are offsets in the view. The descriptors do
// not allow writing, if this kind of device can enforce that.
func (m *ViewMapping) Extents() []Extent { return m.extents }

// Size returns the size of the view in bytes.
func (m *ViewMapping) Size() int64 { return m.v.layout.Size() }

// at returns the n bytes at off of the view.
func (m *ViewMapping) at(off, n int64) (page.Bytes, error) {
	size := m.v.layout.Size()
	if off < 0 || n <= 0 || off > size || n > page.Count(size).Offset()-off {
		return page.Bytes{}, fail(syscall.EINVAL, "%d bytes at %d are not inside the view of %d bytes", n, off, size)
	}
	return page.Span(off, n).Intersect(page.Span(0, size)), nil
}

// Acquire brings the n bytes at off of the view up to date, and returns the number of file pages that were copied. With
// launder, it first flushes the kernel's dirty pages of the files. EINVAL outside the view.
func (m *ViewMapping) Acquire(ctx context.Context, off, n int64, launder bool) (pages int64, err error) {
	_, pages, err = m.v.c.AcquireAll(ctx, []AcquireRange{{m, off, n}}, launder)
	return pages, err
}

func (m *ViewMapping) files() []*File { return m.v.files }

func (m *ViewMapping) lifeOf() *lifetime { return &m.lifetime }

func (m *ViewMapping) check(off, n int64) error {
	_, err := m.at(off, n)
	return err
}

// bring carries out one turn of an acquire.
func (m *ViewMapping) bring(ctx context.Context, off, n int64, launder bool) (pages int64, err error) {
	b, err := m.at(off, n)
	if err != nil {
		return 0, err
	}
	if err := m.enter(m.v.dev); err != nil {
		return 0, err
	}
	defer m.calls.Done()
	for _, p := range m.v.parts {
		p.f.counters.Acquires.Add(1)
	}
	m.v.c.counters.Acquires.Add(1)
	m.pin.Accessed(page.Covering(b.Off, b.Len()))
	return m.v.acquire(ctx, b, launder, func() {})
}

// Release does nothing: nobody may store into a view.
func (m *ViewMapping) Release(context.Context, int64, int64) (pages int64, err error) { return 0, nil }

// TakePastEnd returns 0.
func (m *ViewMapping) TakePastEnd() int64 { return 0 }

// Sync does nothing either.
func (m *ViewMapping) Sync(context.Context, int64, int64, bool) error { return nil }

// Advise gives a hint. AdviceWillNeed begins to bring the range up to date. AdviceDontNeed for the whole view frees
// its memory when this mapping ends, if it is the last one. Other advice does nothing for a view. EINVAL outside the
// view or for an unknown advice.
func (m *ViewMapping) Advise(_ context.Context, off, n int64, a Advice) error {
	b, err := m.at(off, n)
	switch {
	case err != nil:
		return err
	case a > AdviceDontNeed:
		return fail(syscall.EINVAL, "there is no advice %d", a)
	case a == AdviceDontNeed:
		m.unneeded.Store(off == 0 && n >= m.v.layout.Size())
		return nil
	case a != AdviceWillNeed:
		return nil
	}
	if err := m.enter(m.v.dev); err != nil {
		return err
	}
	go func() {
		defer m.calls.Done()
		if _, err := m.v.acquire(m.life, b, false, func() {}); err != nil && m.life.Err() == nil {
			m.v.c.log.Warn("fetching ahead", "file", m.v.name(), "device", m.v.dev.info.Ordinal, "error", err)
		}
	}()
	return nil
}

// Unmap ends the mapping. It waits for calls in progress, and is idempotent.
func (m *ViewMapping) Unmap(context.Context) error {
	m.ended.Do(func() {
		m.finish()
		m.leave(context.Background())
	})
	return nil
}

// Movable reports false: the memory of views does not move.
func (m *ViewMapping) Movable() bool { return false }
