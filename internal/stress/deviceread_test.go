package stress

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

const deviceFileSize = 24<<20 + 1234

// deviceFile makes a file of noise that the first device has and nobody maps.
func deviceFile(t *testing.T, m *testmount.Mount) (content []byte) {
	t.Helper()
	content = make([]byte, deviceFileSize)
	rnd := rand.NewChaCha8([32]byte{1})
	_, _ = rnd.Read(content)
	require.NoError(t, os.WriteFile(filepath.Join(m.Source, "file"), content, 0o644))
	f, err := os.Open(m.Path("file"))
	require.NoError(t, err)
	defer f.Close()
	mapping, err := gaiafs.Map(f, 0, deviceFileSize, gaiafs.ProtRead, testdevice.Number(0))
	require.NoError(t, err)
	require.NoError(t, mapping.Close())
	return content
}

// forget has the host forget what it has of a file, on the mount and below it.
func forget(t *testing.T, m *testmount.Mount) {
	t.Helper()
	for _, path := range []string{m.Path("file"), filepath.Join(m.Source, "file")} {
		f, err := os.Open(path)
		require.NoError(t, err)
		require.NoError(t, unix.Fdatasync(int(f.Fd())))
		require.NoError(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
		require.NoError(t, f.Close())
	}
}

// readAll reads the file in pieces, on several descriptors at once, each its own part, forward or backward.
func readAll(t *testing.T, m *testmount.Mount, content []byte, piece, readers int, backward bool) {
	t.Helper()
	var group sync.WaitGroup
	for r := range readers {
		group.Go(func() {
			f, err := os.Open(m.Path("file"))
			if err != nil {
				t.Error(err)
				return
			}
			defer f.Close()
			part := (len(content) + readers - 1) / readers
			end := min((r+1)*part, len(content))
			buf := make([]byte, piece)
			for done := 0; done < end-r*part; done += piece {
				at := r*part + done
				n := min(piece, end-at)
				if backward {
					at = end - done - n
				}
				if got, err := f.ReadAt(buf[:n], int64(at)); err != nil || !bytes.Equal(buf[:n], content[at:at+n]) {
					t.Errorf("%d bytes at %d: %d, %v", n, at, got, err)
					return
				}
			}
		})
	}
	group.Wait()
}

// TestReadsComeFromADevice: programs on the CPU read a file that only a device has in memory.
func TestReadsComeFromADevice(t *testing.T) {
	for _, mode := range []string{"auto", "always"} {
		t.Run(mode, func(t *testing.T) {
			m := testmount.Start(t, testmount.Options{DeviceReads: mode, Poison: true})
			content := deviceFile(t, m)
			for _, piece := range []int{64 << 10, 1 << 20, 3 * page.Size} {
				for _, readers := range []int{1, 4} {
					forget(t, m)
					readAll(t, m, content, piece, readers, piece == 3*page.Size)
				}
			}
			s := status(t, m)
			served := s.Counters["device_read_bytes"] + s.Counters["clean_read_bytes"]
			t.Logf("%v\ndisk %+v, device %+v", s.Counters, s.Disk, s.Devices[0].Read)
			if mode == "always" {
				require.Greater(t, served, int64(deviceFileSize))
			}
			require.Positive(t, served)
			require.LessOrEqual(t, s.CleanBytes, s.CleanLimit*2)
		})
	}
}

// TestReadsOfAHungDevice: a device that no longer answers costs those who read a bounded time, and nobody anything
// else.
func TestReadsOfAHungDevice(t *testing.T) {
	testdevice.Emulated(t, "a GPU does not hang when told to")
	m := testmount.Start(t, testmount.Options{DeviceReads: "always", Faulty: true})
	content := deviceFile(t, m)
	m.Hang(0)
	forget(t, m)
	began := time.Now()
	readAll(t, m, content, 64<<10, 4, false)
	t.Logf("read in %v", time.Since(began))
	require.Less(t, time.Since(began), 30*time.Second)
	require.True(t, status(t, m).Devices[0].Read.Stuck)

	f, err := os.OpenFile(m.Path("file"), os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	copy(content[100:], "written meanwhile")
	_, err = f.WriteAt(content[100:120], 100)
	require.NoError(t, err)
	require.NoError(t, f.Sync())
	forget(t, m)
	readAll(t, m, content, 64<<10, 1, false)

	m.Resume(0)
	require.Eventually(t, func() bool { return !status(t, m).Devices[0].Read.Stuck }, patience, 10*time.Millisecond)
	before := status(t, m).Counters["device_reads"]
	forget(t, m)
	readAll(t, m, content, 64<<10, 4, false)
	require.Greater(t, status(t, m).Counters["device_reads"], before)
}
