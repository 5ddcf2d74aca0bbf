package stress

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

// TestGrownFile: a program maps the one page of a file, which grows to 64 GiB. Who maps it then gets a few dozen
// descriptors, and shares the memory of the page.
func TestGrownFile(t *testing.T) {
	testdevice.Emulated(t, "no GPU has to have room for it")
	const size, far = int64(64 << 30), int64(50<<30 + 4095)
	m := testmount.Start(t, testmount.Options{Memory: 2 * size})
	require.NoError(t, os.WriteFile(m.Path("file"), pattern(4096, 1), 0o600))
	f, err := os.OpenFile(m.Path("file"), os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	mapped := func(n int64, options ...gaiafs.Option) *gaiafs.Mapping {
		x, err := gaiafs.Map(f, 0, n, gaiafs.ProtRead|gaiafs.ProtWrite, 0, options...)
		require.NoError(t, err)
		return x
	}
	first := mapped(4096)
	require.NoError(t, f.Truncate(size))
	whole := mapped(size, gaiafs.Lazy())
	held := status(t, m).Files[0].Holders[0]
	require.Equal(t, 1+10+31, held.Extents, "the first 2 MiB, 10 that fill 2 GiB up, and 31 of that size")
	require.EqualValues(t, 2<<30, held.ExtentBytes)

	_, err = first.WriteAt([]byte("near"), 100)
	require.NoError(t, err)
	got := make([]byte, 4)
	_, err = whole.ReadAt(got, 100)
	require.NoError(t, err)
	require.Equal(t, "near", string(got), "one memory")
	_, err = whole.WriteAt([]byte("far away"), far)
	require.NoError(t, err)
	_, err = whole.Release(0, size)
	require.NoError(t, err)
	require.NoError(t, first.Close())
	require.NoError(t, whole.Close())
	got = make([]byte, 8)
	_, err = f.ReadAt(got, far)
	require.NoError(t, err)
	require.Equal(t, "far away", string(got))
	_, err = f.ReadAt(got[:4], 100)
	require.NoError(t, err)
	require.Equal(t, "near", string(got[:4]))
}
