package cleanread

import (
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
)

// TestEpochs compares epochs with a counter for each page. A change of a page changes every epoch that covers it. A
// change of few pages changes no epoch of other regions, unless they share an epoch with the changed ones.
func TestEpochs(t *testing.T) {
	const end = groups * groupRegions << regionShift
	rnd := rand.New(rand.NewPCG(1, 1))
	f := new(File)
	within := func(rg page.Range, r page.Index) bool {
		first, last := regionsOf(rg)
		return first <= r && r <= last
	}
	pages := func(most int64) page.Range {
		first := page.Index(rnd.Int64N(int64(end)))
		return page.Range{Start: first, End: min(first+1+page.Index(rnd.Int64N(most)), end)}
	}
	for range 2000 {
		watched := pages(2048)
		before := f.epoch(watched)
		require.Equal(t, before, f.epoch(watched))
		changed := pages(4096)
		if rnd.IntN(4) == 0 {
			changed = page.Range{Start: max(watched.Start-10, 0), End: watched.Start + 1}
		}
		wide := rnd.IntN(10) == 0
		if wide {
			changed = page.Range{Start: changed.Start, End: 1 << 50}
		}
		f.Changed(changed)
		overlap := wide
		first, last := regionsOf(watched)
		for r := first; r <= last; r++ {
			overlap = overlap || within(changed, r)
		}
		require.Equal(t, overlap, before != f.epoch(watched), "%v changed, %v watched", changed, watched)
	}
	before := f.epoch(page.Range{End: 1})
	f.Changed(page.Range{Start: 1 << 49, End: 1<<49 + 1})
	f.Changed(page.Range{})
	require.Equal(t, before+1, f.epoch(page.Range{End: 1}), "far away, with a shared epoch")
}

// TestChangeOfOnePage: the snapshots of all other regions stay valid.
func TestChangeOfOnePage(t *testing.T) {
	const regions = 3000
	f := &file{t: t, home: make([]byte, 0)}
	f.File = &File{c: &Cache{Options: Options{Devices: []*Device{{}}}}, ex: f}
	for range 2 {
		for r := range page.Index(regions) {
			f.publish(page.Range{Start: r << regionShift, End: r<<regionShift + 1}, false)
		}
	}
	valid := func() (n int) {
		for r := range page.Index(regions) {
			if f.valid(r) != nil {
				n++
			}
		}
		return n
	}
	require.Equal(t, regions, valid())
	f.Changed(page.Range{Start: 70<<regionShift + 5, End: 70<<regionShift + 6})
	require.Equal(t, regions-1, valid())
	f.Close()
	require.Zero(t, valid())
}

// TestDeviceIsReadWithoutTheLock: a snapshot tells who has what, and a device is chosen and its memory held, while the
// executor's lock is held elsewhere.
func TestDeviceIsReadWithoutTheLock(t *testing.T) {
	f := newFile(t, 4<<20+100, nil)
	for range 2 {
		f.read(0, page.Size, true)
		f.read(4<<20, 100, true)
	}
	before := f.asked.Load()
	f.mu.Lock()
	defer f.mu.Unlock()
	for range 50 {
		f.read(rand.Int64N(500)<<page.Shift, 32<<10, true)
	}
	require.Equal(t, before, f.asked.Load())
	require.Zero(t, f.reads.Load(), "of home")
}

// TestTrackedPagesNeedTheLock: a snapshot has no digests of pages that programs may be storing into.
func TestTrackedPagesNeedTheLock(t *testing.T) {
	f := newFile(t, 4<<20, nil)
	f.tracked = []page.Range{{Start: 100, End: 400}}
	for range 2 {
		f.read(0, page.Size, true)
	}
	before := f.asked.Load()
	f.read(40*page.Size, 16<<10, true)
	require.Equal(t, before, f.asked.Load())
	f.read(110*page.Size, 64<<10, true)
	require.Greater(t, f.asked.Load(), before)
	require.Zero(t, f.reads.Load(), "of home")
}

// TestFactsThatDoNotHold: nothing is copied by outdated facts, or from memory that is gone.
func TestFactsThatDoNotHold(t *testing.T) {
	f := newFile(t, 4<<20, nil)
	rg := page.Range{Start: 3, End: 9}
	facts := f.Facts(t.Context(), page.Range{End: 64})
	p := f.plan(facts, &facts.haves[0], rg)
	require.NotNil(t, p)
	require.EqualValues(t, 2, f.extent.users.Load())
	p.Drop()
	f.write(50*page.Size, []byte{1})
	require.Nil(t, f.plan(facts, &facts.haves[0], rg))
	require.EqualValues(t, 1, f.extent.users.Load(), "the held extent was let go")
	facts = f.Facts(t.Context(), page.Range{End: 64})
	f.extent.users.Store(0)
	require.Nil(t, f.plan(facts, &facts.haves[0], rg))
	f.extent.users.Store(1)
}

// TestChangesDuringTheCopy: pages that change during a device's copy come from home, with snapshots and without.
func TestChangesDuringTheCopy(t *testing.T) {
	for _, published := range []bool{false, true} {
		f := newFile(t, 4<<20, nil)
		if published {
			f.read(3<<20, page.Size, true)
			f.read(3<<20, page.Size, true)
		}
		gate := f.device.Hold(faulty.CopyOut)
		var reader sync.WaitGroup
		reader.Go(func() {
			p := make([]byte, 256<<10)
			n, err := f.Serve(t.Context(), p, 2<<20, int64(len(f.home)), f, true)
			f.mu.Lock()
			defer f.mu.Unlock()
			if err != nil || string(p[:n]) != string(f.home[2<<20:2<<20+256<<10]) {
				t.Errorf("old bytes, %v", err)
			}
		})
		<-gate.Arrived()
		f.write(2<<20+5, []byte("new"))
		gate.Open()
		reader.Wait()
		require.EqualValues(t, 1, f.all.DeviceReadFallbacks.Load())
	}
}
