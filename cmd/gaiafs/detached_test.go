package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/fs"
)

// detachedWhileFull returns a mount that was detached while 3 MiB wait for free space. The daemon has noticed.
func detachedWhileFull(t *testing.T, flags ...string) (s *serving, room func()) {
	t.Helper()
	p := fullPlace(t)
	s = mountAt(t, p, append([]string{"--gpus=emulated:1", "--gpu-memory=64M"}, flags...)...)
	room = p.fill(t)
	require.NoError(t, p.releases(t, "out", 3*mib).Close())
	require.NoError(t, unix.Unmount(p.mountpoint, unix.MNT_DETACH))
	s.awaitLog(t, "this process ends when")
	return s, room
}

func (s *serving) awaitLog(t *testing.T, text string) {
	t.Helper()
	require.Eventually(t, func() bool { return strings.Contains(s.logged(t), text) }, 30*time.Second, time.Millisecond,
		text)
}

func (s *serving) pid() int { return s.cmd.Process.Pid }

// Nobody can refuse that a mount is detached. Its daemon notices, logs what it keeps and for how long, and can be
// asked.
func TestDaemonKeepsBytesOfADetachedMount(t *testing.T) {
	for name, flags := range map[string][]string{"default socket": nil,
		"other socket": {"--socket=" + filepath.Join(t.TempDir(), "s")}} {
		t.Run(name, func(t *testing.T) {
			s, room := detachedWhileFull(t, flags...)
			require.Contains(t, s.logged(t), "3145728 bytes of out: no space left on device")
			require.Contains(t, s.logged(t), fmt.Sprintf("process=%d", s.pid()))
			for _, query := range [][]string{{s.mountpoint}, {"--pid", fmt.Sprint(s.pid())}} {
				r := gaiafsCommand(t, append([]string{"status"}, query...)...)
				require.Equal(t, exitOK, r.code, r.err)
				require.Contains(t, r.out, fmt.Sprintf("process %d", s.pid()))
				require.Contains(t, r.out, "detached")
				require.Contains(t, r.out, "3.0 MiB wait to be written back (no space left on device)")
			}
			status := s.status(t)
			require.True(t, status.Mount.Detached)
			require.WithinDuration(t, time.Now().Add(keepFor), *status.Mount.GivesUp, time.Minute)
			r := gaiafsCommand(t, "status", "--all")
			require.Equal(t, exitOK, r.code, r.err)
			require.Regexp(t, fmt.Sprintf(`(?m)^%s +%s +%d +3.0 MiB +detached, ending`, s.mountpoint, s.source,
				s.pid()), r.out)
			r = gaiafsCommand(t, "umount", s.mountpoint)
			require.Equal(t, exitFailure, r.code)
			require.Contains(t, r.err, fmt.Sprintf("was detached, and process %d goes on: SOURCE does not accept bytes",
				s.pid()))
			require.Contains(t, r.err, "3145728 bytes of out: no space left on device")

			room()
			r = gaiafsCommand(t, "umount", s.mountpoint)
			if r.code != exitOK { // it ended before or during the request
				require.Regexp(t, "is not a mountpoint of gaiafs|ended before it said whether everything is written back", r.err)
			}
			require.Equal(t, exitOK, s.end(t), s.logged(t))
			s.requireHome(t, "out", 3*mib)
			require.Empty(t, control.Listeners(s.mountpoint))
			r = gaiafsCommand(t, "status", s.mountpoint)
			require.Contains(t, r.err, "is not a mountpoint of gaiafs")
		})
	}
}

func TestForcedEndOfADetachedMount(t *testing.T) {
	for _, byPID := range []bool{false, true} {
		s, _ := detachedWhileFull(t)
		args := []string{"umount", "--force", s.mountpoint}
		if byPID {
			args = []string{"umount", "--force", "--pid", fmt.Sprint(s.pid())}
		}
		r := gaiafsCommand(t, args...)
		require.Equal(t, exitFailure, r.code)
		require.Contains(t, r.err,
			"bytes are lost: 3145728 bytes of out that devices wrote are lost: no space left on device")
		require.Equal(t, exitFailure, s.end(t))
	}
}

// A new mount over a detached one reports the old daemon, which commands still reach.
func TestMountOverADetachedMount(t *testing.T) {
	s, room := detachedWhileFull(t)
	other := t.TempDir()
	log := filepath.Join(t.TempDir(), "log")
	r := gaiafsCommand(t, "mount", "--daemon", "--gpus=none", "--log-file="+log, other, s.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	says := fmt.Sprintf("an earlier mount here was detached, and process %d still has 3145728 bytes to bring to %s "+
		"(no space left on device)",
		s.pid(), s.source)
	require.Contains(t, r.err, says)
	text, err := os.ReadFile(log)
	require.NoError(t, err)
	require.Contains(t, string(text), says)
	r = gaiafsCommand(t, "status", s.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.Contains(t, r.out, other)
	require.Contains(t, r.err, says)
	require.True(t, func() bool {
		var d statusDocument
		r := gaiafsCommand(t, "status", "--json", "--pid", fmt.Sprint(s.pid()))
		return json.Unmarshal([]byte(r.out), &d) == nil && d.Mount.Detached && d.Mount.Source == s.source
	}())
	r = gaiafsCommand(t, "umount", s.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.True(t, runs(s.pid()), "the old daemon was not unmounted")
	room()
	require.Equal(t, exitOK, s.end(t), s.logged(t))
	s.requireHome(t, "out", 3*mib)
}

// Programs go on using a detached mount. Its daemon serves them, and can still be found and ended.
func TestDetachedMountInUse(t *testing.T) {
	p := fullPlace(t)
	s := mountAt(t, p, "--gpus=emulated:1", "--gpu-memory=64M")
	open, err := os.Create(filepath.Join(p.mountpoint, "open"))
	require.NoError(t, err)
	_, err = open.WriteString("before")
	require.NoError(t, err)
	room := p.fill(t)
	require.NoError(t, p.releases(t, "out", 3*mib).Close())
	require.NoError(t, unix.Unmount(p.mountpoint, unix.MNT_DETACH))
	s.awaitLog(t, "the mount was detached")
	status := s.status(t)
	require.True(t, status.Mount.Detached)
	require.Empty(t, status.Mount.Ending)
	require.Nil(t, status.Mount.GivesUp, "it is in service")
	room()
	_, err = open.WriteString("after")
	require.NoError(t, err)
	require.Eventually(t, func() bool { s := s.status(t); return s.waiting() == 0 }, 30*time.Second, time.Millisecond)
	r := gaiafsCommand(t, "umount", "--timeout=1s", p.mountpoint)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, fmt.Sprintf("process %d has not ended after 1s", s.pid()))
	r = gaiafsCommand(t, "umount", "--force", p.mountpoint)
	require.Equal(t, exitFailure, s.end(t), s.logged(t))
	_, err = open.WriteString("x")
	require.ErrorIs(t, err, syscall.ENOTCONN)
	require.NoError(t, open.Close())
	s.requireHome(t, "out", 3*mib)
	require.Equal(t, exitOK, r.code, r.err)
}

// A mount over the mountpoint hides a mount, but does not detach it.
func TestHiddenMountIsNotDetached(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=64M")
	if os.Geteuid() != 0 {
		t.Skip("needs root, to mount a small filesystem")
	}
	require.NoError(t, unix.Mount("tmpfs", s.mountpoint, "tmpfs", 0, "size=1m"))
	all := control.Listeners(s.mountpoint)
	require.Len(t, all, 1)
	require.Equal(t, s.pid(), all[0].PID)
	d, err := statusOf(all[0].Path, 10*time.Second)
	require.NoError(t, err)
	require.False(t, d.Mount.Detached)
	require.NoError(t, unix.Unmount(s.mountpoint, 0))
	r := gaiafsCommand(t, "umount", s.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.Equal(t, exitOK, s.end(t))
}

// umount names what is mounted inside the mount.
func TestUmountNamesAMountInside(t *testing.T) {
	s := mountForeground(t, "--gpus=none")
	if os.Geteuid() != 0 {
		t.Skip("needs root, to mount a small filesystem")
	}
	inside := filepath.Join(s.mountpoint, "inside")
	require.NoError(t, os.Mkdir(inside, 0o700))
	require.NoError(t, unix.Mount("tmpfs", inside, "tmpfs", 0, "size=1m"))
	defer unix.Unmount(inside, unix.MNT_DETACH)
	r := gaiafsCommand(t, "umount", s.mountpoint)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "is in use by the mount at "+inside+": unmount it, and try again")
	require.NoError(t, unix.Unmount(inside, 0))
	r = gaiafsCommand(t, "umount", s.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.Equal(t, exitOK, s.end(t), s.logged(t))
}

// umount names a loop device, which uses a file without a process.
func TestUmountNamesALoopDevice(t *testing.T) {
	s := mountForeground(t, "--gpus=none")
	if os.Geteuid() != 0 {
		t.Skip("needs root, for a loop device")
	}
	image := filepath.Join(s.mountpoint, "image")
	require.NoError(t, os.WriteFile(image, make([]byte, mib), 0o600))
	out, err := exec.Command("losetup", "--find", "--show", image).Output()
	if err != nil {
		t.Skip("no loop device: ", err)
	}
	device := strings.TrimSpace(string(out))
	detach := sync.OnceFunc(func() { require.NoError(t, exec.Command("losetup", "--detach", device).Run()) })
	defer detach()
	r := gaiafsCommand(t, "umount", s.mountpoint)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "is in use by loop device "+device+" on "+image+
		": detach it with 'losetup -d', and try again")
	detach()
	r = gaiafsCommand(t, "umount", s.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.Equal(t, exitOK, s.end(t), s.logged(t))
}

// What uses the mount for a moment and is not in /proc, such as the statfs calls of a df of all mounts, only delays
// umount. A file on its way through a socket stands in for it.
func TestUmountWaitsForAFileOnItsWay(t *testing.T) {
	s := mountForeground(t, "--gpus=none")
	f, err := os.Create(filepath.Join(s.mountpoint, "file"))
	require.NoError(t, err)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	drop := sync.OnceFunc(func() { _, _ = unix.Close(pair[0]), unix.Close(pair[1]) })
	defer drop()
	require.NoError(t, unix.Sendmsg(pair[0], []byte{0}, unix.UnixRights(int(f.Fd())), nil, 0))
	require.NoError(t, f.Close())
	r := gaiafsCommand(t, "umount", s.mountpoint)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "is in use by a process that cannot be seen from here")
	time.AfterFunc(200*time.Millisecond, drop)
	r = gaiafsCommand(t, "umount", s.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.Equal(t, exitOK, s.end(t), s.logged(t))
}

// umount names a bind mount, but no unrelated process and no kernel thread.
func TestUmountNamesABindMount(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=64M")
	if os.Geteuid() != 0 {
		t.Skip("needs root, for a bind mount")
	}
	bound := t.TempDir()
	require.NoError(t, unix.Mount(s.mountpoint, bound, "", unix.MS_BIND, ""))
	defer unix.Unmount(bound, unix.MNT_DETACH)
	r := gaiafsCommand(t, "umount", s.mountpoint)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, "the filesystem is also used by the mount at "+bound+": unmount it there too")
	r = gaiafsCommand(t, "status", "--all")
	require.Regexp(t, fmt.Sprintf(`(?m)^%s .* mounted$`, bound), r.out)
	require.NotContains(t, r.out, s.mountpoint+" ", "nothing is mounted there any more")
	r = gaiafsCommand(t, "umount", bound)
	require.Equal(t, exitOK, r.code, r.err)
	require.Equal(t, exitOK, s.end(t), s.logged(t))
}

// A daemon that does not answer has not confirmed that everything is home. Commands name its process, whatever socket
// it has.
func TestStoppedDaemonIsNamed(t *testing.T) {
	for _, flag := range []string{"--socket=" + filepath.Join(t.TempDir(), "s"), "--log-level=info"} {
		s := mountForeground(t, "--gpus=none", "--passthrough=off", "--attr-timeout=0", flag)
		s.signal(t, syscall.SIGSTOP)
		says := fmt.Sprintf("process %d is stopped; 'kill -CONT %d' continues it", s.pid(), s.pid())
		for _, c := range []struct {
			args []string
			too  string
		}{
			{[]string{"status", "--timeout=100ms", s.mountpoint}, "the daemon does not answer after 100ms"},
			{[]string{"status", "--timeout=100ms", "--pid", fmt.Sprint(s.pid())},
				"the daemon does not answer after 100ms"},
			{[]string{"umount", "--timeout=100ms", s.mountpoint},
				"its daemon does not say whether everything is written back"},
		} {
			r := gaiafsCommand(t, c.args...)
			require.Equal(t, exitFailure, r.code)
			require.Contains(t, r.err, says, c.args)
			require.Contains(t, r.err, c.too, c.args)
		}
		require.True(t, s.isMounted(t))
		r := gaiafsCommand(t, "status", "--all", "--timeout=100ms")
		require.Equal(t, exitOK, r.code, r.err)
		require.Contains(t, r.out, says)
		s.signal(t, syscall.SIGCONT)
		r = gaiafsCommand(t, "umount", s.mountpoint)
		require.Equal(t, exitOK, r.code, r.err)
		require.Equal(t, exitOK, s.end(t))
	}
}

// A daemon that is ending says so.
func TestEndingIsSaid(t *testing.T) {
	p := fullPlace(t)
	s := mountAt(t, p, "--gpus=emulated:1", "--gpu-memory=64M")
	room := p.fill(t)
	require.NoError(t, p.releases(t, "out", 3*mib).Close())
	s.signal(t, syscall.SIGTERM)
	s.awaitLog(t, "this process ends when")
	require.Contains(t, gaiafsCommand(t, "status", p.mountpoint).out, "ending: SIGTERM")
	require.Contains(t, gaiafsCommand(t, "status", "--all").out, "mounted, ending: SIGTERM")
	r := gaiafsCommand(t, "umount", p.mountpoint)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, fmt.Sprintf("Process %d is already ending (SIGTERM)", s.pid()))
	room()
	require.Equal(t, exitOK, s.end(t), s.logged(t))
}

// Signals that a process was started to ignore do not end its mount, neither during mounting nor later.
func TestIgnoredSignalsStayIgnored(t *testing.T) {
	p := newPlace(t)
	old := p.predecessor(t, 0) // it makes the new daemon wait
	cmd := command(t)
	shell := `trap "" INT HUP; exec "$0" "$@"`
	cmd.Path = "/bin/sh"
	cmd.Args = []string{"sh", "-c", shell, executable(t), "mount", "--daemon", "--gpus=none", "--log-file=" + p.log,
		p.source, p.mountpoint}
	var errs bytes.Buffer
	cmd.Stderr = &errs
	require.NoError(t, cmd.Start())
	require.Eventually(t, func() bool {
		log, _ := os.ReadFile(p.log)
		return strings.Contains(string(log), "waiting for the daemon of an earlier mount")
	}, 30*time.Second, time.Millisecond)
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGHUP} {
		require.NoError(t, cmd.Process.Signal(sig))
	}
	require.NoError(t, old.Close())
	require.NoError(t, cmd.Wait(), errs.String())
	pid := p.status(t).Mount.PID
	require.NoError(t, syscall.Kill(pid, syscall.SIGHUP))
	require.True(t, p.isMounted(t))
	r := gaiafsCommand(t, "umount", p.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.NotContains(t, p.logged(t), "SIGHUP")
}

func executable(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	require.NoError(t, err)
	return path
}

// A mount that another mount namespace still has is detached only here.
func TestDetachedInAnotherNamespace(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=64M")
	pid, end := elsewhere(t, s.mountpoint)
	m := s.releases(t, "out", mib)
	require.NoError(t, unix.Unmount(s.mountpoint, unix.MNT_DETACH))
	s.awaitLog(t, "the mount was detached")
	require.Contains(t, s.logged(t), fmt.Sprintf("process %d, mounted at %s in its mount namespace", pid, s.mountpoint))
	require.True(t, s.status(t).Mount.Detached)
	require.NoError(t, m.Close())
	end()
	require.Equal(t, exitOK, s.end(t), s.logged(t))
	s.requireHome(t, "out", mib)
	_, err := fs.MountAt(s.mountpoint)
	require.ErrorIs(t, err, fs.ErrNotMounted)
}
