package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// commandsOnMounts are command lines that talk to the daemon of a mount. MOUNT stands for the mountpoint.
var commandsOnMounts = [][]string{
	{"status", "MOUNT"},
	{"umount", "MOUNT"},
	{"mount", "--gpus=none", "--log-file=/dev/null", "SOURCE", "MOUNT"},
	{"trace", "record", "MOUNT", "-o", "-"},
	{"info", "MOUNT/file"},
	{"warm", "MOUNT/file"},
	{"evict", "MOUNT/file"},
	{"top", "--once", "MOUNT"},
	{"profile", "MOUNT", "-o", "-"},
	{"debug", "MOUNT", "-o", "/dev/null"},
}

// A stopped daemon blocks no command: each names the process, and says what helps.
func TestCommandsOnAStoppedDaemon(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=64M")
	require.NoError(t, os.WriteFile(filepath.Join(s.mountpoint, "file"), []byte("content"), 0o600))
	s.signal(t, syscall.SIGSTOP)
	defer func() {
		s.signal(t, syscall.SIGCONT)
		s.signal(t, syscall.SIGTERM)
		require.Equal(t, exitOK, s.end(t))
	}()
	require.Eventually(t, func() bool { return processState(s.pid()) == 'T' }, time.Minute, time.Millisecond)
	cure := fmt.Sprintf("process %d is stopped; 'kill -CONT %d' continues it", s.pid(), s.pid())
	results := make([]result, len(commandsOnMounts))
	var all sync.WaitGroup
	for i, line := range commandsOnMounts {
		args := strings.Fields(strings.NewReplacer("MOUNT", s.mountpoint, "SOURCE", s.source).Replace(
			strings.Join(line, " ")))
		cmd := command(t, args...)
		all.Go(func() {
			late := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
			defer late.Stop()
			results[i] = execute(t, cmd)
		})
	}
	all.Wait()
	for i, r := range results {
		if commandsOnMounts[i][0] != "debug" { // debug goes on without the daemon
			require.Equal(t, exitFailure, r.code, "%v: %s", commandsOnMounts[i], r.err)
		}
		require.Contains(t, r.err, cure, "%v", commandsOnMounts[i])
	}
	half := filepath.Join(t.TempDir(), "archive")
	debug := command(t, "debug", s.mountpoint, "-o", half)
	require.NoError(t, debug.Start())
	require.Eventually(t, func() bool { _, err := os.Stat(half); return err == nil }, time.Minute, time.Millisecond)
	require.NoError(t, debug.Process.Signal(syscall.SIGINT))
	require.Error(t, debug.Wait())
	require.Equal(t, exitFailure, debug.ProcessState.ExitCode())
	require.NoFileExists(t, half, "an interrupted command leaves no partial archive")
	r := gaiafsCommand(t, "status")
	require.Equal(t, exitOK, r.code, r.err)
	require.Contains(t, r.out, cure)
}
