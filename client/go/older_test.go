package gaiafs

import (
	"net"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestTenantOfAnOlderDaemon: a daemon without named tenants maps nothing for a process that names one. It answers
// requests that map nothing.
func TestTenantOfAnOlderDaemon(t *testing.T) {
	t.Setenv(tenantVariable, "training")
	c := &conn{uc: new(net.UnixConn)}
	require.NoError(t, c.choose(), "such a daemon gets no FEATURES")
	err := c.doMap(typeMap, nil, nil)
	require.ErrorIs(t, err, syscall.EOPNOTSUPP)
}
