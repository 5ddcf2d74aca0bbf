package ctest

import (
	"bufio"
	"context"
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

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/control/controltest"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

// clients has the programs compiled so far, by program and build.
var clients = struct {
	mu    sync.Mutex
	dir   string
	built map[string]bool
}{built: make(map[string]bool)}

func TestMain(m *testing.M) {
	testmount.Main()
	dir, err := os.MkdirTemp("", "ctest")
	if err != nil {
		panic(err)
	}
	clients.dir = dir
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		os.RemoveAll(dir)
		os.Exit(code)
	}))
}

// daemon is a live server over a small page cache or, without a server, a mount at dir.
type daemon struct {
	t      *testing.T
	dir    string
	socket string
	cache  *controltest.Cache
	server *control.Server
	stop   func()
	env    []string // for the clients
}

func startDaemon(t *testing.T, cache *controltest.Cache) *daemon {
	dir := t.TempDir()
	if cache.Devices == 0 {
		cache.Devices = 2
	}
	d := &daemon{t: t, dir: dir, socket: filepath.Join(dir, "run", "s"), cache: cache}
	t.Cleanup(func() { require.NoError(t, cache.Close()) })
	d.start()
	t.Cleanup(func() { d.stop() })
	return d
}

func (d *daemon) grants() string { return filepath.Join(d.dir, "grants") }

func (d *daemon) start() {
	server, err := control.Listen(control.Options{Socket: d.socket, Cache: d.cache})
	require.NoError(d.t, err)
	grants, err := controltest.ListenGrants(server, d.grants())
	require.NoError(d.t, err)
	d.server = server
	d.stop = sync.OnceFunc(func() {
		require.NoError(d.t, server.Close())
		grants.Close() // closes files that the server was using
	})
}

// file makes the file that the scenarios expect.
func (d *daemon) file() string {
	content := make([]byte, 5<<20)
	for i := range content {
		content[i] = byte(i / 7)
	}
	path := filepath.Join(d.dir, "file")
	require.NoError(d.t, os.WriteFile(path, content, 0o600))
	return path
}

func (d *daemon) waitMapped(n int) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	require.NoError(d.t, d.cache.WaitMapped(ctx, n))
}

// command returns a command that runs the client with the daemon's grants.
func (d *daemon) command(client string, args ...string) *exec.Cmd {
	cmd := exec.Command(client, args...)
	if strings.HasSuffix(client, "-thread") {
		// The thread sanitizer needs the usual address layout.
		if setarch, err := exec.LookPath("setarch"); err == nil {
			cmd = exec.Command(setarch, append([]string{"-R", client}, args...)...)
		}
	}
	cmd.Env = append(append(os.Environ(), "TSAN_OPTIONS=die_after_fork=0"), d.env...)
	if d.server != nil {
		cmd.Env = append(cmd.Env, "GAIAFS_TEST_GRANTS="+d.grants())
	}
	return cmd
}

func (d *daemon) run(client string, args ...string) string {
	d.t.Helper()
	cmd := d.command(client, args...)
	// The signal prints where the client is, and ends the test.
	stuck := time.AfterFunc(4*time.Minute, func() { _ = cmd.Process.Signal(syscall.SIGABRT) })
	defer stuck.Stop()
	out, err := cmd.CombinedOutput()
	require.NoError(d.t, err, "%s", out)
	return string(out)
}

var warnings = []string{"-std=c11", "-g", "-O1", "-pthread", "-D_FILE_OFFSET_BITS=64", "-Wall", "-Wextra", "-Werror"}

// builds are the ways to compile the client. In some of them it polls for replies however few processors there are.
var builds = map[string][]string{
	"plain":   nil,
	"address": {"-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DGAIAFS_ENOUGH_PROCESSORS=1"},
	"thread":  {"-fsanitize=thread", "-DGAIAFS_ENOUGH_PROCESSORS=1"},
}

// sources returns the library's files.
func sources(t *testing.T) []string {
	all, err := filepath.Glob("../*.c")
	require.NoError(t, err)
	require.NotEmpty(t, all)
	return all
}

// compile builds a program of testdata with the library. It skips the test if the compiler lacks the sanitizer, and
// fails it without a compiler.
func compile(t *testing.T, program, build string) string {
	t.Helper()
	clients.mu.Lock()
	defer clients.mu.Unlock()
	client := filepath.Join(clients.dir, program+"-"+build)
	if clients.built[client] {
		return client
	}
	dir := clients.dir
	flags := builds[build]
	if flags != nil {
		probe := filepath.Join(dir, "probe.c")
		require.NoError(t, os.WriteFile(probe, []byte("int main(void) { return 0; }\n"), 0o600))
		if out, err := exec.Command("cc", append(append([]string{}, flags...), "-o", probe+".out",
			probe)...).CombinedOutput(); err != nil {
			t.Skipf("this compiler has no %s sanitizer: %s", build, out)
		}
	}
	args := append(append(append([]string{}, warnings...), flags...), "-o", client, "testdata/"+program+".c")
	out, err := exec.Command("cc", append(append(args, sources(t)...), "-ldl")...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	clients.built[client] = true
	return client
}

var frameFiles = []string{"../../../control/testdata/frames.txt", "../../../control/testdata/frames2.txt"}

func TestScenarios(t *testing.T) {
	for build := range builds {
		t.Run(build, func(t *testing.T) {
			client := compile(t, "client", build)
			t.Run("wire", func(t *testing.T) {
				out, err := exec.Command(compile(t, "wire", build), frameFiles...).CombinedOutput()
				if build == "thread" && err != nil && strings.Contains(string(out), "unexpected memory mapping") {
					t.Skip("the thread sanitizer does not run with these address spaces")
				}
				require.NoError(t, err, "%s", out)
			})
			for _, scenario := range []string{"basic", "bad", "addresses", "threads", "forks", "forks-among-threads"} {
				t.Run(scenario, func(t *testing.T) {
					if build == "thread" && scenario == "forks-among-threads" {
						t.Skip("the thread sanitizer does not support threads made by a forked process")
					}
					d := startDaemon(t, &controltest.Cache{})
					d.run(client, scenario, d.file())
					d.waitMapped(0)
				})
			}
			t.Run("past the end", func(t *testing.T) {
				d := startDaemon(t, &controltest.Cache{})
				d.cache.PastEnd.Store(3)
				d.run(client, "past-end", d.file())
			})
			t.Run("many extents", func(t *testing.T) {
				d := startDaemon(t, &controltest.Cache{Extent: 4096})
				d.run(client, "basic", d.file())
				d.waitMapped(0)
			})
			t.Run("restart", func(t *testing.T) { restart(t, client) })
		})
	}
}

// talk starts a client that prints a word and then waits for a byte.
func (d *daemon) talk(client string, args ...string) (cmd *exec.Cmd, expect func(string), answer io.WriteCloser) {
	cmd = d.command(client, args...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(d.t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(d.t, err)
	require.NoError(d.t, cmd.Start())
	lines := bufio.NewReader(out)
	return cmd, func(want string) {
		d.t.Helper()
		line, err := lines.ReadString('\n')
		require.NoError(d.t, err)
		require.Equal(d.t, want+"\n", line)
	}, in
}

// restarts runs the scenario "restart". It stops and restarts the daemon twice: once while the client waits, and once
// between two calls.
func (d *daemon) restarts(client, path string) (cmd *exec.Cmd, expect func(want string), say func()) {
	cmd, expect, answer := d.talk(client, "restart", path)
	stuck := time.AfterFunc(patience, func() { cmd.Process.Kill() })
	d.t.Cleanup(func() { stuck.Stop() })
	say = func() {
		_, err := answer.Write([]byte{1})
		require.NoError(d.t, err)
	}
	expect("mapped")
	d.stop()
	say()
	expect("lost")
	d.start()
	say()
	expect("mapped again")
	d.stop()
	d.start()
	say()
	return cmd, expect, say
}

func restart(t *testing.T, client string) {
	d := startDaemon(t, &controltest.Cache{})
	cmd, expect, say := d.restarts(client, d.file())
	expect("third")
	d.stop()
	d.start()
	say()
	require.NoError(t, cmd.Wait())
}

func TestKilledClientIsReleased(t *testing.T) {
	client := compile(t, "client", "plain")
	d := startDaemon(t, &controltest.Cache{})
	path := d.file()
	for i := range 20 {
		text := fmt.Sprintf("last words %02d", i)
		cmd, expect, _ := d.talk(client, "stay", path, text)
		expect("mapped")
		d.waitMapped(1)
		require.NoError(t, cmd.Process.Kill())
		_ = cmd.Wait() // "signal: killed"
		d.waitMapped(0)
		got, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, text, string(got[:len(text)]))
	}
	require.Eventually(t, func() bool { return d.server.Stats() == control.Stats{} }, 10*time.Second, time.Millisecond)
}

// TestDaemonOfVersion1 checks that a client sends a daemon of version 1 nothing newer.
func TestDaemonOfVersion1(t *testing.T) {
	for build := range builds {
		t.Run(build, func(t *testing.T) {
			client := compile(t, "client", build)
			d := startDaemon(t, &controltest.Cache{})
			socket := filepath.Join(d.dir, "old")
			r, err := controltest.ListenRecorded(socket, controltest.Version1, frameFiles...)
			require.NoError(t, err)
			defer r.Close()
			d.env = []string{"GAIAFS_TEST_SOCKET=" + socket}
			d.run(client, "old-daemon", d.file())
			require.Empty(t, r.Unexpected())
			require.Zero(t, r.First(2)[28], "the kind is reserved in version 1")
		})
	}
}

// TestLaterDaemon runs a client with daemons of later versions.
func TestLaterDaemon(t *testing.T) {
	client := compile(t, "client", "address")
	d := startDaemon(t, &controltest.Cache{})
	for name, c := range map[string]struct {
		answers map[uint16][]string
		says    string
	}{
		"requires": {map[uint16][]string{1: {"welcome2-longer"}}, "requires features 0x4000000000000000"},
		"kinds": {map[uint16][]string{1: {"welcome2"}, 2: {"mapped2-longer", "extents2-longer"}, 7: {"result"},
			13: {"result"}},
			"beside kind 1"},
	} {
		socket := filepath.Join(d.dir, name)
		r, err := controltest.ListenRecorded(socket, c.answers, frameFiles...)
		require.NoError(t, err)
		d.env = []string{"GAIAFS_TEST_SOCKET=" + socket}
		out, err := d.command(client, "old-daemon", d.file()).CombinedOutput()
		require.Error(t, err)
		require.Contains(t, string(out), c.says)
		r.Close()
	}
}

// TestNoticesAreAnswered checks that an idle client is attentive, because a thread of its library answers.
func TestNoticesAreAnswered(t *testing.T) {
	for build := range builds {
		t.Run(build, func(t *testing.T) {
			d := startDaemon(t, &controltest.Cache{})
			cmd, expect, _ := d.talk(compile(t, "client", build), "stay", d.file(), "idle")
			expect("mapped")
			require.Eventually(t, func() bool { return d.server.Stats().Attentive == 1 }, 20*time.Second,
				time.Millisecond)
			require.Equal(t, 1, d.server.Stats().Sessions)
			require.NoError(t, cmd.Process.Kill())
			_ = cmd.Wait() // "signal: killed"
			d.waitMapped(0)
		})
	}
}

func TestRefusals(t *testing.T) {
	client := compile(t, "client", "plain")
	t.Run("budget", func(t *testing.T) {
		d := startDaemon(t, &controltest.Cache{
			MapError: fmt.Errorf("no room: the budget of device 0 (1 GiB) is spent: %w", syscall.ENOMEM)})
		require.Equal(t, "12 no room: the budget of device 0 (1 GiB) is spent: cannot allocate memory\n",
			d.run(client, "refused", d.file()))
	})
	t.Run("unknown kind", func(t *testing.T) {
		d := startDaemon(t, &controltest.Cache{Kind: 77})
		require.Equal(t, "95 device 0 has memory of kind 77, which this library cannot map\n",
			d.run(client, "refused", d.file()))
		d.waitMapped(0)
	})
	t.Run("no daemon", func(t *testing.T) {
		d := startDaemon(t, &controltest.Cache{})
		path := d.file()
		grants, err := controltest.ListenGrants(d.server, d.grants()+"2")
		require.NoError(t, err)
		defer grants.Close()
		// The ioctl still answers, as it does between a killed daemon and the end of its mount.
		require.NoError(t, os.Remove(d.socket))
		cmd := d.command(client, "refused", path)
		cmd.Env = append(cmd.Env, "GAIAFS_TEST_GRANTS="+d.grants()+"2")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "111 there is no socket "+d.socket+" here: gaiafs has ended, or this is a container")
	})
	t.Run("no mount", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "plain")
		require.NoError(t, os.WriteFile(path, make([]byte, 4096), 0o600))
		out, err := exec.Command(client, "foreign", path).CombinedOutput()
		require.NoError(t, err, "%s", out)
	})
}

// run runs a command that must succeed.
func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return string(out)
}

// tool skips the test if a program is not installed, and fails it if GAIAFS_REQUIRE_TOOLS is set.
func tool(t *testing.T, name string) {
	t.Helper()
	_, err := exec.LookPath(name)
	if err != nil && os.Getenv("GAIAFS_REQUIRE_TOOLS") == "" {
		t.Skip(err)
	}
	require.NoError(t, err)
}

// installed builds the library by its Makefile and installs it below the folder it returns.
func installed(t *testing.T, flags string) (prefix, build string) {
	t.Helper()
	dir := t.TempDir()
	prefix, build = filepath.Join(dir, "usr"), filepath.Join(dir, "build")
	run(t, "make", "-C", "..", "GAIAFS_BUILD="+build, "PREFIX="+prefix, "CFLAGS="+flags, "libgaiafs-install")
	return prefix, build
}

// TestLibraryAsShipped builds the library with all warnings, and a C++ program with the flags from pkg-config.
func TestLibraryAsShipped(t *testing.T) {
	flags := "-Werror"
	if strings.Contains(run(t, "cc", "--version"), "Free Software Foundation") {
		flags += " -fanalyzer"
	}
	prefix, build := installed(t, flags)

	requireABI(t, filepath.Join(build, "libgaiafs.so"))
	for _, name := range []string{"include/gaiafs.h", "include/gaiafs.hpp", "lib/libgaiafs.a", "lib/libgaiafs.so.0",
		"lib/cmake/gaiafs/gaiafsConfig.cmake", "share/man/man3/gaia_munmap.3", "share/man/man3/gaia_map.3",
		"share/man/man3/gaia_macquire_async.3",
		"share/man/man3/gaia_mview.3", "share/man/man3/gaia_view_layout.3"} {
		_, err := os.Stat(filepath.Join(prefix, name))
		require.NoError(t, err)
	}

	dir := t.TempDir()
	program := filepath.Join(dir, "program.cc")
	require.NoError(t, os.WriteFile(program, []byte(`#include <gaiafs.h>
#include <cerrno>
int main() {
	if (gaia_mmap(nullptr, 0, PROT_READ, MAP_SHARED, 0, 0, 0) != MAP_FAILED || errno != EINVAL)
		return 1;
	return gaia_error()[0] == '\0';
}
`), 0o600))
	options := []string{"-I" + prefix + "/include", "-L" + prefix + "/lib", "-lgaiafs"}
	if _, err := exec.LookPath("pkg-config"); err == nil {
		cmd := exec.Command("pkg-config", "--cflags", "--libs", "gaiafs")
		cmd.Env = append(os.Environ(), "PKG_CONFIG_PATH="+prefix+"/lib/pkgconfig")
		out, err := cmd.Output()
		require.NoError(t, err)
		require.Equal(t, options, strings.Fields(string(out)))
	}
	// The scenarios compile the header as C; this compiles it as C++.
	run(t, "c++", append([]string{"-Wall", "-Wextra", "-Werror", "-pedantic", "-o", program + ".out", program},
		options...)...)
	cmd := exec.Command(program + ".out")
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+prefix+"/lib")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// TestInstalledElsewhere installs a build that was made for one folder into another. The installed files must name the
// latter.
func TestInstalledElsewhere(t *testing.T) {
	_, build := installed(t, "")
	prefix := t.TempDir()
	run(t, "sh", "-c", `umask 077; exec "$@"`, "sh", "make", "-C", "..", "GAIAFS_BUILD="+build, "PREFIX="+prefix,
		"GAIAFS_VERSION=0.2.0", "libgaiafs-install")
	for name, has := range map[string][]string{
		"lib/pkgconfig/gaiafs.pc":                    {"prefix=" + prefix + "\n", "Version: 0.2.0\n"},
		"lib/cmake/gaiafs/gaiafsConfigVersion.cmake": {`"0.2.0"`},
	} {
		text, err := os.ReadFile(filepath.Join(prefix, name))
		require.NoError(t, err)
		for _, words := range has {
			require.Contains(t, string(text), words)
		}
		st, err := os.Stat(filepath.Join(prefix, name))
		require.NoError(t, err)
		require.EqualValues(t, 0o644, st.Mode(), "whatever the umask")
	}

	apart := t.TempDir() // as on Fedora
	run(t, "make", "-C", "..", "GAIAFS_BUILD="+build, "PREFIX="+apart, "LIBDIR=lib64", "libgaiafs-install")
	text, err := os.ReadFile(filepath.Join(apart, "lib64/pkgconfig/gaiafs.pc"))
	require.NoError(t, err)
	require.Contains(t, string(text), "\nlibdir=${prefix}/lib64\n")
	for _, name := range []string{"libgaiafs.so.0", "libgaiafs.a", "cmake/gaiafs/gaiafsConfig.cmake"} {
		require.FileExists(t, filepath.Join(apart, "lib64", name))
	}
	require.NoDirExists(t, filepath.Join(apart, "lib"))
	run(t, "make", "-C", "..", "GAIAFS_BUILD="+build, "PREFIX="+apart, "LIBDIR=lib64", "libgaiafs-uninstall")
	left, err := filepath.Glob(filepath.Join(apart, "lib64", "*gaiafs*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// TestWrapperAndCMake builds a project that finds the library with CMake and uses gaiafs.hpp, and runs it on a mount.
func TestWrapperAndCMake(t *testing.T) {
	tool(t, "cmake")
	tool(t, "c++")
	prefix, _ := installed(t, "")
	build := filepath.Join(t.TempDir(), "build")
	run(t, "cmake", "-S", "testdata/wrapper", "-B", build, "-DCMAKE_PREFIX_PATH="+prefix)
	run(t, "cmake", "--build", build)
	m := testmount.Start(t, testmount.Options{Memory: 16 << 20, PinnedMemory: 4 << 20}) // wrapper.cpp relies on these
	for _, name := range []string{"wrapper-gaiafs", "wrapper-static"} {
		run(t, filepath.Join(build, name), m.Path(name))
	}

	project := t.TempDir()
	for _, c := range []struct {
		version string
		fits    bool
	}{{"0.1", true}, {"0.1.0", true}, {"0.0.9", false}, {"0.2", false}, {"1.0", false}} {
		text := "cmake_minimum_required(VERSION 3.16)\nproject(p NONE)\nset(CMAKE_SIZEOF_VOID_P 8)\n" +
			"find_package(gaiafs " + c.version + " QUIET CONFIG)\n" +
			"message(STATUS \"considered <${gaiafs_CONSIDERED_CONFIGS}> version <${gaiafs_VERSION}>\")\n"
		require.NoError(t, os.WriteFile(filepath.Join(project, "CMakeLists.txt"), []byte(text), 0o600))
		out := run(t, "cmake", "-S", project, "-B", filepath.Join(project, "b"+c.version),
			"-DCMAKE_PREFIX_PATH="+prefix)
		require.Contains(t, out, "gaiafsConfig.cmake> version")
		require.Equal(t, c.fits, strings.Contains(out, "version <0.1.1>"), "%s: %s", c.version, out)
	}
}

// TestManualPages checks the manual pages with the formatters that are installed.
func TestManualPages(t *testing.T) {
	checked := false
	for _, c := range [][]string{
		{"mandoc", "-T", "lint", "-W", "warning", "../gaia_mmap.3", "../gaia_mview.3", "../gaia_use.3"},
		{"groff", "-man", "-ww", "-z", "-T", "utf8", "../gaia_mmap.3", "../gaia_mview.3", "../gaia_use.3"},
	} {
		if _, err := exec.LookPath(c[0]); err != nil {
			continue
		}
		checked = true
		out, err := exec.Command(c[0], c[1:]...).CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Empty(t, string(out), c[0])
	}
	if !checked {
		t.Skip("neither mandoc nor groff is installed")
	}
}
