package main

import (
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
	for _, text := range []string{"why it failed", "at its place", "panic: test timed out", "FAIL     2.0 s  fs", "2 failed"} {
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
