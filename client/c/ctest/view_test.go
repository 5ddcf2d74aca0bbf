package ctest

import (
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/control/controltest"
)

// viewFiles makes the files that the scenarios of views expect.
func viewFiles(t *testing.T, folder string) {
	t.Helper()
	a, b := make([]byte, 5<<20+123), make([]byte, 3*4096+7)
	for i := range a {
		a[i] = byte(i/7 + i)
	}
	for i := range b {
		b[i] = byte(i*31 + 7)
	}
	require.NoError(t, os.WriteFile(filepath.Join(folder, "a"), a, 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(folder, "b"), b, 0o600))
}

// TestViewsWithoutADaemon is about the layout of views, and about what is refused before a daemon is asked.
func TestViewsWithoutADaemon(t *testing.T) {
	for build := range builds {
		t.Run(build, func(t *testing.T) {
			client := compile(t, "view", build)
			d := &daemon{t: t, dir: t.TempDir()}
			viewFiles(t, d.dir)
			d.run(client, "layout", d.dir)
			d.run(client, "bad", d.dir)
		})
	}
}

// recordedFrame returns the body of a frame of the files.
func recordedFrame(t *testing.T, name string) []byte {
	t.Helper()
	for _, file := range frameFiles {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for line := range strings.Lines(string(text)) {
			if digits, ok := strings.CutPrefix(line, name+" "); ok {
				frame, err := hex.DecodeString(strings.TrimSpace(digits))
				require.NoError(t, err)
				return frame[16:]
			}
		}
	}
	t.Fatal("there is no frame " + name)
	return nil
}

// TestViewRequests looks at what a daemon is asked for, and has some answer that have no views.
func TestViewRequests(t *testing.T) {
	client := compile(t, "view", "address")
	d := startDaemon(t, &controltest.Cache{})
	viewFiles(t, d.dir)
	record := func(name string, answers map[uint16][]string) *controltest.Recorded {
		socket := filepath.Join(d.dir, name)
		r, err := controltest.ListenRecorded(socket, answers, frameFiles...)
		require.NoError(t, err)
		t.Cleanup(r.Close)
		d.env = []string{"GAIAFS_TEST_SOCKET=" + socket}
		return r
	}
	r := record("views", map[uint16][]string{1: {"welcome-view"}, 7: {"result"}, 13: {"result"}, 14: {"result"},
		16: {"mapped-view", "extents-view"}})
	d.run(client, "recorded", d.dir)
	require.Empty(t, r.Unexpected())
	require.Equal(t, recordedFrame(t, "features-view"), r.First(13))
	want, got := recordedFrame(t, "mapview"), r.First(16)
	require.Len(t, got, len(want))
	copy(got[48:64], want[48:64]) // the token
	require.Equal(t, want, got)

	for name, answers := range map[string]map[uint16][]string{
		"version1": controltest.Version1, "without": {1: {"welcome2"}, 13: {"result"}},
	} {
		r := record(name, answers)
		require.Equal(t, "95 the daemon of the mount is older than this library, and has no views\n", d.run(client, "refused", d.dir))
		require.Empty(t, r.Unexpected())
	}
}
