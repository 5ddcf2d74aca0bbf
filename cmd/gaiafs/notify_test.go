package main

import (
	"net"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// manager is the service manager's end of sd_notify(3).
func manager(t *testing.T) (*net.UnixConn, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	return c, path
}

// await returns the next message that begins with a word.
func await(t *testing.T, c *net.UnixConn, word string) string {
	t.Helper()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(time.Minute)))
	for b := make([]byte, 1<<16); ; {
		n, err := c.Read(b)
		require.NoError(t, err, "no %s", word)
		if text := string(b[:n]); strings.HasPrefix(text, word) {
			return text
		}
	}
}

// TestServiceManagerIsTold: the service manager learns of readiness, of life and of the end.
func TestServiceManagerIsTold(t *testing.T) {
	c, path := manager(t)
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("WATCHDOG_USEC", "300000")
	s := mountForeground(t, "--gpus=none")
	text := await(t, c, "READY=1\n")
	require.Contains(t, text, "STATUS="+s.mountpoint+" shows "+s.source)
	require.Equal(t, "WATCHDOG=1", await(t, c, "WATCHDOG"))
	require.Equal(t, "WATCHDOG=1", await(t, c, "WATCHDOG"))
	s.signal(t, syscall.SIGTERM)
	require.Contains(t, await(t, c, "STOPPING=1\n"), "SIGTERM")
	require.Equal(t, exitOK, s.end(t))
}

// TestServiceFile: systemd accepts the unit.
func TestServiceFile(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not installed")
	}
	dir := t.TempDir()
	unit := filepath.Join(dir, "gaiafs@.service")
	out, err := exec.Command("sh", "-c",
		`sed 's|@PREFIX@/bin/gaiafs|/bin/true|' ../../packaging/gaiafs@.service > "$0"`, unit).
		CombinedOutput()
	require.NoError(t, err, "%s", out)
	out, _ = exec.Command(analyze, "verify", "--man=no", unit).CombinedOutput()
	for _, line := range strings.Split(string(out), "\n") {
		require.NotContains(t, line, "gaiafs@", "%s", out) // ignore other units
	}
}
