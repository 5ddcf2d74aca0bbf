package pagecache

import (
	"context"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// TestStatusMapsWhatADeviceHolds: a letter of the map stands for several pages, and shows the worst state among them.
func TestStatusMapsWhatADeviceHolds(t *testing.T) {
	const pages = 2*mapCells + 1
	m := newMachine(t, 2)
	src := m.noisyFile(pages * page.Size)
	p := m.run(src, 0, 0, 16*page.Size, true)
	q := m.run(src, 1, 0, pages*page.Size, false)
	src.home.fail(syscall.ENOSPC) // released pages stay dirty
	p.add(3 * page.Size)
	require.EqualValues(t, 1, p.release())
	require.Error(t, src.attached.Sync(context.Background(), nil))

	f := m.cache.Status().Files[0]
	require.EqualValues(t, 3, f.MapPages)
	require.Equal(t, "cd", f.Holders[0].Map[:2], "page 3 is in the second part")
	require.EqualValues(t, 1, f.Holders[0].Dirty)
	require.EqualValues(t, f.Holders[0].Resident-1, f.Holders[0].Clean)
	require.Len(t, f.Holders[1].Map, (pages+2)/3)
	require.Len(t, f.Holders[0].Map, (pages+2)/3)
	require.Positive(t, m.cache.Status().Counters["write_back_failures"])

	src.home.fail(nil)
	require.NoError(t, src.attached.Sync(context.Background(), nil))
	q.acquire()
	f = m.cache.Status().Files[0]
	for _, h := range f.Holders {
		require.NotContains(t, h.Map, "d")
		require.Equal(t, h.Resident, h.Clean)
	}
}

// TestStatusCountsTransfers: transfers are counted by class and direction.
func TestStatusCountsTransfers(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(4 * page.Size)
	p := m.run(src, 0, 0, 4*page.Size, true)
	p.add(0)
	p.release()
	require.NoError(t, src.attached.Sync(context.Background(), nil))
	bytes := make(map[string]int64)
	for _, moved := range m.cache.Status().Devices[0].Moved {
		require.Positive(t, moved.Calls)
		bytes[moved.Way] += moved.Bytes
	}
	require.GreaterOrEqual(t, bytes["in"], int64(4*page.Size))
	require.GreaterOrEqual(t, bytes["out"], int64(page.Size))
}
