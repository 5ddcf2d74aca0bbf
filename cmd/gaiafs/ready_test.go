package main

import (
	"bufio"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/testdevice"
)

// mount prints one line when the mount is usable, and nothing else on standard output.
func TestMountSaysWhenItIsReady(t *testing.T) {
	p := newPlace(t)
	cmd := command(t, "mount", "--gpus=none", "--log-file="+p.log, p.source, p.mountpoint)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewReader(out)
	line, err := lines.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, p.mountpoint+" shows "+p.source+", without devices (--gpus none)\n", line)
	require.True(t, p.isMounted(t))
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	rest, err := lines.ReadString('\n')
	require.Error(t, err)
	require.Empty(t, rest)
	require.NoError(t, cmd.Wait())
}

// If there is no GPU, the line says why, and that emulated devices are used.
func TestMountSaysThatThereIsNoGPU(t *testing.T) {
	testdevice.Emulated(t, "there are GPUs")
	if _, err := foundCUDA(slog.New(slog.DiscardHandler)); err == nil {
		t.Skip("there are GPUs")
	}
	p := newPlace(t)
	r := gaiafsCommand(t, "mount", "--daemon", "--log-file="+p.log, p.source, p.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.Regexp(t, "shows .*; no GPU: [^C].+; using emulated devices: gpu0 \\(host memory, [0-9.]+ [MG]iB\\)\n$",
		r.out)
	require.Equal(t, exitOK, gaiafsCommand(t, "umount", p.mountpoint).code)
}

func TestDescribeDevices(t *testing.T) {
	var devices []gpubackend.Info
	for i := range 10 {
		devices = append(devices, gpubackend.Info{Ordinal: i, Kind: gpubackend.KindCUDA, Name: "NVIDIA H200",
			Memory: 105 << 30})
	}
	require.Equal(t, "gpu0 (NVIDIA H200, 105 GiB), gpu1 (NVIDIA H200, 105 GiB)", describeDevices(devices[:2]))
	require.True(t, strings.HasSuffix(describeDevices(devices), "gpu7 (NVIDIA H200, 105 GiB), and 2 more"))
}

// A failed mount leaves no log and no folders of its own. Those that existed before stay.
func TestFailedMountLeavesNothing(t *testing.T) {
	p := newPlace(t)
	state := filepath.Join(filepath.Dir(p.source), "state")
	for _, daemon := range []bool{true, false} {
		log := filepath.Join(filepath.Dir(p.source), "failed.log")
		args := []string{"mount", "--log-file=" + log, p.source, p.source}
		if daemon {
			args = append(args, "--daemon")
		}
		require.Equal(t, exitFailure, gaiafsCommand(t, args...).code)
		require.NoFileExists(t, log)
		require.NoError(t, os.WriteFile(log, []byte("earlier\n"), 0o600))
		require.Equal(t, exitFailure, gaiafsCommand(t, args...).code)
		require.FileExists(t, log)
		require.NoError(t, os.Remove(log))
	}
	unmake, err := makeDirectories(filepath.Join(state, "a", "b"), 0o700)
	require.NoError(t, err)
	unmake()
	require.NoDirExists(t, state)
}

// Variables that look like settings but are not are reported.
func TestUnknownVariables(t *testing.T) {
	var said []string
	unknownVariables([]string{"GAIAFS_GPU_MEMROY=1G", "GAIAFS_GPUS=none", "GAIAFS_CONFIG=x", "GAIAFS_TEST_X=1",
		"GAIAFS_ELEPHANT=", "HOME=/"}, func(text string) { said = append(said, text) })
	require.Equal(t, []string{"GAIAFS_GPU_MEMROY is ignored: there is no such setting; did you mean GAIAFS_GPU_MEMORY?",
		"GAIAFS_ELEPHANT is ignored: there is no such setting"}, said)
	p := newPlace(t)
	cmd := command(t, "mount", "--daemon", "--gpus=none", "--log-file="+p.log, p.source, p.mountpoint)
	cmd.Env = append(cmd.Env, "GAIAFS_LOG_LEVLE=debug")
	r := execute(t, cmd)
	require.Equal(t, exitOK, r.code, r.err)
	require.Equal(t, "gaiafs: GAIAFS_LOG_LEVLE is ignored: there is no such setting; did you mean GAIAFS_LOG_LEVEL?\n",
		r.err)
	require.Equal(t, exitOK, gaiafsCommand(t, "umount", p.mountpoint).code)
}

func TestEmulatedDevicesFitIntoTheHost(t *testing.T) {
	p := newPlace(t)
	r := gaiafsCommand(t, "mount", "--gpus=emulated:1", "--gpu-memory=1000T", p.source, p.mountpoint)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "1000 TiB for an emulated device is more than the host's memory")
}

// Messages of the client library begin with "gaiafs:", which appears only once.
func TestErrorsNameTheCommandOnce(t *testing.T) {
	s := mountForeground(t, "--gpus=none")
	first := command(t, "trace", "record", s.mountpoint, "-o", "-")
	out, err := first.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, first.Start())
	_, err = out.Read(make([]byte, 1)) // the read has begun
	require.NoError(t, err)
	r := gaiafsCommand(t, "trace", "record", s.mountpoint, "-o", "/dev/null")
	require.Equal(t, exitFailure, r.code)
	require.Regexp(t, "^gaiafs: record: ", r.err)
	require.NoError(t, first.Process.Signal(syscall.SIGINT))
	_, err = io.Copy(io.Discard, out)
	require.NoError(t, err)
	require.NoError(t, first.Wait())
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

// asUser makes a command run as another user, who owns nothing. It copies the program to where that user can reach it.
func asUser(t *testing.T, uid uint32, cmd *exec.Cmd) *exec.Cmd {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can be other users")
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	cmd.Env = append(cmd.Env, "HOME="+os.TempDir(), "XDG_RUNTIME_DIR=")
	return cmd
}

// Users other than root mount through fusermount3 and see its messages. Only they and root can unmount what they
// mounted.
func TestMountsOfUsers(t *testing.T) {
	const alice, bob = 65534, 1 // fusermount3 accepts only users in /etc/passwd: nobody and daemon
	if _, err := exec.LookPath("fusermount3"); err != nil {
		t.Skip("fusermount3 is not installed")
	}
	if st, err := os.Stat("/dev/fuse"); err != nil || st.Mode()&0o006 != 0o006 {
		t.Skip("only root may use /dev/fuse here")
	}
	p := newPlace(t)
	for dir := filepath.Dir(p.source); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		require.NoError(t, os.Chmod(dir, 0o755))
	}
	r := execute(t, asUser(t, alice, command(t, "mount", "--gpus=none", "--log-file=/dev/null", p.source,
		p.mountpoint)))
	require.Equal(t, exitFailure, r.code)
	require.Regexp(t, "^gaiafs: .* cannot be mounted: user has no write access to mountpoint .*\n$", r.err)
	require.NoError(t, errors.Join(os.Chown(p.mountpoint, alice, alice), os.Chown(p.source, alice, alice)))
	r = execute(t, asUser(t, alice, command(t, "mount", "--daemon", "--gpus=none", "--log-file=/dev/null", p.source,
		p.mountpoint)))
	require.Equal(t, exitOK, r.code, r.err)
	for _, args := range [][]string{{"umount"}, {"umount", "--force"}} {
		r = execute(t, asUser(t, bob, command(t, append(args, p.mountpoint)...)))
		require.Equal(t, exitFailure, r.code)
		require.Regexp(t, "only (root and the user who mounted|that user and root) may", r.err)
	}
	r = execute(t, asUser(t, alice, command(t, "umount", p.mountpoint)))
	require.Equal(t, exitOK, r.code, r.err)
}
