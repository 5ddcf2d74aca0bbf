package gaiafs

import (
	"io"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A call that waits for a stopped process says which one it is, and what continues it.
func TestSilenceOfAStoppedDaemon(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	require.NoError(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	require.NoError(t, cmd.Process.Signal(syscall.SIGSTOP))
	var status unix.WaitStatus
	_, err := unix.Wait4(cmd.Process.Pid, &status, unix.WUNTRACED, nil)
	require.NoError(t, err)
	pid := strconv.Itoa(cmd.Process.Pid)
	require.Equal(t, "process "+pid+" is stopped, and 'kill -CONT "+pid+"' continues it", stoppedProcess(cmd.Process.Pid))
	require.Empty(t, stoppedProcess(os.Getpid()))

	old, r, w := silence, (*os.File)(nil), (*os.File)(nil)
	r, w, err = os.Pipe()
	require.NoError(t, err)
	stderr := os.Stderr
	os.Stderr, silence = w, time.Millisecond
	timer := watchGrant()
	line := make([]byte, 100)
	n, err := io.ReadAtLeast(r, line, 1)
	os.Stderr, silence = stderr, old
	timer.Stop()
	require.NoError(t, err)
	require.Contains(t, string(line[:n]), "gaiafs: still waiting for a mount that does not answer")
}
