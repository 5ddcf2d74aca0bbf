package gaiafs

import (
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/pagecache"
)

// TestTenant: GAIAFS_TENANT names the tenant that is charged for what a program maps, if the program's user may be that
// tenant. Otherwise the program maps nothing, and the error says why.
func TestTenant(t *testing.T) {
	f, cache := startMoving(t)
	require.NoError(t, cache.SetTenants([]pagecache.Tenant{
		{ID: pagecache.NamedTenant("training"), Weight: 1, Users: []uint32{uint32(os.Geteuid())}},
		{ID: pagecache.NamedTenant("theirs"), Weight: 1, Users: []uint32{uint32(os.Geteuid()) + 1}},
		{ID: pagecache.NamedTenant("everyone's"), Weight: 1, Everyone: true},
	}))
	for name, want := range map[string]*Error{
		"theirs":                 {Errno: syscall.EACCES, Text: "may not be the tenant named \"theirs\""},
		"nobody":                 {Errno: syscall.EACCES, Text: "knows no tenant named \"nobody\""},
		strings.Repeat("x", 255): {Errno: syscall.EACCES, Text: "knows no tenant named \"xxx"},
		strings.Repeat("x", 256): {Errno: syscall.EINVAL, Text: "GAIAFS_TENANT has 256 bytes"},
	} {
		t.Setenv("GAIAFS_TENANT", name)
		_, err := Map(f, 0, brick, ProtRead, 0)
		require.ErrorIs(t, err, want.Errno)
		require.ErrorContains(t, err, want.Text)
		_, err = MapView([]*os.File{f}, []Segment{{Length: 1}}, 0)
		require.ErrorIs(t, err, want.Errno)
		require.ErrorContains(t, err, want.Text)
	}
	for _, name := range []string{"training", "everyone's"} {
		t.Setenv("GAIAFS_TENANT", name)
		for _, options := range [][]Option{nil, {Movable()}} {
			m, err := Map(f, 0, brick, ProtRead, 0, options...)
			require.NoError(t, err)
			if m.Movable() {
				_, err = m.Use(t.Context(), 0, brick)
				require.NoError(t, err)
			}
			require.Eventually(t, func() bool { // the previous mapping's bracket may still be ending
				owners := cache.Status().Devices[0].Tenants
				return len(owners) == 1 && owners[0].Tenant == pagecache.NamedTenant(name)
			}, 20*time.Second, time.Millisecond)
			require.NoError(t, m.Close())
		}
	}
}
