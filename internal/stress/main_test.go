package stress

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/hungfs"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

var (
	operations = flag.Int("stress.ops", 100_000, "operations of the test for stale readers")
	soakFor    = flag.Duration("stress.for", 20*time.Second, "how long the mixed load runs")
	hostile    = flag.Bool("stress.memory", false, "the daemon's memory under workloads of full size")
)

// patience is how long to wait for what must happen at once, on a machine that may be busy.
const patience = time.Minute

const programVariable = "GAIAFS_STRESS_PROGRAM"

// programs are the bodies of the processes that tests start. What they return fails the test.
var programs = map[string]func(args []string) error{}

func TestMain(m *testing.M) {
	testmount.Main()
	hungfs.Main()
	if name := os.Getenv(programVariable); name != "" {
		if err := programs[name](os.Args[1:]); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	// Everything that the tests make is in a directory of their own, so that a mount there is one they left.
	dir, err := os.MkdirTemp("", "gaiafs-stress")
	if err == nil {
		err = os.Chmod(dir, 0o755) // PostgreSQL runs as another user
	}
	if err == nil {
		err = os.Setenv("TMPDIR", dir)
	}
	if err != nil {
		panic(err)
	}
	code := m.Run()
	left := mountpointsIn(dir)
	for _, place := range left {
		fmt.Fprintln(os.Stderr, "leaked mount:", place)
		code = max(code, 1)
	}
	if len(left) == 0 {
		_ = os.RemoveAll(dir)
	}
	os.Exit(code)
}

// mountpointsIn returns where something is mounted below a directory.
func mountpointsIn(dir string) (places []string) {
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		panic(err)
	}
	for line := range strings.Lines(string(table)) {
		if fields := strings.Fields(line); len(fields) > 4 && strings.HasPrefix(fields[4], dir+"/") {
			places = append(places, fields[4])
		}
	}
	return places
}

// process is one of programs at work.
type process struct {
	t    testing.TB
	name string
	cmd  *exec.Cmd
	in   io.WriteCloser
	// lines has what the program printed, and is closed when it ended.
	lines chan string
	ended chan struct{}
	err   error // set before ended is closed
	quit  sync.Once
}

// start starts one of programs. It is killed when the test ends, if it has not ended by then.
func start(t testing.TB, name string, args ...any) *process {
	t.Helper()
	require.Contains(t, programs, name)
	texts := make([]string, len(args))
	for i, a := range args {
		texts[i] = fmt.Sprint(a)
	}
	cmd := exec.Command("/proc/self/exe", texts...)
	cmd.Env = append(os.Environ(), programVariable+"="+name)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	p := &process{t: t, name: name, cmd: cmd, in: in, lines: make(chan string, 1<<12), ended: make(chan struct{})}
	go func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			p.lines <- s.Text()
		}
		close(p.lines)
		p.err = cmd.Wait()
		close(p.ended)
	}()
	t.Cleanup(p.kill)
	return p
}

// line returns the next line that the program prints.
func (p *process) line() string {
	p.t.Helper()
	select {
	case l, ok := <-p.lines:
		if !ok {
			<-p.ended
			p.t.Fatalf("%s ended early: %v", p.name, p.err)
		}
		return l
	case <-time.After(patience):
		p.t.Fatalf("%s said nothing for %v", p.name, patience)
		return ""
	}
}

// expect waits for a certain line.
func (p *process) expect(want string) {
	p.t.Helper()
	require.Equal(p.t, want, p.line(), p.name)
}

// wait returns what the program came to and the lines that nobody read. It must end by itself, soon.
func (p *process) wait() (rest []string, err error) {
	p.t.Helper()
	timeout := time.After(patience)
	for {
		select {
		case l, ok := <-p.lines:
			if ok {
				rest = append(rest, l)
				continue
			}
			<-p.ended
			return rest, p.err
		case <-timeout:
			p.t.Fatalf("%s did not end within %v: %s", p.name, patience, processState(p.cmd.Process.Pid))
		}
	}
}

// stop closes the program's standard input, which asks it to end, and waits until it did, well.
func (p *process) stop() (rest []string) {
	p.t.Helper()
	p.quit.Do(func() { p.in.Close() })
	rest, err := p.wait()
	require.NoError(p.t, err, p.name)
	return rest
}

// kill ends the program with SIGKILL. Not even a program that uses a dead mount may outlive that.
func (p *process) kill() {
	p.t.Helper()
	_ = p.cmd.Process.Kill()
	timeout := time.After(patience)
	for {
		select {
		case _, ok := <-p.lines:
			if ok {
				continue
			}
			<-p.ended
			return
		case <-timeout:
			assert.Fail(p.t, "a killed program lives on", "%s: %s", p.name, processState(p.cmd.Process.Pid))
			return
		}
	}
}

// processState says what a process is doing, for people.
func processState(pid int) string {
	var b strings.Builder
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	for _, task := range tasks {
		for _, name := range []string{"stat", "wchan", "stack"} {
			if text, err := os.ReadFile(filepath.Join(task, name)); err == nil {
				fmt.Fprintf(&b, "%s: %s\n", name, text)
			}
		}
	}
	return b.String()
}

// asked is closed when the test has closed the program's standard input.
func asked() <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(io.Discard, os.Stdin)
	}()
	return done
}

// isDone reports whether a channel is closed.
func isDone(done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	default:
		return false
	}
}

// bothModes runs a test with each way of writing.
func bothModes(t *testing.T, test func(t *testing.T, o testmount.Options)) {
	t.Helper()
	t.Run("through", func(t *testing.T) { test(t, testmount.Options{}) })
	t.Run("back", func(t *testing.T) { test(t, testmount.Options{WriteBack: true}) })
}

// allModes runs a test with each way of writing, and with opens that the daemon does not see.
func allModes(t *testing.T, test func(t *testing.T, o testmount.Options)) {
	t.Helper()
	bothModes(t, test)
	t.Run("opens", func(t *testing.T) {
		if os.Geteuid() != 0 {
			t.Skip("needs root")
		}
		test(t, testmount.Options{KernelOpens: true})
	})
}

// requireTool skips what needs a program that is not installed, or fails where skipping is not allowed.
func requireTool(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		missing(t, name)
	}
	return path
}

func missing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("GAIAFS_REQUIRE_TOOLS") == "1" {
		t.Fatalf("%s is missing", what)
	}
	t.Skipf("%s is missing", what)
}

// run runs a command in dir and returns what it printed.
func run(t testing.TB, dir, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s %s: %s", name, strings.Join(args, " "), out)
	return string(out)
}
