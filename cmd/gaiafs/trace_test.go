package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/pagecache/residency/score"
	"github.com/gaiafs/gaiafs/prefetch/trace"
)

// recording is a running "gaiafs trace record".
type recording struct {
	cmd    *exec.Cmd
	output string
	errs   bytes.Buffer
}

func startRecording(t *testing.T, mountpoint string, flags ...string) *recording {
	t.Helper()
	r := &recording{output: filepath.Join(t.TempDir(), "out.trace")}
	r.cmd = command(t, append([]string{"trace", "record", mountpoint, "-o", r.output}, flags...)...)
	r.cmd.Stderr = &r.errs
	require.NoError(t, r.cmd.Start())
	t.Cleanup(func() { _ = r.cmd.Process.Kill() }) // normally it has ended
	require.Eventually(t, func() bool {
		st, err := os.Stat(r.output)
		return err == nil && st.Size() > 0
	}, 30*time.Second, 5*time.Millisecond)
	return r
}

// end waits for the recording to end and returns its exit code.
func (r *recording) end(t *testing.T) int {
	t.Helper()
	late := time.AfterFunc(30*time.Second, func() { _ = r.cmd.Process.Kill() })
	defer late.Stop()
	_ = r.cmd.Wait()
	return r.cmd.ProcessState.ExitCode()
}

// TestCommandTrace records a CPU program and a device program and replays them. The device program reads a file with a
// hole through a lazy mapping.
func TestCommandTrace(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1")
	const size = 4<<20 + 1000
	sparse, err := os.Create(filepath.Join(s.source, "sparse"))
	require.NoError(t, err)
	require.NoError(t, sparse.Truncate(size))
	for _, off := range []int64{0, 1 << 20, size - 5000} {
		_, err = sparse.WriteAt(bytes.Repeat([]byte{7}, 5000), off)
		require.NoError(t, err)
	}
	require.NoError(t, sparse.Close())
	require.NoError(t, os.WriteFile(filepath.Join(s.source, "plain"), make([]byte, 300_000), 0o600))

	r := startRecording(t, s.mountpoint)
	second := gaiafsCommand(t, "trace", "record", s.mountpoint, "-o", filepath.Join(t.TempDir(), "second"))
	require.Equal(t, exitFailure, second.code)
	require.Contains(t, second.err, "are being recorded already")

	_, err = os.ReadFile(filepath.Join(s.mountpoint, "plain"))
	require.NoError(t, err)
	require.NoError(t, os.Truncate(filepath.Join(s.mountpoint, "plain"), 10))
	f, err := os.Open(filepath.Join(s.mountpoint, "sparse"))
	require.NoError(t, err)
	m, err := gaiafs.Map(f, 0, size, gaiafs.ProtRead, 0, gaiafs.Lazy())
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.NoError(t, m.Advise(0, size, gaiafs.AdviceSequential))
	for off := int64(0); off < size; off += 256 << 10 {
		_, err := m.Acquire(off, min(256<<10, size-off))
		require.NoError(t, err)
	}
	want, err := os.ReadFile(filepath.Join(s.source, "sparse"))
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, m.Bytes()[:size]))
	require.NoError(t, m.Close())

	require.NoError(t, r.cmd.Process.Signal(syscall.SIGINT))
	require.Equal(t, exitOK, r.end(t), r.errs.String())
	b, err := os.Open(r.output)
	require.NoError(t, err)
	defer b.Close()
	got, err := trace.Read(b)
	require.NoError(t, err)
	bytesOf, resized := map[string]int64{}, false
	for _, x := range got.Events {
		if x.Resize {
			resized = resized || got.Files[x.File].Name == "plain" && x.Len == 10
			continue
		}
		bytesOf[got.Files[x.File].Name+" "+strings.Split(got.Sources[x.Source].String(), ":")[0]] += x.Len
	}
	require.Equal(t, map[string]int64{"plain cpu": 300_000, "sparse gpu0": size}, bytesOf)
	require.True(t, resized)

	shown := gaiafsCommand(t, "trace", "show", r.output)
	require.Equal(t, exitOK, shown.code, shown.err)
	require.Contains(t, shown.out, `"sparse"`)
	all := gaiafsCommand(t, "trace", "show", "--all", r.output)
	require.Equal(t, len(got.Events), strings.Count(all.out, "\n"))
	require.Contains(t, all.out, "resize")
	replayed := gaiafsCommand(t, "trace", "replay", "--json", "--predictor=none,streams-16m", r.output)
	require.Equal(t, exitOK, replayed.code, replayed.err)
	var d replayDocument
	require.NoError(t, json.Unmarshal([]byte(replayed.out), &d))
	require.Equal(t, got.Accesses(), d.Accesses)
	require.Len(t, d.Predictors, 2)
	require.Greater(t, d.Predictors[1].Hits, d.Predictors[0].Hits)

	exists := gaiafsCommand(t, "trace", "record", s.mountpoint, "-o", r.output)
	require.Equal(t, exitFailure, exists.code)
	require.Contains(t, exists.err, "exists: remove it")
	timed := gaiafsCommand(t, "trace", "record", s.mountpoint, "-o", filepath.Join(t.TempDir(), "timed"), "--for=10ms")
	require.Equal(t, exitOK, timed.code, timed.err)

	// To a pipe, and from a pipe.
	piped := gaiafsCommand(t, "trace", "record", s.mountpoint, "-o", "-", "--for=10ms")
	require.Equal(t, exitOK, piped.code, piped.err)
	require.Contains(t, piped.err, "standard output: ")
	require.NoFileExists(t, "-")
	cmd := command(t, "trace", "show", "-")
	cmd.Stdin = strings.NewReader(piped.out)
	shown = execute(t, cmd)
	require.Equal(t, exitOK, shown.code, shown.err)
	require.Contains(t, shown.out, "0 accesses")
	require.Contains(t, shown.out, "no read reached the daemon: the kernel's page cache answers reads itself")

	// The mount ends during a recording.
	r = startRecording(t, s.mountpoint)
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
	require.Equal(t, exitFailure, r.end(t))
	require.Contains(t, r.errs.String(), "--partial")
	require.Equal(t, exitOK, gaiafsCommand(t, "trace", "show", "--partial", r.output).code)
}

// TestCommandTraceReadsOnAfterCtrlC interrupts readers of a pipe, as a terminal does when it interrupts the writer. It
// interrupts them again when they have read everything.
func TestCommandTraceReadsOnAfterCtrlC(t *testing.T) {
	made := gaiafsCommand(t, "trace", "make", "sparse", "--size=64M", "-o", "-")
	require.Equal(t, exitOK, made.code, made.err)
	for _, args := range [][]string{{"show", "-"}, {"replay", "--predictor=none", "-"}, {"show", "--all", "-"}} {
		cmd := command(t, append([]string{"trace"}, args...)...)
		var errs bytes.Buffer
		in, toIn := pipe(t)
		out, toOut := pipe(t)
		_, err := unix.FcntlInt(out.Fd(), unix.F_SETPIPE_SZ, 4096)
		require.NoError(t, err)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = in, toOut, &errs
		require.NoError(t, cmd.Start())
		t.Cleanup(func() { _ = cmd.Process.Kill() }) // normally it has ended
		require.NoError(t, errors.Join(in.Close(), toOut.Close()))
		_, err = io.WriteString(toIn, made.out[:100])
		require.NoError(t, err)
		require.Eventually(t, func() bool { return waiting(t, toIn) == 0 }, time.Minute, time.Millisecond)
		require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
		// On a busy machine, the signal may still be pending when the reader has read everything and accepts signals
		// again.
		require.Eventually(t, func() bool { return waits(t, cmd.Process.Pid) }, time.Minute, time.Millisecond)
		_, err = io.WriteString(toIn, made.out[100:])
		require.NoError(t, errors.Join(err, toIn.Close()))
		require.Eventually(t, func() bool { return waiting(t, out) > 0 }, time.Minute, time.Millisecond)
		if args[1] != "--all" {
			printed, err := io.ReadAll(out)
			require.NoError(t, err)
			require.NoError(t, cmd.Wait(), errs.String())
			require.Contains(t, string(printed), "accesses")
			continue
		}
		require.NoError(t, cmd.Process.Signal(syscall.SIGINT)) // while it prints more than the pipe holds
		require.ErrorContains(t, cmd.Wait(), "interrupt")
	}
}

func pipe(t *testing.T) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	t.Cleanup(func() { r.Close(); w.Close() })
	return r, w
}

// waits reports whether a process has no pending signals and all its threads sleep.
func waits(t *testing.T, pid int) bool {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	require.NoError(t, err)
	idle := regexp.MustCompile(`(?s)State:\tS .*SigPnd:\t0+\nShdPnd:\t0+\n`)
	for _, path := range threads {
		status, err := os.ReadFile(path)
		if err != nil || !idle.Match(status) {
			return false
		}
	}
	return len(threads) > 0
}

// waiting returns how many bytes are in a pipe.
func waiting(t *testing.T, f *os.File) int {
	n, err := unix.IoctlGetInt(int(f.Fd()), unix.TIOCINQ)
	require.NoError(t, err)
	return n
}

func TestCommandTraceOfAPattern(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a.trace")
	made := gaiafsCommand(t, "trace", "make", "sparse", "--size=64M", "-o", path)
	require.Equal(t, exitOK, made.code, made.err)
	replayed := gaiafsCommand(t, "trace", "replay", path, "--disk=500M", "--disk-latency=2ms")
	require.Equal(t, exitOK, replayed.code, replayed.err)
	for _, name := range []string{"none", "kernel", "tree", "streams", "coverage"} {
		require.Contains(t, replayed.out, "  "+name+" ")
	}

	b, err := os.ReadFile(path)
	require.NoError(t, err)
	write := func(name string, b []byte) string {
		p := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(p, b, 0o600))
		return p
	}
	cut := write("cut", b[:len(b)-100])
	other := bytes.Clone(b)
	other[8] = 9
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"replay", cut}, exitFailure, "is cut short after"},
		{[]string{"show", cut}, exitFailure, "--partial"},
		{[]string{"show", write("other", other)}, exitFailure, "it has version 9, but this gaiafs reads 1"},
		{[]string{"show", write("png", bytes.Repeat([]byte("PNG"), 100))}, exitFailure, "is not a trace of gaiafs"},
		{[]string{"show", dir}, exitFailure, "is a directory"},
		{[]string{"show", dir + "/missing"}, exitFailure, "no such file"},
		{[]string{"replay", path, "--predictor=oracle"}, exitUsage,
			`there is no predictor "oracle"; there are none, kernel`},
		{[]string{"replay", path, "--disk-depth=0"}, exitUsage, "its depth at least 1"},
		{[]string{"evict", cut}, exitFailure, "is cut short after"},
		{[]string{"evict", path, "--rule=oracle"}, exitUsage,
			`there is no rule "oracle" for evictions; there are allocated`},
		{[]string{"evict", path, "--placement=maybe"}, exitUsage, `there is no placement "maybe"`},
		{[]string{"evict", path, "--memory=200"}, exitUsage, "--memory 200 is not a percentage"},
		{[]string{"evict", path, "--extent=3M"}, exitFailure, "a power of two"},
		{[]string{"evict", path, "--chances=0"}, exitUsage, "--chances 0 is not"},
		{[]string{"make", "sideways", "-o", path}, exitUsage, `there is no pattern "sideways"`},
		{[]string{"make", "random"}, exitUsage, "with -o"},
		{[]string{"make", "random", "-o", path}, exitFailure, "exists"},
		{[]string{"make", "random", "-o", path + "2", "--size=1K"}, exitUsage, "64 GiB"},
		{[]string{"record", dir}, exitUsage, "with -o"},
		{[]string{"record", dir, "-o", dir + "/r"}, exitFailure, "is not a mountpoint of gaiafs"},
		{[]string{"record", dir, "-o", dir + "/missing/r"}, exitFailure, "cannot be written"},
		{[]string{"record", dir, "-o", dir + "/r", "--for=-1s"}, exitUsage, "negative"},
		{[]string{"rewind"}, exitUsage, `there is no command "trace rewind"`},
	} {
		r := gaiafsCommand(t, append([]string{"trace"}, c.args...)...)
		require.Equal(t, c.code, r.code, "%v: %s", c.args, r.err)
		require.Contains(t, r.err, c.says, "%v", c.args)
	}
	require.NoFileExists(t, dir+"/r")
	piped := gaiafsCommand(t, "trace", "make", "sparse", "--size=64M", "-o", "-")
	require.Equal(t, exitOK, piped.code, piped.err)
	require.Equal(t, string(b), piped.out)
	none := gaiafsCommand(t, "trace", "record", dir, "-o", "-")
	require.Equal(t, exitFailure, none.code)
	require.Contains(t, none.err, "is not a mountpoint of gaiafs")
	require.NotContains(t, gaiafsCommand(t, "trace", "show", path).out, "no read reached")
	partial := gaiafsCommand(t, "trace", "replay", "--partial", "--predictor=none", cut)
	require.Equal(t, exitOK, partial.code, partial.err)
	require.Contains(t, partial.err, "using the part before that")
}

// TestTraceEvict: each rule and both bounds are scored for each size of memory, as text and as JSON.
func TestTraceEvict(t *testing.T) {
	path := filepath.Join(t.TempDir(), "skewed")
	require.Equal(t, exitOK, gaiafsCommand(t, "trace", "make", "skewed", "--size=64M", "-o", path).code)
	r := gaiafsCommand(t, "trace", "evict", path, "--json", "--memory=0,100", "--placement=always,threshold",
		"--chances=3")
	require.Equal(t, exitOK, r.code, r.err)
	var d evictDocument
	require.NoError(t, json.Unmarshal([]byte(r.out), &d))
	require.EqualValues(t, 64<<20, d.Distinct)
	require.Len(t, d.Plays, 2)
	require.EqualValues(t, 2<<20, d.Plays[0].Memory)
	for _, p := range d.Plays {
		require.Len(t, p.Rules, 2*len(score.Names()))
		require.Equal(t, []string{"belady", "best-of-3"}, []string{p.Bounds[0].Name, p.Bounds[1].Name})
	}
	require.EqualValues(t, 32, d.Plays[1].Rules[0].Moves, "all fits")
	require.Zero(t, d.Plays[1].Rules[0].Trips)
	shown := gaiafsCommand(t, "trace", "evict", path, "--rule=lru", "--read-only-first", "--memory=50")
	require.Equal(t, exitOK, shown.code, shown.err)
	require.Contains(t, shown.out, "best-of-100")
	require.Contains(t, gaiafsCommand(t, "trace", "evict", "--help").out, "FlexGPU")
}

// Output other than a regular file is written in place, and never removed.
func TestTraceToADevice(t *testing.T) {
	r := gaiafsCommand(t, "trace", "make", "sequential", "-o", "/dev/null", "--size", "8M")
	require.Equal(t, exitOK, r.code, r.err)
	r = gaiafsCommand(t, "trace", "record", t.TempDir(), "-o", "/dev/null")
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "is not a mountpoint of gaiafs")
	st, err := os.Stat("/dev/null")
	require.NoError(t, err)
	require.False(t, st.Mode().IsRegular())
	dir := t.TempDir()
	r = gaiafsCommand(t, "trace", "make", "sequential", "-o", dir)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, dir+" is a directory: name a file in it")
}

// On a full disk, no command leaves the beginning of a file.
func TestFullDiskLeavesNoFile(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, for a small filesystem")
	}
	dir := t.TempDir()
	require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=4k"))
	defer func() { require.NoError(t, unix.Unmount(dir, 0)) }()
	path := filepath.Join(dir, "t.trace")
	r := gaiafsCommand(t, "trace", "make", "sequential", "-o", path)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "no space left on device")
	require.NoFileExists(t, path)
}
