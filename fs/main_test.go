package fs

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/hungfs"
)

// programVariable names the program that this test binary runs. Programs on the mount are separate processes: the file
// operations of one process must not meet the daemon's in the same runtime.
const programVariable = "GAIAFS_FS_TEST_PROGRAM"

// testPrefix begins the names of this run's directories; other runs may go on at the same time.
var testPrefix = fmt.Sprintf("gaiafs-fs-test-%d-", os.Getpid())

// programs are the bodies of the processes that tests start. If one returns an error, the process prints it and fails.
var programs = map[string]func(args []string) error{}

func TestMain(m *testing.M) {
	Guard() // a killed test leaves no program hanging
	hungfs.Main()
	if name := os.Getenv(programVariable); name != "" {
		if err := programs[name](os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if code == 0 {
			code = leakedMounts()
		}
		os.Exit(code)
	}))
}

// leakedMounts fails the run if a mount of a test is still there.
func leakedMounts() int {
	mounts, err := Mounts()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	for _, m := range mounts {
		if strings.Contains(m.Mountpoint, testPrefix) {
			fmt.Fprintln(os.Stderr, "leaked mount:", m.Mountpoint)
			return 1
		}
	}
	return 0
}

// program prepares a process that runs one of programs.
func program(name string, args ...string) *exec.Cmd {
	if programs[name] == nil {
		panic("no program " + name)
	}
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), programVariable+"="+name)
	return cmd
}

// user makes cmd run as an ordinary user with the given groups. The first group is the primary one.
func user(cmd *exec.Cmd, uid uint32, groups ...uint32) *exec.Cmd {
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: groups[0],
		Groups: groups[1:]}}
	return cmd
}

// run runs cmd and returns its standard output.
func run(t testing.TB, cmd *exec.Cmd) string {
	t.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	require.NoError(t, err, "%s: %s%s", cmd.Args, out.String(), errs.String())
	return out.String()
}

// sh runs a shell script in dir.
func sh(t testing.TB, dir, script string, args ...string) string {
	t.Helper()
	return run(t, shell(dir, script, args...))
}

// shell prepares a script in dir. The shell itself changes to dir. With exec.Cmd's Dir, the forked child would do that
// before exec, while this process waits in the runtime for the exec, and its daemon may be unable to answer.
func shell(dir, script string, args ...string) *exec.Cmd {
	return exec.Command("/bin/sh", append([]string{"-euc", `cd "$0"` + "\n" + script, dir}, args...)...)
}

// requireRoot skips the test if it does not run as root: it needs other users or devices.
func requireRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
}

// requireTool skips the test if a program is not installed.
func requireTool(t testing.TB, name string) {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		t.Skipf("%s is not installed", name)
	}
}

// scene is a mount for one test.
type scene struct {
	*Server
	source, mnt string
}

// mount mounts a new directory. When the test ends, the mount is unmounted and nothing of it is open.
func mount(t testing.TB, change ...func(*Options)) *scene {
	t.Helper()
	dir, err := os.MkdirTemp("", testPrefix)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0755))
	s := &scene{source: filepath.Join(dir, "source"), mnt: filepath.Join(dir, "mnt")}
	require.NoError(t, os.Mkdir(s.source, 0755))
	require.NoError(t, os.Chmod(s.source, 0777))
	require.NoError(t, os.Mkdir(s.mnt, 0755))
	o := Options{Source: s.source, Mountpoint: s.mnt, AllowOther: os.Geteuid() == 0,
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil))}
	for _, c := range change {
		c(&o)
	}
	s.source = o.Source
	if s.Server, err = Mount(o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		err := s.Unmount()
		if err != nil {
			_ = unix.Unmount(s.mnt, unix.MNT_DETACH) // so that the failure does not spread
		}
		require.NoError(t, err)
	})
	return s
}

func writeBack(o *Options) { o.WriteBack = true }

func passThrough(o *Options) { o.Passthrough = true }

// everyMode runs a test with each way of writing, including passthrough, and with opens that the daemon does not see.
func everyMode(t *testing.T, test func(t *testing.T, s *scene)) {
	t.Helper()
	bothModes(t, test)
	unseenModes(t, test)
	t.Run("passthrough", func(t *testing.T) {
		s := mount(t, passThrough)
		if !s.Passthrough() {
			t.Skip("passthrough needs root and Linux 6.9")
		}
		test(t, s)
	})
}

// unseenModes runs a test on writable mounts whose files the kernel opens, with and without its write-back cache.
func unseenModes(t *testing.T, test func(t *testing.T, s *scene)) {
	t.Helper()
	for name, write := range map[string]bool{"kernel opens": false, "kernel opens, write-back": true} {
		t.Run(name, func(t *testing.T) {
			requireRoot(t)
			test(t, mount(t, unseenOpens, func(o *Options) { o.WriteBack = write }))
		})
	}
}

// unseenOpens lets the kernel open the files of a writable mount.
func unseenOpens(o *Options) { o.KernelOpens = true }

// bothModes runs a test with and without the kernel's write-back cache.
func bothModes(t *testing.T, test func(t *testing.T, s *scene)) {
	t.Helper()
	t.Run("write-through", func(t *testing.T) { test(t, mount(t)) })
	t.Run("write-back", func(t *testing.T) { test(t, mount(t, writeBack)) })
}

// How long and how often to wait for background work.
const (
	eventually = time.Minute
	tick       = time.Millisecond
)
