package pagecache

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
)

// TestGrownFile: a program maps a file of one page, and the file grows. A later mapping shares the existing memory and
// gets large extents for the rest. Both stay coherent, even when some extents are evicted.
func TestGrownFile(t *testing.T) {
	const size, far = 128 << 20, 100<<20 + 5
	m := newMachine(t, 2, memory(256<<20))
	src := m.file(page.Size)
	first := m.run(src, 0, 0, page.Size, true)
	require.Len(t, first.Extents(), 1)
	src.truncate(t, size)
	src.write(t, far, []byte("far"))

	lazy := MapRequest{Len: size, Writable: true, Lazy: true}
	whole, err := m.cache.Map(context.Background(), src, lazy)
	require.NoError(t, err)
	require.Len(t, whole.Extents(), 2+31, "2 MiB that are there, 2 MiB beside them, and 4 MiB each")
	at := int64(0)
	for _, x := range whole.Extents() {
		require.Equal(t, at, x.Offset)
		at += x.Size
	}
	require.EqualValues(t, size, at)
	w := m.attach(whole, 0, size, true)
	first.store(7, 'x')
	require.Equal(t, byte('x'), w.byteAt(7), "one memory")
	w.store(4<<20-1, 'a')
	w.store(4<<20, 'b')
	w.release()
	require.Equal(t, "ab", string(src.read(t, 4<<20-1, 2)))
	require.Equal(t, byte('x'), src.read(t, 7, 1)[0])
	_, err = whole.Acquire(context.Background(), far-5, page.Size, false)
	require.NoError(t, err)
	require.Equal(t, "far", string(w.load(far, far+3)))

	lazy.Device = 1
	other, err := m.cache.Map(context.Background(), src, lazy)
	require.NoError(t, err)
	require.Len(t, other.Extents(), 32, "of 4 MiB: nobody mapped the file there before")
	_, err = other.Acquire(context.Background(), 0, 8<<20, false)
	require.NoError(t, err)
	o := m.attach(other, 0, size, true)
	require.Equal(t, "ab", string(o.load(4<<20-1, 4<<20+1)), "from extents of other sizes")

	first.unmap()
	w.unmap()
	o.unmap()
	require.True(t, m.cache.evictAll(t))
	again := m.run(src, 0, 0, page.Size, false)
	require.EqualValues(t, 4<<20, again.Extents()[0].Size, "nobody has the small one any more")
	require.Equal(t, byte('x'), again.byteAt(7))
}

// TestSamePagesMappedAtOnce: two programs map the same pages concurrently. No device has memory for them yet.
func TestSamePagesMappedAtOnce(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	gate := m.devices[0].Hold(faulty.Zero)
	mapped := make(chan *Mapping, 2)
	for range 2 {
		own := *src
		go func() {
			x, err := m.cache.Map(context.Background(), &own, MapRequest{Len: page.Size})
			assert.NoError(t, err)
			mapped <- x
		}()
	}
	require.Eventually(t, func() bool { return m.devices[0].Calls(faulty.Zero) == 2 }, patient, time.Millisecond)
	gate.Open()
	a, b := <-mapped, <-mapped
	require.Same(t, a.pin.Extents()[0], b.pin.Extents()[0])
	require.EqualValues(t, emulated.Granularity, m.devices[0].Used())
}
