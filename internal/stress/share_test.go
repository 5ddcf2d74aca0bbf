package stress

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

// TestShared lets programs of all kinds write the same pages for some seconds. Every byte of theirs is in the file
// afterwards.
func TestShared(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	allModes(t, func(t *testing.T, o testmount.Options) {
		o.Devices = 2
		o.WriteBackInterval = 200 * time.Millisecond
		m := testmount.Start(t, o)
		c := startCrew(t, m.Path("shared"), seed, 0)
		<-time.After(3 * time.Second)
		c.stop()
		content := mustRead(t, m.Path("shared"))
		kept, _ := c.verify(t, content, nil)
		t.Logf("%d promises kept", kept)
		require.Positive(t, kept)
		sameEverywhere(t, m, "shared", content)
		for _, f := range status(t, m).Files {
			require.Zero(t, f.Counters["overlapping_bytes"], "nobody stored into the slots of others")
			require.Zero(t, f.Counters["home_replacements"], "nobody changed SOURCE")
		}
	})
}

// TestTwoDaemons has two mounts use one GPU. Neither sees what the other holds, and one goes on when the other dies.
func TestTwoDaemons(t *testing.T) {
	const size = 8 << 20
	var mounts [2]*testmount.Mount
	var maps [2]*gaiafs.Mapping
	for i := range mounts {
		m := testmount.Start(t, testmount.Options{Memory: 64 << 20})
		mounts[i] = m
		require.NoError(t, os.WriteFile(m.Path("file"), pattern(size, byte(i+1)), 0o600))
		f, err := os.OpenFile(m.Path("file"), os.O_RDWR, 0)
		require.NoError(t, err)
		defer f.Close()
		maps[i], err = gaiafs.Map(f, 0, size, gaiafs.ProtRead|gaiafs.ProtWrite, 0)
		require.NoError(t, err)
	}
	publish := func(i int, seed byte) []byte {
		content := pattern(size, seed)
		_, err := maps[i].WriteAt(content, 0)
		require.NoError(t, err)
		_, err = maps[i].Release(0, size)
		require.NoError(t, err)
		return content
	}
	for i, m := range mounts {
		requireBytes(t, pattern(size, byte(i+1)), load(t, maps[i]), "on the device")
		d := status(t, m).Devices[0]
		require.EqualValues(t, size, d.UsedBytes, "a daemon counts what is its own")
		require.EqualValues(t, 64<<20, d.MemoryBytes)
	}
	first, second := publish(0, 10), publish(1, 11)
	sameEverywhere(t, mounts[0], "file", first)
	sameEverywhere(t, mounts[1], "file", second)

	mounts[0].Kill()
	require.NoError(t, mounts[0].Wait(10*time.Second))
	_, err := maps[0].Acquire(0, size)
	require.ErrorIs(t, err, unix.ENOTCONN)
	require.ErrorIs(t, maps[0].Close(), unix.ENOTCONN)
	requireBytes(t, second, load(t, maps[1]), "on the device")
	sameEverywhere(t, mounts[1], "file", publish(1, 12))
	require.NoError(t, maps[1].Close())
}
