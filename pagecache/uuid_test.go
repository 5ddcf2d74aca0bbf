package pagecache

import (
	"context"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
)

// named is a device with a UUID.
type named struct {
	gpubackend.Device
	uuid gpubackend.UUID
}

func (n named) Info() gpubackend.Info {
	info := n.Device.Info()
	info.UUID = n.uuid
	return info
}

func TestDeviceByUUID(t *testing.T) {
	m := newMachine(t, 0, func(o *Options, memory *int64) {
		for i := range 2 {
			d, err := emulated.New(emulated.Options{Ordinal: i, Memory: *memory})
			require.NoError(t, err)
			o.Devices = append(o.Devices, named{d, gpubackend.UUID{0xab, 15: byte(i)}})
		}
	})
	for _, x := range []struct {
		number int
		uuid   gpubackend.UUID
		want   int
	}{{0, gpubackend.UUID{0xab, 15: 1}, 1}, {-1, gpubackend.UUID{0xab}, 0}, {1, gpubackend.UUID{}, 1}} {
		mp, err := m.cache.Map(context.Background(), m.file(4096), MapRequest{Device: x.number, UUID: x.uuid, Len: 1})
		require.NoError(t, err)
		require.Equal(t, x.want, mp.Device().Ordinal)
		require.NoError(t, mp.Unmap(context.Background()))
	}
	_, err := m.cache.Map(context.Background(), m.file(4096), MapRequest{UUID: gpubackend.UUID{7}, Len: 1})
	require.ErrorIs(t, err, syscall.ENODEV)
	require.ErrorContains(t, err, "the mount does not use GPU-07000000-0000-0000-0000-000000000000")
	require.Equal(t, "GPU-ab000000-0000-0000-0000-000000000001", m.cache.Status().Devices[1].UUID)
}
