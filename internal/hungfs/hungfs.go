package hungfs

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// serverVariable makes a process a server. Its value is the directory to show and the mountpoint, each on its own line.
const serverVariable = "GAIAFS_HUNG_SERVER"

// patience is how long Wait and other calls wait for the server.
const patience = 20 * time.Second

// Main must be called first in TestMain. It does not return in a server's process.
func Main() {
	what, is := os.LookupEnv(serverVariable)
	if !is {
		return
	}
	shown, mountpoint, _ := strings.Cut(what, "\n")
	if err := serve(shown, mountpoint); err != nil {
		fmt.Fprintln(os.Stderr, "hungfs:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Server is a mount of the filesystem.
type Server struct {
	t   testing.TB
	cmd *exec.Cmd
	in  *bufio.Writer
	end func()

	mu      sync.Mutex
	changed sync.Cond // of mu
	said    []string  // lines that the server printed; protected by mu
	gone    bool      // the server has ended; protected by mu
}

// Mount shows a directory at an existing mountpoint until the test ends. It skips the test if it does not run as root.
func Mount(t testing.TB, shown, mountpoint string) *Server {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to mount a filesystem")
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), serverVariable+"="+shown+"\n"+mountpoint)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	// If the test is killed, the server must end too. Otherwise threads that wait for it would keep the test from
	// ending.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	s := &Server{t: t, cmd: cmd, in: bufio.NewWriter(in)}
	s.changed.L = &s.mu
	ended, started := make(chan struct{}), make(chan error)
	go func() {
		// The server is signalled when the thread that started it ends.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		started <- cmd.Start()
		<-ended
	}()
	require.NoError(t, <-started)
	read := make(chan struct{})
	go func() {
		defer close(read)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			s.say(lines.Text(), false)
		}
		s.say("", true)
	}()
	s.end = sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		<-read
		_ = cmd.Wait()
		close(ended)
		_ = unix.Unmount(mountpoint, unix.MNT_DETACH)
	})
	t.Cleanup(s.end)
	s.wait("ready", 1)
	return s
}

// Kill ends the server. Waiting requests fail with ENOTCONN.
func (s *Server) Kill() { s.end() }

// Hang makes requests of these kinds hang: lookup, getattr, setattr, open, read, write, flush, fsync, opendir, readdir,
// unlink.
func (s *Server) Hang(kinds ...string) {
	s.t.Helper()
	s.tell("hang " + strings.Join(kinds, " "))
}

// Fail makes writes and fsync fail with errno until Answer.
func (s *Server) Fail(errno syscall.Errno) {
	s.t.Helper()
	s.tell(fmt.Sprintf("fail %d", errno))
}

// Answer makes every hanging request go on, and ends Hang and Fail.
func (s *Server) Answer() {
	s.t.Helper()
	s.tell("answer")
}

// Wait returns when n requests of a kind hang or have hung.
func (s *Server) Wait(kind string, n int) {
	s.t.Helper()
	s.wait("hung "+kind, n)
}

// tell sends an order and waits until the server has carried it out.
func (s *Server) tell(order string) {
	s.t.Helper()
	done := "done " + order
	s.mu.Lock()
	n := s.countLocked(done) + 1
	s.mu.Unlock()
	_, err := fmt.Fprintln(s.in, order)
	require.NoError(s.t, err)
	require.NoError(s.t, s.in.Flush())
	s.wait(done, n)
}

func (s *Server) say(line string, gone bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone = gone; !gone {
		s.said = append(s.said, line)
	}
	s.changed.Broadcast()
}

func (s *Server) countLocked(line string) (n int) {
	for _, l := range s.said {
		if l == line {
			n++
		}
	}
	return n
}

// wait returns when the server has printed line n times. It fails the test if the server ends or patience is over.
func (s *Server) wait(line string, n int) {
	s.t.Helper()
	late := false
	timer := time.AfterFunc(patience, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		late = true
		s.changed.Broadcast()
	})
	defer timer.Stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.countLocked(line) < n && !s.gone && !late {
		s.changed.Wait()
	}
	require.GreaterOrEqual(s.t, s.countLocked(line), n, "the server printed %q too few times; its output: %q", line, s.said)
}
