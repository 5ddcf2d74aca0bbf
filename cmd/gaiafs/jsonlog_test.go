package main

import (
	"encoding/json"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// jsonLines checks that every line is a JSON object, and returns the objects.
func jsonLines(t *testing.T, text string) (lines []map[string]any) {
	t.Helper()
	for line := range strings.Lines(text) {
		var l map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &l), line)
		lines = append(lines, l)
	}
	require.NotEmpty(t, lines)
	return lines
}

// With --log-format json, standard error has only JSON, whatever the end, and says each thing once.
func TestJSONLog(t *testing.T) {
	p := fullPlace(t)
	s := mountAt(t, p, "--log-format=json", "--gpus=emulated:1", "--gpu-memory=64M")
	p.fill(t)
	require.NoError(t, p.releases(t, "out", 3*mib).Close())
	s.signal(t, syscall.SIGTERM)
	s.awaitLog(t, "this process ends when")
	s.signalAgain(t, syscall.SIGTERM)
	require.Equal(t, exitFailure, s.end(t))
	lines := jsonLines(t, s.logged(t))
	lost, kinds := 0, 0
	for _, l := range lines {
		if why, _ := l["error"].(string); strings.Contains(why, "3145728 bytes of out that devices wrote are lost") {
			lost++
		}
		if l["msg"] == "device" {
			kinds++
			require.Equal(t, "emulated", l["kind"])
		}
	}
	require.Equal(t, 1, lost, s.logged(t))
	require.Equal(t, 1, kinds)
	require.Contains(t, lines[len(lines)-1]["error"], "are lost")

	r := gaiafsCommand(t, "mount", "--log-format=json", p.source+"/missing", p.mountpoint)
	require.Equal(t, exitFailure, r.code)
	lines = jsonLines(t, r.err)
	require.Contains(t, lines[len(lines)-1]["error"], "does not exist")
}

// A text log, too, ends with the reason, which is not repeated.
func TestLastLineOfTheLog(t *testing.T) {
	p := fullPlace(t)
	s := mountAt(t, p, "--gpus=emulated:1", "--gpu-memory=64M")
	p.fill(t)
	require.NoError(t, p.releases(t, "out", 3*mib).Close())
	r := gaiafsCommand(t, "umount", "--force", p.mountpoint)
	require.Equal(t, exitFailure, r.code)
	require.Equal(t, exitFailure, s.end(t))
	require.Equal(t, 1, strings.Count(s.logged(t), "that devices wrote are lost"), s.logged(t))
}
