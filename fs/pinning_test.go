package fs

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestPinOfAnotherOwner: a pin is on account of the file's present owner: at once after a chown on the mount, and with
// the next use after one in SOURCE.
func TestPinOfAnotherOwner(t *testing.T) {
	requireRoot(t)
	s, cache, n := mountWithDevices(t, 1)
	path := filepath.Join(s.mnt, "file")
	require.NoError(t, os.WriteFile(path, []byte("bytes"), 0o600))
	require.NoError(t, unix.Setxattr(path, AttributePin, []byte("0"), 0))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	w := mapOn(t, cache, n, f, 0, 5)
	defer w.close(t)
	by := func() uint32 { return cache.Inspect(n.last().ID()).PinnedBy }
	require.Zero(t, by())
	require.NoError(t, os.Chown(path, bob, -1))
	require.EqualValues(t, bob, by())
	require.NoError(t, os.Chown(filepath.Join(s.source, "file"), 0, -1))
	require.NoError(t, ioctl(f, IoctlGrant, make([]byte, GrantSize)))
	require.Zero(t, by())
}
