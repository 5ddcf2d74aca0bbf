package stress

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/internal/testmount"
	"github.com/gaiafs/gaiafs/pagecache"
)

// usage is what a daemon takes of what can run out.
type usage struct {
	descriptors, goroutines int
	open                    map[string]int // what the descriptors are of
	deviceBytes             int64          // in extents, mapped or not
	mappedBytes             int64
	heapBytes               int64 // in use
	residentBytes           int64 // of the process, garbage included
}

// status asks the daemon as `gaiafs status` does.
func status(t testing.TB, m *testmount.Mount) pagecache.Status {
	t.Helper()
	doc, err := gaiafs.Status(m.Dir)
	require.NoError(t, err)
	var s pagecache.Status
	require.NoError(t, json.Unmarshal(doc, &s))
	return s
}

// measure reads the usage of a daemon. The connection that asks is part of it, always.
func measure(t testing.TB, m *testmount.Mount) usage {
	t.Helper()
	s := status(t, m)
	u := usage{goroutines: s.Goroutines, heapBytes: s.HeapLiveBytes}
	for _, d := range s.Devices {
		u.deviceBytes += d.UsedBytes
		u.mappedBytes += d.MappedBytes
	}
	table := fmt.Sprintf("/proc/%d/fd", m.Process.Pid)
	entries, err := os.ReadDir(table)
	require.NoError(t, err)
	u.descriptors = len(entries)
	u.open = make(map[string]int)
	for _, e := range entries {
		of, _ := os.Readlink(filepath.Join(table, e.Name()))
		u.open[strings.TrimRight(of, "0123456789[]")]++
	}
	memory, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.Process.Pid))
	require.NoError(t, err)
	for line := range strings.Lines(string(memory)) {
		if rest, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			_, err := fmt.Sscan(rest, &u.residentBytes)
			require.NoError(t, err)
			u.residentBytes <<= 10
		}
	}
	return u
}

// eventually waits for what happens in the background, and fails with what the last look said.
func eventually(t testing.TB, look func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := look()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			require.NoError(t, err, "after %v", patience)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// unmapped waits until no client maps anything.
func unmapped(t testing.TB, m *testmount.Mount) {
	t.Helper()
	eventually(t, func() error {
		for _, f := range status(t, m).Files {
			if f.Mappings > 0 {
				return fmt.Errorf("%s is still mapped %d times", f.Name, f.Mappings)
			}
		}
		return nil
	})
}

// gpu maps a whole file of the mount on a device in the test's own process. The mapping ends with the test, or before.
func gpu(t testing.TB, path string, length int64, device int) *gaiafs.Mapping {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	m, err := gaiafs.Map(f, 0, length, gaiafs.ProtRead|gaiafs.ProtWrite, testdevice.Number(device))
	require.NoError(t, err)
	t.Cleanup(func() { _ = m.Close() })
	return m
}

// load returns the bytes that a device has of a mapping, of whatever kind its memory is.
func load(t testing.TB, m *gaiafs.Mapping) []byte {
	t.Helper()
	b, err := loaded(m)
	require.NoError(t, err)
	return b
}

func loaded(m *gaiafs.Mapping) ([]byte, error) {
	b := make([]byte, m.Len())
	_, err := m.ReadAt(b, 0)
	return b, err
}

// store stores bytes into the device's memory.
func store(t testing.TB, m *gaiafs.Mapping, off int64, p ...byte) {
	t.Helper()
	_, err := m.WriteAt(p, off)
	require.NoError(t, err)
}

// dropCaches makes the kernel forget what it holds of a file of the mount.
func dropCaches(t testing.TB, path string) {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Sync())
	require.NoError(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
}

// sameEverywhere checks that a file reads the same on the mount, with and without what the kernel holds, and in SOURCE.
func sameEverywhere(t testing.TB, m *testmount.Mount, name string, want []byte) {
	t.Helper()
	got, err := os.ReadFile(m.Path(name))
	require.NoError(t, err)
	requireBytes(t, want, got, "on the mount")
	dropCaches(t, m.Path(name)) // which syncs, so what devices released is home
	got, err = os.ReadFile(m.Path(name))
	require.NoError(t, err)
	requireBytes(t, want, got, "on the mount, read again")
	got, err = os.ReadFile(m.Source + "/" + name)
	require.NoError(t, err)
	requireBytes(t, want, got, "in SOURCE")
}

// requireBytes is Equal for bytes too many to print.
func requireBytes(t testing.TB, want, got []byte, where string) {
	t.Helper()
	require.Equal(t, len(want), len(got), "size %s", where)
	for i := range want {
		if want[i] != got[i] {
			t.Fatalf("%s: byte %d (page %d, offset %d) is %#x, not %#x", where, i, i/4096, i%4096, got[i], want[i])
		}
	}
}
