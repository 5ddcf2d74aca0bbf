package fs

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

// cachedPages returns how many pages of a part of a file are in the host's page cache.
func cachedPages(t testing.TB, f *os.File, off, n int64) int64 {
	t.Helper()
	var s unix.Cachestat_t
	require.NoError(t, unix.Cachestat(uint(f.Fd()), &unix.CachestatRange{Off: uint64(off), Len: uint64(n)}, &s, 0))
	return int64(s.Cache)
}

// TestColdFillLeavesThePageCacheAlone: a fill leaves a CPU program's pages in the host's page cache, adds none, and
// sees bytes that the program wrote and that are not on the disk yet.
func TestColdFillLeavesThePageCacheAlone(t *testing.T) {
	const size, kept, dirty = 16<<20 + 5000, 3 << 20, 9<<20 + 3*page.Size
	s, cache, n := mountWithDevices(t, 1)
	backing, err := os.OpenFile(filepath.Join(s.source, "f"), os.O_RDWR|os.O_CREATE, 0o644)
	require.NoError(t, err)
	defer backing.Close()
	if err := directPossible(int(backing.Fd())); err != nil {
		t.Skip(err)
	}
	data := make([]byte, size)
	rnd := rand.New(rand.NewPCG(1, 2))
	for i := range data {
		data[i] = byte(rnd.Uint32())
	}
	clear(data[6<<20 : 7<<20])
	_, err = backing.WriteAt(data, 0)
	require.NoError(t, err)
	require.NoError(t, unix.Fallocate(int(backing.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 6<<20,
		1<<20))
	require.NoError(t, backing.Sync())
	require.NoError(t, unix.Fadvise(int(backing.Fd()), 0, 0, unix.FADV_DONTNEED))
	require.Zero(t, cachedPages(t, backing, 0, size))
	require.NoError(t, unix.Fadvise(int(backing.Fd()), 0, 0, unix.FADV_RANDOM))
	_, err = backing.ReadAt(make([]byte, 1<<20), kept)
	require.NoError(t, err)
	copy(data[dirty:], "not on the disk yet")
	_, err = backing.WriteAt(data[dirty:dirty+page.Size], dirty)
	require.NoError(t, err)
	before := cachedPages(t, backing, 0, size)

	f, err := os.OpenFile(filepath.Join(s.mnt, "f"), os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, askGrant(f, make([]byte, GrantSize)))
	m, err := cache.Map(context.Background(), n.last(), pagecache.MapRequest{Len: size})
	require.NoError(t, err)
	defer func() { require.NoError(t, m.Unmap(context.Background())) }()
	got := make([]byte, 0, size)
	for _, x := range m.Extents() {
		got = append(got, loadExtent(t, n.devices[0], x.Descriptor, min(x.Size, size-x.Offset))...)
	}
	require.True(t, bytes.Equal(data, got))
	require.EqualValues(t, 1<<20>>page.Shift, cachedPages(t, backing, kept, 1<<20), "what a program reads stays")
	require.Less(t, cachedPages(t, backing, 0, size)-before, int64(64), "and hardly anything comes")
	c := cache.Status().Counters
	require.Greater(t, c["direct_pages"], int64(size>>page.Shift*8/10))
	require.GreaterOrEqual(t, c["cached_pages"], int64(1<<20>>page.Shift))
	require.EqualValues(t, page.Count(size), c["direct_pages"]+c["cached_pages"]+c["buffered_pages"])
	require.Empty(t, cache.Status().Buffered)
}

// loadExtent returns the first n bytes of the memory that descriptor stands for.
func loadExtent(t *testing.T, d *device, descriptor *os.File, n int64) []byte {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, memory := range d.given {
		if exported, err := memory.Export(false); err == nil && exported == descriptor {
			b := make([]byte, n)
			require.NoError(t, d.CopyOut(context.Background(), []gpubackend.Copy{{Mem: memory, Host: b}}))
			return b
		}
	}
	require.Fail(t, "the device did not give that memory")
	return nil
}
