package main

import (
	"bufio"
	"encoding/json"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/pagecache/live"
)

// trace --live shows what a mount does as it happens. Users other than root see only their own requests.
func TestTraceLive(t *testing.T) {
	const alice = 65534
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=8M", "--allow-other")
	for dir := s.mountpoint; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		require.NoError(t, os.Chmod(dir, 0o755))
	}
	require.NoError(t, os.Mkdir(filepath.Join(s.mountpoint, "dir"), 0o755))
	path := filepath.Join(s.mountpoint, "dir", "model")
	require.NoError(t, os.WriteFile(path, make([]byte, 2*mib), 0o644))

	watch := func(as uint32, args ...string) (next func(kind string) live.Event, end func()) {
		cmd := command(t, append([]string{"trace", "--live", s.mountpoint, "--json"}, args...)...)
		if as != 0 {
			cmd = asUser(t, as, cmd)
		}
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		cmd.Stderr = os.Stderr
		require.NoError(t, cmd.Start())
		lines := bufio.NewScanner(out)
		next = func(kind string) live.Event {
			t.Helper()
			for lines.Scan() {
				var e live.Event
				require.NoError(t, json.Unmarshal(lines.Bytes(), &e))
				if e.Kind == kind {
					return e
				}
			}
			t.Fatalf("no %s came", kind)
			return live.Event{}
		}
		return next, func() {
			require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
			require.NoError(t, cmd.Wait())
		}
	}
	all, endAll := watch(0)
	mine, endMine := watch(alice)
	reads, endReads := watch(0, "--path", filepath.Join(s.mountpoint, "dir"), "--kind", "open")

	// Make things happen until every watcher has seen its events.
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
			f, err := os.Open(path)
			if err != nil {
				t.Error(err)
				return
			}
			if m, err := gaiafs.Map(f, 0, 2*mib, gaiafs.ProtRead, 0); err != nil {
				t.Error(err)
			} else if _, err := m.Acquire(4096, 8192); err != nil {
				t.Error(err)
			} else if err := m.Close(); err != nil {
				t.Error(err)
			}
			f.Close()
			_ = execute(t, asUser(t, alice, command(t, "info", path)))
		}
	}()
	e := all("acquire")
	require.Equal(t, "dir/model", e.File)
	require.EqualValues(t, os.Getpid(), e.Process)
	require.EqualValues(t, 4096, e.Offset)
	require.Equal(t, "gpu0", e.Device)
	require.Equal(t, "dir/model", reads("open").File)
	e = mine("open")
	require.EqualValues(t, alice, e.User)
	require.NotContains(t, e.File, "model")
	close(stop)
	<-done
	endAll()
	endMine()
	endReads()

	r := execute(t, asUser(t, alice, command(t, "trace", "--live", s.mountpoint, "--path", "dir")))
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "only root and the user who mounted may watch paths")
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

func TestLiveLines(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 6000, time.Local)
	require.Equal(t, "03:04:05.000006     85 µs       12 read       dir/a: 128 KiB at 4096",
		liveLine(live.Event{At: at, Micros: 85, Kind: "read", Process: 12, File: "dir/a", Bytes: 128 << 10,
			Offset: 4096}))
	require.Equal(t, "… 3 events are missing: they came too fast\n03:04:05.000006     12 ms        - transfer   gpu0 acquire in: 2.0 MiB",
		liveLine(live.Event{At: at, Micros: 12000, Kind: "transfer", Device: "gpu0", Detail: "acquire in",
			Bytes: 2 << 20, Lost: 3}))
	mountpoint := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(mountpoint, "dir/dir"), 0o755))
	t.Chdir(filepath.Dir(mountpoint))
	for path, want := range map[string]string{
		mountpoint + "/dir/*.bin":             "dir/*.bin",
		mountpoint:                            ".",
		"dir":                                 "dir",
		"../etc":                              "../etc",
		filepath.Base(mountpoint) + "/dir":    "dir", // from the working directory
		filepath.Base(mountpoint) + "/absent": filepath.Base(mountpoint) + "/absent",
	} {
		below, err := belowMount(mountpoint, path)
		require.NoError(t, err)
		require.Equal(t, want, below, path)
	}
	_, err := belowMount(mountpoint, "/etc/passwd")
	require.ErrorContains(t, err, "--path /etc/passwd is not below "+mountpoint)
	t.Chdir(filepath.Join(mountpoint, "dir"))
	below, err := belowMount(mountpoint, "dir")
	require.NoError(t, err)
	require.Equal(t, "dir/dir", below)
}
