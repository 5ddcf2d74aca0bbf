package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// served returns the answer of a mount's metrics server at a path.
func (s *serving) served(t *testing.T, path, token string) (int, string) {
	t.Helper()
	document, err := gaiafs.Status(s.mountpoint)
	require.NoError(t, err)
	var status statusDocument
	require.NoError(t, json.Unmarshal(document, &status))
	r, err := http.NewRequest(http.MethodGet, "http://"+status.Mount.Metrics+path, nil)
	require.NoError(t, err)
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	answer, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	return answer.StatusCode, string(body)
}

// useDevice stores into a new file on a device and releases it.
func (s *serving) useDevice(t *testing.T, name string) *gaiafs.Mapping {
	t.Helper()
	path := filepath.Join(s.mountpoint, name)
	require.NoError(t, os.WriteFile(path, make([]byte, 64<<10), 0o600))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	m, err := gaiafs.Map(f, 0, 64<<10, gaiafs.ProtWrite, 0)
	require.NoError(t, err)
	_, err = m.WriteAt([]byte("device"), 5000)
	require.NoError(t, err)
	_, err = m.Release(0, m.Len())
	require.NoError(t, err)
	return m
}

// TestMetricsOfAMount reads a mount's metrics, document and page, with and without a token.
func TestMetricsOfAMount(t *testing.T) {
	const token = "0123456789abcdef"
	path := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(path, []byte(token+"\n"), 0o600))
	for _, with := range []bool{false, true} {
		t.Run(fmt.Sprintf("token=%t", with), func(t *testing.T) {
			flags, given := []string{"--gpus=emulated:1", "--metrics=127.0.0.1:0"}, ""
			if with {
				flags, given = append(flags, "--metrics-token-file="+path), token
			}
			s := mountForeground(t, flags...)
			m := s.useDevice(t, "secret.bin")
			code, text := s.served(t, "/metrics", given)
			require.Equal(t, http.StatusOK, code, text)
			for _, want := range []string{"gaiafs_releases_total 1\n", "gaiafs_released_pages_total 1\n",
				"gaiafs_mappings 1\n",
				`gaiafs_device_memory_bytes{device="0"}`, `gaiafs_fuse_request_seconds_count{kind="write"}`,
				`gaiafs_device_transferred_bytes_total{class="acquire",device="0",way="in"}`} {
				require.Contains(t, text, want)
			}
			code, text = s.served(t, "/status.json", given)
			require.Equal(t, http.StatusOK, code, text)
			var document statusDocument
			require.NoError(t, json.Unmarshal([]byte(text), &document))
			require.Equal(t, s.mountpoint, document.Mount.Mountpoint)
			require.Len(t, document.Files, 1)
			require.Equal(t, with, document.Files[0].Name == "secret.bin", document.Files[0].Name)
			require.Equal(t, with, strings.Contains(text, "secret.bin"))
			require.NotEmpty(t, document.Files[0].Holders[0].Map)
			code, text = s.served(t, "/", "")
			require.Equal(t, http.StatusOK, code)
			require.Contains(t, text, "<title>gaiafs</title>")
			if with {
				code, _ = s.served(t, "/metrics", "")
				require.Equal(t, http.StatusUnauthorized, code)
			}
			require.NoError(t, m.Close())
			s.signal(t, syscall.SIGTERM)
			require.Equal(t, exitOK, s.end(t))
		})
	}
}

// TestTokenFileOfOthers: the log warns of a token that other users may read.
func TestTokenFileOfOthers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	for mode, warns := range map[os.FileMode]bool{0o600: false, 0o640: true} {
		require.NoError(t, os.WriteFile(path, []byte("0123456789abcdef\n"), 0o600))
		require.NoError(t, os.Chmod(path, mode))
		s := mountForeground(t, "--gpus=none", "--metrics=127.0.0.1:0", "--metrics-token-file="+path)
		s.signal(t, syscall.SIGTERM)
		require.Equal(t, exitOK, s.end(t))
		log, err := os.ReadFile(s.log)
		require.NoError(t, err)
		require.Equal(t, warns, strings.Contains(string(log), "chmod 600"), "%s", log)
	}
}

// TestMetricsThatCannotBeServed: nothing is mounted, and the error says why.
func TestMetricsThatCannotBeServed(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	p := newPlace(t)
	short := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(short, []byte("short"), 0o600))
	for _, c := range []struct {
		flags []string
		code  int
		says  string
	}{
		{[]string{"--metrics=" + l.Addr().String()}, exitFailure, "another program listens there"},
		{[]string{"--daemon", "--metrics=" + l.Addr().String()}, exitFailure, "another program listens there"},
		{[]string{"--metrics=0.0.0.0:0"}, exitUsage, "--metrics-token-file"},
		{[]string{"--metrics=9400"}, exitUsage, "127.0.0.1:9400"},
		{[]string{"--metrics-token-file=" + short}, exitUsage, "has no effect"},
		{[]string{"--metrics=127.0.0.1:0", "--metrics-token-file=" + short}, exitFailure, "has no token"},
		{[]string{"--metrics=127.0.0.1:0", "--metrics-token-file=/nonexistent"}, exitFailure, "no such file"},
	} {
		args := append(append([]string{"mount", "--gpus=none", "--log-file=" + p.log}, c.flags...), p.source,
			p.mountpoint)
		r := gaiafsCommand(t, args...)
		require.Equal(t, c.code, r.code, "%v: %s", c.flags, r.err)
		require.Contains(t, r.err, c.says, c.flags)
	}
}
