package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/pagecache/live"
)

// asViewer is set in a process that maps a view of two files, says so, and waits for the end of its input. It names the
// files.
const asViewer = "GAIAFS_TEST_VIEW_OF"

// viewSegments are what the view has of the two files: 3 MiB and 1 MiB.
var viewSegments = []gaiafs.Segment{{Offset: 8, Length: 3 * mib}, {File: 1, Length: mib}}

func viewerMain() {
	var files []*os.File
	for _, path := range filepath.SplitList(os.Getenv(asViewer)) {
		f, err := os.Open(path)
		if err != nil {
			panic(err)
		}
		files = append(files, f)
	}
	v, err := gaiafs.MapView(files, viewSegments, 1)
	if err != nil {
		panic(err)
	}
	fmt.Println("mapped")
	_, _ = io.Copy(io.Discard, os.Stdin)
	_ = v.Close()
}

// startViewer starts such a process, and returns it once it has the view. end ends it.
func startViewer(t *testing.T, paths ...string) (pid int, end func()) {
	t.Helper()
	cmd := exec.Command(executable(t))
	cmd.Env = append(os.Environ(), asViewer+"="+strings.Join(paths, string(filepath.ListSeparator)))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	_, err = out.Read(make([]byte, 7))
	require.NoError(t, err)
	return cmd.Process.Pid, func() {
		require.NoError(t, in.Close())
		require.NoError(t, cmd.Wait())
	}
}

// Two processes map a view of two files. info, status, top, the live page and its metrics show the bytes that it has of
// each file, and who maps it; trace --live shows the files of each request.
func TestViewsAreShown(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:2", "--gpu-memory=64M", "--metrics=127.0.0.1:0")
	weights, other := filepath.Join(s.mountpoint, "weights"), filepath.Join(s.mountpoint, "other")
	require.NoError(t, os.WriteFile(weights, make([]byte, 4*mib), 0o600))
	require.NoError(t, os.WriteFile(other, make([]byte, 2*mib), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(s.mountpoint, "zeros"), make([]byte, 2*mib), 0o600))
	require.Equal(t, exitOK, gaiafsCommand(t, "warm", "--device=0", filepath.Join(s.mountpoint, "zeros")).code)
	first, endFirst := startViewer(t, weights, other)
	second, endSecond := startViewer(t, weights, other)

	r := gaiafsCommand(t, "info", weights)
	require.Equal(t, exitOK, r.code, r.err)
	require.Contains(t, r.out, "\n  gpu1       3.0 MiB current, 1.0 MiB absent\n")
	require.Contains(t, r.out, "\n  view       on gpu1: 4.0 MiB in 2 segments of 2 files, 3.0 MiB of them of this one, for user 0, "+
		"2 mappings; 4.0 MiB of device memory\n")
	for _, pid := range []int{first, second} {
		require.Contains(t, r.out, fmt.Sprintf(
			"\n  mapped by  gaiafs.test, process %d of user 0: a view of 4.0 MiB on gpu1, to read\n", pid))
	}
	r = gaiafsCommand(t, "info", "--json", other)
	var info []fileInfo
	require.NoError(t, json.Unmarshal([]byte(r.out), &info))
	require.Len(t, info[0].MappedBy, 2)
	for _, m := range info[0].MappedBy {
		require.Contains(t, []int{first, second}, int(m.Process))
		require.True(t, m.View)
		require.EqualValues(t, 4*mib, m.Bytes)
		require.Equal(t, 1, m.Device)
	}
	require.Equal(t, []residencyInfo{{Device: 1, Current: mib, Absent: mib}}, info[0].Residency)

	r = gaiafsCommand(t, "status", s.mountpoint)
	require.Contains(t, r.out, `
  file     size     mappings  where      resident  stale  dirty  bases  overlaps
  other    2.0 MiB  2         gpu1 view  256       0      0      0      0 B
  weights  4.0 MiB  2         gpu1 view  769       0      0      0      0 B
  zeros    2.0 MiB  0         gpu0       512       0      0      0      0 B
`)
	document, err := statusOf(s.mountpoint, patience)
	require.NoError(t, err)
	for _, f := range document.Files {
		if f.Name == "weights" {
			require.Equal(t, strings.Repeat("c", 49)+strings.Repeat(".", 15), f.Views[0].Map)
			require.EqualValues(t, 3*mib, f.Views[0].FileBytes)
		}
	}
	r = gaiafsCommand(t, "top", "--once", s.mountpoint)
	require.Regexp(t, `\ngpu1 +4\.0 MiB +64 MiB +4\.0 MiB +0 B +0 B +0 B `, r.out, "used, of, clean")
	require.Regexp(t, `\n> weights +4\.0 MiB +3\.0 MiB +2\n`, r.out)
	require.Contains(t, r.out, "\ngpu1 view  "+strings.Repeat("c", 49)+strings.Repeat(".", 15)+"\n")

	// Without a token: the page has no names, but the same bars.
	shown := browser(t, "http://"+document.Mount.Metrics+"/", "--dump-dom")
	require.Contains(t, shown, "4.0 MiB, 2 mappings<")
	require.Equal(t, 49, strings.Count(between(t, shown, `aria-label="769 pages resident`, "</div>"), `class="clean"`))
	require.Contains(t, shown, "gpu1 view<")
	require.Contains(t, shown, "clean 4.0 MiB, stale 0 B, dirty 0 B, other 0 B", "of gpu1")
	answer, err := http.Get("http://" + document.Mount.Metrics + "/metrics")
	require.NoError(t, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	require.Contains(t, string(text), `gaiafs_device_resident_bytes{device="1",state="clean"} 4.194304e+06`)

	// A change in the mount makes a part stale.
	f, err := os.OpenFile(weights, os.O_RDWR, 0)
	require.NoError(t, err)
	_, err = f.WriteAt(make([]byte, mib), 2*mib)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	r = gaiafsCommand(t, "status", s.mountpoint)
	require.Contains(t, r.out, "\n  weights  4.0 MiB  2         gpu1 view  769       256    0      0      0 B\n")
	r = gaiafsCommand(t, "info", weights)
	require.Contains(t, r.out, "\n  gpu1       2.0 MiB current, 1023 KiB stale, 1.0 MiB absent\n")
	r = gaiafsCommand(t, "top", "--once", s.mountpoint)
	require.Contains(t, r.out, "\ngpu1 view  "+strings.Repeat("c", 32)+strings.Repeat("s", 16)+"c"+strings.Repeat(".", 15)+"\n")
	endFirst()
	endSecond()
	r = gaiafsCommand(t, "info", weights)
	require.NotContains(t, r.out, "mapped by")
	require.Contains(t, r.out, "0 mappings")

	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

// between returns the text from one string to the next other.
func between(t *testing.T, text, from, to string) string {
	t.Helper()
	_, text, found := strings.Cut(text, from)
	require.True(t, found, from)
	text, _, found = strings.Cut(text, to)
	require.True(t, found, to)
	return text
}

// trace --live names the files of a view, whatever the request.
func TestTraceOfViews(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=8M")
	var files []*os.File
	for _, name := range []string{"a", "b"} {
		f, err := os.Create(filepath.Join(s.mountpoint, name))
		require.NoError(t, err)
		defer f.Close()
		require.NoError(t, f.Truncate(4*mib))
		files = append(files, f)
	}
	cmd := command(t, "trace", "--live", s.mountpoint, "--json", "--path=b")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	cmd.Stderr = os.Stderr
	require.NoError(t, cmd.Start())
	events := json.NewDecoder(out)
	stop, done := make(chan struct{}), make(chan error)
	go func() {
		var err error
		for err == nil {
			select {
			case <-stop:
				close(done)
				return
			default:
			}
			var v *gaiafs.View
			if v, err = gaiafs.MapView(files, viewSegments, 0); err == nil {
				_, err = v.Acquire(0, 100)
			}
			if err == nil {
				_, err = gaiafs.AcquireAll(gaiafs.Range{Of: v.Mapping, Len: 100})
			}
			if err == nil {
				err = v.Close()
			}
		}
		done <- err
	}()
	want := map[string]string{"map-view": "", "acquire": "", "acquire-all": "", "unmap": ""}
	for left := len(want); left > 0; {
		var e live.Event
		require.NoError(t, events.Decode(&e))
		if was, asked := want[e.Kind]; asked && was == "" {
			require.Equal(t, "b", e.File)
			require.Equal(t, 2, e.Files)
			require.Equal(t, "gpu0", e.Device)
			want[e.Kind] = e.File
			left--
		}
	}
	close(stop)
	require.NoError(t, <-done)
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	_ = cmd.Wait() // it may have been writing to the closed pipe
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}
