package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// A daemon in a container has another process ID there than here. Commands show, and wait for, the one here.
func TestDaemonInAnotherPIDNamespace(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, for another PID namespace")
	}
	p := newPlace(t)
	cmd := command(t, "mount", "--gpus=emulated:1", "--gpu-memory=64M", p.source, p.mountpoint)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	s := serveAt(t, p, cmd)
	here := s.pid()
	require.Equal(t, here, s.status(t).Mount.PID)
	require.Contains(t, gaiafsCommand(t, "status", s.mountpoint).out, fmt.Sprintf(", process %d, since", here))
	m := s.releases(t, "out", mib)
	require.Contains(t, gaiafsCommand(t, "info", s.mountpoint+"/out").out, "a process in another container of user 0")
	require.NoError(t, m.Close())
	r := gaiafsCommand(t, "umount", "--timeout=10s", s.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.Equal(t, exitOK, s.end(t), s.logged(t))
	s.requireHome(t, "out", mib)

	// And the reverse: from a container, the daemon's process is not seen.
	s = mountForeground(t, "--gpus=none")
	inside := func(args ...string) result {
		cmd := command(t, args...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
		return execute(t, cmd)
	}
	r = inside("status", s.mountpoint)
	require.Contains(t, r.out, "a process in another container, since", r.err)
	var document statusDocument
	require.NoError(t, json.Unmarshal([]byte(inside("status", "--json", s.mountpoint).out), &document))
	require.Zero(t, document.Mount.PID)
	require.Equal(t, s.mountpoint, document.Mount.Mountpoint)
	r = inside("umount", s.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.Equal(t, exitOK, s.end(t), s.logged(t))
}

// Messages about a detached daemon whose process cannot be seen advise nothing about process 0.
func TestDetachedDaemonInAnotherPIDNamespace(t *testing.T) {
	f := &found{err: errNoAnswer}
	u := &unmounting{mountpoint: "/mnt", detached: f}
	require.EqualError(t, u.withoutDaemon(errNoAnswer), "the mount at /mnt was detached, and the daemon in its container "+
		"goes on: it does not say whether everything is written back (the daemon does not answer). Only SIGKILL ends it "+
		"then, and what is not written back is lost")
	f.err, f.status.Mount.Source = nil, "/src"
	require.Equal(t, "an earlier mount here was detached, and the daemon in its container still has 0 bytes to bring to "+
		"/src", f.earlier())
}

// A mount that is only in a container is listed, and the list says so.
func TestStatusOfAMountInAnotherNamespace(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, for another mount namespace")
	}
	p := newPlace(t)
	cmd := command(t, "mount", "--gpus=none", p.source, p.mountpoint)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS} // and mounts do not propagate
	s := serveAt(t, p, cmd)
	require.False(t, p.isMounted(t))
	var listed string
	for line := range strings.Lines(gaiafsCommand(t, "status").out) {
		if strings.Contains(line, s.mountpoint+" ") {
			listed += line
		}
	}
	require.Contains(t, listed, "mounted in a container or another mount namespace")
	require.Contains(t, listed, fmt.Sprintf(" %d ", s.pid()))
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t), s.logged(t))
}
