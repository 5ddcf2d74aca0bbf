package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// TestTune: each file that brackets use is in pinned memory once. The file with the highest cost per byte there gets
// the highest priority. The resulting file can be set.
func TestTune(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=32M", "--pinned-memory=32M")
	path := func(name string) string { return filepath.Join(s.mountpoint, name) }
	for name, size := range map[string]int{"hot": 4 * mib, "warm": 8 * mib, "cold": 4 * mib, "unused": mib} {
		require.NoError(t, os.WriteFile(path(name), make([]byte, size), 0o644))
	}
	pinned := func(name string) (n int64) {
		now, err := statusOf(s.mountpoint, patience) // not a command: its start would count as time of the program
		require.NoError(t, err)
		for _, f := range now.Files {
			for _, h := range f.Holders {
				if f.Name == name {
					n += int64(h.PinnedExtents)
				}
			}
		}
		return n
	}
	program := func(ctx context.Context) error {
		for name, delay := range map[string]time.Duration{
			"hot": time.Second, "warm": time.Second, "cold": 0,
		} {
			f, err := os.Open(path(name))
			if err != nil {
				return err
			}
			defer f.Close()
			info, err := f.Stat()
			if err != nil {
				return err
			}
			m, err := gaiafs.Map(f, 0, info.Size(), gaiafs.ProtRead, 0, gaiafs.Movable())
			if err != nil {
				return err
			}
			b, err := m.Use(ctx, 0, m.Len())
			if err != nil {
				return err
			}
			if pinned(name) > 0 {
				time.Sleep(delay)
			}
			if err := b.Done(); err != nil {
				return err
			}
			if err := m.Close(); err != nil {
				return err
			}
		}
		return nil
	}
	var out bytes.Buffer
	tune := tuning{mountpoint: s.mountpoint, runs: 1, out: &out, run: program}
	text, err := tune.tune(context.Background())
	require.NoError(t, err)
	list, err := parsePriorities(text)
	require.NoError(t, err, text)
	priority := make(map[string]int)
	for _, p := range list {
		priority[p.Path] = p.Priority
	}
	require.Len(t, priority, 3, text)
	require.Greater(t, priority["hot"], priority["warm"], text)
	require.Greater(t, priority["warm"], priority["cold"], text)

	file := filepath.Join(t.TempDir(), "priorities.toml")
	require.NoError(t, os.WriteFile(file, []byte(text), 0o644))
	r := gaiafsCommand(t, "set", s.mountpoint, "priorities="+file)
	require.Equal(t, exitOK, r.code, r.err)
	require.NoError(t, program(context.Background()))
	require.Zero(t, pinned("hot")+pinned("warm")+pinned("cold"), "no further measurement")
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

// TestTuneLeavesSettings: however tune ends, the mount has its former priorities. If they could not be restored, tune
// runs nothing.
func TestTuneLeavesSettings(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=32M")
	file := filepath.Join(t.TempDir(), "priorities.toml")
	require.NoError(t, os.WriteFile(file, []byte("[[file]]\npath = \"a\"\n"), 0o600))
	r := gaiafsCommand(t, "set", s.mountpoint, "priorities="+file)
	require.Equal(t, exitOK, r.code, r.err)
	tune := tuning{mountpoint: s.mountpoint, runs: 1, out: io.Discard}
	ctx, cancel := context.WithCancel(context.Background())
	ran := 0
	tune.run = func(ctx context.Context) error {
		ran++
		cancel()
		return ctx.Err()
	}
	_, err := tune.tune(ctx)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, 1, ran)
	now, err := statusOf(tune.mountpoint, patience)
	require.NoError(t, err)
	require.Equal(t, file, now.Mount.Settings["priorities"])

	require.NoError(t, os.Remove(file))
	_, err = tune.tune(context.Background())
	require.ErrorContains(t, err, file)
	require.Equal(t, 1, ran)
	now, err = statusOf(tune.mountpoint, patience)
	require.NoError(t, err)
	require.Equal(t, file, now.Mount.Settings["priorities"])
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

// TestFilesThatAreNotMeasured: such files are named with the reason, and get no priority.
func TestFilesThatAreNotMeasured(t *testing.T) {
	text := priorities([]tuned{
		{path: "a\nb", bytes: mib, took: 2 * time.Second, cost: 1},
		{path: "large\n", bytes: 2 * mib, why: "of its size"},
	}, time.Second)
	list, err := parsePriorities(text)
	require.NoError(t, err, text)
	require.Len(t, list, 1, text)
	require.Equal(t, "a\nb", list[0].Path)
	require.Contains(t, text, `# "large\n" is not measured: of its size`)
}

func TestPrioritiesThatAreNone(t *testing.T) {
	for text, says := range map[string]string{
		"[[file]]\npriority = 1\n":                           "path names a file",
		"[[file]]\npath = \"a\"\nplace = \"moon\"\n":         "place is \"host\"",
		"[[file]]\npath = \"a\"\n[[file]]\npath = \"/a/\"\n": "two entries",
		"[[file]]\npath = \"a\"\nweight = 1\n":               "there is no \"file.weight\"",
		"[[file]\n":                                          "line 2",
	} {
		_, err := parsePriorities(text)
		require.ErrorContains(t, err, says)
	}
	r := gaiafsCommand(t, "tune", "/nowhere", "-o", filepath.Join(t.TempDir(), "f"), "--", "true")
	require.Equal(t, exitFailure, r.code)
	r = gaiafsCommand(t, "tune", "/nowhere", "true")
	require.Equal(t, exitUsage, r.code)
	r = gaiafsCommand(t, "tune", "/nowhere", "-o", "-", "--", "true")
	require.Equal(t, exitUsage, r.code)
}
