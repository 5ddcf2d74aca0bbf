package ctest

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/control/controltest"
	"github.com/gaiafs/gaiafs/internal/fakecuda"
	"github.com/gaiafs/gaiafs/internal/testmount"
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

// TestViewsWithoutADaemon checks the layout of views, and the failures that need no daemon.
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

// TestViewRequests checks the requests for views, and what happens with daemons that have no views.
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
		require.Equal(t, "95 the daemon of the mount is older than this library, and has no views\n",
			d.run(client, "refused", d.dir))
		require.Empty(t, r.Unexpected())
	}
}

// mountViews mounts a directory that has the files of the scenarios.
func mountViews(t *testing.T, o testmount.Options) (*testmount.Mount, *daemon) {
	t.Helper()
	o.Poison = true
	if o.Devices == 0 {
		o.Devices = 2
	}
	m := testmount.Start(t, o)
	viewFiles(t, m.Dir)
	return m, &daemon{t: t, dir: m.Dir}
}

// TestViews makes views on mounts.
func TestViews(t *testing.T) {
	for build := range builds {
		t.Run(build, func(t *testing.T) {
			client := compile(t, "view", build)
			for _, scenario := range []string{"bytes", "coherent", "addresses", "many", "threads", "forks"} {
				t.Run(scenario, func(t *testing.T) {
					skipForks(t, build, scenario)
					m, d := mountViews(t, testmount.Options{})
					d.run(client, scenario, m.Dir)
				})
			}
			t.Run("interrupted", func(t *testing.T) {
				m, d := mountViews(t, testmount.Options{})
				cmd, expect, answer := d.talk(client, "interrupted", m.Dir)
				defer time.AfterFunc(patience, func() { cmd.Process.Kill() }).Stop()
				expect("done")
				// The replies that came after a signal are gone.
				require.Eventually(t, func() bool { return viewStatus(t, m).mappings() == 0 }, patience,
					time.Millisecond)
				_, err := answer.Write([]byte{1})
				require.NoError(t, err)
				require.NoError(t, cmd.Wait())
			})
		})
	}
}

func TestViewsOnGPUs(t *testing.T) {
	libcuda := fakecuda.Dir(t)
	for build := range builds {
		t.Run(build, func(t *testing.T) {
			client := compile(t, "view", build)
			for _, scenario := range []string{"bytes", "coherent", "many", "threads"} {
				t.Run(scenario, func(t *testing.T) {
					m, d := mountViews(t, testmount.Options{Disguised: true, Memory: 512 << 20})
					d.env = []string{"LD_LIBRARY_PATH=" + libcuda, "FAKECUDA_LEAKS=1", "GAIAFS_TEST_CUDA=1"}
					d.run(client, scenario, m.Dir)
				})
			}
		})
	}
}

func TestViewsOfSeveralMounts(t *testing.T) {
	m, d := mountViews(t, testmount.Options{})
	other, _ := mountViews(t, testmount.Options{})
	d.run(compile(t, "view", "plain"), "two-mounts", m.Dir, other.Dir)
}

func TestViewsThatAreTooLarge(t *testing.T) {
	m, d := mountViews(t, testmount.Options{Memory: 64 << 20})
	d.run(compile(t, "view", "plain"), "too-large", m.Dir)
}

// TestViewsAndTheDaemon ends the daemon while a view exists.
func TestViewsAndTheDaemon(t *testing.T) {
	d := startDaemon(t, &controltest.Cache{})
	viewFiles(t, d.dir)
	cmd, _, _ := d.restarts(compile(t, "view", "address"), d.dir)
	require.NoError(t, cmd.Wait())
	d.waitMapped(0)
}

// TestViewsAndSource changes a view's file directly in SOURCE: it is rewritten, cut, made longer, and replaced.
func TestViewsAndSource(t *testing.T) {
	m, d := mountViews(t, testmount.Options{})
	path := filepath.Join(m.Source, "a")
	cmd, expect, answer := d.talk(compile(t, "view", "plain"), "source", m.Dir)
	defer time.AfterFunc(patience, func() { cmd.Process.Kill() }).Stop()
	content, err := os.ReadFile(path)
	require.NoError(t, err)
	for i := range content {
		content[i] = ^content[i]
	}
	for _, change := range []func() error{
		func() error { return os.WriteFile(path, content, 0o600) },
		func() error { return os.Truncate(path, 1<<20+5000) },
		func() error { return os.WriteFile(path, append(content, content...), 0o600) },
		func() error {
			require.NoError(t, os.WriteFile(path+".new", make([]byte, len(content)), 0o600))
			return os.Rename(path+".new", path) // the descriptor and the view stay with the old file
		},
	} {
		expect("waiting")
		require.NoError(t, change())
		_, err := answer.Write([]byte{1})
		require.NoError(t, err)
	}
	require.NoError(t, cmd.Wait())
}

func TestViewsOnALostDevice(t *testing.T) {
	m, d := mountViews(t, testmount.Options{Faulty: true})
	cmd, expect, answer := d.talk(compile(t, "view", "plain"), "lost", m.Dir)
	defer time.AfterFunc(patience, func() { cmd.Process.Kill() }).Stop()
	expect("mapped")
	m.Lose(0)
	_, err := answer.Write([]byte{1})
	require.NoError(t, err)
	require.NoError(t, cmd.Wait())
}

// viewed is the part of a status that these tests look at.
type viewed struct {
	Devices []struct {
		Used int64 `json:"used_bytes"`
	} `json:"devices"`
	Files []struct {
		Name  string `json:"name"`
		Views []struct {
			Bytes       int64 `json:"bytes"`
			DeviceBytes int64 `json:"device_bytes"`
			Mappings    int   `json:"mappings"`
		} `json:"views"`
	} `json:"files"`
}

func viewStatus(t *testing.T, m *testmount.Mount) (s viewed) {
	t.Helper()
	text, err := gaiafs.Status(m.Dir)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &s))
	return s
}

// mappings returns the number of mappings of all views.
func (s viewed) mappings() (n int) {
	for _, f := range s.Files {
		for _, v := range f.Views {
			n += v.Mappings
		}
	}
	return n
}

// TestViewsAreShared makes several programs make the same view, twice each. Its memory counts once. Then they are
// killed.
func TestViewsAreShared(t *testing.T) {
	client := compile(t, "view", "plain")
	m, d := mountViews(t, testmount.Options{})
	var used int64
	var kill []func()
	for i := range 3 {
		cmd, expect, _ := d.talk(client, "stay", m.Dir, "2")
		kill = append(kill, func() {
			require.NoError(t, cmd.Process.Kill())
			_ = cmd.Wait() // "signal: killed"
		})
		expect("mapped")
		s := viewStatus(t, m)
		require.Len(t, s.Files, 1)
		require.Len(t, s.Files[0].Views, 1)
		require.Equal(t, 2*(i+1), s.mappings())
		require.EqualValues(t, 2<<20+30*99, s.Files[0].Views[0].Bytes)
		if i == 0 {
			used = s.Devices[0].Used
			require.Equal(t, s.Files[0].Views[0].DeviceBytes, used)
		}
		require.Equal(t, used, s.Devices[0].Used)
	}
	for i, k := range kill {
		k()
		require.Eventually(t, func() bool { return viewStatus(t, m).mappings() == 2*(2-i) }, patience, time.Millisecond)
	}
	d.run(client, "bytes", m.Dir) // later programs find the right bytes
}
