package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/fs"
)

const mib = 1 << 20

// fullPlace is a place whose SOURCE is a separate filesystem of 8 MiB.
func fullPlace(t *testing.T) place {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to mount a small filesystem")
	}
	p := newPlace(t)
	require.NoError(t, unix.Mount("tmpfs", p.source, "tmpfs", 0, "size=8m"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(p.source, unix.MNT_DETACH)) })
	return p
}

// fill uses up all space of SOURCE. room frees it.
func (p place) fill(t *testing.T) (room func()) {
	t.Helper()
	name := filepath.Join(p.source, "filler")
	f, err := os.Create(name)
	require.NoError(t, err)
	for err == nil {
		_, err = f.Write(make([]byte, 64<<10))
	}
	require.ErrorIs(t, err, syscall.ENOSPC)
	require.NoError(t, f.Close())
	return func() { require.NoError(t, os.Remove(name)) }
}

// releases stores into a new file on a device and releases it. Home has no bytes of the file yet.
func (p place) releases(t *testing.T, name string, size int64) *gaiafs.Mapping {
	t.Helper()
	f, err := os.Create(filepath.Join(p.mountpoint, name))
	require.NoError(t, err)
	require.NoError(t, f.Truncate(size))
	m, err := gaiafs.Map(f, 0, size, gaiafs.ProtRead|gaiafs.ProtWrite, 0)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	copy(m.Bytes(), bytes.Repeat([]byte("x"), int(size)))
	_, err = m.Release(0, size)
	require.NoError(t, err)
	return m
}

func (p place) requireHome(t *testing.T, name string, size int) {
	t.Helper()
	got, err := os.ReadFile(filepath.Join(p.source, name))
	require.NoError(t, err)
	require.Equal(t, size, bytes.Count(got, []byte("x")))
}

func (p place) isMounted(t *testing.T) bool {
	t.Helper()
	mounted, err := fs.IsMount(p.mountpoint)
	require.NoError(t, err)
	return mounted
}

func (p place) logged(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(p.log)
	require.NoError(t, err)
	return string(text)
}

func (p place) status(t *testing.T) (s statusDocument) {
	t.Helper()
	r := gaiafsCommand(t, "status", "--json", p.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.NoError(t, json.Unmarshal([]byte(r.out), &s))
	return s
}

// While SOURCE is full, nothing that asks first can unmount. The bytes arrive when there is free space.
func TestUmountRefusesWhileSourceIsFull(t *testing.T) {
	for _, daemon := range []bool{false, true} {
		p := fullPlace(t)
		flags := []string{"--gpus=emulated:1", "--gpu-memory=64M", "--log-file=" + p.log}
		if daemon {
			r := gaiafsCommand(t, append(append([]string{"mount", "--daemon"}, flags...), p.source, p.mountpoint)...)
			require.Equal(t, exitOK, r.code, r.err)
		} else {
			mountAt(t, p, flags[:2]...)
		}
		pid := p.status(t).Mount.PID
		room := p.fill(t)
		require.NoError(t, p.releases(t, "out", 3*mib).Close())
		require.Equal(t, syscall.EBUSY, unix.Unmount(p.mountpoint, 0),
			"umount(8), before anybody tried to write the bytes home")
		r := gaiafsCommand(t, "umount", p.mountpoint)
		require.Equal(t, exitFailure, r.code)
		require.Contains(t, r.err, "is not unmounted")
		require.Contains(t, r.err, "3145728 bytes of out: no space left on device")
		require.True(t, p.isMounted(t))
		require.Equal(t, syscall.EBUSY, unix.Unmount(p.mountpoint, 0))
		s := p.status(t)
		require.Equal(t, int64(3*mib), s.Files[0].WaitingBytes)
		require.Contains(t, s.Files[0].Error, "no space left")
		require.Contains(t, gaiafsCommand(t, "status", p.mountpoint).out,
			"3.0 MiB wait to be written back: no space left")
		require.Contains(t, p.logged(t), "released bytes cannot be written back")

		room()
		require.Eventually(t, func() bool { return p.status(t).Files[0].WaitingBytes == 0 }, 30*time.Second,
			time.Millisecond)
		p.requireHome(t, "out", 3*mib)
		require.True(t, runs(pid))
		r = gaiafsCommand(t, "umount", p.mountpoint)
		require.Equal(t, exitOK, r.code, r.err)
		require.False(t, daemon && runs(pid))
		require.Contains(t, p.logged(t), "unmounted by gaiafs umount, process")
	}
}

// The daemon is a child of this process, which does not wait for it, so the result comes another way.
func TestUmountForceNamesWhatIsLost(t *testing.T) {
	p := fullPlace(t)
	s := mountAt(t, p, "--gpus=emulated:1", "--gpu-memory=64M")
	require.NoError(t, p.releases(t, "kept", mib).Close())
	require.NoError(t, syncFile(filepath.Join(p.mountpoint, "kept")))
	p.fill(t)
	require.NoError(t, p.releases(t, "out", 3*mib).Close())
	r := gaiafsCommand(t, "umount", "--force", p.mountpoint)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err,
		"bytes are lost: 3145728 bytes of out that devices wrote are lost: no space left on device")
	require.False(t, p.isMounted(t))
	require.Equal(t, exitFailure, s.end(t))
	p.requireHome(t, "kept", mib)
}

func syncFile(name string) error {
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// Like umount, SIGTERM does not silently lose bytes. The mount stays in service.
func TestSigtermWaitsForRoom(t *testing.T) {
	for _, again := range []bool{false, true} {
		p := fullPlace(t)
		s := mountAt(t, p, "--gpus=emulated:1", "--gpu-memory=64M")
		room := p.fill(t)
		m := p.releases(t, "out", 3*mib)
		s.signal(t, syscall.SIGTERM)
		require.Eventually(t, func() bool { return strings.Contains(p.logged(t), "this process ends when") },
			30*time.Second, time.Millisecond)
		require.Contains(t, p.logged(t), "3145728 bytes of out: no space left on device")
		require.True(t, p.isMounted(t))
		require.Equal(t, int64(3*mib), p.status(t).Files[0].WaitingBytes)
		require.Equal(t, exitFailure, gaiafsCommand(t, "umount", p.mountpoint).code)
		if again {
			s.signalAgain(t, syscall.SIGTERM)
			require.Equal(t, exitFailure, s.end(t))
			require.Contains(t, p.logged(t), "3145728 bytes of out that devices wrote are lost")
		} else {
			room()
			require.Equal(t, exitOK, s.end(t), p.logged(t))
			p.requireHome(t, "out", 3*mib)
		}
		require.False(t, p.isMounted(t))
		_ = m.Close()
	}
}

// A killed daemon that holds a detached mount ends: its own descriptor does not keep the mount.
func TestKilledDaemonDoesNotHoldItself(t *testing.T) {
	p := fullPlace(t)
	s := mountAt(t, p, "--gpus=emulated:1", "--gpu-memory=64M", "--write-back")
	require.NoError(t, os.WriteFile(filepath.Join(p.mountpoint, "dirty"), make([]byte, mib), 0o600))
	p.fill(t)
	require.NoError(t, p.releases(t, "out", 3*mib).Close())
	require.NoError(t, unix.Unmount(p.mountpoint, unix.MNT_DETACH))
	require.NoError(t, s.cmd.Process.Kill())
	state, err := waitFor(s.cmd.Process, 30*time.Second)
	require.NoError(t, err)
	require.Equal(t, -1, state.ExitCode())
}

// killed returns a mount whose daemon was killed while a program had a file open and the kernel had the attributes
// cached.
func killed(t *testing.T) (s *serving, open *os.File) {
	t.Helper()
	s = mountForeground(t, "--gpus=none", "--passthrough=off", "--attr-timeout=1h")
	open, err := os.Create(filepath.Join(s.mountpoint, "open"))
	require.NoError(t, err)
	t.Cleanup(func() { open.Close() })
	_, err = os.Stat(s.mountpoint)
	require.NoError(t, err)
	require.NoError(t, s.cmd.Process.Kill())
	_, err = s.cmd.Process.Wait()
	require.NoError(t, err)
	return s, open
}

func TestUmountOfADeadDaemonWithClients(t *testing.T) {
	s, _ := killed(t)
	r := gaiafsCommand(t, "umount", s.mountpoint)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "has ended")
	require.Contains(t, r.err, fmt.Sprintf("(process %d, open file %s/open)", os.Getpid(), s.mountpoint))
	require.Contains(t, r.err, "gaiafs umount --force "+s.mountpoint)
	r = gaiafsCommand(t, "umount", "--force", s.mountpoint)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "is unmounted, but its daemon had ended without unmounting")
	require.False(t, s.isMounted(t))
}

func TestMountOverADeadDaemon(t *testing.T) {
	for _, daemon := range []bool{false, true} {
		s, open := killed(t)
		link := filepath.Join(filepath.Dir(filepath.Dir(s.mountpoint)), "link"+fmt.Sprint(daemon))
		require.NoError(t, os.Symlink(filepath.Dir(s.mountpoint), link))
		through := place{s.source, filepath.Join(link, filepath.Base(s.mountpoint)), s.log}
		if daemon {
			r := gaiafsCommand(t, "mount", "--daemon", "--gpus=none", "--log-file="+s.log, through.source,
				through.mountpoint)
			require.Equal(t, exitOK, r.code, r.err)
		} else {
			mountAt(t, through, "--gpus=none")
		}
		require.Contains(t, s.logged(t), "detached a mount whose daemon had ended")
		require.NoError(t, os.WriteFile(filepath.Join(s.mountpoint, "file"), []byte("x"), 0o600))
		_, err := open.Write([]byte("x"))
		require.ErrorIs(t, err, syscall.ENOTCONN)
		require.Equal(t, s.mountpoint, s.status(t).Mount.Mountpoint)
		r := gaiafsCommand(t, "umount", s.mountpoint)
		require.Equal(t, exitOK, r.code, r.err)
		require.False(t, s.isMounted(t))
	}
}

// withoutMounts returns a shell command for a mount namespace of its own. It drops the mounts of gaiafs except one, so
// that the namespace does not keep mounts of other tests in use.
func withoutMounts(except string) string {
	return `awk -v except="` + except + `" '$3 == "fuse.gaiafs" && $2 != except {print $2}' /proc/self/mounts |
		xargs -r -n1 umount -i -l || true`
}

// elsewhere starts a process that has a mount in its own mount namespace, too, until end is called.
func elsewhere(t *testing.T, mountpoint string) (pid int, end func()) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, for another mount namespace")
	}
	cmd := exec.Command("unshare", "--mount", "--propagation=private", "sh", "-c",
		withoutMounts(mountpoint)+"; echo; read x")
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	if err := cmd.Start(); errors.Is(err, exec.ErrNotFound) {
		t.Skip("unshare is not installed")
	} else {
		require.NoError(t, err)
	}
	_, err = out.Read(make([]byte, 1))
	require.NoError(t, err)
	end = sync.OnceFunc(func() {
		in.Close()
		_ = cmd.Wait() // read got the end of its input
	})
	t.Cleanup(end)
	return cmd.Process.Pid, end
}

// A mount that is also in another mount namespace is unmounted here, and umount names the process that has it.
func TestUmountWhileMountedElsewhere(t *testing.T) {
	for _, signal := range []bool{false, true} {
		s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=64M", "--write-back-interval=1h")
		pid, end := elsewhere(t, s.mountpoint)
		m := s.releases(t, "out", mib)
		require.NoError(t, m.Close())
		who := fmt.Sprintf("sh (process %d, mounted at %s in its mount namespace)", pid, s.mountpoint)
		if signal {
			s.signal(t, syscall.SIGTERM)
			require.Eventually(t, func() bool { return strings.Contains(s.logged(t), "mounted elsewhere") },
				30*time.Second, time.Millisecond)
			require.Contains(t, s.logged(t), who)
		} else {
			r := gaiafsCommand(t, "umount", s.mountpoint)
			require.Equal(t, exitFailure, r.code)
			require.Contains(t, r.err, "is unmounted here, and everything that was released is written back")
			require.Contains(t, r.err, who)
		}
		s.requireHome(t, "out", mib)
		require.False(t, s.isMounted(t))
		end()
		require.Equal(t, exitOK, s.end(t), s.logged(t))
	}
}

// An unmount that takes long does not count as one that took effect: a busy machine may be late to say EBUSY.
func TestLateUnmount(t *testing.T) {
	for name, c := range map[string]struct {
		here         bool
		after        time.Duration
		result, want error
	}{
		"it fails late":           {true, 3 * time.Second, syscall.EBUSY, syscall.EBUSY},
		"it succeeds late":        {true, 3 * time.Second, nil, nil},
		"it succeeds":             {false, 0, nil, nil},
		"it is mounted elsewhere": {false, time.Hour, nil, errElsewhere},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				done := make(chan error, 1)
				time.AfterFunc(c.after, func() { done <- c.result })
				require.Equal(t, c.want, awaitUnmount(done, func() bool { return c.here }))
			})
		})
	}
}

// timeout(1) sends two signals at once, one to the process and one to its group. Nothing is lost.
func TestSignalsAtOnceCountAsOne(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=64M", "--write-back-interval=1h")
	f, err := os.Create(filepath.Join(s.mountpoint, "open"))
	require.NoError(t, err)
	m := s.releases(t, "out", mib)
	require.NoError(t, m.Close())
	s.signal(t, syscall.SIGTERM)
	s.signal(t, syscall.SIGTERM)
	s.awaitLog(t, "the mountpoint is in use")
	_, err = f.WriteString("written after both signals")
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.Equal(t, exitOK, s.end(t), s.logged(t))
	s.requireHome(t, "out", mib)
}

// SIGTERM does not wait for a program whose only open file is the descriptor of its client library.
func TestSigtermDoesNotWaitForDevices(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=64M")
	m := s.releases(t, "out", mib) // only the library has a descriptor of it
	copy(m.Bytes(), "yy")
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t), s.logged(t))
	s.requireHome(t, "out", mib-2)
	require.Contains(t, s.logged(t), "open for devices only")
	require.Error(t, m.Close())

	// SIGTERM does wait if the program also reads through the descriptor.
	s = mountForeground(t, "--gpus=emulated:1", "--gpu-memory=64M")
	f, err := os.Create(filepath.Join(s.mountpoint, "both"))
	require.NoError(t, err)
	require.NoError(t, f.Truncate(4096))
	m, err = gaiafs.Map(f, 0, 4096, gaiafs.ProtRead|gaiafs.ProtWrite, 0)
	require.NoError(t, err)
	_, err = f.WriteAt([]byte("x"), 0)
	require.NoError(t, err)
	s.signal(t, syscall.SIGTERM)
	require.Eventually(t, func() bool { return !s.isMounted(t) }, 30*time.Second, time.Millisecond)
	_, err = f.WriteAt([]byte("x"), 1)
	require.NoError(t, err)
	require.Error(t, m.Close())
	require.NoError(t, f.Close())
	require.Equal(t, exitOK, s.end(t), s.logged(t))
	s.requireHome(t, "both", 2)
}

// A `mount --daemon` that is interrupted or killed before it returns leaves nothing mounted.
func TestInterruptedMountLeavesNothing(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGKILL} {
		p := newPlace(t)
		old := p.predecessor(t, 0) // it makes the new daemon wait
		cmd := command(t, "mount", "--daemon", "--gpus=none", "--log-file="+p.log, p.source, p.mountpoint)
		var errs bytes.Buffer
		cmd.Stderr = &errs
		require.NoError(t, cmd.Start())
		require.Eventually(t, func() bool {
			log, _ := os.ReadFile(p.log)
			return strings.Contains(string(log), "waiting for the daemon of an earlier mount")
		}, 30*time.Second, time.Millisecond)
		require.NoError(t, cmd.Process.Signal(sig))
		if sig == syscall.SIGKILL {
			_ = cmd.Wait()
			require.NoError(t, old.Close())
		} else {
			require.NoError(t, old.Close())
			require.Error(t, cmd.Wait())
			require.Equal(t, exitFailure, cmd.ProcessState.ExitCode())
			require.Contains(t, errs.String(), "interrupted: nothing is mounted")
			require.False(t, p.isMounted(t))
		}
		require.Eventually(t, func() bool { return strings.Contains(p.logged(t), "everything is written back") },
			30*time.Second, time.Millisecond)
		require.Contains(t, p.logged(t), "is removed again")
		require.False(t, p.isMounted(t))
	}
}

// A daemon that is killed while it starts leaves no process behind, and nothing that keeps the next one from mounting
// there.
func TestKilledStart(t *testing.T) {
	const tries = 20
	seed := time.Now().UnixNano()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewSource(seed))
	p := newPlace(t)

	var whole time.Duration
	for try := range tries {
		cmd := command(t, "mount", "--gpus=none", "--log-file="+p.log, p.source, p.mountpoint)
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		start := time.Now()
		require.NoError(t, cmd.Start())
		sig := syscall.SIGKILL
		switch {
		case try == 0:
			_, err := out.Read(make([]byte, 1)) // it is ready
			require.NoError(t, err)
			whole = time.Since(start)
		case try%2 == 0:
			time.Sleep(time.Duration(random.Int63n(int64(whole))))
			sig = []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM}[random.Intn(2)]
		default: // right after the mount shows
			for !p.isMounted(t) {
				require.NotEqual(t, byte('Z'), processState(cmd.Process.Pid), "it ended by itself")
			}
			time.Sleep(time.Duration(random.Int63n(int64(whole/10) + 1)))
		}
		require.NoError(t, cmd.Process.Signal(sig))
		_, err = waitFor(cmd.Process, 30*time.Second)
		require.NoError(t, err)
		if p.isMounted(t) {
			require.Equal(t, syscall.SIGKILL, sig, "SIGTERM left the mount behind")
			if try < tries-1 {
				require.NoError(t, detach(p.mountpoint))
			}
		}
	}
	r := gaiafsCommand(t, "mount", "--daemon", "--gpus=none", "--log-file="+p.log, p.source, p.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.Equal(t, exitOK, gaiafsCommand(t, "umount", p.mountpoint).code)
}

// A mount ends with a killed demo or bench, and the next demo or bench removes the files.
func TestKilledRunsAreSwept(t *testing.T) {
	for name, c := range map[string]struct{ first, next []string }{
		"demo": {[]string{"demo", "--gpus=emulated:1", "--width=4096"},
			[]string{"demo", "--gpus=emulated:1", "--width=64"}},
		"bench": {[]string{"bench", "--quick", "--run=^metadata/"},
			[]string{"bench", "--quick", "--rounds=1", "--run=^merge/"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir, out := t.TempDir(), t.TempDir()
			start := func(args []string) *exec.Cmd {
				if name == "demo" {
					args = append(args, "--output", filepath.Join(out, "out.png"))
				}
				cmd := command(t, args...)
				cmd.Env = append(cmd.Env, "TMPDIR="+dir)
				return cmd
			}
			cmd := start(c.first)
			require.NoError(t, cmd.Start())
			mounted := func() bool { return len(leftMounts(dir)) > 0 }
			require.Eventually(t, mounted, 30*time.Second, time.Millisecond)
			require.NoError(t, cmd.Process.Kill())
			_ = cmd.Wait()
			require.Eventually(t, func() bool { return !mounted() }, 30*time.Second, time.Millisecond)
			left, err := os.ReadDir(dir)
			require.NoError(t, err)
			require.NotEmpty(t, left)
			r := execute(t, start(c.next))
			require.Equal(t, exitOK, r.code, r.err)
			left, err = os.ReadDir(dir)
			require.NoError(t, err)
			require.Empty(t, left)
		})
	}
}

// A mount below the mountpoint keeps a dead mount busy, and umount names it.
func TestUmountOfADeadDaemonWithAMountInside(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to mount")
	}
	s := mountForeground(t, "--gpus=none", "--passthrough=off")
	inside := filepath.Join(s.mountpoint, "inside")
	require.NoError(t, os.Mkdir(inside, 0o755))
	require.NoError(t, unix.Mount("none", inside, "tmpfs", 0, ""))
	require.NoError(t, s.cmd.Process.Kill())
	_, err := s.cmd.Process.Wait()
	require.NoError(t, err)
	r := gaiafsCommand(t, "umount", s.mountpoint)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "still in use by the mount at "+inside+", though every access fails")
	r = gaiafsCommand(t, "umount", "--force", s.mountpoint)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "is unmounted, but its daemon had ended without unmounting")
	require.False(t, s.isMounted(t))
}
