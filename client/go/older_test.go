package gaiafs

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestTenantOfAnOlderDaemon: a daemon without named tenants maps nothing for a process that names one. It answers
// requests that map nothing.
func TestTenantOfAnOlderDaemon(t *testing.T) {
	t.Setenv(tenantVariable, "training")
	require.NoError(t, choose(nil, nil, welcome{}), "such a daemon gets no FEATURES")
	c := &conn{}
	err := c.doMap(typeMap, nil, nil)
	require.ErrorIs(t, err, syscall.EOPNOTSUPP)
}
