package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) {
	serveIfAsked()
	mapIfAsked()
	os.Exit(m.Run())
}

func TestSummarise(t *testing.T) {
	s := summarise([]float64{5, 1, 3, 2, 4})
	require.Equal(t, summary{Median: 3, Q1: 2, Q3: 4, Min: 1, Max: 5}, s)
	require.Equal(t, summary{Median: 7, Q1: 7, Q3: 7, Min: 7, Max: 7}, summarise([]float64{7}))
	require.InDelta(t, 1.75, summarise([]float64{1, 2, 3, 4}).Q1, 1e-9)
}

func TestRatiosAreSpeedOverSpeed(t *testing.T) {
	require.Equal(t, []float64{2, 0.5}, ratios([]float64{20, 5}, []float64{10, 10}, true))
	require.Equal(t, []float64{0.5, 2}, ratios([]float64{20, 5}, []float64{10, 10}, false))
	require.Empty(t, ratios([]float64{1}, []float64{0}, true), "nothing is divided by zero")
}

// fixed is a side that gives these values in turn.
func fixed(name string, values ...float64) side {
	i := 0
	return side{name: name, measure: func(context.Context) (float64, error) {
		i++
		return values[i-1], nil
	}}
}

func TestRowsAreInterleavedAndJudged(t *testing.T) {
	r := row{
		group: "g", name: "n", unit: mbPerSecond,
		sides: []side{fixed("gaiafs", 10, 30, 20), fixed("slow", 5, 10, 10), fixed("same", 11, 30.1, 19), fixed("fast", 20, 60, 41)},
		targets: []target{
			{against: "slow", limit: 1}, {against: "same", limit: 1}, {against: "fast", limit: 1}, {limit: 19}, {limit: 25},
		},
	}
	var order []string
	res, err := r.run(context.Background(), 3, func(_, _ int, side string) { order = append(order, side) })
	require.NoError(t, err)
	require.Equal(t, []string{"gaiafs", "slow", "same", "fast", "slow", "same", "fast", "gaiafs", "same", "fast", "gaiafs", "slow"}, order)
	require.Nil(t, res.Sides[0].Ratio)
	require.Equal(t, 2.0, res.Sides[1].Ratio.Median)
	var verdicts []verdict
	for _, v := range res.Targets {
		verdicts = append(verdicts, v.Verdict)
	}
	require.Equal(t, []verdict{met, even, missed, even, met}, verdicts)
}

func TestAFailingSideEndsTheRow(t *testing.T) {
	r := row{group: "g", name: "n", sides: []side{{name: "gaiafs", measure: func(context.Context) (float64, error) {
		return 0, os.ErrInvalid
	}}}}
	_, err := r.run(context.Background(), 3, func(int, int, string) {})
	require.ErrorIs(t, err, os.ErrInvalid)
	require.ErrorContains(t, err, "g/n: gaiafs")
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
	var r report
	text, err := os.ReadFile(jsonFile)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &r))
	require.Len(t, r.Rows, 2+3+1)
	lost := r.Rows[len(r.Rows)-1]
	require.Equal(t, "lost updates", lost.Name)
	require.Equal(t, met, lost.Targets[0].Verdict)
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
