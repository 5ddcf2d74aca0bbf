package ctest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/control/controltest"
	"github.com/gaiafs/gaiafs/pagecache"
)

// TestTenant checks that a program's memory is charged to the tenant that GAIAFS_TENANT names, if its user may be that
// tenant. Otherwise the program maps nothing, and is told why.
func TestTenant(t *testing.T) {
	client := compile(t, "moving", "plain")
	d, cache, path := startMoving(t)
	require.NoError(t, cache.SetTenants([]pagecache.Tenant{
		{ID: pagecache.NamedTenant("training"), Weight: 1, Users: []uint32{uint32(os.Geteuid())}},
		{ID: pagecache.NamedTenant("theirs"), Weight: 1, Users: []uint32{uint32(os.Geteuid()) + 1}},
	}))
	for name, says := range map[string]string{
		"theirs": fmt.Sprintf("%d user %d may not be the tenant named \"theirs\"", syscall.EACCES,
			os.Geteuid()),
		"nobody":                 fmt.Sprintf("%d the mount knows no tenant named \"nobody\"", syscall.EACCES),
		strings.Repeat("x", 255): fmt.Sprintf("%d the mount knows no tenant named \"xxx", syscall.EACCES),
		strings.Repeat("x", 256): fmt.Sprintf("%d GAIAFS_TENANT has 256 bytes", syscall.EINVAL),
	} {
		d.env = []string{"GAIAFS_TENANT=" + name}
		require.Contains(t, d.run(client, "tenant", path), says)
	}
	d.env = []string{"GAIAFS_TENANT=training"}
	cmd, expect, answer := d.talk(client, "tenant", path)
	expect("mapped")
	owners := cache.Status().Devices[0].Tenants
	require.Len(t, owners, 1)
	require.Equal(t, pagecache.NamedTenant("training"), owners[0].Tenant)
	_, err := answer.Write([]byte{1})
	require.NoError(t, err)
	require.NoError(t, cmd.Wait())
	waitIdle(t, cache)
}

// TestTenantOfAnOlderDaemon sets a tenant's name with a daemon that has no named tenants. Nothing is mapped, but the
// status still works.
func TestTenantOfAnOlderDaemon(t *testing.T) {
	client := compile(t, "client", "plain")
	d := startDaemon(t, &controltest.Cache{})
	socket := filepath.Join(d.dir, "old")
	answers := map[uint16][]string{1: {"welcome"}, 8: {"result"}}
	r, err := controltest.ListenRecorded(socket, answers, frameFiles...)
	require.NoError(t, err)
	defer r.Close()
	d.env = []string{"GAIAFS_TEST_SOCKET=" + socket, "GAIAFS_TENANT=training"}
	require.Equal(t, fmt.Sprintf("%d GAIAFS_TENANT is set, but the daemon is too old for named tenants\n",
		syscall.EOPNOTSUPP), d.run(client, "refused", d.file()))
	require.Nil(t, r.First(8))
	require.Error(t, d.command(client, "status", d.dir).Run(), "the recorded daemon has no document")
	require.NotNil(t, r.First(8), "but it was asked for one")
	require.Empty(t, r.Unexpected())
}
