package pagecache

import (
	"math/rand/v2"
	"os"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/pagecache/residency/tenants"
)

// descriptors returns the number of this process's descriptors.
func descriptors(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(list)
}

// TestManyUsersMap: several users concurrently map more files than there is memory for, on two devices, one of which is
// lost. Nobody gets more than there is, every byte is right, and neither memory nor descriptors leak.
func TestManyUsersMap(t *testing.T) {
	testdevice.Emulated(t, "programs look at memory by its descriptor")
	const files, room, users = 6, 4, 4
	seed := rand.Uint64()
	t.Logf("go test -run TestManyUsersMap; seed %d", seed)
	m := newMachine(t, 2, memory(room*emulated.Granularity), userShare(0.5))
	before := descriptors(t)
	var sources []*source
	for i := range files {
		src := m.file(page.Size)
		src.home.data[0] = byte(i + 1)
		sources = append(sources, src)
	}
	var all sync.WaitGroup
	for user := range uint32(users) {
		rnd := rand.New(rand.NewPCG(seed, uint64(user)))
		all.Go(func() {
			for n := range 60 {
				if user == 0 && n == 40 {
					m.devices[1].Lose()
				}
				i := rnd.IntN(files)
				own := *sources[i] // Attach is per open
				x, err := m.cache.Map(t.Context(), &own, MapRequest{
					Device: rnd.IntN(2), Len: page.Size, Writable: rnd.IntN(2) == 0, User: user, Limited: user > 0,
				})
				for d, dev := range m.devices {
					assert.LessOrEqual(t, dev.Used(), int64(room*emulated.Granularity), "device %d", d)
				}
				if err != nil {
					continue // full, over the share, or lost
				}
				if x.Device().Ordinal == 0 {
					p := make([]byte, 1)
					_, err = x.Extents()[0].Descriptor.ReadAt(p, 0)
					assert.NoError(t, err)
					assert.Equal(t, byte(i+1), p[0])
				}
				_ = x.Unmap(t.Context())
			}
		})
	}
	all.Wait()
	m.cache.letGoOfLost()
	for _, src := range sources {
		m.cache.Forget(src.id)
	}
	m.cache.lanes.work.Wait()
	for d, dev := range m.devices {
		require.Zero(t, dev.Used(), "device %d", d)
	}
	for _, d := range m.cache.Status().Devices {
		require.Zero(t, d.Extents)
		require.Zero(t, d.MappedBytes)
		require.Empty(t, d.Users)
	}
	require.LessOrEqual(t, descriptors(t), before)
}

// TestMovedFileStaysOnItsAccount: memory belongs to the directory where its file was when it was mapped, as long as
// that mapping lasts.
func TestMovedFileStaysOnItsAccount(t *testing.T) {
	m := newMachine(t, 1, func(o *Options, _ *int64) {
		o.Tenants = []tenants.Tenant{{ID: tenants.Directory("a"), Weight: 1}, {ID: tenants.Directory("b"), Weight: 1}}
	})
	src := m.file(page.Size)
	owners := func() (ids []tenants.ID) {
		for _, a := range m.cache.Status().Devices[0].Tenants {
			if a.Owned > 0 {
				ids = append(ids, a.Tenant)
			}
		}
		return ids
	}
	src.name = "a/file"
	p := m.run(src, 0, 0, page.Size, false)
	src.name = "b/file"
	q := m.run(src, 0, 0, page.Size, false)
	require.Equal(t, []tenants.ID{tenants.Directory("a")}, owners())
	p.unmap()
	require.Equal(t, []tenants.ID{tenants.Directory("b")}, owners(), "it goes to the next one")
	q.unmap()
}
