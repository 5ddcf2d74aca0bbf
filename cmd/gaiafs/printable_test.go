package main

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// Paths of mounts do not reach the terminal either.
func TestPathsOfMountsDoNotReachTheTerminal(t *testing.T) {
	p := newPlace(t)
	evil := func(path string) string { return path + "\x1b[31m\n  fake" }
	for _, path := range []*string{&p.source, &p.mountpoint} {
		require.NoError(t, os.Rename(*path, evil(*path)))
		*path = evil(*path)
	}
	said := gaiafsCommand(t, "mount", "--daemon", "--gpus=none", "--log-file="+p.log, p.source, p.mountpoint)
	require.Equal(t, exitOK, said.code, said.err)
	for _, r := range []result{said, gaiafsCommand(t, "status"), gaiafsCommand(t, "status", p.mountpoint)} {
		require.Equal(t, exitOK, r.code, r.err)
		require.Contains(t, r.out, `\x1b[31m\n  fake`)
		require.NotContains(t, r.out, "\n  fake")
		require.NotContains(t, r.out, "\x1b")
	}
	require.Equal(t, exitOK, gaiafsCommand(t, "umount", p.mountpoint).code)
}

// Any user can choose the names of files. No command prints a name so that a terminal obeys it as a command, or so that
// it looks like a separate line.
func TestNamesDoNotReachTheTerminal(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1")
	const name = "evil\x1b[31m\n  fake\u009b\xff"
	path := filepath.Join(s.mountpoint, name)
	require.NoError(t, os.WriteFile(path, make([]byte, 8192), 0o600))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	m, err := gaiafs.Map(f, 0, 4096, gaiafs.ProtRead|gaiafs.ProtWrite, 0)
	require.NoError(t, err)
	quoted := strconv.Quote(name)
	quoted = quoted[1 : len(quoted)-1]
	for _, args := range [][]string{
		{"status", s.mountpoint}, {"info", path}, {"warm", path}, {"warm", "--check", path}, {"evict", path},
		{"info", path + "no"}, {"umount", s.mountpoint},
	} {
		r := gaiafsCommand(t, args...)
		for _, c := range r.out + r.err {
			require.True(t, unicode.IsPrint(c) || c == '\n', "%v writes %q", args, r.out+r.err)
		}
		if args[len(args)-1] != path+"no" { // the system's errors contain names with newlines
			require.NotContains(t, r.out+r.err, "\n  fake", "%v", args)
		}
		if args[0] != "status" { // invalid UTF-8 becomes U+FFFD in JSON
			require.Contains(t, r.out+r.err, strings.Split(quoted, "\\n")[0], "%v", args)
		}
	}
	require.NoError(t, errors.Join(m.Close(), f.Close()))
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}
