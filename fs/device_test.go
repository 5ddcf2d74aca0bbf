package fs

import (
	"context"
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/pagecache"
)

// mountWithDevices mounts with emulated devices.
func mountWithDevices(t *testing.T, count int, change ...func(*Options)) (*scene, *pagecache.Cache, *notary) {
	t.Helper()
	var devices []gpubackend.Device
	for i := range count {
		d, err := emulated.New(emulated.Options{Ordinal: i, Memory: 64 << 20, Poison: true})
		require.NoError(t, err)
		devices = append(devices, d)
	}
	cache, err := pagecache.New(pagecache.Options{Devices: devices, HostMemory: 64 << 20, WriteBackInterval: time.Hour})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, cache.Close(context.Background())) })
	n := &notary{socket: "/s"}
	s := mount(t, append(change, func(o *Options) { o.Cache, o.Granter = cache, n })...)
	return s, cache, n
}

// window is a mapping of the start of a file on a device, as a client would have it.
type window struct {
	*pagecache.Mapping
	memory []byte
}

// mapOn maps the first n bytes of an open file on a device, for writing.
func mapOn(t *testing.T, cache *pagecache.Cache, n *notary, f *os.File, device int, size int64) window {
	t.Helper()
	require.NoError(t, ioctl(f, IoctlGrant, make([]byte, GrantSize)))
	m, err := cache.Map(context.Background(), n.last(), pagecache.MapRequest{Device: device, Len: size, Writable: true, Launder: true})
	require.NoError(t, err)
	extents := m.Extents()
	require.Len(t, extents, 1)
	require.Zero(t, extents[0].Offset)
	memory, err := unix.Mmap(int(extents[0].Descriptor.Fd()), 0, int(extents[0].Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	return window{m, memory}
}

func (w window) close(t *testing.T) {
	t.Helper()
	require.NoError(t, w.Unmap(context.Background()))
	require.NoError(t, unix.Munmap(w.memory))
}

func TestDeviceAndProgramsShareAFile(t *testing.T) {
	for _, mode := range []struct {
		name   string
		change func(*Options)
	}{{"write-through", func(*Options) {}}, {"write-back", writeBack}} {
		t.Run(mode.name, func(t *testing.T) {
			ctx := context.Background()
			s, cache, n := mountWithDevices(t, 1, mode.change)
			path := filepath.Join(s.mnt, "f")
			require.NoError(t, os.WriteFile(path, []byte("0123456789"), 0644))
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			require.NoError(t, err)
			defer f.Close()
			w := mapOn(t, cache, n, f, 0, 10)
			assert.Equal(t, "0123456789", string(w.memory[:10]))

			copy(w.memory[2:], "GPU")
			_, err = f.WriteAt([]byte("cpu"), 6)
			require.NoError(t, err)
			pages, err := w.Release(ctx, 0, 10)
			require.NoError(t, err)
			assert.EqualValues(t, 1, pages)
			got, err := os.ReadFile(path)
			require.NoError(t, err)
			assert.Equal(t, "01GPU5cpu9", string(got))
			_, err = w.Acquire(ctx, 0, 10, true)
			require.NoError(t, err)
			assert.Equal(t, "01GPU5cpu9", string(w.memory[:10]))

			copy(w.memory, "AB")
			_, err = w.Release(ctx, 0, 10)
			require.NoError(t, err)
			require.NoError(t, f.Sync())
			got, err = os.ReadFile(filepath.Join(s.source, "f"))
			require.NoError(t, err)
			assert.Equal(t, "ABGPU5cpu9", string(got))

			require.NoError(t, f.Truncate(4))
			_, err = f.WriteAt([]byte("!"), 6)
			require.NoError(t, err)
			_, err = w.Acquire(ctx, 0, 10, true)
			require.NoError(t, err)
			assert.Equal(t, "ABGP\x00\x00!\x00\x00\x00", string(w.memory[:10]))
			require.NoError(t, os.Remove(path))
			w.close(t)
			assert.Zero(t, s.fs.changed.Load(), "what the mount did was taken for somebody else's doing")
		})
	}
}

// TestNoStaleReadsWhileDevicesRelease has two devices write between the slots of the programs, in the same pages, and
// release. Nobody may see old bytes, and nothing may be lost.
func TestNoStaleReadsWhileDevicesRelease(t *testing.T) {
	for _, mode := range []struct {
		name   string
		change func(*Options)
	}{{"write-through", func(*Options) {}}, {"write-back", writeBack}} {
		t.Run(mode.name, func(t *testing.T) {
			ctx := context.Background()
			s, cache, n := mountWithDevices(t, 2, mode.change)
			path := makeSlots(t, s)
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			require.NoError(t, err)
			defer f.Close()
			const size = slotStride * slotCount
			var releases [2]uint64
			var windows [2]window
			var drops []func()
			for d := range windows {
				w := mapOn(t, cache, n, f, d, size)
				windows[d] = w
				drops = append(drops, func() {
					releases[d]++
					for slot := range slotCount {
						binary.NativeEndian.PutUint64(w.memory[slot*slotStride+slotSize+8*d:], releases[d])
					}
					_, err := w.Release(ctx, 0, size)
					assert.NoError(t, err)
					_, err = w.Acquire(ctx, 0, size, true)
					assert.NoError(t, err)
				})
			}
			operations := *staleOperations / 10
			assert.Zero(t, staleReadsDuring(t, s, path, operations, uint64(time.Now().UnixNano()), drops...), "reads that got old bytes")
			require.NoError(t, f.Sync())
			got, err := os.ReadFile(filepath.Join(s.source, "slots"))
			require.NoError(t, err)
			for slot := range slotCount {
				for d := range windows {
					at := slot*slotStride + slotSize + 8*d
					assert.Equal(t, releases[d], binary.NativeEndian.Uint64(got[at:]), "slot %d of device %d", slot, d)
				}
			}
			assert.Positive(t, releases[0])
			for _, w := range windows {
				w.close(t)
			}
			t.Logf("%d and %d releases, %d writes had pages dropped again, %d of them did not wait to the end",
				releases[0], releases[1], s.fs.corrections.Load(), s.fs.impatient.Load())
		})
	}
}
