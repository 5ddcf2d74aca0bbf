package fs

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestRootRaisesTheLimitOfDescriptors: a program may keep 200,000 files open, and so does the daemon.
func TestRootRaisesTheLimitOfDescriptors(t *testing.T) {
	requireRoot(t)
	var before, after unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: before.Cur, Max: before.Max + 1}); err != nil {
		t.Skipf("root may not raise limits here: %v", err)
	}
	_, err := raiseDescriptorLimit()
	require.NoError(t, err)
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &after))
	require.GreaterOrEqual(t, after.Cur, max(before.Max, 1<<20))
}
