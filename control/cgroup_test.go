package control

import (
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// connectElsewhere has another process connect a socket of this one, and end.
func connectElsewhere(t *testing.T, path string) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	f := os.NewFile(uintptr(fd), "socket")
	t.Cleanup(func() { _ = f.Close() })
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "GAIAFS_TEST_CONNECT="+path)
	cmd.ExtraFiles = []*os.File{f}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// TestCgroupOfAProcessThatEnded: nobody gets a stranger's account, or leaves a cgroup's account, by ending the process
// that made the connection.
func TestCgroupOfAProcessThatEnded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	defer l.Close()
	accepted := func() *net.UnixConn {
		conn, err := l.AcceptUnix()
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}

	here, err := net.Dial("unix", path)
	require.NoError(t, err)
	defer here.Close()
	conn := accepted()
	who, err := whoIs(conn)
	require.NoError(t, err)
	_, err = cgroupOf(conn, who.Pid)
	require.NoError(t, err)

	connectElsewhere(t, path)
	conn = accepted()
	who, err = whoIs(conn)
	require.NoError(t, err)
	_, err = cgroupOf(conn, who.Pid)
	require.ErrorContains(t, err, "has ended")
	lives, err := peerLives(conn)
	require.NoError(t, err)
	if lives {
		t.Skip("this kernel does not say whether the process has ended")
	}
	_, err = cgroupOf(conn, int32(os.Getpid()))
	require.ErrorContains(t, err, "has ended", "another process has the number")
	name, err := commandOf(conn, int32(os.Getpid()))
	require.NoError(t, err)
	require.Empty(t, name, "another process has the number")
}

// TestProcessWithoutDescriptors: while the daemon has no descriptors left, no process counts as one without a cgroup or
// a command, or as one that has ended.
func TestProcessWithoutDescriptors(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	defer l.Close()
	here, err := net.Dial("unix", path)
	require.NoError(t, err)
	defer here.Close()
	conn, err := l.AcceptUnix()
	require.NoError(t, err)
	defer conn.Close()
	s := newSession(&Server{ctx: t.Context(), opts: Options{Log: slog.New(slog.DiscardHandler)}}, conn,
		unix.Ucred{Pid: int32(os.Getpid())})

	var before unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: before.Max}))
	_, err = s.cgroup()
	_, nameless := s.command()
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &before))
	require.ErrorIs(t, err, unix.EMFILE)
	require.ErrorIs(t, nameless, unix.EMFILE)
	want, err := cgroupOf(conn, s.who.Pid)
	require.NoError(t, err)
	got, err := s.cgroup()
	require.NoError(t, err)
	require.Equal(t, want, got)
	want, err = commandOf(conn, s.who.Pid)
	require.NoError(t, err)
	require.NotEmpty(t, want)
	got, err = s.command()
	require.NoError(t, err)
	require.Equal(t, want, got)
}
