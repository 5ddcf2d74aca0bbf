package pagecache

import (
	"context"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

// TestWarmAndEvict: Warm brings a file to a device, Verify finds home's bytes there, and Evict gives them up.
func TestWarmAndEvict(t *testing.T) {
	const pages = 700
	ctx := context.Background()
	m := newMachine(t, 1)
	src := m.noisyFile(pages * page.Size)
	v, err := m.cache.Verify(ctx, src, 0, 0, pages*page.Size)
	require.NoError(t, err)
	require.Equal(t, Verification{Absent: pages}, v)
	require.Empty(t, m.cache.Inspect(src.id).Holders)

	warmed, err := m.cache.Warm(ctx, src, MapRequest{Len: pages * page.Size})
	require.NoError(t, err)
	require.EqualValues(t, pages, warmed)
	warmed, err = m.cache.Warm(ctx, src, MapRequest{Off: page.Size, Len: page.Size})
	require.NoError(t, err)
	require.Zero(t, warmed, "the pages are on the device")
	in := m.cache.Inspect(src.id)
	require.Empty(t, in.MappedBy)
	require.EqualValues(t, pages, in.Holders[0].Clean)
	require.GreaterOrEqual(t, in.Holders[0].Memory, int64(pages*page.Size))
	v, err = m.cache.Verify(ctx, src, 0, 0, pages*page.Size)
	require.NoError(t, err)
	require.Equal(t, Verification{Equal: pages}, v)

	p := m.run(src, 0, 0, page.Size, false)
	in = m.cache.Inspect(src.id)
	require.Equal(t, []MappingInfo{{Bytes: page.Size}}, in.MappedBy)
	e, err := m.cache.Evict(ctx, src.id, -1)
	require.NoError(t, err)
	require.Positive(t, e.Mapped, "a client maps it")
	p.unmap()
	e, err = m.cache.Evict(ctx, src.id, 0)
	require.NoError(t, err)
	require.Positive(t, e.Freed)
	require.Zero(t, e.Mapped+e.Kept)
	require.Zero(t, m.cache.Status().Devices[0].UsedBytes)
	_, err = m.cache.Evict(ctx, src.id, 7)
	require.ErrorIs(t, err, syscall.ENODEV)
}

// TestEvictViews: Evict counts the memory of views as freed, mapped or pinned, for the named device only.
func TestEvictViews(t *testing.T) {
	ctx := context.Background()
	m := newMachine(t, 2)
	src := m.noisyFile(1 << 20)
	req := ViewRequest{Segments: []view.Segment{bytesOf(1, 1<<19)}}
	first := m.view(req, src)
	bytes := m.used()
	req.Device = 1
	m.view(req, src).unmap()
	e, err := m.cache.Evict(ctx, src.id, -1)
	require.NoError(t, err)
	require.Equal(t, Eviction{Freed: bytes, Mapped: bytes}, e)
	first.unmap()
	e, err = m.cache.Evict(ctx, src.id, 1)
	require.NoError(t, err)
	require.Zero(t, e, "device 1 has no views of it any more")
	e, err = m.cache.Evict(ctx, src.id, 0)
	require.NoError(t, err)
	require.Equal(t, Eviction{Freed: bytes}, e)
	require.Zero(t, m.used())
}

// TestVerifyTellsWhatDiffers: stores of programs and newer pages in SOURCE count as tracked and stale; other
// differences count as different.
func TestVerifyTellsWhatDiffers(t *testing.T) {
	const pages = 8
	ctx := context.Background()
	m := newMachine(t, 2)
	src := m.noisyFile(pages * page.Size)
	p := m.run(src, 0, 0, pages*page.Size, true)
	_, err := m.cache.Warm(ctx, src, MapRequest{Device: 1, Len: pages * page.Size})
	require.NoError(t, err)
	p.add(3 * page.Size) // and not released
	v, err := m.cache.Verify(ctx, src, 0, 0, pages*page.Size)
	require.NoError(t, err)
	require.Equal(t, Verification{Equal: pages - 1, Tracked: 1}, v)
	src.home.fail(syscall.ENOSPC)
	p.release()
	require.Error(t, src.attached.Sync(ctx, nil))
	v, err = m.cache.Verify(ctx, src, 0, 0, pages*page.Size)
	require.NoError(t, err)
	require.Equal(t, Verification{Equal: pages - 1, Dirty: 1}, v)
	src.home.fail(nil)
	require.NoError(t, src.attached.Sync(ctx, nil))
	v, err = m.cache.Verify(ctx, src, 1, 0, pages*page.Size)
	require.NoError(t, err)
	require.Equal(t, Verification{Equal: pages - 1, Stale: 1}, v)

	// Change memory of device 1 behind the cache's back.
	f := src.attached
	f.mu.Lock()
	for h := range f.holdersLocked() {
		if h.dev.info.Ordinal == 1 {
			x, off := h.at(5)
			require.NoError(t, m.devices[1].CopyIn(ctx,
				[]gpubackend.Copy{{Mem: x.Memory(), Off: off, Host: []byte{1, 2, 3}}}))
		}
	}
	f.mu.Unlock()
	v, err = m.cache.Verify(ctx, src, 1, 0, pages*page.Size)
	require.NoError(t, err)
	require.Equal(t, Verification{Equal: pages - 2, Stale: 1, Different: 1, Where: []page.Index{5}}, v)
}

// TestEvictBesideWhatHomeDoesNotTake: while home is full, what one device has released stays there. The same part of
// the file leaves another device nevertheless, and makes room there.
func TestEvictBesideWhatHomeDoesNotTake(t *testing.T) {
	m := newMachine(t, 3, memory(2<<20))
	src, other := m.file(2<<20), m.file(2<<20)
	p, r, both := m.run(src, 0, 0, 2<<20, true), m.run(src, 1, 0, 2<<20, false), m.run(src, 2, 0, 2<<20, true)
	r.unmap()
	p.store(0, 1)
	p.store(8*page.Size, 2)
	both.store(8*page.Size+1, 3)
	src.home.fail(syscall.ENOSPC)
	p.release()
	both.release()
	p.unmap()
	both.unmap()
	ctx := context.Background()
	e, err := m.cache.Evict(ctx, src.id, 1)
	require.NoError(t, err)
	require.Equal(t, Eviction{Freed: 2 << 20}, e)
	m.run(other, 1, 0, 1, false).unmap()
	for device := range 3 {
		e, err = m.cache.Evict(ctx, src.id, device)
		require.NoError(t, err)
		if device != 1 {
			require.EqualValues(t, 2<<20, e.Kept, "device %d", device)
			require.Contains(t, e.Error, "no space left")
		}
	}
	require.Equal(t, []byte{1}, src.read(t, 0, 1))
	require.Equal(t, []byte{2, 3}, src.read(t, 8*page.Size, 2))
	src.home.fail(nil)
	require.NoError(t, src.attached.Sync(ctx, func() error { return nil }))
	require.Equal(t, []byte{2, 3}, src.home.data[8*page.Size:8*page.Size+2])
}
