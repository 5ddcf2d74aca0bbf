package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/fs"
	"github.com/gaiafs/gaiafs/internal/hungfs"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

// asMain makes this binary run as the command itself: tests start it in separate processes.
const asMain = "GAIAFS_TEST_AS_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(asMain) != "" {
		main()
		return
	}
	if os.Getenv(asViewer) != "" {
		viewerMain()
		return
	}
	testmount.Main()
	hungfs.Main()
	// Everything that the tests make is in one directory, so that a mount there is known to be a leftover of this run.
	dir, err := os.MkdirTemp("", "gaiafs-cmd")
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if err == nil {
		err = errors.Join(os.Chmod(dir, 0o755), os.Setenv("TMPDIR", dir))
	}
	if err != nil {
		panic(err)
	}
	code := m.Run()
	left := leftMounts(dir)
	for _, mountpoint := range left {
		fmt.Fprintln(os.Stderr, "a test left a mount behind:", mountpoint)
		code = max(code, 1)
	}
	if len(left) == 0 {
		_ = os.RemoveAll(dir)
	}
	os.Exit(code)
}

// leftMounts returns the mountpoints of gaiafs below dir.
func leftMounts(dir string) (left []string) {
	mounts, err := fs.Mounts()
	if err != nil {
		panic(err)
	}
	for _, m := range mounts {
		if strings.HasPrefix(m.Mountpoint, dir+"/") {
			left = append(left, m.Mountpoint)
		}
	}
	return left
}

// command returns a gaiafs command that has no settings but those of the test.
func command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(withoutSettings(os.Environ()), asMain+"=1", "XDG_CONFIG_HOME="+t.TempDir(),
		variable("config")+"=/dev/null")
	return cmd
}

type result struct {
	out, err string
	code     int
}

func execute(t *testing.T, cmd *exec.Cmd) result {
	t.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		require.NoError(t, err)
	}
	return result{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
}

func gaiafsCommand(t *testing.T, args ...string) result {
	t.Helper()
	return execute(t, command(t, args...))
}

// place has the directories of a future mount.
type place struct {
	source, mountpoint, log string
}

func newPlace(t *testing.T) place {
	t.Helper()
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Fatal("these tests need /dev/fuse")
	}
	dir, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	p := place{filepath.Join(dir, "source"), filepath.Join(dir, "mnt"), filepath.Join(dir, "log")}
	require.NoError(t, os.Mkdir(p.source, 0o755))
	require.NoError(t, os.Mkdir(p.mountpoint, 0o755))
	t.Cleanup(func() {
		if mounted, err := fs.IsMount(p.mountpoint); err == nil && mounted {
			t.Error("the mount is left behind")
			_ = detach(p.mountpoint)
		}
		if t.Failed() {
			log, _ := os.ReadFile(p.log)
			t.Logf("log of the mount:\n%s", log)
		}
	})
	return p
}

// serving is a mount in the foreground of a separate process.
type serving struct {
	place
	cmd *exec.Cmd
	// copied is closed when the log is complete.
	copied chan struct{}
}

// mountForeground starts "gaiafs mount" and waits until it reports the mount.
func mountForeground(t *testing.T, flags ...string) *serving {
	t.Helper()
	return mountAt(t, newPlace(t), flags...)
}

// mountAt is mountForeground at a given place.
func mountAt(t *testing.T, p place, flags ...string) *serving {
	t.Helper()
	return serveAt(t, p, command(t, append(append([]string{"mount"}, flags...), p.source, p.mountpoint)...))
}

// serveAt starts a command that mounts at a place, and waits until it reports the mount.
func serveAt(t *testing.T, p place, cmd *exec.Cmd) *serving {
	t.Helper()
	pipe, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	log, err := os.Create(p.log)
	require.NoError(t, err)
	lines := bufio.NewReader(io.TeeReader(pipe, log))
	for {
		line, err := lines.ReadString('\n')
		require.NoError(t, err, "it ended: %s", line)
		if strings.Contains(line, "msg=mounted") || strings.Contains(line, `"msg":"mounted"`) {
			break
		}
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // normally it has ended
	})
	s := &serving{p, cmd, make(chan struct{})}
	go func() {
		defer close(s.copied)
		_, _ = io.Copy(io.Discard, lines)
		log.Close()
	}()
	return s
}

// end waits for the process and returns its exit code.
func (s *serving) end(t *testing.T) int {
	t.Helper()
	state, err := waitFor(s.cmd.Process, 30*time.Second)
	require.NoError(t, err)
	if s.copied != nil {
		<-s.copied
	}
	return state.ExitCode()
}

func waitFor(p *os.Process, limit time.Duration) (*os.ProcessState, error) {
	late := time.AfterFunc(limit, func() { _ = p.Kill() })
	defer late.Stop()
	return p.Wait()
}

func (s *serving) signal(t *testing.T, sig os.Signal) {
	t.Helper()
	require.NoError(t, s.cmd.Process.Signal(sig))
}

// signalAgain sends a signal that counts as a second one.
func (s *serving) signalAgain(t *testing.T, sig os.Signal) {
	t.Helper()
	time.Sleep(oneAct) // the first signal counts for so long
	s.signal(t, sig)
}

func TestCommandUsage(t *testing.T) {
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"mont"}, `there is no command "mont"; did you mean mount or umount?`},
		{[]string{"mount"}, "needs SOURCE and MOUNTPOINT; 0 arguments were given"},
		{[]string{"mount", "a"}, "1 argument was given"},
		{[]string{"mount", "--frobnicate", "a", "b"}, "unknown flag: --frobnicate"},
		{[]string{"mount", "--gpus=quantum", "a", "b"}, "use auto, none, or one or several of cuda:0,1, emulated:2"},
		{[]string{"mount", "--gpus=emulated:161", "a", "b"}, "from 1 to 160"},
		{[]string{"mount", "--gpu-memory=much", "a", "b"}, "is not a size; write one such as 512M"},
		{[]string{"mount", "--write-back-interval=0s", "a", "b"}, "too short"},
		{[]string{"mount", "--log-level=loud", "a", "b"}, "none of debug, info, warn, error"},
		{[]string{"mount", "--socket=here", "a", "b"}, "--socket here: the path must be absolute"},
		{[]string{"mount", "--socket=/" + strings.Repeat("x", 103), "a", "b"},
			"has 104 bytes, but at most 103 are possible: choose a shorter one"},
		{[]string{"mount", "--gpus=emulated:1", "--gpu-memory=1", "a", "b"},
			"--gpu-memory is 1 bytes, but a device needs at least 2MiB; leave it out to have gaiafs choose"},
		{[]string{"mount", "--gpu-memory=2047K", "a", "b"}, "a device needs at least 2MiB"},
		{[]string{"mount", "--host-memory=1", "a", "b"}, "--host-memory is 1 bytes, and the least is 1MiB: "},
		{[]string{"help", "bogus"}, `there is no command "bogus"`},
		{[]string{"foo"}, `there is no command "foo"` + "\n"},
		{[]string{""}, `there is no command ""`},
		{[]string{"help", "mont"}, `did you mean mount or umount?`},
		{[]string{"help", "trace", "bogus"}, `there is no command "trace bogus"`},
		{[]string{"help", "mount", "a"}, `there is no command "mount a"`},
		{[]string{"--version", "bogus"}, `there is no command "bogus"`},
		{[]string{"mount", "--config=/does/not/exist", "a", "b"}, "configuration file cannot be read"},
		{[]string{"umount"}, "needs MOUNTPOINT"},
		{[]string{"status", "--timeout=0", "a"}, `"0" is too short; the minimum is 1ms`},
		{[]string{"status", "a", "b"}, "2 arguments were given"},
		{[]string{"version", "a"}, "takes no arguments"},
		{[]string{"demo", "--gpus=none"}, "the demo needs a device"},
		{[]string{"demo", "--width=3"}, "from 64 to 16384"},
	} {
		r := gaiafsCommand(t, c.args...)
		require.Equal(t, exitUsage, r.code, "%v: %s", c.args, r.err)
		require.Contains(t, r.err, c.says, "%v", c.args)
		require.Contains(t, r.err, "--help'", "%v says where help is", c.args)
		require.Empty(t, r.out)
	}
}

func TestCommandHelp(t *testing.T) {
	for _, args := range [][]string{nil, {"--help"}, {"mount", "--help"}, {"umount", "--help"}, {"status", "-h"},
		{"demo", "-h"}, {"version", "-h"},
		{"trace", "-h"}, {"trace", "record", "-h"}, {"trace", "replay", "-h"}, {"trace", "show", "-h"},
		{"trace", "make", "-h"}, {"trace", "evict", "-h"}} {
		r := gaiafsCommand(t, args...)
		require.Equal(t, exitOK, r.code, r.err)
		require.Contains(t, r.out, "Examples:", "%v", args)
	}
	require.NotContains(t, gaiafsCommand(t, "mount", "--help").out, "ready-fd")
	require.NotContains(t, gaiafsCommand(t, "--help").out, "demo-program")
	require.Contains(t, gaiafsCommand(t, "completion", "bash").out, "bash completion")
	for _, shell := range []string{"tcsh", "powershell"} {
		r := gaiafsCommand(t, "completion", shell)
		require.Equal(t, exitUsage, r.code)
		require.Contains(t, r.err, `there is no command "completion `+shell+`"`)
	}
	require.NotContains(t, gaiafsCommand(t, "completion", "--help").out, "powershell")
	require.Contains(t, gaiafsCommand(t, "version").out, "gaiafs "+version)
	require.Equal(t, gaiafsCommand(t, "version"), gaiafsCommand(t, "--version"))
	for args, same := range map[string]string{"help": "--help", "help mount": "mount --help",
		"help trace record": "trace record --help", "help help": "help -h"} {
		require.Equal(t, gaiafsCommand(t, strings.Fields(same)...), gaiafsCommand(t, strings.Fields(args)...), args)
	}
	require.Contains(t, gaiafsCommand(t, "__complete", "help", "trace", "rec").out, "record")
	for _, name := range []string{"mount", "demo", "bench"} {
		require.Contains(t, gaiafsCommand(t, name, "--help").out, "emulated[:N]", "without a number it is one device")
	}
}

func TestCommandRefusesBadPlaces(t *testing.T) {
	p := newPlace(t)
	full := filepath.Join(filepath.Dir(p.source), "full")
	require.NoError(t, os.MkdirAll(filepath.Join(full, "x"), 0o755))
	inside := filepath.Join(p.source, "inside")
	require.NoError(t, os.Mkdir(inside, 0o755))
	file := filepath.Join(p.source, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	for _, daemon := range []bool{false, true} {
		for _, c := range []struct {
			args []string
			says string
		}{
			{[]string{p.source + "/missing", p.mountpoint}, "does not exist: create it with mkdir"},
			{[]string{p.source, p.mountpoint + "/missing"}, "does not exist: create it with mkdir"},
			{[]string{file, p.mountpoint}, "is not a directory"},
			{[]string{p.source, full}, "is not empty"},
			{[]string{p.source, p.source}, "are the same directory"},
			{[]string{p.source, inside}, "is inside SOURCE"},
			{[]string{inside, p.source}, "which would hide it"},
			{[]string{"--socket=" + file, p.source, p.mountpoint}, "is not a socket is in the way"},
		} {
			args := append([]string{"mount", "--log-file=" + p.log}, c.args...)
			if daemon {
				args = append([]string{"mount", "--daemon"}, args[1:]...)
			}
			r := gaiafsCommand(t, args...)
			require.Equal(t, exitFailure, r.code, "%v", args)
			require.Contains(t, r.err, c.says, "%v", args)
			require.Equal(t, 1, strings.Count(r.err, "\n"), "one line: %s", r.err)
		}
	}
	r := gaiafsCommand(t, "mount", "--gpus=emulated:1", p.source+"/missing", p.mountpoint)
	require.Equal(t, 1, strings.Count(r.err, "\n"), "no device was opened: %s", r.err)
	r = gaiafsCommand(t, "mount", "--gpus=cuda:0", p.source, p.mountpoint)
	if r.code == exitFailure { // if there is a usable CUDA device, TestCommandDaemon tests this
		require.Contains(t, r.err, "--gpus emulated:1 works everywhere")
	}
}

func TestCommandDaemon(t *testing.T) {
	p := newPlace(t)
	cmd := command(t, "mount", "--daemon", "--log-file", "../log", "--gpus", "emulated:2", "--gpu-memory", "64M",
		"../source", "--", "../mnt")
	cmd.Dir = p.source // relative paths are relative to the caller
	r := execute(t, cmd)
	require.Equal(t, exitOK, r.code, r.err)
	require.Equal(t, p.mountpoint+" shows "+p.source+"; emulated devices, as --gpus says: gpu0 (host memory, 64 MiB), "+
		"gpu1 (host memory, 64 MiB)\n", r.out)
	require.Empty(t, r.err)

	f, err := os.Create(filepath.Join(p.mountpoint, "file"))
	require.NoError(t, err)
	require.NoError(t, f.Truncate(3*4096))
	m, err := gaiafs.Map(f, 0, 3*4096, gaiafs.ProtRead|gaiafs.ProtWrite, 1)
	require.NoError(t, err)
	copy(m.Bytes()[5000:], "from a device")
	_, err = f.WriteAt([]byte("from the cpu"), 4096)
	require.NoError(t, err)
	_, err = m.Release(0, m.Len())
	require.NoError(t, err)

	doc := gaiafsCommand(t, "status", "--json", p.mountpoint)
	require.Equal(t, exitOK, doc.code, doc.err)
	var s statusDocument
	require.NoError(t, json.Unmarshal([]byte(doc.out), &s))
	require.Equal(t, p.source, s.Mount.Source)
	require.Equal(t, p.mountpoint, s.Mount.Mountpoint)
	require.Equal(t, 1, s.Mount.Mappings)
	require.Len(t, s.Devices, 2)
	require.Equal(t, int64(64<<20), s.Devices[0].MemoryBytes)
	require.Len(t, s.Files, 1)
	require.Equal(t, int64(1), s.Counters["releases"])
	table := gaiafsCommand(t, "status", p.mountpoint)
	require.Equal(t, exitOK, table.code, table.err)
	for _, word := range []string{p.source, "gpu1", "emulated", "64 MiB", "file", "12 KiB"} {
		require.Contains(t, table.out, word)
	}
	require.NotContains(t, table.out, "overlapping bytes", "what is zero is left out")
	require.NotContains(t, table.out, "collecting read")
	table = gaiafsCommand(t, "status", "--all", p.mountpoint)
	require.Equal(t, exitOK, table.code, table.err)
	require.Contains(t, table.out, "overlapping bytes")
	list := gaiafsCommand(t, "status")
	require.Equal(t, exitOK, list.code, list.err)
	require.Regexp(t, "(?m)^"+p.mountpoint+" +"+p.source+" +[0-9]+ +[0-9.]+ K?i?B +mounted$", list.out)

	again := gaiafsCommand(t, "mount", "--daemon", "--log-file", p.log, p.source, p.mountpoint)
	require.Equal(t, exitFailure, again.code)
	require.Contains(t, again.err, "is already a mountpoint of gaiafs: unmount it")

	busy := gaiafsCommand(t, "umount", p.mountpoint)
	require.Equal(t, exitFailure, busy.code)
	require.Contains(t, busy.err, fmt.Sprintf("(process %d, open file %s)", os.Getpid(), f.Name()))
	require.NoError(t, f.Close())
	require.NoError(t, m.Close())

	pid := s.Mount.PID
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	require.NoError(t, err)
	require.Equal(t, "gaiafs\n", string(name), "as ps shows it")
	down := gaiafsCommand(t, "umount", p.mountpoint)
	require.Equal(t, exitOK, down.code, down.err)
	require.False(t, runs(pid), "the daemon is gone when umount returns")
	got, err := os.ReadFile(filepath.Join(p.source, "file"))
	require.NoError(t, err)
	require.Equal(t, "from the cpu", string(got[4096:4108]))
	require.Equal(t, "from a device", string(got[5000:5013]))
	_, err = os.Stat(s.Mount.Socket)
	require.ErrorIs(t, err, os.ErrNotExist)
	log, err := os.ReadFile(p.log)
	require.NoError(t, err)
	require.Contains(t, string(log), "everything is written back")
	require.Contains(t, string(log), "unmounted by gaiafs umount, process ")

	down = gaiafsCommand(t, "umount", p.mountpoint)
	require.Equal(t, exitFailure, down.code)
	require.Contains(t, down.err, "is not a mountpoint of gaiafs")
}

// runs reports whether a process has not ended. A zombie has ended.
func runs(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

// status shows what was lost with a device, as text and as JSON.
func TestCommandStatusOfALostDevice(t *testing.T) {
	m := testmount.Start(t, testmount.Options{Faulty: true, WriteBackInterval: time.Hour})
	path := m.Path("out.raw")
	require.NoError(t, os.WriteFile(path, make([]byte, 4*4096), 0o600))
	require.NotContains(t, gaiafsCommand(t, "status", m.Dir).out, "lost with devices")
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	g, err := gaiafs.Map(f, 0, 4*4096, gaiafs.ProtRead|gaiafs.ProtWrite, 0)
	require.NoError(t, err)
	_, err = g.WriteAt([]byte{1}, 4096)
	require.NoError(t, err)
	_, err = g.WriteAt([]byte{1}, 2*4096)
	require.NoError(t, err)
	_, err = g.Release(0, g.Len())
	require.NoError(t, err)
	m.Lose(0)
	_, err = g.Release(0, g.Len())
	require.ErrorIs(t, err, syscall.ENODEV)
	require.EqualError(t, err,
		"gaiafs: release: no such device: device 0 is lost, and with it all bytes that were not in the backing files; 'gaiafs "+
			"status' lists the released pages among them; mount again to use the device")

	r := gaiafsCommand(t, "status", m.Dir)
	require.Equal(t, exitOK, r.code, r.err)
	require.Regexp(t, `(?m)^  gpu0 .* lost *$`, r.out)
	require.Regexp(t, `Released bytes that were lost with devices \(pages of 4 KiB\)\n  file +device +pages +which\n  out\.raw +gpu0 +2 +\[1,3\)\n`, r.out)
	r = gaiafsCommand(t, "status", "--json", m.Dir)
	var s statusDocument
	require.NoError(t, json.Unmarshal([]byte(r.out), &s))
	require.True(t, s.Devices[0].Lost)
	require.JSONEq(t, `[{"device": 0, "file": "out.raw", "pages": 2, "runs": [[1, 3]]}]`, losses(t, r.out))
	require.ErrorIs(t, g.Close(), syscall.ENODEV)
	require.NoError(t, m.Process.Signal(syscall.SIGTERM))
	require.ErrorContains(t, m.Wait(time.Minute), "released bytes of out.raw were lost with device 0")
}

// losses returns the part of a status about losses.
func losses(t *testing.T, status string) string {
	t.Helper()
	var s struct{ Losses json.RawMessage }
	require.NoError(t, json.Unmarshal([]byte(status), &s))
	return string(s.Losses)
}

func TestCommandStatusElsewhere(t *testing.T) {
	r := gaiafsCommand(t, "status", t.TempDir())
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "is not a mountpoint of gaiafs")
	r = gaiafsCommand(t, "status", "/does/not/exist")
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "does not exist")
}

func TestCommandEndsOnSignals(t *testing.T) {
	// If this process ignored these signals, as under nohup, its children would ignore them too.
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, syscall.SIGTERM, syscall.SIGINT)
	defer signal.Stop(caught)
	for _, sig := range []os.Signal{syscall.SIGTERM, syscall.SIGINT} {
		s := mountForeground(t, "--gpus=none")
		require.NoError(t, os.WriteFile(filepath.Join(s.mountpoint, "file"), []byte("content"), 0o600))
		s.signal(t, sig)
		require.Equal(t, exitOK, s.end(t))
		got, err := os.ReadFile(filepath.Join(s.source, "file"))
		require.NoError(t, err)
		require.Equal(t, "content", string(got))
	}
}

// SIGHUP says that the terminal is gone. Without a terminal, nothing ends.
func TestHangUp(t *testing.T) {
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, syscall.SIGHUP) // so that the commands do not ignore it
	defer signal.Stop(caught)
	p := newPlace(t)
	cmd := command(t, "mount", "--gpus=none", p.source, p.mountpoint)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	s := serveAt(t, p, cmd)
	s.signal(t, syscall.SIGHUP)
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
	require.Contains(t, s.logged(t), "cause=SIGTERM")

	r := gaiafsCommand(t, "mount", "--daemon", "--gpus=none", "--log-file="+p.log, p.source, p.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.NoError(t, syscall.Kill(p.status(t).Mount.PID, syscall.SIGHUP))
	r = gaiafsCommand(t, "umount", p.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.NotContains(t, p.logged(t), "SIGHUP")

	ours, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	defer ours.Close()
	number, err := unix.IoctlGetInt(int(ours.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetPointerInt(int(ours.Fd()), unix.TIOCSPTLCK, 0))
	terminal, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	defer terminal.Close()
	cmd = command(t, "mount", "--gpus=none", p.source, p.mountpoint)
	cmd.Stdin = terminal
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	s = serveAt(t, p, cmd)
	s.signal(t, syscall.SIGHUP)
	require.Equal(t, exitOK, s.end(t))
	require.Contains(t, s.logged(t), "cause=SIGHUP")
}

// A script whose variable is not set names no directory, rather than the working directory.
func TestEmptyArguments(t *testing.T) {
	dir := t.TempDir()
	for _, args := range [][]string{{"mount", "", dir}, {"mount", dir, ""}, {"umount", ""}, {"status", ""}, {"info", ""},
		{"set", "", "log-level=info"}, {"debug", "", "-o", "-"}} {
		r := gaiafsCommand(t, args...)
		require.Equal(t, exitUsage, r.code, "%v: %s", args, r.err)
		require.Contains(t, r.err, "an argument is empty", args)
	}
}

// Of several commands that unmount at once, one succeeds, and the others say that they came late. One that finds the
// daemon by its socket, while it ends, says what it can.
func TestUmountsAtOnce(t *testing.T) {
	p := newPlace(t)
	for range 5 {
		r := gaiafsCommand(t, "mount", "--daemon", "--gpus=none", "--log-file="+p.log, p.source, p.mountpoint)
		require.Equal(t, exitOK, r.code, r.err)
		var results [3]result
		var all sync.WaitGroup
		for i := range results {
			cmd := command(t, "umount", p.mountpoint)
			all.Go(func() { results[i] = execute(t, cmd) })
		}
		all.Wait()
		done := 0
		for _, r := range results {
			if r.code == exitOK {
				done++
			} else {
				require.Regexp(t, "has just been unmounted by another program|is not a mountpoint of gaiafs|"+
					"was detached before: its daemon ended before it said", r.err)
				require.NotContains(t, r.err, "ioctl")
			}
		}
		require.NotZero(t, done)
		require.False(t, p.isMounted(t))
	}
}

// Root of a rootless container may not write to the directories of root. Log and socket have other places then.
func TestRootless(t *testing.T) {
	const alice = 65534
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	p := newPlace(t)
	dir := filepath.Dir(p.source)
	for up := dir; up != os.TempDir() && up != "/"; up = filepath.Dir(up) {
		require.NoError(t, os.Chmod(up, 0o755))
	}
	fuse, home := filepath.Join(dir, "fuse"), filepath.Join(dir, "home")
	require.NoError(t, unix.Mknod(fuse, unix.S_IFCHR, int(unix.Mkdev(10, 229))))
	require.NoError(t, errors.Join(os.Chmod(fuse, 0o666), os.Mkdir(home, 0o700)))
	for _, name := range []string{p.source, p.mountpoint, home} {
		require.NoError(t, os.Chown(name, alice, alice))
	}
	program, err := os.Open(executable(t)) // in a directory that alice may not search
	require.NoError(t, err)
	defer program.Close()
	cmd := command(t)
	cmd.Path, cmd.Args = "/bin/sh", []string{"sh", "-euc", `mount --bind "$1" /dev/fuse; g=/proc/self/fd/3
		$g mount --daemon --gpus=none "$2" "$3"; echo x >"$3/file"; $g status "$3"; $g umount "$3"`,
		"sh", fuse, p.source, p.mountpoint}
	cmd.ExtraFiles = []*os.File{program}
	cmd.Env = append(cmd.Env, "HOME="+home, "XDG_RUNTIME_DIR=", "XDG_STATE_HOME=")
	ids := []syscall.SysProcIDMap{{HostID: alice, Size: 1}}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS, UidMappings: ids,
		GidMappings: ids, Credential: &syscall.Credential{NoSetGroups: true}}
	r := execute(t, cmd)
	require.Equal(t, exitOK, r.code, r.out+r.err)
	require.Contains(t, r.out, p.mountpoint+" shows "+p.source)
	logs, err := filepath.Glob(filepath.Join(home, ".local/state/gaiafs/*.log"))
	require.NoError(t, err)
	require.Len(t, logs, 1)
}

func TestCommandEndsWhenUnmountedByOthers(t *testing.T) {
	s := mountForeground(t)
	// Whoever looks at all mounts of the machine keeps this one busy for a moment.
	require.Eventually(t, func() bool { return fs.Unmount(s.mountpoint) == nil }, 10*time.Second, time.Millisecond)
	require.Equal(t, exitOK, s.end(t))
}

// predecessor stands in for the daemon of an earlier mount at the place, with the socket of that number.
func (p *place) predecessor(t *testing.T, number int) *net.UnixListener {
	t.Helper()
	socket := control.DefaultSocket(p.mountpoint, number)
	require.NoError(t, os.MkdirAll(filepath.Dir(socket), 0o755))
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	require.NoError(t, err)
	return l
}

// TestCommandMountsAfterUmount mounts while the daemon of an earlier mount has not yet ended. A socket stands in for
// that daemon. It is closed when the new mount has looked at it.
func TestCommandMountsAfterUmount(t *testing.T) {
	p := newPlace(t)
	old := p.predecessor(t, 0)
	ended := make(chan error, 1)
	go func() {
		conn, err := old.Accept()
		if err == nil {
			conn.Close()
		}
		ended <- errors.Join(err, old.Close())
	}()
	r := gaiafsCommand(t, "mount", "--daemon", "--gpus", "emulated:1", "--log-file", p.log, p.source, p.mountpoint)
	require.Zero(t, r.code, r.err)
	require.NoError(t, <-ended)
	require.Zero(t, gaiafsCommand(t, "umount", p.mountpoint).code)
}

// TestCommandMountsWhileAnotherGoesOn mounts while the daemon of an earlier mount does not end, because that mount
// still exists in another mount namespace. Programs map files of the new mount.
func TestCommandMountsWhileAnotherGoesOn(t *testing.T) {
	p := newPlace(t)
	old := p.predecessor(t, 0)
	defer old.Close()
	r := gaiafsCommand(t, "mount", "--daemon", "--gpus", "emulated:1", "--log-file", p.log, p.source, p.mountpoint)
	require.Zero(t, r.code, r.err)
	f, err := os.Create(filepath.Join(p.mountpoint, "file"))
	require.NoError(t, err)
	require.NoError(t, f.Truncate(4096))
	m, err := gaiafs.Map(f, 0, 4096, gaiafs.ProtRead, 0)
	require.NoError(t, err)
	require.NoError(t, errors.Join(m.Close(), f.Close()))
	require.Zero(t, gaiafsCommand(t, "umount", p.mountpoint).code)
	log, err := os.ReadFile(p.log)
	require.NoError(t, err)
	require.Equal(t, 1, strings.Count(string(log), "waiting for the daemon of an earlier mount here to end"),
		string(log))
	require.Contains(t, string(log), "the daemon of an earlier mount here goes on")
}

// TestCommandRemovesSocketsOfKilledDaemons mounts after one daemon of an earlier mount was killed, while another one
// still serves.
func TestCommandRemovesSocketsOfKilledDaemons(t *testing.T) {
	p := newPlace(t)
	killed, serves := control.DefaultSocket(p.mountpoint, 1), control.DefaultSocket(p.mountpoint, 2)
	l := p.predecessor(t, 1)
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
	defer p.predecessor(t, 2).Close()
	r := gaiafsCommand(t, "mount", "--daemon", "--gpus", "none", "--log-file", p.log, p.source, p.mountpoint)
	require.Zero(t, r.code, r.err)
	require.NoFileExists(t, killed)
	require.FileExists(t, serves)
	require.Zero(t, gaiafsCommand(t, "umount", p.mountpoint).code)
}

// A mapping that its program never released is released when the daemon ends.
func TestCommandReleasesForClientsWhenItEnds(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1", "--write-back-interval=50ms")
	f, err := os.Create(filepath.Join(s.mountpoint, "file"))
	require.NoError(t, err)
	require.NoError(t, f.Truncate(4096))
	m, err := gaiafs.Map(f, 0, 4096, gaiafs.ProtRead|gaiafs.ProtWrite, 0)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	copy(m.Bytes()[100:], "never released")
	s.signal(t, syscall.SIGTERM)
	// The mapping keeps the mount in use, so the daemon detaches it and goes on for this program.
	require.Eventually(t, func() bool {
		mounted, err := fs.IsMount(s.mountpoint)
		return err == nil && !mounted
	}, 20*time.Second, time.Millisecond)
	require.ErrorIs(t, m.Close(), syscall.ENOTCONN)
	require.Equal(t, exitOK, s.end(t))
	got, err := os.ReadFile(filepath.Join(s.source, "file"))
	require.NoError(t, err)
	require.Equal(t, "never released", string(got[100:114]))
	log, err := os.ReadFile(s.log)
	require.NoError(t, err)
	require.Contains(t, string(log), "is in use")
	require.Contains(t, string(log), fmt.Sprintf("process %d", os.Getpid()))
}

func TestCommandSecondSignalForces(t *testing.T) {
	s := mountForeground(t)
	f, err := os.Create(filepath.Join(s.mountpoint, "file"))
	require.NoError(t, err)
	defer f.Close()
	_, err = f.WriteString("written")
	require.NoError(t, err)
	s.signal(t, syscall.SIGTERM)
	require.Eventually(t, func() bool {
		mounted, err := fs.IsMount(s.mountpoint)
		return err == nil && !mounted
	}, 20*time.Second, time.Millisecond)
	_, err = f.WriteString(" after it was detached")
	require.NoError(t, err, "it still serves open files")
	s.signalAgain(t, syscall.SIGTERM)
	require.Equal(t, exitFailure, s.end(t))
	_, err = f.WriteString("lost")
	require.ErrorIs(t, err, syscall.ENOTCONN)
	got, err := os.ReadFile(filepath.Join(s.source, "file"))
	require.NoError(t, err)
	require.Equal(t, "written after it was detached", string(got))
}

func TestCommandUmountOfADeadDaemon(t *testing.T) {
	s := mountForeground(t)
	require.NoError(t, s.cmd.Process.Kill())
	_, err := s.cmd.Process.Wait()
	require.NoError(t, err)
	r := gaiafsCommand(t, "status", s.mountpoint)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, fmt.Sprintf("has ended: 'gaiafs mount %s %s' mounts again", s.source, s.mountpoint))
	for _, args := range [][]string{{"info"}, {"warm"}, {"evict"}, {"pin", "--device=0"}} {
		r = gaiafsCommand(t, append(args, filepath.Join(s.mountpoint, "file"))...)
		require.Equal(t, exitFailure, r.code, args)
		require.Contains(t, r.err, "mounts again", args)
	}
	r = gaiafsCommand(t, "status")
	require.Equal(t, exitOK, r.code, r.err)
	require.Regexp(t, regexp.QuoteMeta(s.mountpoint)+" .*its daemon has ended: mount again\n", r.out)
	r = gaiafsCommand(t, "umount", s.mountpoint)
	require.Equal(t, exitFailure, r.code, "a daemon that was killed did not say that everything is in SOURCE")
	require.Contains(t, r.err, s.mountpoint+" is unmounted, but its daemon had ended without unmounting: bytes that "+
		"devices released in its last seconds may be lost")
	require.False(t, s.isMounted(t))
}

func TestCommandGoesOnWhenNobodyReadsItsLog(t *testing.T) {
	p := newPlace(t)
	cmd := command(t, "mount", "--log-level=debug", p.source, p.mountpoint)
	read, write, err := os.Pipe()
	require.NoError(t, err)
	cmd.Stderr = write
	require.NoError(t, cmd.Start())
	write.Close()
	for lines := bufio.NewReader(read); ; {
		line, err := lines.ReadString('\n')
		require.NoError(t, err)
		if strings.Contains(line, "msg=mounted") || strings.Contains(line, `"msg":"mounted"`) {
			break
		}
	}
	read.Close()
	s := &serving{place: p, cmd: cmd}
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

func TestCommandWriteBack(t *testing.T) {
	s := mountForeground(t, "--write-back", "--gpus=emulated:160", "--gpu-memory=64M", "--log-format=text")
	name := filepath.Join(s.mountpoint, "file")
	require.NoError(t, os.WriteFile(name, bytes.Repeat([]byte("cpu "), 2048), 0o600))
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	require.NoError(t, err)
	m, err := gaiafs.Map(f, 0, 8192, gaiafs.ProtWrite, 159)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	copy(m.Bytes()[4096:], "device")
	require.NoError(t, m.Close())
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
	got, err := os.ReadFile(filepath.Join(s.source, "file"))
	require.NoError(t, err)
	require.Equal(t, "deviceu cpu ", string(got[4096:4108]))
	require.Equal(t, "cpu cpu ", string(got[:8]))
}

func TestCommandReadOnly(t *testing.T) {
	s := mountForeground(t, "--read-only", "--log-format=text", "--attr-timeout=0", "--entry-timeout=0")
	require.ErrorIs(t, os.WriteFile(filepath.Join(s.mountpoint, "file"), nil, 0o600), syscall.EROFS)
	require.NoError(t, os.WriteFile(filepath.Join(s.source, "file"), []byte("x"), 0o600))
	got, err := os.ReadFile(filepath.Join(s.mountpoint, "file"))
	require.NoError(t, err)
	require.Equal(t, "x", string(got))
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

func TestCommandPassthrough(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("passthrough needs root")
	}
	type inForce struct {
		Passthrough        bool
		PassthroughRefused *int `json:"passthrough_refused"`
		WriteBack          bool `json:"write_back"`
	}
	none := new(int)
	for flags, want := range map[string]inForce{
		"--gpus=none":                                {true, none, false},
		"--gpus=none --write-back":                   {true, none, false},
		"--gpus=emulated:1 --read-only":              {true, none, false},
		"--gpus=emulated:1 --read-only --write-back": {true, none, false},
		"--gpus=none --passthrough=off":              {false, none, false},
		"--gpus=none --passthrough=off --write-back": {false, none, true},
		"--gpus=emulated:1":                          {false, none, false},
		"--gpus=emulated:1 --write-back":             {false, none, true},
	} {
		t.Run(flags, func(t *testing.T) {
			s := mountForeground(t, append(strings.Fields(flags), "--log-format=text")...)
			require.NoError(t, os.WriteFile(filepath.Join(s.source, "file"), []byte("x"), 0o600))
			got, err := os.ReadFile(filepath.Join(s.mountpoint, "file"))
			require.NoError(t, err)
			require.Equal(t, "x", string(got))
			var document struct{ Mount inForce }
			r := gaiafsCommand(t, "status", "--json", s.mountpoint)
			require.Equal(t, exitOK, r.code)
			require.NoError(t, json.Unmarshal([]byte(r.out), &document))
			table := gaiafsCommand(t, "status", s.mountpoint)
			require.Equal(t, exitOK, table.code)
			s.signal(t, syscall.SIGTERM)
			require.Equal(t, exitOK, s.end(t))
			if want.Passthrough && !document.Mount.Passthrough {
				t.Skip("passthrough needs Linux 6.9")
			}
			require.Equal(t, want, document.Mount)
			first, _, _ := strings.Cut(table.out, "\n")
			require.Equal(t, want.WriteBack, strings.Contains(first, ", write-back"), first)
			require.Equal(t, want.Passthrough, strings.Contains(first, ", passthrough"), first)
			log, err := os.ReadFile(s.place.log)
			require.NoError(t, err)
			require.Contains(t, string(log), fmt.Sprintf("passthrough=%t write_back=%t", want.Passthrough,
				want.WriteBack))
			lost := strings.Contains(flags, "--write-back") && !want.WriteBack
			require.Equal(t, lost, strings.Contains(string(log), "--write-back has no effect"), string(log))
		})
	}
}

// TestStandardOutputFails: a failed write to standard output is a failure, also of commands that do not check their
// prints.
func TestStandardOutputFails(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=16M")
	path := filepath.Join(s.mountpoint, "file")
	require.NoError(t, os.WriteFile(path, make([]byte, 4096), 0o600))
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	require.NoError(t, err)
	defer full.Close()
	for _, args := range [][]string{{"warm", path}, {"warm", "--check", path}, {"pin", path}, {"unpin", path},
		{"evict", path}, {"set", s.mountpoint}, {"debug", s.mountpoint, "-o", "-"},
		{"profile", s.mountpoint, "--kind=heap", "-o", "-"}, {"status", s.mountpoint}, {"info", path}, {"--help"},
		{"bench", "--list"}} {
		cmd := command(t, args...)
		var errs bytes.Buffer
		cmd.Stdout, cmd.Stderr = full, &errs
		require.Error(t, cmd.Run(), "%v", args)
		require.Equal(t, exitFailure, cmd.ProcessState.ExitCode(), "%v", args)
		require.Equal(t, 1, strings.Count(errs.String(), "no space left on device"), "%v: %s", args, errs.String())
	}
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}
