package fs

import (
	"context"
	"encoding/binary"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/pagecache"
)

// device remembers the memory that it allocated, for windows on it.
type device struct {
	gpubackend.Device
	mu    sync.Mutex
	given []gpubackend.Memory // protected by mu
}

func (d *device) Alloc(size int64) (gpubackend.Memory, error) {
	m, err := d.Device.Alloc(size)
	if err == nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.given = append(d.given, m)
	}
	return m, err
}

// mountWithDevices mounts with emulated devices or GPUs.
func mountWithDevices(t *testing.T, count int, change ...func(*Options)) (*scene, *pagecache.Cache, *notary) {
	t.Helper()
	return mountReading(t, count, pagecache.DeviceReadsAuto, change...)
}

// mountReading is mountWithDevices. reads says when CPU reads come from the devices.
func mountReading(
	t *testing.T, count int, reads pagecache.DeviceReads, change ...func(*Options),
) (*scene, *pagecache.Cache, *notary) {
	t.Helper()
	testdevice.Require(t)
	if n := testdevice.Count(count); n < count {
		t.Skipf("%d devices are needed, and there are %d GPUs", count, n)
	}
	n := &notary{socket: "/s"}
	var devices []gpubackend.Device
	for i := range count {
		d, err := testdevice.Open(emulated.Options{Ordinal: i, Memory: 64 << 20, Poison: true})
		require.NoError(t, err)
		n.devices = append(n.devices, &device{Device: d})
		devices = append(devices, n.devices[i])
	}
	var o Options
	for _, c := range change {
		c(&o)
	}
	cache, err := pagecache.New(pagecache.Options{
		Devices: devices, HostMemory: 64 << 20, WriteBackInterval: time.Hour, WriteBack: o.WriteBack,
		DeviceReads: reads,
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, cache.Close(context.Background())) })
	s := mount(t, append(change, func(o *Options) { o.Cache, o.Granter = cache, n })...)
	return s, cache, n
}

// window is a client's mapping of a part of a file on a device. It has one extent. It accesses the extent by copies,
// because the CPU can address only the memory of emulated devices.
type window struct {
	*pagecache.Mapping
	device *device
	memory gpubackend.Memory
	base   int64 // offset in the file at which memory begins
}

// mapOn maps the first size bytes of an open file on a device, for writing.
func mapOn(t *testing.T, cache *pagecache.Cache, n *notary, f *os.File, device int, size int64) window {
	t.Helper()
	return mapAs(t, cache, n, f, pagecache.MapRequest{Device: device, Len: size, Writable: true, Launder: true})
}

// mapReadOnlyOn maps the first size bytes of an open file on a device, for reading.
func mapReadOnlyOn(t *testing.T, cache *pagecache.Cache, n *notary, f *os.File, device int, size int64) window {
	t.Helper()
	return mapAs(t, cache, n, f, pagecache.MapRequest{Device: device, Len: size, Launder: true})
}

func mapAs(t *testing.T, cache *pagecache.Cache, n *notary, f *os.File, r pagecache.MapRequest) window {
	t.Helper()
	require.NoError(t, askGrant(f, make([]byte, GrantSize)))
	m, err := cache.Map(context.Background(), n.last(), r)
	require.NoError(t, err)
	extents := m.Extents()
	require.Len(t, extents, 1)
	d := n.devices[r.Device]
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, memory := range d.given {
		if exported, err := memory.Export(r.Writable); err == nil && exported == extents[0].Descriptor {
			return window{m, d, memory, extents[0].Offset}
		}
	}
	require.Fail(t, "the device did not give that memory")
	return window{}
}

// load returns the first n bytes of the extent.
func (w window) load(t *testing.T, n int) string {
	t.Helper()
	return w.loadAt(t, w.base, n)
}

// loadAt returns n bytes at an offset of the file.
func (w window) loadAt(t *testing.T, at int64, n int) string {
	t.Helper()
	b := make([]byte, n)
	require.NoError(t, w.device.CopyOut(context.Background(),
		[]gpubackend.Copy{{Mem: w.memory, Off: at - w.base, Host: b}}))
	return string(b)
}

// store stores b at an offset of the file.
func (w window) store(t *testing.T, at int64, b []byte) {
	t.Helper()
	assert.NoError(t, w.device.CopyIn(context.Background(),
		[]gpubackend.Copy{{Mem: w.memory, Off: at - w.base, Host: b}}))
}

// release releases the first n bytes of the mapping.
func (w window) release(t *testing.T, n int64) {
	t.Helper()
	_, err := w.Release(context.Background(), 0, n)
	require.NoError(t, err)
}

// bothModesWithDevices runs a test on mounts with one device, with and without the kernel's write-back cache.
func bothModesWithDevices(t *testing.T, test func(t *testing.T, s *scene, cache *pagecache.Cache, n *notary),
	change ...func(*Options)) {
	t.Helper()
	runDeviceModes(t, deviceModes()[:2], test, change)
}

// everyModeWithDevices runs a test on mounts with one device, with all ways of writing.
func everyModeWithDevices(t *testing.T, test func(t *testing.T, s *scene, cache *pagecache.Cache, n *notary),
	change ...func(*Options)) {
	t.Helper()
	runDeviceModes(t, deviceModes(), test, change)
}

func runDeviceModes(t *testing.T, modes []deviceMode,
	test func(t *testing.T, s *scene, cache *pagecache.Cache, n *notary), change []func(*Options)) {
	t.Helper()
	for _, mode := range modes {
		t.Run(mode.name, func(t *testing.T) {
			s, cache, n := mountWithDevices(t, 1, append(change, mode.change)...)
			test(t, s, cache, n)
		})
	}
}

// deviceMode is a way of writing.
type deviceMode struct {
	name   string
	change func(*Options)
}

// deviceModes returns the ways of writing with and without the kernel's write-back cache and, for root, with opens that
// the daemon does not see.
func deviceModes() []deviceMode {
	modes := []deviceMode{{"write-through", func(*Options) {}}, {"write-back", writeBack}}
	if os.Geteuid() == 0 {
		modes = append(modes, deviceMode{"kernel opens", unseenOpens})
	}
	return modes
}

func (w window) close(t *testing.T) {
	t.Helper()
	require.NoError(t, w.Unmap(context.Background()))
}

func TestDeviceAndProgramsShareAFile(t *testing.T) {
	for _, mode := range deviceModes() {
		t.Run(mode.name, func(t *testing.T) {
			ctx := context.Background()
			s, cache, n := mountWithDevices(t, 1, mode.change)
			path := filepath.Join(s.mnt, "f")
			require.NoError(t, os.WriteFile(path, []byte("0123456789"), 0644))
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			require.NoError(t, err)
			defer f.Close()
			w := mapOn(t, cache, n, f, 0, 10)
			assert.Equal(t, "0123456789", w.load(t, 10))

			w.store(t, 2, []byte("GPU"))
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
			assert.Equal(t, "01GPU5cpu9", w.load(t, 10))

			w.store(t, 0, []byte("AB"))
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
			assert.Equal(t, "ABGP\x00\x00!\x00\x00\x00", w.load(t, 10))
			require.NoError(t, os.Remove(path))
			w.close(t)
			assert.Zero(t, s.fs.changed.Load(), "the mount's own change was taken for a foreign one")
		})
	}
}

// TestNoStaleReadsWhileDevicesRelease makes two devices write between the slots of the programs, in the same pages, and
// release. No program may read old bytes, and no byte may be lost.
func TestNoStaleReadsWhileDevicesRelease(t *testing.T) {
	for _, mode := range deviceModes() {
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
						w.store(t, int64(slot*slotStride+slotSize+8*d),
							binary.NativeEndian.AppendUint64(nil, releases[d]))
					}
					_, err := w.Release(ctx, 0, size)
					assert.NoError(t, err)
					_, err = w.Acquire(ctx, 0, size, true)
					assert.NoError(t, err)
				})
			}
			operations := *staleOperations / 10
			assert.Zero(t, staleReadsDuring(t, s, path, operations, uint64(time.Now().UnixNano()), drops...),
				"reads that got old bytes")
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
