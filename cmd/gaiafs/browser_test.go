package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// browser makes headless Chromium open the address, wait two seconds, and do what the flags say.
func browser(t *testing.T, address string, flags ...string) (out string) {
	t.Helper()
	program := ""
	for _, name := range []string{"chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			program = path
			break
		}
	}
	if program == "" {
		t.Skip("no Chromium is here")
	}
	args := []string{"--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
		"--user-data-dir=" + t.TempDir(), "--virtual-time-budget=3000"}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute) // Chromium sometimes hangs
	defer cancel()
	cmd := exec.CommandContext(ctx, program, append(append(args, flags...), address)...)
	var said, complained strings.Builder
	cmd.Stdout, cmd.Stderr = &said, &complained
	require.NoError(t, cmd.Run(), complained.String())
	require.NotContains(t, complained.String(), "CONSOLE", "a fault of the page's program")
	_, body, _ := strings.Cut(said.String(), "<body>")
	body, _, _ = strings.Cut(body, "<script>")
	return body
}

// inFront serves a page with other names of places and programs. Each request takes a second of the daemon's time,
// during which the browser's clock stands still, so the page shows rates.
func inFront(t *testing.T, s statusDocument, page string) string {
	t.Helper()
	at, err := url.Parse("http://" + s.Mount.Metrics)
	require.NoError(t, err)
	names := strings.NewReplacer(s.Mount.Mountpoint, "/mnt/models", s.Mount.Source, "/srv/models", "gaiafs.test", "serve",
		fmt.Sprintf(`"process":%d,`, os.Getpid()), `"process":4711,`)
	proxy := httputil.NewSingleHostReverseProxy(at)
	proxy.ModifyResponse = func(r *http.Response) error {
		if r.Request.URL.Path == "/status.json" {
			time.Sleep(time.Second)
		}
		body, err := io.ReadAll(r.Body)
		text := names.Replace(string(body))
		r.Body = io.NopCloser(strings.NewReader(text))
		r.ContentLength = int64(len(text))
		r.Header.Set("Content-Length", fmt.Sprint(len(text)))
		return err
	}
	server := httptest.NewServer(proxy)
	t.Cleanup(server.Close)
	return strings.Replace(page, at.String(), server.URL, 1)
}

// A browser draws the live page of a mount that a program works on: complete with the token, without names for
// strangers, locked without the token. -update takes the pictures of the documentation.
func TestPageInABrowser(t *testing.T) {
	const token = "0123456789abcdef"
	tokenFile := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(tokenFile, []byte(token+"\n"), 0o600))
	s := mountForeground(t, "--gpus=emulated:2", "--gpu-memory=64M", "--pinned-memory=128M", "--metrics=127.0.0.1:0",
		"--metrics-token-file="+tokenFile)
	in := func(name string) string { return filepath.Join(s.mountpoint, name) }
	for name, size := range map[string]int{"model-00001.safetensors": 24 * mib, "model-00002.safetensors": 18 * mib,
		"dataset <b>.bin": 9 * mib} {
		require.NoError(t, os.WriteFile(in(name), make([]byte, size), 0o600))
	}
	require.Equal(t, exitOK, gaiafsCommand(t, "warm", in("model-00001.safetensors")).code)
	require.Equal(t, exitOK, gaiafsCommand(t, "warm", "--device=1", in("model-00002.safetensors")).code)
	f, err := os.OpenFile(in("dataset <b>.bin"), os.O_RDWR, 0)
	require.NoError(t, err)
	m, err := gaiafs.Map(f, 0, 9*mib, gaiafs.ProtRead, 0)
	require.NoError(t, err)
	_, err = f.WriteAt(make([]byte, 3*mib), 4*mib) // makes it stale
	require.NoError(t, err)
	require.NoError(t, unix.Fsync(int(f.Fd())))
	stop := work(t, in("out.bin"))
	document, err := statusOf(s.mountpoint, patience)
	require.NoError(t, err)
	page := "http://" + document.Mount.Metrics + "/#token=" + token

	shown := browser(t, page, "--dump-dom")
	for _, want := range []string{s.mountpoint + "</h1>", `class="state live" id="state" role="status">live<`,
		"model-00001.safetensors", "dataset &lt;b&gt;.bin", `<i class="stale" title="from `,
		"pinned host memory", "gaiafs.test ", "gpu1 write-back, to host"} {
		require.Contains(t, shown, want)
	}
	require.NotContains(t, shown, "undefined")
	require.NotContains(t, shown, "NaN")
	locked := browser(t, strings.TrimSuffix(page, "#token="+token), "--dump-dom")
	require.Contains(t, locked, ">locked<")
	require.NotContains(t, locked, "model-00001")
	if *update {
		page = inFront(t, document, page)
		for name, flags := range map[string][]string{"page-light.png": {"--window-size=1280,1500"},
			"page-narrow-dark.png": {"--window-size=500,1800", "--force-device-scale-factor=1",
				"--blink-settings=preferredColorScheme=0"}} {
			browser(t, page, append(flags, "--virtual-time-budget=12000", "--screenshot="+filepath.Join("../../docs/images", name))...)
		}
	}
	stop()
	require.NoError(t, errors.Join(m.Close(), f.Close()))
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}
