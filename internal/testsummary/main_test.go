package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func summarise(t *testing.T, lines ...string) (string, bool) {
	t.Helper()
	var out strings.Builder
	s := newSummary(&out)
	require.NoError(t, s.read(strings.NewReader(strings.Join(lines, "\n"))))
	ok := s.finish(3 * time.Second)
	return out.String(), ok
}

func TestPassAndSkip(t *testing.T) {
	out, ok := summarise(t,
		`{"Action":"run","Package":"github.com/gaiafs/gaiafs/lrc","Test":"A"}`,
		`{"Action":"output","Package":"github.com/gaiafs/gaiafs/lrc","Test":"A","Output":"noise\n"}`,
		`{"Action":"pass","Package":"github.com/gaiafs/gaiafs/lrc","Test":"A"}`,
		`{"Action":"output","Package":"github.com/gaiafs/gaiafs/lrc","Test":"B","Output":"    b_test.go:7: no strace: install it\n"}`,
		`{"Action":"output","Package":"github.com/gaiafs/gaiafs/lrc","Test":"B","Output":"--- SKIP: B (0.00s)\n"}`,
		`{"Action":"skip","Package":"github.com/gaiafs/gaiafs/lrc","Test":"B"}`,
		`{"Action":"pass","Package":"github.com/gaiafs/gaiafs/lrc","Elapsed":1.5}`,
		`{"Action":"skip","Package":"github.com/gaiafs/gaiafs/none"}`)
	require.True(t, ok)
	require.Contains(t, out, "ok       1.5 s  lrc\n")
	require.Contains(t, out, "  lrc B: no strace: install it\n")
	require.Contains(t, out, "1 packages: 1 tests passed, 0 failed, 1 were skipped, in 3s.")
	require.NotContains(t, out, "noise")
}

func TestFailuresAreShown(t *testing.T) {
	out, ok := summarise(t,
		`{"Action":"output","Package":"github.com/gaiafs/gaiafs/fs","Test":"A","Output":"why it failed\n"}`,
		`{"Action":"fail","Package":"github.com/gaiafs/gaiafs/fs","Test":"A"}`,
		`{"Action":"output","Package":"github.com/gaiafs/gaiafs/fs","Test":"Stuck","Output":"at its place\n"}`,
		`{"Action":"output","Package":"github.com/gaiafs/gaiafs/fs","Output":"panic: test timed out\n"}`,
		`{"Action":"fail","Package":"github.com/gaiafs/gaiafs/fs","Elapsed":2}`)
	require.False(t, ok)
	for _, text := range []string{"why it failed", "at its place", "panic: test timed out", "FAIL     2.0 s  fs",
		"2 failed"} {
		require.Contains(t, out, text)
	}
}

func TestBuildFailuresAreShown(t *testing.T) {
	out, ok := summarise(t,
		`{"ImportPath":"github.com/gaiafs/gaiafs/fs [x]","Action":"build-output","Output":"fs/a.go:1: undefined: b\n"}`,
		`{"ImportPath":"github.com/gaiafs/gaiafs/fs [x]","Action":"build-fail"}`,
		`{"Action":"fail","Package":"github.com/gaiafs/gaiafs/fs","FailedBuild":"github.com/gaiafs/gaiafs/fs [x]"}`)
	require.False(t, ok)
	require.Contains(t, out, "undefined: b")
}

func TestNothingIsAFailure(t *testing.T) {
	out, ok := summarise(t, "go: no packages")
	require.False(t, ok)
	require.Contains(t, out, "go: no packages")
}

// TestOutputIsKept: the output of a failed test is printed after everything else, and all output of its package is in a
// file.
func TestOutputIsKept(t *testing.T) {
	var out strings.Builder
	s := newSummary(&out)
	s.keep = filepath.Join(t.TempDir(), "test-output")
	require.NoError(t, s.read(strings.NewReader(strings.Join([]string{
		`{"Action":"output","Package":"github.com/gaiafs/gaiafs/fs/x","Test":"A","Output":"why it failed\n"}`,
		`{"Action":"output","Package":"github.com/gaiafs/gaiafs/fs/x","Test":"B","Output":"the daemon died\n"}`,
		`{"Action":"pass","Package":"github.com/gaiafs/gaiafs/fs/x","Test":"B"}`,
		`{"Action":"fail","Package":"github.com/gaiafs/gaiafs/fs/x","Test":"A"}`,
		`{"Action":"fail","Package":"github.com/gaiafs/gaiafs/fs/x","Elapsed":2}`,
		`{"Action":"output","Package":"github.com/gaiafs/gaiafs/lrc","Test":"C","Output":"noise\n"}`,
		`{"Action":"pass","Package":"github.com/gaiafs/gaiafs/lrc","Test":"C"}`,
		`{"Action":"pass","Package":"github.com/gaiafs/gaiafs/lrc","Elapsed":1}`,
	}, "\n"))))
	require.False(t, s.finish(time.Second))
	text, err := os.ReadFile(filepath.Join(s.keep, "fs-x.txt"))
	require.NoError(t, err)
	require.Equal(t, "why it failed\nthe daemon died\n", string(text))
	entries, err := os.ReadDir(s.keep)
	require.NoError(t, err)
	require.Len(t, entries, 1)
	require.Less(t, strings.Index(out.String(), "ok       1.0 s  lrc"), strings.Index(out.String(), "why it failed"))
	require.Contains(t, out.String(), filepath.Join(s.keep, "fs-x.txt"))
}
