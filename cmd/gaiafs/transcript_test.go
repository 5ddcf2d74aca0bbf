package main

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/stretchr/testify/require"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

const transcriptPage = "../../docs/transcript.md"

// transcript is the output of commands, with the same places, processes and times in each run.
type transcript struct {
	text  strings.Builder
	place place
}

var varying = []struct {
	what *regexp.Regexp
	is   string
}{
	{regexp.MustCompile(`gaiafs\.test, process`), "serve, process"},
	{regexp.MustCompile(`process \d+`), "process 4711"},
	{regexp.MustCompile(`since [0-9-]+ [0-9:]+ \([^)]*\)`), "since 2026-01-02 03:04:05 (2 hours ago)"},
	{regexp.MustCompile(`gaiafs \S+, process`), "gaiafs 0.1.0, process"},
	{regexp.MustCompile(`(?m)^gaiafs \S+  (\d+ clients?  )`), "gaiafs /mnt/data  $1"}, // top cuts long lines
	{regexp.MustCompile(`(?m)^(gpu1 +8\.0 MiB +16 MiB)( +\d\S* [KMi]*B){3} `), "$1  8.0 MiB      0 B      0 B "},
	{regexp.MustCompile(`(?m)^  gaiafs\.test {31}.{9} `), "  serve                                          4711 "},
	{regexp.MustCompile(`(?m)^\d\d:\d\d:\d\d\.\d+ +\d+ .s +\d+ `), "03:04:05.000006    120 µs     4711 "},
}

// columns matches the space between columns: at least two blanks.
var columns = regexp.MustCompile(" {2,}")

// aligned aligns the columns of all lines, two blanks apart.
func aligned(text string) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for line := range strings.Lines(text) {
		fmt.Fprint(w, columns.ReplaceAllString(line, "\t"))
	}
	_ = w.Flush() // into memory
	return b.String()
}

// The findings of doctor differ between machines. The transcript always has those of one machine.
var examined = map[string]string{
	"kernel": "ok    kernel      Linux 6.18.44\n",
	"fuse":   "ok    fuse        /dev/fuse can be used\n",
	"limits": "ok    limits      1048576 open files\n",
	"memory": "ok    memory      22 GiB of 24 GiB available; --host-memory would be 1.5 GiB\n",
	"driver": "warn  driver      CUDA cannot be used: there is no NVIDIA driver; emulated devices stand in\n" +
		"                  → install NVIDIA's driver for CUDA 11.0 or later, and see what nvidia-smi says\n",
	"disk":   "ok    disk        /srv/data: reads 2.1 GiB/s, writes 1.4 GiB/s, past the host's page cache\n",
	"mounts": "ok    mounts      1 mount of gaiafs\n",
}

// doctor adds the output of doctor for checks that every machine has.
func (r *transcript) doctor(t *testing.T) {
	t.Helper()
	args := []string{"doctor", "--dir", r.place.source}
	var kept strings.Builder
	seen := make(map[string]bool)
	for line := range strings.Lines(gaiafsCommand(t, args...).out) { // ignore faults of this machine
		state, rest, _ := strings.Cut(line, " ")
		name, _, _ := strings.Cut(strings.TrimLeft(rest, " "), " ")
		if text := examined[name]; text != "" && !seen[name] && state != "" {
			require.Regexp(t, "^(ok|warn|fail)$", state)
			seen[name] = true
			kept.WriteString(text)
		}
	}
	require.Len(t, seen, len(examined))
	r.says(args, kept.String())
}

// bench adds a short run of bench, with constant figures.
func (r *transcript) bench(t *testing.T) {
	t.Helper()
	args := []string{"bench", "--quick", "--rounds=2", "--run=^merge/"}
	got := gaiafsCommand(t, args...)
	require.Equal(t, exitOK, got.code, got.err)
	_, text, found := strings.Cut(got.out, "[merge]")
	require.True(t, found, got.out)
	title, table, _ := strings.Cut(text, "\n")
	table, rest, _ := strings.Cut(table, "\n\n")
	head, table, _ := strings.Cut(table, "\n")
	shown := head + "\n"
	for line := range strings.Lines(table) {
		switch cells := columns.Split(line, -1); {
		case cells[1] == "gaiafs":
			require.Regexp(t, `µs .*≤ 0\.7: (met|missed|within spread)`, line)
			shown += cells[0] + "\tgaiafs\t0.52 µs\t0.51–0.53\t\t≤ 0.7: met\n"
		default:
			require.Regexp(t, `^ +copy +.* µs .*\d\.\d+ \(\S+\)`, line)
			shown += "\tcopy\t0.26 µs\t0.25–0.26\t0.50 (0.49–0.50)\n"
		}
	}
	require.Regexp(t, `^\d of 2 targets missed, .*\nTo repeat: gaiafs bench .*\n$`, rest)
	r.says(args, "[merge]"+strings.TrimSpace(title)+"\n"+aligned(shown)+
		"\n0 of 2 targets missed, Linux 6.18.44, AMD EPYC, 16 cores, 128 GiB, go1.26, 0 s.\nTo repeat: gaiafs "+
		strings.Join(args, " ")+"\n")
}

var trailing = regexp.MustCompile(`(?m) +$`)

// says adds the output of a command.
func (r *transcript) says(args []string, text string) {
	line := "$ gaiafs " + strings.Join(args, " ") + "\n" + text
	line = strings.NewReplacer(r.place.mountpoint, "/mnt/data", r.place.source, "/srv/data").Replace(line)
	for _, v := range varying {
		line = v.what.ReplaceAllString(line, v.is)
	}
	r.text.WriteString(trailing.ReplaceAllString(line, ""))
}

// run runs a command. only, if not nil, selects lines.
func (r *transcript) run(t *testing.T, code int, only func(string) bool, args ...string) {
	t.Helper()
	got := gaiafsCommand(t, args...)
	require.Equal(t, code, got.code, "%v: %s%s", args, got.out, got.err)
	var kept strings.Builder
	for line := range strings.Lines(got.out + got.err) {
		if only == nil || only(line) {
			kept.WriteString(line)
		}
	}
	r.says(args, kept.String())
}

// head is the text above the transcript.
const head = `# A session

The output of the commands, on a mount with two emulated devices and another program at work. A test makes this page:
` + "`go test ./cmd/gaiafs -run TestTranscript -update`" + `.
`

// Each command prints on a busy mount what docs/transcript.md has.
func TestTranscript(t *testing.T) {
	r := &transcript{place: newPlace(t)}
	at := r.place.mountpoint
	model, busy := filepath.Join(at, "model"), filepath.Join(at, "busy")
	section := func(title string) { r.text.WriteString("```\n\n## " + title + "\n\n```text\n") }
	r.text.WriteString(head)
	r.text.WriteString("\n## Mount\n\n```text\n")
	r.run(t, exitOK, nil, "mount", "--daemon", "--gpus=emulated:2", "--gpu-memory=16M", "--pinned-memory=32M",
		r.place.source, at)
	require.NoError(t, os.WriteFile(model, make([]byte, 6*mib), 0o600))
	stop := work(t, busy)

	section("Bring a file to devices")
	r.run(t, exitFailure, nil, "warm", "--check", "--device=0", model)
	r.run(t, exitOK, nil, "warm", model)
	r.run(t, exitOK, nil, "warm", "--verify", model)
	section("Where it is, and who maps it")
	f, err := os.Open(model)
	require.NoError(t, err)
	m, err := gaiafs.Map(f, 0, 4*mib, gaiafs.ProtRead, 0)
	require.NoError(t, err)
	r.run(t, exitOK, nil, "info", model)
	before := true
	r.run(t, exitOK, func(line string) bool {
		before = before && !strings.HasPrefix(line, "Host memory")
		return before && !strings.Contains(line, "busy")
	}, "status", at)
	section("Look at it")
	require.Eventually(t, func() bool {
		now, err := statusOf(at, time.Minute)
		return err == nil && now.Mount.Clients == 1
	}, time.Minute, 10*time.Millisecond, "this program: the commands are over")
	r.run(t, exitOK, nil, "top", "--once", at)
	section("Keep it there")
	r.run(t, exitOK, nil, "pin", "--device=0", model)
	r.run(t, exitOK, nil, "evict", model)
	require.NoError(t, m.Close())
	require.NoError(t, f.Close())
	r.run(t, exitOK, nil, "unpin", model)
	r.run(t, exitOK, nil, "evict", model)
	section("What happens now")
	live := []string{"trace", "--live", at, "--kind=acquire"}
	r.says(live, firstLine(t, live))
	section("Is this machine fit for it?")
	r.doctor(t)
	section("To report a bug")
	r.run(t, exitOK, nil, "debug", "-o", filepath.Join(r.place.source, "fault.tar.gz"), at)
	list, err := exec.Command("tar", "tzf", filepath.Join(r.place.source, "fault.tar.gz")).CombinedOutput()
	require.NoError(t, err, "%s", list)
	r.text.WriteString("$ tar tzf /srv/data/fault.tar.gz\n" + string(list))
	r.run(t, exitOK, nil, "profile", "--kind=stacks", "-o", filepath.Join(r.place.source, "stacks.txt"), at)
	section("Measure")
	r.bench(t)
	section("Mistakes")
	r.run(t, exitFailure, nil, "warm", "--device=3", model)
	r.run(t, exitFailure, nil, "info", filepath.Join(at, "modle"))
	r.run(t, exitUsage, nil, "warm", at)
	r.run(t, exitUsage, nil, "wram", model)
	r.run(t, exitFailure, nil, "info", filepath.Join(r.place.source, "model"))
	section("Unmount")
	stop()
	r.run(t, exitOK, nil, "umount", at)
	r.text.WriteString("```\n")

	if *update {
		require.NoError(t, os.WriteFile(transcriptPage, []byte(r.text.String()), 0o644))
	}
	written, err := os.ReadFile(transcriptPage)
	require.NoError(t, err)
	require.Equal(t, string(written), r.text.String(),
		"if that is right: go test ./cmd/gaiafs -run TestTranscript -update")
}

// work stores into a file on the second device, releases and reads it, until stop is called. It returns after the first
// round.
func work(t *testing.T, path string) (stop func()) {
	t.Helper()
	require.NoError(t, os.WriteFile(path, make([]byte, 2*mib), 0o600))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	m, err := gaiafs.Map(f, 0, 2*mib, gaiafs.ProtRead|gaiafs.ProtWrite, 1)
	require.NoError(t, err)
	over, done := make(chan struct{}), make(chan error, 1)
	go func() {
		b := make([]byte, 4096)
		for i := int64(0); ; i++ {
			select {
			case <-over:
				done <- nil
				return
			default:
			}
			_, err := m.WriteAt(fmt.Append(nil, i), i%512*4096)
			if err == nil {
				_, err = m.Release(0, m.Len())
			}
			if err == nil {
				_, err = f.ReadAt(b, i%512*4096)
			}
			if err == nil {
				_, err = m.Acquire(0, m.Len())
			}
			if err != nil {
				done <- err
				return
			}
		}
	}()
	return func() {
		close(over)
		require.NoError(t, <-done)
		require.NoError(t, m.Close())
		require.NoError(t, f.Close())
	}
}

// firstLine returns the first line of a command's output, and then interrupts the command.
func firstLine(t *testing.T, args []string) string {
	t.Helper()
	cmd := command(t, args...)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	_ = cmd.Wait() // it may have been writing to the closed pipe
	return line
}
