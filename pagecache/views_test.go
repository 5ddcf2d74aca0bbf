package pagecache

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

// viewer is a client that maps a view.
type viewer struct {
	*ViewMapping
	m       *machine
	sources []*source
}

// bytesOf returns a segment of one row.
func bytesOf(off, n int64) view.Segment { return view.Segment{Offset: off, Length: n, Count: 1} }

// mapView maps a view whose bytes are up to date, unless the request is lazy.
func (c *Cache) mapView(ctx context.Context, sources []Source, req ViewRequest) (*ViewMapping, error) {
	m, err := c.OpenView(ctx, sources, req)
	if err != nil || req.Lazy {
		return m, err
	}
	if err := m.Fill(ctx); err != nil {
		_ = m.Unmap(ctx)
		return nil, err
	}
	return m, nil
}

func (m *machine) tryView(req ViewRequest, sources ...*source) (*viewer, error) {
	list := make([]Source, len(sources))
	for i, s := range sources {
		list[i] = s
	}
	if req.Alignment == 0 {
		req.Alignment = 256
	}
	vm, err := m.cache.mapView(context.Background(), list, req)
	if err != nil {
		return nil, err
	}
	return &viewer{vm, m, sources}, nil
}

func (m *machine) view(req ViewRequest, sources ...*source) *viewer {
	m.t.Helper()
	v, err := m.tryView(req, sources...)
	require.NoError(m.t, err)
	return v
}

// all returns the view's bytes on the device.
func (v *viewer) all() []byte {
	v.m.t.Helper()
	b := make([]byte, v.Size())
	var copies []gpubackend.Copy
	for _, x := range v.pin.Extents() {
		off := x.Pages().Offset()
		n := min(x.Size(), v.Size()-off)
		if n <= 0 {
			continue
		}
		_, mem := v.m.devices[v.Device().Ordinal].Inner(x.Memory())
		copies = append(copies, gpubackend.Copy{Mem: mem, Host: b[off : off+n]})
	}
	gpu, _ := v.m.devices[v.Device().Ordinal].Inner(v.pin.Extents()[0].Memory())
	require.NoError(v.m.t, gpu.CopyOut(context.Background(), copies))
	return b
}

// want returns the bytes that the view should have, computed from homes and devices.
func (v *viewer) want() []byte {
	b, at := make([]byte, v.Size()), int64(0)
	files := make([][]byte, len(v.sources))
	for i, src := range v.sources {
		files[i] = src.released(v.m)
	}
	for _, s := range v.v.layout.Segments() {
		at = (at + 255) &^ 255
		for k := range s.Count {
			off := s.Offset + k*s.Stride
			copy(b[at:at+s.Length], files[s.File][min(off, int64(len(files[s.File]))):])
			at += s.Length
		}
	}
	return b
}

// released returns the file's bytes: home's, with the released bytes of devices that home does not have yet. No page is
// pending of two devices.
func (s *source) released(m *machine) []byte {
	m.t.Helper()
	s.home.mu.Lock()
	b := append(make([]byte, 0, len(s.home.data)+page.Size), s.home.data...)
	s.home.mu.Unlock()
	f := s.attached
	if f == nil {
		return b
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	_, err := f.homeLocked().ReadAt(b, 0)
	require.NoError(m.t, err)
	for _, p := range f.lrc.Pending(page.Range{End: page.Count(int64(len(b)))}, true) {
		h := f.holdings[p.Owner]
		var copies []gpubackend.Copy
		h.each(p.Range, func(x *extent, part page.Range) {
			_, mem := m.devices[h.dev.info.Ordinal].Inner(x.Memory())
			copies = append(copies, gpubackend.Copy{Mem: mem, Off: x.off(part.Start),
				Host: b[:cap(b)][part.Start.Offset():part.End.Offset()]})
		})
		x, _ := h.at(p.Range.Start)
		gpu, _ := m.devices[h.dev.info.Ordinal].Inner(x.Memory())
		require.NoError(m.t, gpu.CopyOut(context.Background(), copies))
	}
	return b
}

func (v *viewer) acquire() int64 {
	v.m.t.Helper()
	n, err := v.Acquire(context.Background(), 0, v.Size(), false)
	require.NoError(v.m.t, err)
	return n
}

// check compares the view with homes.
func (v *viewer) check() {
	v.m.t.Helper()
	want, got := v.want(), v.all()
	if bytes.Equal(want, got) {
		return
	}
	for i := range want {
		if want[i] != got[i] {
			require.Fail(v.m.t, "the view is wrong", "byte %d is %d, not %d", i, got[i], want[i])
		}
	}
}

func (v *viewer) unmap() {
	v.m.t.Helper()
	require.NoError(v.m.t, v.Unmap(context.Background()))
}

func TestViewPacksSegments(t *testing.T) {
	m := newMachine(t, 1)
	a, b := m.noisyFile(5<<20+3), m.noisyFile(9000)
	m.view(ViewRequest{Segments: []view.Segment{
		bytesOf(4000, 3<<20),
		{File: 1, Offset: 5, Length: 100, Stride: 333, Count: 20},
		bytesOf(4000, 200), // again
		{Offset: 1 << 20, Length: 5000, Stride: 20000, Count: 100},
		bytesOf(5<<20, 9000), // past end of file
		{File: 1, Offset: 8999, Length: 1, Count: 1},
		bytesOf(0, 1),
	}}, a, b).check()
}

func TestViewIsCoherent(t *testing.T) {
	m := newMachine(t, 2)
	src := m.noisyFile(1 << 20)
	v := m.view(ViewRequest{Segments: []view.Segment{bytesOf(100, 300_000), bytesOf(500_001, 300_000)}}, src)
	v.check()
	require.Zero(t, v.acquire(), "nothing changed")

	src.write(t, 200_000, []byte("written"))
	require.EqualValues(t, 1, v.acquire())
	v.check()
	src.write(t, 450_000, []byte("not in the view"))
	require.Zero(t, v.acquire())

	for dev := range 2 { // released by the view's own device, and by another one
		p := m.run(src, dev, 0, 1<<20, true)
		p.store(600_000, byte('a'+dev))
		p.release()
		require.EqualValues(t, 1, v.acquire(), "device %d", dev)
		v.check()
		require.Equal(t, byte('a'+dev), v.all()[(300_000+255)&^255+600_000-500_001])
		p.unmap()
	}
	src.home.editAt(120_000, []byte("in SOURCE"))
	v.acquire()
	v.check()
	src.truncate(t, 700_000)
	v.acquire()
	v.check()
	src.truncate(t, 900_000)
	src.write(t, 850_000, []byte("behind the former end"))
	v.acquire()
	v.check()
	src.home.resize(1000)
	v.acquire()
	v.check()
}

// TestPartOfAView: an acquire brings the range that it was asked for.
func TestPartOfAView(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(1 << 20)
	v := m.view(ViewRequest{Lazy: true, Segments: []view.Segment{bytesOf(0, 400_000), bytesOf(600_000, 300_000)}}, src)
	require.Equal(t, make([]byte, v.Size()), v.all(), "memory that was not filled is zero")
	n, err := v.Acquire(context.Background(), 5000, 10_000, false)
	require.NoError(t, err)
	require.EqualValues(t, 3, n)
	require.Equal(t, src.home.bytes(5000, 10_000), v.all()[5000:15_000])
	require.Equal(t, make([]byte, 1000), v.all()[400_384:401_384])
	n, err = v.Acquire(context.Background(), 400_384, 300_000, false)
	require.NoError(t, err)
	require.EqualValues(t, page.Covering(600_000, 300_000).Len(), n)
	v.acquire()
	v.check()
	for _, r := range [][2]int64{{-1, 1}, {0, 0}, {0, v.Size() + page.Size}, {v.Size() + page.Size, 1}, {1, -1}} {
		_, err = v.Acquire(context.Background(), r[0], r[1], false)
		require.ErrorIs(t, err, syscall.EINVAL)
	}
	require.NoError(t, v.Advise(context.Background(), 0, 1, AdviceWillNeed))
	require.NoError(t, v.Advise(context.Background(), 0, 1, AdviceDontNeed))
	require.ErrorIs(t, v.Advise(context.Background(), 0, 1, 77), syscall.EINVAL)
	v.unmap()
	_, err = v.Acquire(context.Background(), 0, 1, false)
	require.ErrorIs(t, err, syscall.EINVAL)
}

// TestViewIsShared: programs of one user share a view of the same segments, even one that nobody maps any more. Other
// users have their own.
func TestViewIsShared(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(1 << 20)
	req := ViewRequest{Segments: []view.Segment{bytesOf(1, 1<<19)}, User: alice}
	v := m.view(req, src)
	filled := func() int64 { return m.cache.counters.ViewPages.Load() }
	used, before := m.used(), filled()
	require.Positive(t, before)
	same := m.view(req, src)
	require.Equal(t, used, m.used())
	v.unmap()
	same.unmap()
	again := m.view(req, src)
	again.check()
	require.Equal(t, used, m.used())
	require.Equal(t, before, filled(), "the bytes were there")

	req.User = bob
	m.view(req, src).check()
	require.Equal(t, 2*used, m.used())
	req.Segments = []view.Segment{bytesOf(2, 1<<19)}
	m.view(req, src).check()
	require.Equal(t, 3*used, m.used())
	require.Len(t, m.cache.Status().Files[0].Views, 3)
}

// TestViewAfterRightsWereTaken: memory that was given to a program gets no more bytes once rights were taken away and
// nobody maps it.
func TestViewAfterRightsWereTaken(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(1 << 20)
	src.home.rights = Rights{UID: alice, GID: alice, Mode: 0o644}
	req := ViewRequest{Segments: []view.Segment{bytesOf(0, 1<<19)}, User: bob}
	v := m.view(req, src)
	kept := v.pin.Extents()[0]
	src.chmod(func(r *Rights) { r.Mode = 0o600 })
	src.write(t, 0, []byte("secret"))
	later := m.view(req, src)
	require.NotSame(t, kept, later.pin.Extents()[0])
	v.unmap()
	later.unmap()
	src.chmod(func(r *Rights) { r.Mode = 0o400 })
	require.Empty(t, m.cache.Status().Files, "unmapped views go when rights are taken away")
}

// TestViewMakesRoom: an unmapped view gives its memory to others, and is filled again.
func TestViewMakesRoom(t *testing.T) {
	m := newMachine(t, 1, memory(8<<20))
	src := m.noisyFile(6 << 20)
	req := ViewRequest{Segments: []view.Segment{bytesOf(10, 5<<20)}}
	m.view(req, src).unmap()
	p := m.run(src, 0, 0, 4<<20, false)
	require.Positive(t, m.cache.counters.Evictions.Load())
	_, err := m.tryView(req, src)
	require.ErrorIs(t, err, syscall.ENOMEM)
	p.unmap()
	v := m.view(req, src)
	v.check()
	v.unmap()
	m.run(src, 0, 0, 8<<20, false)
	require.Eventually(t, func() bool { return m.cache.memory.classes[memoryViews].Load() == 0 }, time.Minute,
		time.Millisecond)
}

func TestViewRefuses(t *testing.T) {
	m := newMachine(t, 1, memory(8<<20))
	src := m.noisyFile(100)
	for name, c := range map[string]struct {
		req  ViewRequest
		want syscall.Errno
		text string
	}{
		"no segments": {ViewRequest{}, syscall.EINVAL, "0 segments"},
		"no file": {ViewRequest{Segments: []view.Segment{{File: 1, Length: 1, Count: 1}}}, syscall.EINVAL,
			"no file 1"},
		"past what files": {ViewRequest{Segments: []view.Segment{bytesOf(1<<63-1, 1)}}, syscall.EOVERFLOW,
			"largest file"},
		"more than is there": {ViewRequest{Segments: []view.Segment{bytesOf(0, 9<<20)}}, syscall.ENOMEM,
			"raise gpu-memory"},
		"no device": {ViewRequest{Device: 5, Segments: []view.Segment{bytesOf(0, 1)}}, syscall.ENODEV,
			"device 5"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := m.tryView(c.req, src)
			require.ErrorIs(t, err, c.want)
			require.ErrorContains(t, err, c.text)
		})
	}
	require.Empty(t, m.cache.Status().Files)
	require.Empty(t, m.cache.viewsByKey)
}

// TestViewsTakeNoMoreHostMemoryThanThereIs: the lists of segments count, and a request for too many fails.
func TestViewsTakeNoMoreHostMemoryThanThereIs(t *testing.T) {
	m := newMachine(t, 1, hostMemory(4<<20))
	src := m.noisyFile(100)
	segments := make([]view.Segment, 1<<17)
	for i := range segments {
		segments[i] = bytesOf(int64(i), 1)
	}
	_, err := m.tryView(ViewRequest{Alignment: 1, Segments: segments}, src)
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.ErrorContains(t, err, "--host-memory")
	require.Empty(t, m.cache.viewsByKey)
}

// TestViewAfterAFault: the next acquire brings the bytes that could not be read or copied.
func TestViewAfterAFault(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(1 << 20)
	req := ViewRequest{Segments: []view.Segment{bytesOf(10, 1<<19)}}
	src.home.failReads(syscall.EIO)
	_, err := m.tryView(req, src)
	require.ErrorIs(t, err, syscall.EIO)
	src.home.failReads(nil)
	v := m.view(req, src)
	v.check()
	src.write(t, 20, []byte("new"))
	m.devices[0].Fail(faulty.CopyIn, 1, errors.New("the bus is broken"))
	_, err = v.Acquire(context.Background(), 0, v.Size(), false)
	require.Error(t, err)
	v.acquire()
	v.check()
}

// TestUnneededView: the memory of a view goes with the last mapping if that was told that nobody needs it.
func TestUnneededView(t *testing.T) {
	m := newMachine(t, 1)
	req := ViewRequest{Segments: []view.Segment{bytesOf(10, 1<<19)}}
	src := m.noisyFile(1 << 20)
	used := func() int64 { return m.cache.Status().Devices[0].UsedBytes }
	unneeded := func(v *viewer, n int64) {
		require.NoError(t, v.Advise(context.Background(), 0, n, AdviceDontNeed))
		v.unmap()
	}
	first, second := m.view(req, src), m.view(req, src)
	before := used()
	unneeded(first, first.Size())
	second.check()
	require.Equal(t, before, used(), "another program maps it")
	second.unmap()
	require.Equal(t, before, used(), "the last program did not say so")
	third := m.view(req, src)
	unneeded(third, 4096)
	require.Equal(t, before, used(), "only a part of it")
	unneeded(m.view(req, src), first.Size())
	require.Zero(t, used())
	m.view(req, src).check()
}

// TestViewOfALostDevice: the client gets an error, and everything can be closed.
func TestViewOfALostDevice(t *testing.T) {
	m := newMachine(t, 2)
	src := m.noisyFile(1 << 20)
	req := ViewRequest{Segments: []view.Segment{bytesOf(10, 1<<19)}}
	v := m.view(req, src)
	idle := ViewRequest{Segments: []view.Segment{bytesOf(11, 1<<19)}}
	m.view(idle, src).unmap()
	src.write(t, 20, []byte("new"))
	m.devices[0].Lose()
	_, err := v.Acquire(context.Background(), 0, v.Size(), false)
	require.ErrorIs(t, err, syscall.ENODEV)
	_, err = m.tryView(idle, src)
	require.ErrorIs(t, err, syscall.ENODEV)
	v.unmap()
	req.Device = 1
	m.view(req, src).check()
}

// TestViewOfARemovedFile: mappings stay, and unmapped views go.
func TestViewOfARemovedFile(t *testing.T) {
	m := newMachine(t, 1)
	a, b := m.noisyFile(1<<20), m.noisyFile(1<<20)
	v := m.view(ViewRequest{Segments: []view.Segment{bytesOf(10, 1<<19), {File: 1, Offset: 3, Length: 9, Count: 1}}}, a,
		b)
	m.view(ViewRequest{Segments: []view.Segment{bytesOf(11, 1<<19)}}, a).unmap()
	m.cache.Forget(a.id)
	b.write(t, 5, []byte("new"))
	v.acquire()
	v.check()
	require.Eventually(t, func() bool { return len(m.cache.Status().Files[0].Views) == 1 }, time.Minute,
		time.Millisecond)
	v.unmap()
	require.Eventually(t, func() bool { return m.used() == 0 && len(m.cache.Status().Files) == 0 }, time.Minute,
		time.Millisecond)
}

// fromHome returns the number of pages that came from homes.
func (m *machine) fromHome() int64 {
	c := &m.cache.counters
	return c.CachedPages.Load() + c.DirectPages.Load() + c.BufferedPages.Load()
}

// TestViewsCopyFromEachOther: pages on one device do not come from home again, even if only a mapping has them.
func TestViewsCopyFromEachOther(t *testing.T) {
	m := newMachine(t, 3)
	src := m.noisyFile(4 << 20)
	req := ViewRequest{Segments: []view.Segment{bytesOf(100, 3<<20),
		{Offset: 50, Length: 3000, Stride: 7000, Count: 500}}}
	m.view(req, src).check()
	before := m.fromHome()
	req.Device = 1
	v := m.view(req, src)
	v.check()
	require.Equal(t, before, m.fromHome())
	src.write(t, 1<<20, make([]byte, 1<<20))
	v.acquire() // from home, because the first view is stale there
	v.check()
	require.Equal(t, before+256, m.fromHome())

	// Another user's view has other memory, and its bytes are not trusted.
	req.User, req.Device = alice, 2
	m.view(req, src).check()
	require.Equal(t, 2*before+256, m.fromHome())

	m.run(src, 2, 0, 4<<20, false)
	before = m.fromHome()
	m.view(ViewRequest{Device: 2, Segments: []view.Segment{bytesOf(77, 2<<20)}}, src).check()
	m.view(ViewRequest{Device: 0, Segments: []view.Segment{bytesOf(78, 2<<20)}}, src).check()
	require.Equal(t, before, m.fromHome(), "from the extents of a mapping")
	w := m.run(src, 2, 0, 4<<20, true)
	m.view(ViewRequest{Device: 2, Segments: []view.Segment{bytesOf(79, 2<<20)}}, src).check()
	require.Greater(t, m.fromHome(), before, "programs may have unreleased stores there")
	w.store(200, 'u')
	m.view(ViewRequest{Device: 2, Segments: []view.Segment{bytesOf(80, 2<<20)}}, src).check()
}

// TestViewsThatAreFilledAtOnce: one device is filled from home, and the others follow it, page by page.
func TestViewsThatAreFilledAtOnce(t *testing.T) {
	for name, fails := range map[string]bool{"and all goes well": false, "and the first one fails": true} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, 3)
			m.cache.leastPeer = 1
			src := m.noisyFile(8 << 20)
			req := ViewRequest{Segments: []view.Segment{bytesOf(100, 7<<20)}}
			var gate *faulty.Gate
			if gate = m.devices[0].Hold(faulty.CopyIn); fails {
				m.devices[0].Fail(faulty.CopyIn, 2, errors.New("the bus is broken"))
			}
			var group sync.WaitGroup
			views := make([]*viewer, 3)
			errs := make([]error, 3)
			begin := func(i int) {
				req := req
				req.Device = i
				group.Go(func() { views[i], errs[i] = m.tryView(req, src) })
			}
			begin(0)
			<-gate.Arrived() // the pages of the first view are coming
			begin(1)
			begin(2)
			require.Eventually(t, func() bool { // both wait for the first view
				f := m.cache.Lookup(src.id)
				f.mu.Lock()
				defer f.mu.Unlock()
				return f.views.turn == 3
			}, time.Minute, time.Millisecond)
			gate.Open()
			group.Wait()
			if fails {
				require.ErrorContains(t, errs[0], "the bus is broken")
				require.NoError(t, errs[1])
				require.NoError(t, errs[2])
				views[1].check()
				views[2].check()
				return
			}
			require.NoError(t, errors.Join(errs...))
			for _, v := range views {
				v.check()
			}
			require.Equal(t, page.Covering(100, 7<<20).Len(), m.fromHome(), "home was read once")
		})
	}
}
