package stress

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// program is the path of a gaiafs built for these tests: how it ends, and with which status, is part of what they look
// at.
var program = sync.OnceValues(func() (string, error) {
	path := filepath.Join(os.TempDir(), "gaiafs")
	out, err := exec.Command("go", "build", "-o", path, "github.com/gaiafs/gaiafs/cmd/gaiafs").CombinedOutput()
	if err != nil {
		return "", errors.New(string(out))
	}
	return path, nil
})

// served is a gaiafs in the foreground.
type served struct {
	t           *testing.T
	source, dir string
	cmd         *exec.Cmd
	log         bytes.Buffer // read after wait
	ended       chan error
}

// serve mounts with a write-back interval that nothing waits for: what is in the backing file afterwards was brought
// there by ending.
func serve(t *testing.T, more ...string) *served {
	t.Helper()
	requireTool(t, "go")
	exe, err := program()
	require.NoError(t, err)
	s := &served{t: t, source: t.TempDir(), dir: t.TempDir(), ended: make(chan error, 1)}
	args := []string{"mount", "--gpus", "emulated:2", "--gpu-memory", "64MiB", "--write-back-interval", "1h",
		"--socket", filepath.Join(t.TempDir(), "run", "sock")}
	s.cmd = exec.Command(exe, slices.Concat(args, more, []string{s.source, s.dir})...)
	s.cmd.Stderr, s.cmd.Stdout = &s.log, &s.log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(t, s.cmd.Start())
	go func() { s.ended <- s.cmd.Wait() }()
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		_ = unix.Unmount(s.dir, unix.MNT_DETACH)
	})
	eventually(t, func() error {
		_, err := gaiafs.Status(s.dir)
		return err
	})
	return s
}

// wait returns the exit status and what the program said.
func (s *served) wait() (status int, log string) {
	s.t.Helper()
	select {
	case <-s.ended:
	case <-time.After(patience):
		s.t.Fatalf("gaiafs did not end within %v", patience)
	}
	return s.cmd.ProcessState.ExitCode(), s.log.String()
}

// someRounds waits until each writer was promised something.
func (c *crew) someRounds(t testing.TB) {
	t.Helper()
	eventually(t, func() error {
		for i, l := range c.ledgers {
			if l.length().Load() < 200 {
				return errors.New(c.kinds[i] + " has not done much")
			}
		}
		return nil
	})
}

// modes are the ways of writing, as options of gaiafs, and one with opens that the daemon does not see.
var modes = modesHere()

func modesHere() map[string][]string {
	all := map[string][]string{"through": nil, "back": {"--write-back"}}
	if os.Geteuid() == 0 {
		all["opens"] = []string{"--kernel-opens"}
	}
	return all
}

// TestTermination ends gaiafs with SIGTERM while programs write. GPU programs lose their mappings, with what they
// stored; CPU programs may finish. Everything is in the backing file.
func TestTermination(t *testing.T) {
	for mode, options := range modes {
		t.Run(mode, func(t *testing.T) {
			s := serve(t, options...)
			c := startCrew(t, filepath.Join(s.dir, "shared"), uint64(time.Now().UnixNano()), 0)
			c.someRounds(t)
			require.NoError(t, s.cmd.Process.Signal(syscall.SIGTERM))
			for i, p := range c.processes {
				if c.kinds[i] != "gpu" {
					continue
				}
				rest, err := p.wait()
				require.NoError(t, err)
				require.NotEmpty(t, rest)
				require.Contains(t, rest[0], "lost: ")
			}
			for i, p := range c.processes {
				if c.kinds[i] != "gpu" {
					require.Empty(t, p.stop())
				}
			}
			status, log := s.wait()
			require.Zero(t, status, log)
			kept, _ := c.verify(t, mustRead(t, filepath.Join(s.source, "shared")), nil)
			require.Positive(t, kept)
			require.NotContains(t, mountpointsIn(filepath.Dir(s.dir)), s.dir)
		})
	}
}

// TestIdleTermination ends gaiafs while nobody uses the mount, but released bytes are on a device only. It also ends
// with the umount of gaiafs and with that of the system.
func TestIdleTermination(t *testing.T) {
	for mode, options := range modes {
		for _, way := range []string{"SIGTERM", "SIGINT", "gaiafs umount", "umount"} {
			t.Run(mode+" "+way, func(t *testing.T) {
				s := serve(t, options...)
				path := filepath.Join(s.dir, "file")
				want := pattern(300_000, 1)
				require.NoError(t, os.WriteFile(path, want, 0o600))
				g := gpu(t, path, 300_000, 1)
				store(t, g, 5000, pattern(9000, 7)...)
				copy(want[5000:], pattern(9000, 7))
				_, err := g.Release(0, 300_000)
				require.NoError(t, err)
				store(t, g, 123_456, 99)
				want[123_456] = 99 // not released but by the end of the mapping
				require.NoError(t, g.Close())
				switch way {
				case "SIGTERM":
					require.NoError(t, s.cmd.Process.Signal(syscall.SIGTERM))
				case "SIGINT":
					require.NoError(t, s.cmd.Process.Signal(syscall.SIGINT))
				case "umount":
					// It is refused while bytes wait, which they do not for long when nobody maps anything.
					eventually(t, func() error {
						out, err := exec.Command("umount", s.dir).CombinedOutput()
						if err != nil {
							return fmt.Errorf("%w: %s", err, out)
						}
						return nil
					})
				default:
					exe, err := program()
					require.NoError(t, err)
					run(t, "/", exe, "umount", s.dir)
				}
				status, log := s.wait()
				require.Zero(t, status, log)
				requireBytes(t, want, mustRead(t, filepath.Join(s.source, "file")), "in SOURCE")
			})
		}
	}
}

// TestLazyUnmount takes the mount out of sight while programs use it, as `umount -l` does. They go on until they end,
// and so does gaiafs.
func TestLazyUnmount(t *testing.T) {
	for mode, options := range modes {
		t.Run(mode, func(t *testing.T) {
			s := serve(t, options...)
			c := startCrew(t, filepath.Join(s.dir, "shared"), uint64(time.Now().UnixNano()), 0)
			c.someRounds(t)
			require.NoError(t, unix.Unmount(s.dir, unix.MNT_DETACH))
			entries, err := os.ReadDir(s.dir)
			require.NoError(t, err)
			require.Empty(t, entries)
			for _, l := range c.ledgers {
				l.length().Store(0)
			}
			c.someRounds(t) // they work on
			c.stop()
			status, log := s.wait()
			require.Zero(t, status, log)
			kept, _ := c.verify(t, mustRead(t, filepath.Join(s.source, "shared")), nil)
			require.Positive(t, kept)
		})
	}
}

// TestPlaces tries to mount where it makes no sense. Each time gaiafs says in a sentence what is wrong.
func TestPlaces(t *testing.T) {
	requireTool(t, "go")
	exe, err := program()
	require.NoError(t, err)
	s := serve(t)
	dir := t.TempDir()
	sub := filepath.Join(dir, "sub")
	full := filepath.Join(t.TempDir(), "full")
	for _, d := range []string{sub, full} {
		require.NoError(t, os.Mkdir(d, 0o755))
	}
	require.NoError(t, os.WriteFile(filepath.Join(full, "file"), nil, 0o600))
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(sub, link))
	empty := t.TempDir()
	for _, c := range []struct{ what, source, mountpoint, says string }{
		{"mountpoint inside of source", dir, sub, "inside SOURCE"},
		{"mountpoint inside of source, by a link", dir, link, "inside SOURCE"},
		{"source inside of mountpoint", sub, dir, "MOUNTPOINT"},
		{"the same", empty, empty, "same directory"},
		{"not empty", dir, full, "not empty"},
		{"used", dir, s.dir, "already"},
		{"no source", filepath.Join(dir, "nowhere"), empty, "does not exist"},
		{"no mountpoint", dir, filepath.Join(empty, "nowhere"), "does not exist"},
		{"a source that is a file", filepath.Join(full, "file"), empty, "not a directory"},
	} {
		for _, daemon := range []bool{false, true} {
			args := []string{"mount", "--gpus", "none", "--socket", filepath.Join(t.TempDir(), "run", "sock"), c.source,
				c.mountpoint}
			if daemon {
				args = append(args, "--daemon")
			}
			out, err := exec.Command(exe, args...).CombinedOutput()
			var exit *exec.ExitError
			if !assert.ErrorAs(t, err, &exit, "%s: %s", c.what, out) {
				_ = unix.Unmount(c.mountpoint, unix.MNT_DETACH)
				continue
			}
			assert.Equal(t, 1, exit.ExitCode(), c.what)
			assert.Contains(t, string(out), c.says, c.what)
			assert.Equal(t, 1, strings.Count(string(out), "\n"), "%s: %s", c.what, out)
		}
	}
	require.NoError(t, s.cmd.Process.Signal(syscall.SIGTERM))
	status, log := s.wait()
	require.Zero(t, status, log)
}
