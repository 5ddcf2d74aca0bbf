package pagecache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

// TestViewBesideAMappingAndAChangeInSource: a view does not copy pages from a mapping if they were changed in SOURCE in
// the meantime.
func TestViewBesideAMappingAndAChangeInSource(t *testing.T) {
	m := newMachine(t, 2)
	m.cache.leastPeer = 1
	src := m.noisyFile(1 << 20)
	for dev := range 2 {
		m.run(src, dev, 0, 1<<20, false)
	}
	v := m.view(ViewRequest{Segments: []view.Segment{bytesOf(100, 1<<19)}}, src)
	v.check()
	src.home.editAt(5*page.Size, []byte("in SOURCE"))
	v.acquire()
	v.check()
	src.home.editAt(6*page.Size, []byte("in SOURCE"))
	m.view(ViewRequest{Device: 1, Segments: []view.Segment{bytesOf(101, 1<<19)}}, src).check()
}

// TestViewFollowsNoLostDevice: others copy nothing from a view whose memory is gone.
func TestViewFollowsNoLostDevice(t *testing.T) {
	m := newMachine(t, 2)
	src := m.noisyFile(1 << 20)
	req := ViewRequest{Segments: []view.Segment{bytesOf(100, 1<<19)}}
	first := m.view(req, src)
	req.Device = 1
	second := m.view(req, src)
	first.v.letGo()
	from, p := first.v.parts[0], second.v.parts[0]
	pages := []page.Range{p.of.Span().Pages()}
	rest, err := p.follow(context.Background(), from, pages, &viewFill{p: p, extents: second.v.extents, turn: 99})
	require.NoError(t, err)
	require.Equal(t, pages, rest)
}

// TestViewWhoseSourceDeviceIsLost: a copy between devices fails because one of them is lost, and does not say which.
func TestViewWhoseSourceDeviceIsLost(t *testing.T) {
	for name, mapped := range map[string]bool{"of a view": false, "of a mapping": true} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, 2)
			src := m.noisyFile(1 << 20)
			req := ViewRequest{Segments: []view.Segment{bytesOf(100, 1<<19)}}
			if mapped {
				m.run(src, 0, 0, 1<<20, false)
			} else {
				m.view(req, src)
			}
			m.devices[1].Fail(faulty.CopyPeer, 1, gpubackend.ErrDeviceLost)
			req.Device = 1
			v := m.view(req, src)
			v.check()
			src.write(t, 200, []byte("new"))
			v.acquire()
			v.check()
		})
	}
}

// TestNoMemoryToFillAView: there is no memory for a copy. The reason is given once, and the view can be filled later.
func TestNoMemoryToFillAView(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(1 << 20)
	req := withAlignment(ViewRequest{Segments: []view.Segment{bytesOf(100, 1<<19)}})
	m.devices[0].Fail(faulty.HostBuffer, 1, gpubackend.ErrNoMemory)
	vm, err := m.cache.OpenView(t.Context(), []Source{src}, req)
	require.NoError(t, err)
	err = vm.Fill(t.Context())
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.Equal(t, 1, strings.Count(err.Error(), "device 0 has no memory left"), err)
	require.NoError(t, vm.Fill(t.Context()))
	(&viewer{vm, m, []*source{src}}).check()
}

// TestViewsAskedForAtOnceTakeNoMoreHostMemoryThanThereIs: no request gets through because it did not see the others.
func TestViewsAskedForAtOnceTakeNoMoreHostMemoryThanThereIs(t *testing.T) {
	const one = 1 << 20
	m := newMachine(t, 1, hostMemory(3*one/2))
	src := m.noisyFile(100)
	request := func(k int) ViewRequest {
		segments := make([]view.Segment, one/70)
		for i := range segments {
			segments[i] = bytesOf(int64(i+k), 1)
		}
		return ViewRequest{Alignment: 1, Segments: segments}
	}
	var group sync.WaitGroup
	views := make([]*viewer, 8)
	for k := range views {
		req := request(k)
		group.Go(func() { views[k], _ = m.tryView(req, src) })
	}
	group.Wait()
	require.LessOrEqual(t, m.cache.memory.classes[memoryViews].Load(), int64(3*one/2))
	for _, v := range views {
		if v != nil {
			v.unmap()
		}
	}
}

// TestViewOfShortRows: rows are gathered, so that a row of one byte does not cost a copy of its own.
func TestViewOfShortRows(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(4<<20 + 7)
	rnd := rand.New(rand.NewPCG(1, 2))
	segments := []view.Segment{{Offset: 1, Length: 1, Stride: 4, Count: 1 << 20},
		{Offset: 3, Length: 5, Stride: 5, Count: 9000}}
	for range 40 {
		n := 1 + rnd.Int64N(2*leastRow)
		segments = append(segments, view.Segment{Offset: rnd.Int64N(1 << 20), Length: n, Stride: n + rnd.Int64N(50),
			Count: 1 + rnd.Int64N(5000)})
	}
	v := m.view(ViewRequest{Segments: segments}, src)
	v.check()
	p := v.v.parts[0]
	pages := page.Range{End: 256}
	copies := (&viewFill{p: p, extents: v.v.extents}).AppendCopies(nil, pages, src.home.bytes(0, int(pages.Bytes())))
	require.Less(t, len(copies), 50_000, "there are 262144 rows")
	src.write(t, 1<<20, make([]byte, 1<<20))
	v.acquire()
	v.check()

	m.run(src, 0, 0, 4<<20, false) // the view either copies each row from this mapping, or none
	m.view(ViewRequest{Segments: segments[:1]}, src).check()
}

// TestViewOfShortRowsBesideASegment: a segment that is copied from where it was read, at the end of a page, follows
// short rows that were gathered elsewhere. How much room is behind these depends on their number.
func TestViewOfShortRowsBesideASegment(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(page.Size)
	for count := range int64(12) {
		segments := []view.Segment{{Offset: 100, Length: 128, Stride: 140, Count: count + 1},
			{Offset: page.Size - leastRow, Length: leastRow, Count: 1}}
		for i := range int64(10) { // so many copies are joined if they can be
			segments = append(segments, view.Segment{Offset: 1790 + 20*i, Length: 8, Count: 1})
		}
		segments = append(segments, view.Segment{Offset: 2000, Length: 1000, Count: 1}) // else all would be gathered
		m.view(ViewRequest{Segments: segments}, src).check()
	}
}

// TestViewOfLongRows: the rows of a piece are one copy, beside parts of rows at its ends. Where an extent of the view
// ends, it is split.
func TestViewOfLongRows(t *testing.T) {
	m := newMachine(t, 1)
	const size, piece = 24 << 20, page.Index(512)
	src := m.noisyFile(size)
	v := m.view(ViewRequest{Segments: []view.Segment{{Offset: 140, Length: 1500, Stride: 4000, Count: 5000},
		{Offset: 5, Length: leastRow, Stride: leastRow + 1, Count: 9000}}}, src)
	v.check()
	fill := &viewFill{p: v.v.parts[0], extents: v.v.extents}
	require.Greater(t, len(v.v.extents), 3)
	most := 0
	for at := page.Index(0); at < page.Count(size); at += piece {
		pages := page.Range{Start: at, End: at + piece}
		copies := fill.AppendCopies(nil, pages, src.home.bytes(int(pages.Offset()), int(pages.Bytes())))
		most = max(most, len(copies))
		for i := range copies {
			require.NoError(t, copies[i].Check())
		}
	}
	require.LessOrEqual(t, most, 2*(3+2), "two segments, each with two parts of rows and a split row")
}

// TestViewWhoseClientEndsWhileOthersFollowIt: the others bring the rest themselves.
func TestViewWhoseClientEndsWhileOthersFollowIt(t *testing.T) {
	m := newMachine(t, 3)
	m.cache.leastPeer = 1
	src := m.noisyFile(32 << 20)
	req := ViewRequest{Segments: []view.Segment{bytesOf(100, 31<<20)}}
	gate := m.devices[0].Hold(faulty.CopyIn)
	ctx, kill := context.WithCancel(context.Background())
	var group sync.WaitGroup
	var firstErr error
	group.Go(func() { _, firstErr = m.cache.mapView(ctx, []Source{src}, withAlignment(req)) })
	<-gate.Arrived()
	views := make([]*viewer, 2)
	errs := make([]error, 2)
	for i := range views {
		req := req
		req.Device = i + 1
		group.Go(func() { views[i], errs[i] = m.tryView(req, src) })
	}
	f := m.cache.Lookup(src.id)
	require.Eventually(t, func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.views.turn == 3
	}, time.Minute, time.Millisecond)
	kill()
	gate.Open()
	group.Wait()
	require.ErrorIs(t, firstErr, context.Canceled)
	for i, v := range views {
		require.NoError(t, errs[i])
		v.check()
		v.unmap()
	}
	m.view(req, src).check() // reuses the memory of the first view
}

func withAlignment(req ViewRequest) ViewRequest {
	req.Alignment = 256
	return req
}

// TestAHungFileHoldsUpNoViewOfAnother: views of other files are filled, evicted and shown while a fill waits for a file
// that hangs.
func TestAHungFileHoldsUpNoViewOfAnother(t *testing.T) {
	m := newMachine(t, 1, memory(16<<20))
	hung, src := m.noisyFile(2<<20), m.noisyFile(8<<20)
	reading, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	hung.home.beforeRead = func(page.Bytes) {
		once.Do(func() { close(reading) })
		<-goOn
	}
	var group sync.WaitGroup
	var v *viewer
	group.Go(func() { v = m.view(ViewRequest{Segments: []view.Segment{bytesOf(1, 1<<20)}}, hung) })
	<-reading
	for i := range 4 {
		o := m.view(ViewRequest{Segments: []view.Segment{bytesOf(int64(i), 7<<20)}}, src)
		o.check()
		o.unmap()
	}
	require.Positive(t, m.cache.counters.Evictions.Load())
	require.Len(t, m.cache.Status().Files, 2)
	close(goOn)
	group.Wait()
	v.check()
}

// TestViewOfAFileThatWasLetGo: a file that left the cache comes back as another File, with its bytes.
func TestViewOfAFileThatWasLetGo(t *testing.T) {
	m := newMachine(t, 1, memory(8<<20))
	src, other := m.noisyFile(4<<20), m.noisyFile(8<<20)
	req := ViewRequest{Segments: []view.Segment{bytesOf(10, 3<<20)}}
	v := m.view(req, src)
	before := v.v
	v.unmap()
	p := m.run(other, 0, 0, 8<<20, false)
	require.Eventually(t, func() bool { return m.cache.Lookup(src.id) == nil }, time.Minute, time.Millisecond)
	p.unmap()
	src.home.editAt(100, []byte("while nobody looked"))
	v = m.view(req, src)
	require.NotSame(t, before, v.v)
	v.check()
}

// TestViewsAndChangesAtOnce: an acquire shows every earlier change, whatever happened while views were acquired,
// evicted and mapped.
func TestViewsAndChangesAtOnce(t *testing.T) {
	for seed := range uint64(2) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			m := newMachine(t, 2, memory(12<<20))
			m.cache.leastPeer = 1
			const size = 2 << 20
			src, other := m.noisyFile(size), m.noisyFile(8<<20)
			reader := []*program{m.run(src, 0, 0, size, false), m.run(src, 1, 0, size, false)}
			ctx, stop := context.WithCancel(context.Background())
			var changes, views sync.WaitGroup
			for k := range 2 {
				changes.Go(func() {
					rnd := rand.New(rand.NewPCG(seed, uint64(k)))
					for range 100 {
						switch rnd.IntN(6) {
						case 0:
							src.truncate(t, size/2+rnd.Int64N(size/2))
						case 1:
							src.home.editAt(rnd.IntN(size/2-8), []byte{byte(rnd.Uint32())})
						case 2:
							_, err := reader[k].Acquire(context.Background(), 0, size, false)
							require.NoError(t, err)
						default:
							src.write(t, rnd.IntN(size), []byte{byte(rnd.Uint32()), byte(rnd.Uint32())})
						}
					}
				})
			}
			req := ViewRequest{Segments: []view.Segment{bytesOf(5, size-9),
				{Offset: 3, Length: 100, Stride: 5000, Count: 300}}}
			for dev := range 2 {
				req := req
				req.Device = dev
				again := &source{id: src.id, home: src.home, kernel: src.kernel}
				other := &source{id: other.id, home: other.home, kernel: other.kernel}
				views.Go(func() {
					for ctx.Err() == nil {
						v, err := m.tryView(req, again)
						if err != nil {
							continue // the other file has the memory
						}
						if _, err := v.Acquire(context.Background(), 0, v.Size(), false); err != nil {
							t.Error(err)
						}
						v.unmap()
					}
				})
				views.Go(func() {
					for ctx.Err() == nil {
						if p, err := m.cache.Map(ctx, other, MapRequest{Device: dev, Len: 6 << 20}); err == nil {
							_ = p.Unmap(context.Background())
						}
					}
				})
			}
			changes.Wait()
			stop()
			views.Wait()
			for dev := range 2 {
				req.Device = dev
				v := m.view(req, src)
				v.acquire()
				v.check()
			}
		})
	}
}

// TestViewChangesWhileItComes: pages that change on their way are stale when they arrive.
func TestViewChangesWhileItComes(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(1 << 20)
	gate := m.devices[0].Hold(faulty.CopyIn)
	var group sync.WaitGroup
	var v *viewer
	again := &source{id: src.id, home: src.home, kernel: src.kernel}
	// All bytes are one piece. Otherwise the second piece might be read after the changes.
	const size = mover.LeastPiece
	group.Go(func() { v = m.view(ViewRequest{Segments: []view.Segment{bytesOf(0, size)}}, again) })
	<-gate.Arrived()
	src.attached = m.cache.Lookup(src.id)
	src.write(t, 100, []byte("new"))
	src.truncate(t, size/2)
	gate.Open()
	group.Wait()
	require.EqualValues(t, 1+size/2/page.Size, v.acquire())
	v.check()
}

// TestViewBesideMemoryThatWasGivenAway: a program that keeps memory mapped for writing may store there at any time.
func TestViewBesideMemoryThatWasGivenAway(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(1 << 20)
	p := m.run(src, 0, 0, 1<<20, true)
	p.unmapAndKeep()
	f := src.attached
	f.mu.Lock()
	f.untrackIdleLocked()
	f.mu.Unlock()
	p.store(200, ^p.byteAt(200))
	m.view(ViewRequest{Segments: []view.Segment{bytesOf(100, 1<<19)}}, src).check()
}

// TestSmallViewWhereHostMemoryIsFull: a few segments are allowed even if others have filled the host memory.
func TestSmallViewWhereHostMemoryIsFull(t *testing.T) {
	m := newMachine(t, 1, hostMemory(1<<20))
	src := m.noisyFile(1 << 20)
	m.cache.memory.charge(memoryBases, 2<<20)
	m.view(ViewRequest{Segments: []view.Segment{bytesOf(10, 1<<19)}}, src).check()
	m.cache.memory.charge(memoryBases, -2<<20)
}

// TestManyRowsAtOnce: clients concurrently ask for very many rows, all from few pages.
func TestManyRowsAtOnce(t *testing.T) {
	m := newMachine(t, 1, hostMemory(128<<20))
	src := m.noisyFile(64 << 10)
	var group sync.WaitGroup
	for k := range 2 {
		segments := make([]view.Segment, 1<<13)
		for i := range segments {
			segments[i] = view.Segment{Offset: int64(i%40 + k), Length: 1, Stride: 31, Count: view.MaxRows >> 16}
		}
		group.Go(func() {
			v, err := m.tryView(ViewRequest{Segments: segments}, &source{id: src.id, home: src.home,
				kernel: src.kernel})
			if err != nil {
				t.Error(err)
				return
			}
			v.check()
		})
	}
	group.Wait()
}

// oneByteEach returns n segments, so that their list takes much more host memory than the view has bytes. No two calls
// with another k return the same.
func oneByteEach(n, k int) ViewRequest {
	segments := make([]view.Segment, n)
	for i := range segments {
		segments[i] = bytesOf(int64(i+k), 1)
	}
	return ViewRequest{Segments: segments}
}

// TestUnusedViewsGiveHostMemoryBack: the lists of views that nobody maps go when others need the host memory.
func TestUnusedViewsGiveHostMemoryBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit, n = 2 << 20, 1 << 13
		m := newMachine(t, 1, hostMemory(limit))
		src, gone := m.noisyFile(64<<10), m.noisyFile(64<<10)
		m.view(oneByteEach(1000, 0), gone).unmap()
		m.view(oneByteEach(1000, 0), gone, src).unmap()
		mapped := m.view(oneByteEach(n, 1), src)
		first := m.view(oneByteEach(n, 2), src)
		first.unmap()
		for k := range 10 {
			v := m.view(oneByteEach(n, 3+k), src)
			v.check()
			v.unmap()
			require.LessOrEqual(t, m.cache.memory.classes[memoryViews].Load(), int64(limit))
		}
		theirs := oneByteEach(n, 0)
		theirs.User = 7
		v := m.view(theirs, src)
		v.check()
		synctest.Wait()
		require.LessOrEqual(t, int64(len(m.cache.viewsByKey)), limit/mapped.v.host)
		require.Nil(t, m.cache.Lookup(gone.id), "a file none of whose views is left")

		src.write(t, 0, bytes.Repeat([]byte{3}, 64<<10))
		again := m.view(oneByteEach(n, 2), src)
		require.NotSame(t, first.v, again.v)
		for _, v := range []*viewer{mapped, v, again} {
			v.acquire()
			v.check()
			v.unmap()
		}
		synctest.Wait()
		used := int64(0)
		for _, v := range m.cache.viewsByKey {
			used += v.memory()
		}
		require.Equal(t, used, m.devices[0].Used(), "memory of views that are gone")
	})
}

// TestUnusedViewsOfTheLargestUserGoFirst: a user whose unused views take little host memory keeps them. Of the others,
// the least recently used go. A view that is too large in any case costs nobody anything.
func TestUnusedViewsOfTheLargestUserGoFirst(t *testing.T) {
	const n = 1 << 12
	m := newMachine(t, 1)
	src := m.noisyFile(64 << 10)
	views := make([]*View, 5)
	for k := range views {
		req := oneByteEach(n, k)
		req.User = min(uint32(k), 1)
		v := m.view(req, src)
		views[k] = v.v
		v.unmap()
	}
	used := oneByteEach(n, 1)
	used.User = 1
	m.view(used, src).unmap()
	m.cache.memory.limit = m.cache.memory.total.Load()
	_, err := m.tryView(oneByteEach(10*n, 0), src)
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.Len(t, m.cache.viewsByKey, len(views))

	m.view(oneByteEach(2*n, 9), src)
	for k, v := range views {
		kept := m.cache.viewsByKey[v.key] == v
		require.Equal(t, k != 2 && k != 3, kept, "view %d", k)
	}
}

// TestViewThatCannotBeExported: the fill that began meanwhile ends before OpenView returns.
func TestViewThatCannotBeExported(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(8 << 20)
	keep := m.run(src, 0, 0, page.Size, false)
	export := m.devices[0].Hold(faulty.Export)
	m.devices[0].Fail(faulty.Export, 1, errors.New("injected"))
	m.devices[0].Slow(faulty.CopyIn, 50*time.Millisecond)
	before := m.devices[0].Calls(faulty.CopyIn)
	go func() {
		for m.devices[0].Calls(faulty.CopyIn) == before {
			time.Sleep(time.Millisecond)
		}
		export.Open()
	}()
	_, err := m.cache.OpenView(t.Context(), []Source{src},
		withAlignment(ViewRequest{Segments: []view.Segment{bytesOf(0, 8<<20)}}))
	require.ErrorContains(t, err, "injected")
	require.True(t, m.cache.devices[0].moves.Idle(), "the fill has ended")
	require.Zero(t, m.cache.Lookup(src.id).views.expected)
	keep.unmap()
}

// TestViewThatNobodyFills: Unmap ends the fill that OpenView began.
func TestViewThatNobodyFills(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(8 << 20)
	gate := m.devices[0].Hold(faulty.CopyIn)
	t.Cleanup(gate.Open)
	vm, err := m.cache.OpenView(t.Context(), []Source{src},
		withAlignment(ViewRequest{Segments: []view.Segment{bytesOf(0, 8<<20)}}))
	require.NoError(t, err)
	<-gate.Arrived()
	done := make(chan error, 1)
	go func() { done <- vm.Unmap(t.Context()) }()
	select {
	case err := <-done:
		require.NoError(t, err)
	case <-time.After(10 * time.Second):
		t.Fatal("Unmap waits for a fill that nobody wants")
	}
}

// TestViewIsLaundered: with Launder, the fill brings what the kernel still has.
func TestViewIsLaundered(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(1 << 20)
	for _, launder := range []bool{false, true} {
		req := withAlignment(ViewRequest{Launder: launder, Segments: []view.Segment{bytesOf(0, 1<<20)}})
		src.kernel.take()
		vm, err := m.cache.OpenView(t.Context(), []Source{src}, req)
		require.NoError(t, err)
		require.NoError(t, vm.Fill(t.Context()))
		require.Equal(t, launder, len(src.kernel.take()) > 0)
		require.NoError(t, vm.Unmap(t.Context()))
	}
}
