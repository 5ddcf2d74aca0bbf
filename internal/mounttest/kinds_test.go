package mounttest

import (
	"bytes"
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

// TestTwoKinds mounts with devices of two kinds: a GPU, or an emulated device that reports that it is one, and an
// emulated device. Programs on both write the same page.
func TestTwoKinds(t *testing.T) {
	if !testdevice.GPUs() && !inProcessWithCUDA(t) {
		return
	}
	m := testmount.Start(t, testmount.Options{Devices: 2, Emulated: 1, Disguised: !testdevice.GPUs(), Poison: true})
	f, err := os.OpenFile(m.Path("f"), os.O_RDWR|os.O_CREATE, 0o600)
	require.NoError(t, err)
	defer f.Close()
	before := bytes.Repeat([]byte("gaia"), 3000)
	_, err = f.Write(before)
	require.NoError(t, err)

	gpu, err := gaiafs.Map(f, 0, int64(len(before)), gaiafs.ProtWrite, 0)
	require.NoError(t, err)
	require.Equal(t, gaiafs.KindCUDA, gpu.Kind(), "a GPU is what is taken where any will do")
	host, err := gaiafs.Map(f, 0, int64(len(before)), gaiafs.ProtWrite, 1, gaiafs.OnKind(gaiafs.KindEmulated))
	require.NoError(t, err)
	require.Equal(t, gaiafs.KindEmulated, host.Kind())
	both := []*gaiafs.Mapping{gpu, host}
	for i, m := range both {
		_, err = m.WriteAt([]byte{byte('0' + i)}, int64(i))
		require.NoError(t, err)
		_, err = m.Release(0, m.Len())
		require.NoError(t, err)
	}
	want := append([]byte("01"), before[2:]...)
	for _, m := range both {
		_, err = m.Acquire(0, m.Len())
		require.NoError(t, err)
		got := make([]byte, len(want))
		_, err = m.ReadAt(got, 0)
		require.NoError(t, err)
		require.Equal(t, string(want), string(got), m.Kind())
	}
	got := make([]byte, len(want))
	_, err = f.ReadAt(got, 0)
	require.NoError(t, err)
	require.Equal(t, string(want), string(got))

	segments := []gaiafs.Segment{{Offset: 1, Length: 5000}}
	for i, kind := range []gaiafs.Kind{gaiafs.KindCUDA, gaiafs.KindEmulated} {
		v, err := gaiafs.MapView([]*os.File{f}, segments, i, gaiafs.OnKind(kind))
		require.NoError(t, err)
		require.Equal(t, kind, v.Kind())
		requireView(t, v, []*os.File{f}, segments, 256)
		require.NoError(t, v.Close())
	}
	for _, m := range both {
		require.NoError(t, m.Close())
	}
	_, err = gaiafs.Map(f, 0, 1, gaiafs.ProtRead, 0, gaiafs.OnKind(gaiafs.KindEmulated))
	require.ErrorIs(t, err, syscall.ENODEV, "the number is of the GPU")
	_, err = gaiafs.Map(f, 0, 1, gaiafs.ProtRead, 0, gaiafs.OnKind(77))
	require.ErrorIs(t, err, syscall.ENODEV)
}
