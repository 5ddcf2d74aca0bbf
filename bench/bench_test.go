package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/bench/rows"
)

func TestMain(m *testing.M) {
	serveIfAsked()
	mapIfAsked()
	os.Exit(m.Run())
}

func TestFioRate(t *testing.T) {
	rate, err := fioRate([]byte("fio: a warning\n" + `{"jobs":[{"error":0,"read":{"bw_bytes":1000},"write":{"bw_bytes":24}}]}`))
	require.NoError(t, err)
	require.Equal(t, 1024.0, rate)
	for _, bad := range []string{"", "{", `{"jobs":[]}`, `{"jobs":[{"error":5,"read":{"bw_bytes":1}}]}`} {
		_, err := fioRate([]byte(bad))
		require.Error(t, err, bad)
	}
}

func TestEveryFioWorkloadHasAJobFile(t *testing.T) {
	for _, w := range fioWorkloads(false) {
		text, err := jobFiles.ReadFile("fio/" + w.pattern + ".fio")
		require.NoError(t, err)
		require.Contains(t, string(text), "rw="+w.pattern+"\n")
	}
	require.Len(t, fioWorkloads(false), 32)
}

// mounted returns the mountpoints below dir.
func mounted(t *testing.T, dir string) (below []string) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	require.NoError(t, err)
	for _, line := range bytes.Split(text, []byte("\n")) {
		if f := bytes.Fields(line); len(f) > 4 && bytes.HasPrefix(f[4], []byte(dir)) {
			below = append(below, string(f[4]))
		}
	}
	return below
}

func needFUSE(t *testing.T) {
	if _, err := os.Stat("/dev/fuse"); err != nil || os.Geteuid() != 0 {
		t.Skip("needs /dev/fuse, and root to mount without fusermount3")
	}
}

func TestPlacesAreMountedAndTakenAway(t *testing.T) {
	needFUSE(t)
	parent := t.TempDir()
	s, err := newSession(parent, true)
	require.NoError(t, err)
	places, err := s.allPlaces()
	require.NoError(t, err)
	require.Len(t, mounted(t, parent), 3)
	for _, p := range places {
		require.NoError(t, os.WriteFile(p.path("file"), []byte(p.name), 0o644))
		text, err := os.ReadFile(p.home("file"))
		require.NoError(t, err)
		require.Equal(t, p.name, string(text))
		require.NoError(t, p.dropFiles("file"))
		require.NoError(t, p.warm(context.Background(), "file"))
	}
	busy, err := os.Open(places[0].path("file"))
	require.NoError(t, err)
	defer busy.Close()
	require.NoError(t, s.close())
	require.Empty(t, mounted(t, parent), "also the mount that a program still uses")
	left, err := os.ReadDir(parent)
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestARunWritesItsFilesAndLeavesNothing(t *testing.T) {
	needFUSE(t)
	dir, out := t.TempDir(), t.TempDir()
	jsonFile, markdown := filepath.Join(out, "r.json"), filepath.Join(out, "r.md")
	var table, progress bytes.Buffer
	err := run([]string{"-quick", "-rounds", "2", "-dir", dir, "-json", jsonFile, "-markdown", markdown,
		"-run", "^(merge/|sharing/(4 KiB|lost))"}, &table, &progress)
	require.NoError(t, err, progress.String())
	var r rows.Report
	text, err := os.ReadFile(jsonFile)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &r))
	// A group that cannot run here has a line, which says why.
	r.Rows = slices.DeleteFunc(r.Rows, func(x rows.Result) bool { return x.Skipped != "" })
	require.Len(t, r.Rows, 2+3+1)
	lost := r.Rows[len(r.Rows)-1]
	require.Equal(t, "lost updates", lost.Name)
	require.Equal(t, rows.Met, lost.Targets[0].Verdict)
	text, err = os.ReadFile(markdown)
	require.NoError(t, err)
	require.Contains(t, string(text), "### sharing")
	require.Contains(t, table.String(), "To repeat: go run ./bench -quick")
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestWrongUsage(t *testing.T) {
	var out bytes.Buffer
	require.ErrorContains(t, run([]string{"-run", "("}, &out, &out), "-run")
	require.ErrorContains(t, run([]string{"extra"}, &out, &out), "extra")
	require.Error(t, run([]string{"-nonsense"}, &out, &out))
	require.Error(t, run([]string{"-dir", "/nonexistent"}, &out, &out))
	require.NoError(t, run([]string{"-list"}, &out, &out))
	require.Contains(t, out.String(), "sharing\n")
}
