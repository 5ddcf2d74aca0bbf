package monitor

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/gaiafs/gaiafs/pagecache"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// example has a value for every metric.
func example() Snapshot {
	l := pagecache.Latency{Count: 3, Mean: 10, Buckets: []int64{0, 0, 0, 1, 0, 2}}
	return Snapshot{
		Version: "1.2.3", Started: time.Unix(1e9, 0), Sessions: 2, Mappings: 3,
		Requests: map[string]pagecache.Latency{"read": l},
		Status: pagecache.Status{
			Devices: []pagecache.DeviceStatus{{Device: 0, Kind: "emulated", Name: "a device", MemoryBytes: 1 << 30,
				UsedBytes: 4 << 20}},
			Files: []pagecache.FileStatus{
				{Name: "secret.bin", WaitingBytes: 4096, PendingSeconds: 1.5, Error: "full",
					Holders: []pagecache.HoldingStatus{{Clean: 3, Stale: 2, Dirty: 1}},
					Views:   []pagecache.ViewStatus{{DeviceBytes: 2 << 20, Files: 2}}},
				{Name: "other.bin", PendingSeconds: 0.5,
					Views: []pagecache.ViewStatus{{DeviceBytes: 2 << 20, Files: 2}}},
			},
			Memory:    pagecache.MemoryStatus{Classes: map[string]int64{"bases": 5}},
			Counters:  map[string]int64{"merged_pages": 7, "overlapping_bytes": 9},
			Latencies: map[string]pagecache.Latency{"fill": l},
		},
		Document: map[string]string{"name": "secret.bin"},
	}
}

func listen(t *testing.T, token string, change ...func(*Server)) *Server {
	t.Helper()
	s, err := Listen(Options{Address: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}, Token: []byte(token), Snapshot: example,
		Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	for _, c := range change {
		c(s)
	}
	s.Serve()
	t.Cleanup(s.Close)
	return s
}

// get requests a path and returns the status code and the answer.
func get(t *testing.T, s *Server, path string, change ...func(r *http.Request)) (int, string, http.Header) {
	t.Helper()
	r, err := http.NewRequest(http.MethodGet, "http://"+s.Address()+path, nil)
	require.NoError(t, err)
	for _, c := range change {
		c(r)
	}
	transport := &http.Transport{DisableKeepAlives: true}
	answer, err := transport.RoundTrip(r)
	require.NoError(t, err)
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	return answer.StatusCode, string(body), answer.Header
}

func bearer(token string) func(r *http.Request) {
	return func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token) }
}

func TestEveryMetricIsServed(t *testing.T) {
	code, text, _ := get(t, listen(t, ""), "/metrics")
	require.Equal(t, http.StatusOK, code, text)
	for _, m := range metrics {
		if !strings.Contains(m.name, "transfer") { // the example moved nothing
			require.Regexp(t, `(?m)^`+m.name+`[ {]`, text)
		}
	}
	for _, h := range histograms {
		require.Contains(t, text, h.name+"_bucket{"+h.label)
	}
	for _, want := range []string{
		`gaiafs_build_info{version="1.2.3"} 1`,
		`gaiafs_device_resident_bytes{device="0",state="clean"} 12288`,
		`gaiafs_write_back_waiting_bytes 4096`,
		`gaiafs_write_back_oldest_seconds 1.5`,
		`gaiafs_files_failing 1`,
		`gaiafs_views{device="0"} 1`, // the view has bytes of two files
		`gaiafs_view_bytes{device="0"} 2.097152e+06`,
		`gaiafs_merged_pages_total 7`,
		`gaiafs_fuse_request_seconds_bucket{kind="read",le="4e-06"} 0`,
		`gaiafs_fuse_request_seconds_bucket{kind="read",le="1.6e-05"} 1`,
		`gaiafs_fuse_request_seconds_bucket{kind="read",le="+Inf"} 3`,
		`gaiafs_fuse_request_seconds_count{kind="read"} 3`,
		"go_goroutines", "process_resident_memory_bytes",
	} {
		require.Contains(t, text, want)
	}
	require.NotContains(t, text, "secret.bin", "metrics name no files")
}

func TestMetricsAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../../../docs/metrics.md")
	require.NoError(t, err)
	require.Contains(t, string(text), Table(), "docs/metrics.md has this table")
}

// TestDashboard: the dashboard uses only metrics and labels that exist.
func TestDashboard(t *testing.T) {
	text, err := os.ReadFile("../../../packaging/grafana.json")
	require.NoError(t, err)
	var dashboard struct {
		Panels []struct {
			Title   string
			GridPos struct{ X, Y, W, H int }
			Targets []struct{ Expr, LegendFormat string }
		}
	}
	require.NoError(t, json.Unmarshal(text, &dashboard))
	labels := make(map[string][]string)
	for _, m := range metrics {
		labels[m.name] = m.labels
	}
	for _, h := range histograms {
		for _, end := range []string{"_bucket", "_sum", "_count"} {
			labels[h.name+end] = []string{h.label, "le"}
		}
	}
	require.NotEmpty(t, dashboard.Panels)
	for _, p := range dashboard.Panels {
		require.LessOrEqual(t, p.GridPos.X+p.GridPos.W, 24, p.Title)
		for _, target := range p.Targets {
			names := regexp.MustCompile(`gaiafs_[a-z_]+`).FindAllString(target.Expr, -1)
			require.NotEmpty(t, names, target.Expr)
			known := []string{"instance", "job"}
			for _, name := range names {
				require.Contains(t, labels, name, target.Expr)
				known = append(known, labels[name]...)
			}
			used := regexp.MustCompile(`by \(([a-z, ]+)\)`).FindStringSubmatch(target.Expr)
			if used != nil {
				for _, l := range strings.Split(used[1], ", ") {
					require.Contains(t, known, l, target.Expr)
				}
			}
			for _, l := range regexp.MustCompile(`{{([a-z]+)}}`).FindAllStringSubmatch(target.LegendFormat, -1) {
				require.Contains(t, known, l[1], "%s: %s", p.Title, target.LegendFormat)
			}
		}
	}
}

func TestWithoutATokenOnlyThisMachineIsAnswered(t *testing.T) {
	s := listen(t, "")
	for host, want := range map[string]int{"": 200, "localhost": 200, "localhost:1": 200, "[::1]:9": 200,
		"127.0.0.2":    200,
		"evil.example": 403, "evil.example:80": 403, "10.0.0.1": 403, "127.0.0.1.evil.example": 403} {
		for _, path := range []string{"/metrics", "/status.json"} {
			code, text, _ := get(t, s, path, func(r *http.Request) { r.Host = host })
			require.Equal(t, want, code, "%s %s: %s", host, path, text)
		}
	}
	_, err := Listen(Options{Address: &net.TCPAddr{IP: net.IPv4zero}, Log: slog.New(slog.DiscardHandler)})
	require.ErrorContains(t, err, "needs a token")
}

func TestToken(t *testing.T) {
	const token = "correct-horse-battery"
	s := listen(t, token)
	for _, path := range []string{"/metrics", "/status.json"} {
		for _, change := range []func(r *http.Request){func(*http.Request) {}, bearer(""), bearer(token + "x"),
			bearer(token[1:]),
			func(r *http.Request) { r.Header.Set("Authorization", "Basic "+token) },
			func(r *http.Request) { r.Header.Set("Authorization", token) },
			func(r *http.Request) { r.URL.RawQuery = "token=" + token }} {
			code, text, header := get(t, s, path, change)
			require.Equal(t, http.StatusUnauthorized, code)
			require.Contains(t, header.Get("WWW-Authenticate"), "Bearer")
			require.NotContains(t, text, "gaiafs_")
			require.NotContains(t, text, "secret")
		}
		code, text, _ := get(t, s, path, bearer(token))
		require.Equal(t, http.StatusOK, code, text)
	}
	code, text, header := get(t, s, "/")
	require.Equal(t, http.StatusOK, code, "the page has no figures in it")
	require.Equal(t, pageHTML, text)
	require.Contains(t, header.Get("Content-Security-Policy"), "default-src 'none'")
}

func TestTokenFiles(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "token")
	for content, ok := range map[string]bool{"0123456789abcdef\n": true, "  0123456789abcdef": true, "short": false,
		"":                  false,
		"0123456789 abcdef": false, strings.Repeat("x", mostToken+1): false, "0123456789abcde\x00f": false} {
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		token, err := ReadToken(path)
		require.Equal(t, ok, err == nil, "%.20q: %v", content, err)
		if ok {
			require.Equal(t, "0123456789abcdef", string(token))
		}
	}
	_, err := ReadToken(filepath.Join(dir, "none"))
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestAddresses(t *testing.T) {
	for text, loopback := range map[string]bool{"127.0.0.1:9400": true, "[::1]:9400": true, "localhost:0": true,
		":9400": false, "0.0.0.0:9400": false, "192.0.2.1:9400": false} {
		_, is, err := Address(text)
		require.NoError(t, err, text)
		require.Equal(t, loopback, is, text)
	}
	for _, text := range []string{"9400", "localhost", "127.0.0.1:x", "127.0.0.1:70000", "127.0.0.1:-1"} {
		_, _, err := Address(text)
		require.ErrorContains(t, err, "127.0.0.1:9400", text)
	}
}

func TestPortInUse(t *testing.T) {
	s := listen(t, "")
	_, err := Listen(Options{Address: s.listener.Addr().(*net.TCPAddr), Log: slog.New(slog.DiscardHandler)})
	require.ErrorContains(t, err, "another program listens there")
}

// TestOtherRequests: nothing can be changed, and there are no other paths.
func TestOtherRequests(t *testing.T) {
	s := listen(t, "")
	for _, path := range []string{"/x", "/metrics/", "/../etc/passwd", "/page.html"} {
		code, _, _ := get(t, s, path)
		require.Contains(t, []int{http.StatusNotFound, http.StatusTemporaryRedirect, http.StatusMovedPermanently}, code,
			path)
	}
	for _, path := range []string{"/", "/metrics", "/status.json"} {
		code, _, _ := get(t, s, path, func(r *http.Request) { r.Method = http.MethodPost })
		require.Equal(t, http.StatusMethodNotAllowed, code, path)
	}
	code, _, header := get(t, s, "/status.json",
		func(r *http.Request) { r.Header.Set("Origin", "http://evil.example") })
	require.Equal(t, http.StatusOK, code)
	require.Empty(t, header.Get("Access-Control-Allow-Origin"), "a browser does not give it to other pages")
}

// TestHostileClients: a client that sends too much is refused, and silent clients take no more than their share.
func TestHostileClients(t *testing.T) {
	s := listen(t, "", func(s *Server) {
		require.Positive(t, s.http.ReadHeaderTimeout)
		require.Positive(t, s.http.WriteTimeout)
		require.Positive(t, s.http.IdleTimeout)
		s.http.ReadHeaderTimeout = 200 * time.Millisecond
	})
	r, err := http.NewRequest(http.MethodGet, "http://"+s.Address()+"/metrics", nil)
	require.NoError(t, err)
	r.Header.Set("X", strings.Repeat("x", 8*mostHeader))
	transport := &http.Transport{DisableKeepAlives: true}
	if answer, err := transport.RoundTrip(r); err == nil { // otherwise the connection ended before the request was sent
		answer.Body.Close()
		require.Equal(t, http.StatusRequestHeaderFieldsTooLarge, answer.StatusCode)
	}

	// Clients that start a request and do not finish it are cut off. Then another client is served.
	for range mostConnections {
		c, err := net.Dial("tcp", s.Address())
		require.NoError(t, err)
		defer c.Close()
		_, err = io.WriteString(c, "GET / HTTP/1.1\r\nX: ")
		require.NoError(t, err)
	}
	code, _, _ := get(t, s, "/metrics")
	require.Equal(t, http.StatusOK, code)

	c, err := net.Dial("tcp", s.Address())
	require.NoError(t, err)
	defer c.Close()
	_, err = io.WriteString(c, "no request\r\n\r\n")
	require.NoError(t, err)
	answer, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	answer.Body.Close()
	require.Equal(t, http.StatusBadRequest, answer.StatusCode)
}

// TestSnapshotsAreShared: frequent requests cause no more work for the daemon.
func TestSnapshotsAreShared(t *testing.T) {
	var taken atomic.Int32
	s, err := Listen(Options{Address: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}, Snapshot: func() Snapshot {
		taken.Add(1)
		return example()
	}, Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	defer s.Close()
	s.mu.Lock()
	s.last, s.at = example(), time.Now().Add(time.Hour)
	s.mu.Unlock()
	for range 100 {
		s.snapshot()
	}
	require.Zero(t, taken.Load())
	s.mu.Lock()
	s.at = time.Now().Add(-time.Hour)
	s.mu.Unlock()
	s.snapshot()
	require.EqualValues(t, 1, taken.Load())
}

// TestPageIsSelfContained: the page refers to no other place, and its policy has the hashes of its contents.
func TestPageIsSelfContained(t *testing.T) {
	without := strings.ReplaceAll(pageHTML, "http://www.w3.org/2000/svg", "")
	for _, word := range []string{"http:", "https:", "//cdn", "innerHTML", "outerHTML", "insertAdjacentHTML", "eval(",
		" style=", " onclick="} {
		require.NotContains(t, without, word)
	}
	require.Equal(t, 1, strings.Count(pageHTML, "<script>"))
	require.Equal(t, 1, strings.Count(pageHTML, "<style>"))
	require.Equal(t, 2, strings.Count(newPage().policy, "'sha256-"))
}

// TestPageKnowsTheStatus: the document has every field that the page reads.
func TestPageKnowsTheStatus(t *testing.T) {
	text, err := json.Marshal(pagecache.Status{Devices: []pagecache.DeviceStatus{{}}, Files: []pagecache.FileStatus{{
		Holders: []pagecache.HoldingStatus{{}}, Views: []pagecache.ViewStatus{{}}, Error: "x", BusySeconds: 1}}})
	require.NoError(t, err)
	var fields []string
	for _, m := range regexp.MustCompile(`"([a-z_0-9]+)":`).FindAllStringSubmatch(string(text), -1) {
		fields = append(fields, m[1])
	}
	for _, m := range regexp.MustCompile(`\b[fdh]\.([a-z]+_[a-z_]+)\b`).FindAllStringSubmatch(pageHTML, -1) {
		require.True(t, slices.Contains(fields, m[1]), fmt.Sprintf("the status has no %s", m[1]))
	}
}
