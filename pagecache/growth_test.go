package pagecache

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/internal/page"
)

// TestForgettingWhatIsPastTheEndTakesLittleMemory: however many bytes devices store past end of file, few are copied at
// a time.
func TestForgettingWhatIsPastTheEndTakesLittleMemory(t *testing.T) {
	const size = 3 * pastPages * page.Size
	m := newMachine(t, 1, memory(2*size+emulated.Granularity), func(o *Options, _ *int64) { o.WriteBack = true })
	src := m.file(page.Size)
	p := m.run(src, 0, 0, size, true)
	stored := []int{page.Size, pastPages*page.Size - 1, pastPages * page.Size, size - 1}
	for _, at := range append(stored, 0) {
		p.store(at, 7)
	}
	f := src.attached
	f.mu.Lock()
	found, next, err := f.pastEndLocked(t.Context(), nil, page.From(0).Pages())
	f.mu.Unlock()
	require.NoError(t, err)
	require.LessOrEqual(t, next, page.Index(1+pastPages))
	for _, x := range found {
		require.LessOrEqual(t, x.pages.End, next)
	}
	p.release()
	for _, at := range stored {
		require.Zero(t, p.byteAt(at), "byte %d", at)
	}
	require.EqualValues(t, 7, p.byteAt(0))
	p.unmap()
}

// TestLookingPastTheEndLetsOthersIn: however much is mapped past end of file, one hold examines only a little of it.
func TestLookingPastTheEndLetsOthersIn(t *testing.T) {
	const size = 3 * pastPages * page.Size
	m := newMachine(t, 1, memory(2*size+emulated.Granularity))
	src := m.file(page.Size)
	p := m.run(src, 0, 0, size, true)
	f := src.attached
	f.mu.Lock()
	found, next, err := f.pastEndLocked(t.Context(), nil, page.From(0).Pages())
	f.mu.Unlock()
	require.NoError(t, err)
	require.Empty(t, found)
	require.LessOrEqual(t, next, page.Index(1+pastHold))
	p.store(size-1, 7)
	require.Zero(t, p.release())
	require.EqualValues(t, 1, p.TakePastEnd())
	require.Zero(t, p.byteAt(size-1))
}

// TestStoresPastTheEndAreNoModification: in the page at the end of file, a release finds stores before the end but not
// those past it.
func TestStoresPastTheEndAreNoModification(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(page.Size + 100)
	p := m.run(src, 0, 0, 3*page.Size, true)
	for _, at := range []int{page.Size + 100, 2*page.Size - 1, 2 * page.Size} {
		p.add(at)
		require.Zero(t, p.release(), "byte %d", at)
		require.EqualValues(t, 1, p.TakePastEnd(), "byte %d", at)
	}
	require.Zero(t, p.release())
	require.Zero(t, p.TakePastEnd(), "they are told of once")
	require.EqualValues(t, 3, m.cache.Status().Counters["past_end_pages"])
	src.write(t, page.Size, []byte("beside")) // the base is now a copy
	require.Zero(t, p.release())
	p.add(page.Size + 99)
	require.EqualValues(t, 1, p.release())
	src.truncate(t, page.Size)
	p.add(page.Size + 5000)
	src.write(t, page.Size, []byte("xy"))
	require.Zero(t, p.release())
	p.add(page.Size - 1)
	require.EqualValues(t, 1, p.release())
}

// TestReleasesLookAtTheirOwnMemoryPastTheEnd: a release past end of file reads no memory of other devices. Their stores
// there are discarded all the same: at their own releases and before the file grows.
func TestReleasesLookAtTheirOwnMemoryPastTheEnd(t *testing.T) {
	m := newMachine(t, 2)
	src := m.file(page.Size)
	p, other := m.run(src, 0, 0, 4*page.Size, true), m.run(src, 1, 0, 4*page.Size, true)
	p.store(2*page.Size, 7)
	other.store(2*page.Size, 8)
	require.Zero(t, p.release())
	require.EqualValues(t, 1, p.TakePastEnd())
	require.Zero(t, other.TakePastEnd())
	require.EqualValues(t, 8, other.byteAt(2*page.Size))
	require.Zero(t, other.release())
	require.EqualValues(t, 1, other.TakePastEnd())
	other.store(2*page.Size, 9)
	src.truncate(t, 4*page.Size)
	require.Zero(t, other.release())
	other.acquire()
	require.Zero(t, other.byteAt(2*page.Size))
}

// TestStoresInsideTheSizeOfTheKernelSurviveGrowthInSource: a device stores inside the length that only the kernel
// knows. Then the file is extended directly in SOURCE.
func TestStoresInsideTheSizeOfTheKernelSurviveGrowthInSource(t *testing.T) {
	m := newMachine(t, 1, func(o *Options, _ *int64) { o.WriteBack = true })
	src := m.file(0)
	p := m.run(src, 0, 0, 2*page.Size, true)
	p.store(10, 7)
	require.NoError(t, src.attached.BeforeWrite(context.Background(), -1)) // say, of a byte at the end of the page
	p.store(1000, 7)
	src.home.resize(2000)
	src.home.editAt(1500, []byte{5})
	p.acquire()
	want := make([]byte, 2000)
	want[1000], want[1500] = 7, 5
	requireSame(t, want, p.load(0, 2000))
	require.EqualValues(t, 1, p.release())
	require.NoError(t, src.attached.Sync(context.Background(), nil))
	requireSame(t, want, src.home.bytes(0, 2000))
}

// TestRequestsZeroFromTheEndThatTheKernelKnows: a request makes a file longer whose end only the kernel knows. A device
// stored before that end, which is kept, and past it, which is not. If the end is not known, both are kept.
func TestRequestsZeroFromTheEndThatTheKernelKnows(t *testing.T) {
	const known, inside, outside, end = 2*page.Size + 100, page.Size + 50, 2*page.Size + 200, 3 * page.Size
	for _, kind := range []ChangeKind{ChangeWrite, ChangeAllocate, ChangeZero, ChangeTruncate} {
		for _, known := range []int64{known, -1} {
			m := newMachine(t, 1, func(o *Options, _ *int64) { o.WriteBack = true })
			src := m.file(100)
			p := m.run(src, 0, 0, 4*page.Size, true)
			p.acquire()
			require.NoError(t, src.attached.BeforeWrite(t.Context(), 100)) // of a byte before known
			p.store(inside, 7)
			p.store(outside, 8)
			c := Change{Kind: kind, Off: end - 100, Len: 100, Known: known}
			if kind == ChangeTruncate {
				c.Off, c.Len = 0, end
			}
			require.NoError(t, src.attached.ChangeHome(t.Context(), c, func(int64, int64) error {
				src.home.resize(end)
				return nil
			}))
			p.acquire()
			require.EqualValues(t, 7, p.byteAt(inside), "kind %d", kind)
			require.NotEqual(t, known >= 0, p.byteAt(outside) == 8, "kind %d, known %d", kind, known)
		}
	}
}

// TestStoresPastTheEndOfACollectedPage: released bytes of the last page come home while a device has stores past the
// end. The stores are discarded if the kernel's length did not reach there either. Otherwise they are kept.
func TestStoresPastTheEndOfACollectedPage(t *testing.T) {
	for _, kept := range []bool{false, true} { // the base of the page is a copy
		m := newMachine(t, 1, func(o *Options, _ *int64) { o.WriteBack = true })
		src := m.file(page.Size + 100)
		p := m.run(src, 0, 0, 2*page.Size, true)
		release := func() {
			p.add(page.Size + 50)
			require.EqualValues(t, 1, p.release())
			if kept {
				src.home.editAt(page.Size+20, []byte{1})
			}
		}
		collect := func() { require.NoError(t, src.attached.Sync(t.Context(), nil)) }
		release()
		p.store(page.Size+200, 7)
		collect()
		require.NoError(t, src.attached.BeforeWrite(t.Context(), -1))
		require.Zero(t, p.byteAt(page.Size+200), "kept: %v", kept)

		release()
		// A program extends the file. The kernel reports that later.
		require.NoError(t, src.attached.BeforeWrite(t.Context(), -1))
		p.store(page.Size+300, 8)
		collect()
		end := Change{Kind: ChangeWrite, Off: page.Size + 399, Len: 1, WriteBack: true}
		require.NoError(t, src.tryWrite(end, []byte{1}))
		p.release()
		collect()
		require.EqualValues(t, 8, src.home.bytes(page.Size+300, 1)[0], "kept: %v", kept)
	}
}
