package pagecache

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

// A view copies some pages straight from the device that released them, and reads their neighbours from home. These
// tests change something between the two.

// half is the pages of a file of which a device releases the second half of every eight. CPU programs write the first.
const half = 4

// eights calls do with the bytes of the first or the second half of every eight pages.
func eights(size int, second bool, do func(at int)) {
	for at := 0; at < size; at += 2 * half * page.Size {
		if second {
			do(at + half*page.Size)
		} else {
			do(at)
		}
	}
}

// meanwhiles are events that make the released pages stale in a view. Before them the pages are on their device only.
var meanwhiles = []struct {
	name string
	do   func(t *testing.T, src *source, size int)
}{
	{"a CPU program reads, and the bytes fly", func(t *testing.T, src *source, size int) {
		src.read(t, 0, size)
		require.True(t, src.attached.flights.any())
	}},
	{"the times of the file in SOURCE are set", func(t *testing.T, src *source, _ int) {
		src.home.editAt(0, nil)
		changed, err := src.attached.CheckHome(context.Background())
		require.NoError(t, err)
		require.True(t, changed)
	}},
	{"a CPU program writes another byte", func(t *testing.T, src *source, size int) {
		eights(size, true, func(at int) { src.write(t, at+9, []byte("meanwhile")) })
	}},
	{"the file is made durable", func(t *testing.T, src *source, _ int) {
		require.NoError(t, src.attached.Sync(context.Background(), func() error { return nil }))
	}},
	{"the file becomes longer", func(t *testing.T, src *source, size int) {
		src.truncate(t, int64(size)+1)
	}},
}

// TestReleasedPagesThatBecomeStaleDuringAnAcquire: an acquire shows every byte that was released before it, also in
// pages that become stale while it reads home: no read of home, its own or that of another view, replaces bytes that
// home does not have yet.
func TestReleasedPagesThatBecomeStaleDuringAnAcquire(t *testing.T) {
	const size = 4 << 20
	for _, event := range meanwhiles {
		for _, beside := range []bool{false, true} {
			for device := range 2 { // the one that releases, and another one
				t.Run(fmt.Sprintf("%s/beside another view: %v/device %d", event.name, beside, device), func(t *testing.T) {
					m := newMachine(t, 3)
					m.cache.gather = func(int64) time.Duration { return time.Minute }
					src := m.noisyFile(size)
					p := m.run(src, 0, 0, size, true)
					v := m.view(ViewRequest{Device: device, Segments: []view.Segment{bytesOf(0, size)}}, src)
					eights(size, false, func(at int) { src.write(t, at, bytes.Repeat([]byte{1}, half*page.Size)) })
					land := m.keepAloft(src)

					f := src.attached
					f.views.expect(1) // fills that know what they will read from home wait for one more view
					var group sync.WaitGroup
					begin := func(v *viewer) {
						group.Go(func() {
							if _, err := v.Acquire(context.Background(), 0, v.Size(), false); err != nil {
								t.Error(err)
							}
						})
						require.Eventually(t, func() bool {
							f.views.mu.Lock()
							defer f.views.mu.Unlock()
							return v.v.parts[0].shares != nil
						}, time.Minute, time.Millisecond)
					}
					if beside { // it has taken all pages before the release
						all := []view.Segment{bytesOf(1, size-1)}
						begin(m.view(ViewRequest{Device: 2, Segments: all, Lazy: true}, src))
					}
					eights(size, true, func(at int) { p.add(at) })
					p.release()
					begin(v)
					released := v.want()
					event.do(t, src, size)
					f.views.expect(-1)
					group.Wait()
					got, changed := v.all(), v.want() // it may have the changes, and has what was there before
					for i := range got {
						if got[i] != released[i] && got[i] != changed[i] {
							require.Fail(t, "the view is wrong", "byte %d is %d, not %d or %d", i, got[i], released[i], changed[i])
						}
					}
					land()
					v.acquire()
					v.check()
					p.unmap()
				})
			}
		}
	}
}

// TestAChangeInSourceThatACollectFinds: an acquire of a view copies some released pages straight from their device, and
// first brings others home. That finds a change in SOURCE, so none of the pages may be copied straight any more.
func TestAChangeInSourceThatACollectFinds(t *testing.T) {
	const size = 1 << 20
	m := newMachine(t, 2)
	src := m.noisyFile(size)
	p := m.run(src, 0, 0, size, true)
	v := m.view(ViewRequest{Device: 1, Segments: []view.Segment{bytesOf(0, size)}}, src)
	eights(size, false, func(at int) { // these have to be merged
		src.write(t, at+9, []byte("by a CPU program"))
		p.add(at)
	})
	eights(size, true, func(at int) { p.add(at) })
	p.release()
	gate := m.devices[0].Hold(faulty.CopyOut)
	acquired := make(chan error)
	go func() {
		_, err := v.Acquire(context.Background(), 0, v.Size(), false)
		acquired <- err
	}()
	<-gate.Arrived()
	src.home.editAt(0, nil)
	gate.Open()
	require.NoError(t, <-acquired)
	v.check()
	p.unmap()
}

// TestFlightsBesidePagesThatAreCopiedStraight: an acquire of a view that copies some pages straight from their device
// still brings flights home before it reads them there.
func TestFlightsBesidePagesThatAreCopiedStraight(t *testing.T) {
	const size = 1 << 20
	m := newMachine(t, 2)
	src := m.noisyFile(size)
	p := m.run(src, 0, 0, size, true)
	v := m.view(ViewRequest{Device: 1, Segments: []view.Segment{bytesOf(0, size)}}, src)
	m.keepAloft(src)
	for at := 0; at < size/2; at += page.Size {
		p.add(at)
	}
	p.release()
	src.read(t, 0, size/2)
	require.True(t, src.attached.flights.any())
	p.add(size - page.Size)
	p.release()
	v.acquire()
	v.check()
	p.unmap()
}

// TestPagesThatTwoDevicesReleased: a view has the stores of both devices into a page.
func TestPagesThatTwoDevicesReleased(t *testing.T) {
	const size = 1 << 20
	m := newMachine(t, 3)
	src := m.noisyFile(size)
	want := src.home.bytes(0, size)
	programs := []*program{m.run(src, 0, 0, size, true), m.run(src, 1, 0, size, true)}
	v := m.view(ViewRequest{Device: 2, Segments: []view.Segment{bytesOf(0, size)}}, src)
	for i, p := range programs {
		for at := i; at < size; at += page.Size {
			p.add(at)
			want[at]++
		}
		p.release()
	}
	v.acquire()
	require.True(t, bytes.Equal(want, v.all()))
	for _, p := range programs {
		p.unmap()
	}
}
