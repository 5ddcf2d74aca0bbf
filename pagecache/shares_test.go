package pagecache

import (
	"context"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/internal/page"
)

func userShare(part float64) machineOption { return func(o *Options, _ *int64) { o.UserShare = part } }

// TestNoUserMapsMoreThanAShare: memory that a user's programs share counts once, a user without a limit may map
// everything, and all memory is given back.
func TestNoUserMapsMoreThanAShare(t *testing.T) {
	m := newMachine(t, 1, memory(4*emulated.Granularity), userShare(0.5))
	mapAs := func(src *source, user uint32, limited bool) (*Mapping, error) {
		return m.cache.Map(context.Background(), src, MapRequest{Len: page.Size, User: user, Limited: limited})
	}
	var files []*source
	for range 4 {
		files = append(files, m.file(page.Size))
	}
	one, err := mapAs(files[0], 7, true)
	require.NoError(t, err)
	again, err := mapAs(files[0], 7, true)
	require.NoError(t, err)
	two, err := mapAs(files[1], 7, true)
	require.NoError(t, err)
	_, err = mapAs(files[2], 7, true)
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.ErrorContains(t, err, "user 7 may map no more than 4.0 MiB of its 8.0 MiB and maps 4.0 MiB already")
	require.Len(t, m.cache.Status().Files, 2, "nothing was evicted or allocated for a refused request")

	other, err := mapAs(files[1], 8, true)
	require.NoError(t, err, "memory that several users map counts for each")
	third, err := mapAs(files[2], 8, true)
	require.NoError(t, err)
	_, err = mapAs(files[0], 8, true)
	require.ErrorIs(t, err, syscall.ENOMEM, "even though the memory is there")
	all := []*Mapping{one, again, two, other, third}
	for _, src := range files {
		free, err := mapAs(src, 0, false)
		require.NoError(t, err)
		all = append(all, free)
	}
	const g = emulated.Granularity
	require.Equal(t, []UserPins{{User: 0, Bytes: 4 * g}, {User: 7, Bytes: 2 * g}, {User: 8, Bytes: 2 * g}},
		m.cache.Status().Devices[0].Users)

	require.NoError(t, one.Unmap(context.Background()))
	require.Equal(t, []UserPins{{User: 0, Bytes: 4 * g}, {User: 7, Bytes: 2 * g}, {User: 8, Bytes: 2 * g}},
		m.cache.Status().Devices[0].Users)
	require.NoError(t, again.Unmap(context.Background()))
	last, err := mapAs(files[3], 7, true)
	require.NoError(t, err)
	for _, x := range append(all[2:], last) {
		require.NoError(t, x.Unmap(context.Background()))
	}
	require.Empty(t, m.cache.Status().Devices[0].Users)
}
