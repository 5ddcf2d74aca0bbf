package gaiafs

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestTenantOfAnOlderDaemon: with a tenant's name nothing is mapped by a daemon that knows none; requests that map
// nothing are answered.
func TestTenantOfAnOlderDaemon(t *testing.T) {
	t.Setenv(tenantVariable, "training")
	require.NoError(t, choose(nil, nil, welcome{}), "nothing is to be told to such a daemon")
	c := &conn{}
	err := c.doMap(typeMap, nil, nil)
	require.ErrorIs(t, err, syscall.EOPNOTSUPP)
}
