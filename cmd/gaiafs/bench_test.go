package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/bench/rows"
	"github.com/gaiafs/gaiafs/fs"
)

// benchPlace is the folder of a bench, and its report.
type benchPlace struct{ dir, json string }

func newBenchPlace(t *testing.T) benchPlace {
	t.Helper()
	return benchPlace{t.TempDir(), filepath.Join(t.TempDir(), "report.json")}
}

func (p benchPlace) command(t *testing.T, flags ...string) *exec.Cmd {
	t.Helper()
	return command(t, append([]string{"bench", "--quick", "--gpus=emulated:2", "--dir", p.dir, "--json", p.json},
		flags...)...)
}

// report reads the report.
func (p benchPlace) report(t *testing.T) (r rows.Report) {
	t.Helper()
	text, err := os.ReadFile(p.json)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &r))
	return r
}

// requireClean fails if the bench left a file or a mount.
func (p benchPlace) requireClean(t *testing.T) {
	t.Helper()
	mounts, err := fs.Mounts()
	require.NoError(t, err)
	for _, m := range mounts {
		require.NotContains(t, m.Mountpoint, p.dir)
	}
	left, err := os.ReadDir(p.dir)
	require.NoError(t, err)
	require.Empty(t, left)
}

func needProgram(t *testing.T, name string) {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		t.Skipf("%s is missing", name)
	}
}

func TestCommandBench(t *testing.T) {
	needProgram(t, "fio")
	p := newBenchPlace(t)
	page, markdown := p.json+".html", p.json+".md"
	r := execute(t, p.command(t, "--rounds=1", "--html", page, "--markdown", markdown,
		"--run", `^(merge/|sharing/(4 KiB|lost)|device/second|metadata/(create|rename)|`+
			`fio/(write 1 MiB host-warm 1 job$|randread 4 KiB device-cached 16 jobs|randwrite .*mapped)|`+
			`cached/random 4 KiB 16 jobs, (0|100)|versions/write 4 KiB, mapped by all, 32)`))
	require.Equal(t, exitOK, r.code, r.err)
	report := p.report(t)
	count := make(map[string]int)
	for _, row := range report.Rows {
		count[row.Group]++
		switch {
		case row.Skipped == "":
			require.NotEmpty(t, row.Sides[0].Values, "%s: %s", row.Name, row.Failed)
		default: // TMPDIR may be on any filesystem, and the machine may be busy
			require.Regexp(t, "cannot be made cold|tmpfs|time of --quick", row.Skipped)
		}
		if row.Name == "lost updates" && row.Skipped == "" {
			require.Equal(t, rows.Met, row.Targets[0].Verdict)
		}
	}
	require.Equal(t, map[string]int{"merge": 2, "sharing": 4, "device": 1, "metadata": 2, "fio": 3, "cached": 2,
		"versions": 1}, count)
	require.Equal(t, version, report.Version)
	require.Len(t, report.Machine.Devices, 2)
	require.Contains(t, r.out, "To repeat: gaiafs bench --quick")
	require.Contains(t, r.err, "[fio 3/3]")
	for path, has := range map[string]string{page: "<svg ", markdown: "### cached"} {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Contains(t, string(text), has)
	}
	p.requireClean(t)
}

// A Ctrl-C ends bench while a program still uses one of its mounts.
func TestCommandBenchIsInterrupted(t *testing.T) {
	p := newBenchPlace(t)
	cmd := p.command(t, "--quick=false", "--run", "^(merge|metadata)/")
	errs, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() }) // normally it has ended
	var said bytes.Buffer
	lines := bufio.NewReader(io.TeeReader(errs, &said))
	for !strings.Contains(said.String(), "[merge 2/2]") {
		_, err := lines.ReadString('\n')
		require.NoError(t, err, said.String())
	}
	var mountpoint string
	require.Eventually(t, func() bool {
		mounts, err := fs.Mounts()
		require.NoError(t, err)
		for _, m := range mounts {
			if strings.HasPrefix(m.Mountpoint, p.dir) {
				mountpoint = m.Mountpoint
			}
		}
		return mountpoint != ""
	}, 30*time.Second, 5*time.Millisecond)
	busy, err := os.Open(mountpoint)
	require.NoError(t, err)
	defer busy.Close()
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	_, err = io.Copy(io.Discard, lines)
	require.NoError(t, err)
	require.Error(t, cmd.Wait())
	require.Equal(t, exitFailure, cmd.ProcessState.ExitCode(), said.String())
	require.Contains(t, said.String(), "gaiafs: interrupted")
	report := p.report(t)
	require.Equal(t, "interrupted", report.Ended)
	require.GreaterOrEqual(t, len(report.Rows), 2)
	p.requireClean(t)
}

// userFile makes a file that belongs to the user. It returns its path and content.
func userFile(t *testing.T) (string, []byte) {
	t.Helper()
	content := bytes.Repeat([]byte("not to be written to. "), 300_000)
	path := filepath.Join(t.TempDir(), "my file: weights")
	require.NoError(t, os.WriteFile(path, content, 0o444))
	return path, content
}

func TestCommandBenchReadsAFileOfTheUser(t *testing.T) {
	needProgram(t, "fio")
	path, content := userFile(t)
	var before, after unix.Stat_t
	require.NoError(t, unix.Stat(path, &before))
	p := newBenchPlace(t)
	link := filepath.Join(t.TempDir(), "model") // like a link in a model cache
	require.NoError(t, os.Symlink(path, link))
	r := execute(t, p.command(t, "--rounds=1", "--file", link, "--run",
		"^fio/randread 4 KiB .*16|^cached/random.*16 jobs, 50"))
	require.Equal(t, exitOK, r.code, r.err)
	for _, row := range p.report(t).Rows {
		require.NotContains(t, row.Name, "write")
	}
	require.Contains(t, r.out, "randread 4 KiB host-warm 16 jobs")
	require.Contains(t, r.err, "only the first part of "+path+" is read: ", "only whole pages are read")
	require.NoError(t, unix.Stat(path, &after))
	require.Equal(t, before.Mtim, after.Mtim)
	require.Equal(t, before.Ctim, after.Ctim)
	now, err := os.ReadFile(path)
	require.NoError(t, err)
	require.True(t, bytes.Equal(content, now))
	entries, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, entries, 1, "nothing else is in its folder")
	p.requireClean(t)
}

func TestCommandBenchNoticesThatAFileChanges(t *testing.T) {
	needProgram(t, "fio")
	path, _ := userFile(t)
	require.NoError(t, os.Chmod(path, 0o644))
	p := newBenchPlace(t)
	cmd := p.command(t, "--rounds=100000", "--file", path, "--run", "^fio/read 1 MiB host-warm")
	errs, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() }) // normally it has ended
	lines := bufio.NewReader(errs)
	first, err := lines.ReadString('\n') // the machine's line: bench has inspected the file
	require.NoError(t, err)
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	require.NoError(t, err)
	defer f.Close()
	_, err = f.WriteAt([]byte("X"), 4097)
	require.NoError(t, err)
	rest, err := io.ReadAll(lines)
	require.NoError(t, err)
	require.Error(t, cmd.Wait())
	require.Equal(t, exitFailure, cmd.ProcessState.ExitCode())
	require.Contains(t, string(rest), "was changed while it was measured", first)
	p.requireClean(t)
}

func TestCommandBenchWithoutPrograms(t *testing.T) {
	p := newBenchPlace(t)
	cmd := p.command(t, "--rounds=1", "--run", "^(fio|tree)/(all|read|git|go|readdir)")
	cmd.Env = append(cmd.Env, "PATH="+t.TempDir())
	r := execute(t, cmd)
	require.Equal(t, exitOK, r.code, r.err)
	why := make(map[string]string)
	for _, row := range p.report(t).Rows {
		why[row.Group+"/"+row.Name] = row.Skipped
	}
	require.Contains(t, why["fio/all"], "apt-get install fio")
	require.Contains(t, why["tree/git"], "apt-get install git")
	require.Empty(t, why["tree/read 1 KiB files, warm"])
	p.requireClean(t)
}

// A user without privileges measures what needs none.
func TestCommandBenchNotRoot(t *testing.T) {
	needProgram(t, "fusermount3")
	if os.Geteuid() != 0 {
		t.Skip("only root can become another user")
	}
	needProgram(t, "unshare")
	needProgram(t, "setpriv")
	dir, err := os.MkdirTemp("", "gaiafs-nobody-") // testing's own folders are closed to other users
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0o777))
	p := benchPlace{dir: filepath.Join(dir, "work"), json: filepath.Join(dir, "report.json")}
	require.NoError(t, os.Mkdir(p.dir, 0o777))
	require.NoError(t, os.Chmod(p.dir, 0o777))
	program := filepath.Join(dir, "gaiafs.test") // a user cannot run a program where root builds
	text, err := os.ReadFile("/proc/self/exe")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(program, text, 0o755))
	// In a mount namespace of its own, /dev/fuse is accessible to all users, as on most machines.
	device := filepath.Join(dir, "fuse")
	require.NoError(t, unix.Mknod(device, unix.S_IFCHR|0o666, int(unix.Mkdev(10, 229))))
	require.NoError(t, os.Chmod(device, 0o666))
	cmd := p.command(t, "--rounds=1", "--run", "^metadata/(stat|readdir)")
	script := withoutMounts("") + `
		mount --bind "$0" /dev/fuse && exec setpriv --reuid=65534 --regid=65534 --clear-groups "$@"`
	cmd.Args = append([]string{"unshare", "--mount", "sh", "-c", script, device, program}, cmd.Args[1:]...)
	cmd.Path, err = exec.LookPath("unshare")
	require.NoError(t, err)
	cmd.Dir = dir
	cmd.Env = append(cmd.Env, "HOME="+dir, "XDG_RUNTIME_DIR="+dir, "TMPDIR="+dir)
	r := execute(t, cmd)
	require.Equal(t, exitOK, r.code, r.err)
	require.Contains(t, r.err, "only root can make the kernel forget names; rows about cold names are left out")
	for _, row := range p.report(t).Rows {
		if strings.HasPrefix(row.Name, "stat, cold") || strings.HasPrefix(row.Name, "readdir, cold") {
			require.Contains(t, row.Skipped, "only root")
		} else if row.Group == "metadata" {
			require.Empty(t, row.Skipped, row.Name)
		}
	}
	p.requireClean(t)
}

func TestCommandBenchWrongUsage(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"--run", "("}, exitUsage, "--run"},
		{[]string{"--rounds=-1"}, exitUsage, "--rounds -1: each side must be measured at least once"},
		{[]string{"--rounds=0"}, exitUsage, "--rounds 0: each side must be measured at least once"},
		{[]string{"--gpus=nonsense"}, exitUsage, "use auto, none"},
		{[]string{"extra"}, exitUsage, "takes no arguments"},
		{[]string{"--nonsense"}, exitUsage, "nonsense"},
		{[]string{"--run", "^nothing/"}, exitUsage, "--list"},
		{[]string{"--run", "zzz", "--dir", dir + "/missing"}, exitUsage,
			`no row matches "zzz"; 'gaiafs bench --list' names the groups`},
		{[]string{"--dir", dir + "/missing"}, exitFailure, "choose another folder with --dir"},
		{[]string{"--html", dir + "/missing/r.html"}, exitFailure, "the report cannot be written"},
		{[]string{"--file", dir + "/missing"}, exitFailure, "gaiafs: " + dir + "/missing cannot be read: no such file"},
		{[]string{"--file", dir}, exitFailure, "not a regular file"},
		{[]string{"--model", dir + "/missing"}, exitFailure, "no such file"},
		{[]string{"--model", dir}, exitFailure, "not a regular file"},
		{[]string{"--model", "bench_test.go"}, exitFailure, "bench_test.go: it is not a safetensors file"},
		{[]string{"--model", "a", "--file", "b"}, exitUsage, "--file and --model cannot be used together"},
	} {
		r := gaiafsCommand(t, append([]string{"bench"}, c.args...)...)
		require.Equal(t, c.code, r.code, "%v: %s", c.args, r.err)
		require.Contains(t, r.err, c.says, "%v", c.args)
	}
	r := gaiafsCommand(t, "bench", "--list")
	require.Equal(t, exitOK, r.code)
	require.Contains(t, r.out, "versions ")
	require.Equal(t, exitFailure, gaiafsCommand(t, "bench-process").code)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
}

// No report overwrites the file that is read, or another report, whatever the names.
func TestCommandBenchDestroysNoFile(t *testing.T) {
	path, content := userFile(t)
	require.NoError(t, os.Chmod(path, 0o644))
	dir := t.TempDir()
	link, hard := filepath.Join(dir, "link"), filepath.Join(filepath.Dir(path), "hard")
	require.NoError(t, os.Symlink(path, link))
	require.NoError(t, os.Link(path, hard))
	for _, args := range [][]string{
		{"--file", path, "--json", path}, {"--file", path, "--html", link}, {"--file", link, "--markdown", path},
		{"--file", path, "--json", hard},
		{"--json", dir + "/r", "--html", dir + "/r"}, {"--html", dir + "/r", "--markdown", dir + "/r.part"},
	} {
		r := gaiafsCommand(t, append([]string{"bench", "--run", "^nothing/"}, args...)...)
		require.Equal(t, exitUsage, r.code, "%v: %s", args, r.err)
		require.Contains(t, r.err, "would write over", "%v", args)
		now, err := os.ReadFile(path)
		require.NoError(t, err)
		require.True(t, bytes.Equal(content, now), "%v", args)
	}
	table := filepath.Join(dir, "table")
	cmd := command(t, "bench", "--run", "^nothing/", "--json", table)
	var err error
	cmd.Stdout, err = os.Create(table)
	require.NoError(t, err)
	require.Error(t, cmd.Run())
	require.Equal(t, exitUsage, cmd.ProcessState.ExitCode())
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 2)
}

// The reader of a pipe gets one JSON document.
func TestCommandBenchWritesToAPipe(t *testing.T) {
	p := newBenchPlace(t)
	require.NoError(t, unix.Mkfifo(p.json, 0o600))
	cmd := p.command(t, "--rounds=1", "--run", "^merge/")
	read := make(chan []byte)
	go func() {
		text, _ := os.ReadFile(p.json) // until the writer has finished
		read <- text
	}()
	r := execute(t, cmd)
	require.Equal(t, exitOK, r.code, r.err)
	var report rows.Report
	require.NoError(t, json.Unmarshal(<-read, &report))
	require.Len(t, report.Rows, 2)
	st, err := os.Lstat(p.json)
	require.NoError(t, err)
	require.NotZero(t, st.Mode()&os.ModeNamedPipe)
}

// The report says of each mount whether its files pass through. The rows of many devices and of a user's file ask the
// daemon.
func TestCommandBenchSaysWhatPassesThrough(t *testing.T) {
	needProgram(t, "fio")
	passes := func(t *testing.T, run string, flags ...string) (map[string]bool, rows.Report) {
		p := newBenchPlace(t)
		r := execute(t, p.command(t, append([]string{"--rounds=1", "--run", run}, flags...)...))
		require.Equal(t, exitOK, r.code, r.err)
		p.requireClean(t)
		sides, report := make(map[string]bool), p.report(t)
		for _, m := range report.Mounts {
			sides[m.Side] = m.Passthrough
		}
		return sides, report
	}
	sides, report := passes(t, "^fio/write 4 KiB host-warm 1 job|^versions/read 4 KiB, not mapped, 32", "--gpus=none")
	require.Contains(t, sides, "gaiafs, no devices")
	require.False(t, sides["gaiafs, no devices"])
	for _, row := range report.Rows {
		if strings.HasSuffix(row.Name, "--write-back") && sides["gaiafs"] {
			require.Contains(t, row.Skipped, "the files pass through")
		} else {
			require.Empty(t, row.Skipped+row.Failed, row.Name)
		}
	}
	if os.Geteuid() == 0 && !sides["gaiafs"] {
		t.Log("the kernel has no passthrough")
	}
	path, _ := userFile(t)
	for _, gpus := range []string{"none", "emulated:1"} {
		sides, report = passes(t, "^fio/read 1 MiB host-warm", "--gpus="+gpus, "--file="+path)
		require.Equal(t, map[string]bool{"gaiafs": false}, sides)
		require.Equal(t, gpus, report.Mounts[0].GPUs)
		require.Equal(t, gpus == "none", report.Machine.Devices == nil)
	}
}

// gaiafs and safetensors load a model in separate processes, and get the same bytes. The sentences below the table
// compare them.
func TestCommandBenchModel(t *testing.T) {
	python, err := filepath.Abs("../../build/python/bin/python")
	require.NoError(t, err)
	library, err := filepath.Abs("../../build/libgaiafs.so.0")
	require.NoError(t, err)
	for _, needed := range []string{python, library} {
		if _, err := os.Stat(needed); err != nil {
			t.Skip(err) // make test makes them
		}
	}
	packages, err := filepath.Abs("../../client/python")
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "model.safetensors")
	const tensors = `import sys, numpy, safetensors.numpy as s
a = numpy.arange(1 << 20, dtype=numpy.float32)
s.save_file({"w": a.reshape(1024, 1024), "x.w": a.reshape(64, -1)[:, ::2].copy(), "steps": numpy.arange(3),
	"scale": a[7:8].reshape(()), "none": a[:0].reshape(0, 5)}, sys.argv[1])`
	out, err := exec.Command(python, "-c", tensors, path).CombinedOutput()
	require.NoError(t, err, "%s", out)
	p := newBenchPlace(t)
	bench := func(flags ...string) result {
		cmd := p.command(t, append([]string{"--model", path, "--rounds=1"}, flags...)...)
		cmd.Env = append(cmd.Env, "PYTHONPATH="+packages, "PYTHONDONTWRITEBYTECODE=1", "GAIAFS_LIBRARY="+library)
		return execute(t, cmd)
	}
	r := bench("--python", python)
	require.Equal(t, exitOK, r.code, r.err+r.out)
	report := p.report(t)
	require.Len(t, report.Rows, 4)
	for _, row := range report.Rows {
		require.Empty(t, row.Failed)
		if row.Skipped != "" {
			require.Regexp(t, "cannot be made cold|tmpfs|time of --quick", row.Skipped)
		}
	}
	for _, words := range []string{"From the host's page cache, it is loaded after ",
		"A second process, while the first one has the model, loads it in ", "A pass over all weights takes ",
		"Processes share one copy", "Devices were emulated"} {
		require.Contains(t, r.out, words)
	}
	p.requireClean(t)

	// NumPy lacks the type of these weights, and the Python lacks what adds it: bench says so once, before any row.
	header := `{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}`
	require.NoError(t, os.WriteFile(path, fmt.Appendf(binary.LittleEndian.AppendUint64(nil, uint64(len(header))),
		"%s\x80\x3f\x80\x3f", header), 0o600))
	packages += ":" + t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(packages[strings.LastIndex(packages, ":")+1:], "ml_dtypes.py"),
		[]byte("raise ImportError('no ml_dtypes')\n"), 0o600))
	r = bench("--python", python)
	require.Equal(t, exitFailure, r.code)
	require.Equal(t, 1, strings.Count(r.out, "no ml_dtypes"), r.err+r.out)
	require.Contains(t, r.err+r.out, "gaiafs[numpy]")
	require.NotContains(t, r.out, "0 of 0")

	r = bench("--python", "/nonexistent/python")
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.out, "choose another Python by --python")
	r = bench("--python", python, "--gpus=none")
	require.Equal(t, exitOK, r.code, r.err)
	require.Contains(t, r.out, "--gpus none gives 0 devices and 1 are needed")
	require.NoError(t, os.Truncate(path, 1<<20))
	r = bench("--python", python)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.out, "SafetensorError")
	p.requireClean(t)
}

func TestBenchShowsItsCommand(t *testing.T) {
	require.Equal(t, `gaiafs bench --run '^a b$' --rounds=3 'it'\''s'`,
		shown([]string{"bench", "--run", "^a b$", "--rounds=3", "it's"}))
}
