package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/control"
)

// startDaemon serves the mount in a new process in its own session. It returns when the mount is usable, or with the
// reason why it is not. arguments is the command line of this process: "mount" and what follows. A signal to this
// process before that leaves nothing mounted. ready is a text for the user.
func startDaemon(m *mountPlan, arguments []string) (ready string, err error) {
	log, name, discard, err := m.daemonLog()
	if err != nil {
		return "", err
	}
	defer log.Close()
	ctx, stop := signal.NotifyContext(context.Background(), endingSignals()...)
	defer stop()
	context.AfterFunc(ctx, func() { time.AfterFunc(oneAct, stop) }) // a second signal kills this process
	cmd, ready, err := startServing(ctx, goOnAlone, arguments[1:], func(cmd *exec.Cmd) {
		cmd.Stderr = log
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	})
	if errors.Is(err, errDiedSilently) {
		return "", fmt.Errorf("%w; see the end of its log: %s", err, name)
	}
	if err != nil {
		if !errors.Is(err, errInterrupted) {
			discard() // the error says enough
		}
		return "", err
	}
	return ready, cmd.Process.Release()
}

// errInterrupted says that a signal came before the mount was usable.
var errInterrupted = errors.New("interrupted: nothing is mounted")

// startServing runs "gaiafs mount" with arguments in a new process and waits until its mount is usable. On an error,
// and if ctx ends first, the process has ended and nothing is mounted. answer says whether the new process ends
// together with this one. ready is its text for the user.
func startServing(ctx context.Context, answer byte, arguments []string, prepare func(*exec.Cmd)) (cmd *exec.Cmd,
	ready string, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, "", err
	}
	conn, theirs := os.NewFile(uintptr(pair[0]), "ready socket"), os.NewFile(uintptr(pair[1]), "ready socket")
	cmd = exec.Command("/proc/self/exe", append([]string{"mount", "--ready-fd=3"}, arguments...)...)
	cmd.Args[0] = "gaiafs"
	cmd.ExtraFiles = []*os.File{theirs} // descriptor 3 of the new process
	prepare(cmd)
	err = cmd.Start()
	theirs.Close()
	if err != nil {
		conn.Close()
		return nil, "", fmt.Errorf("the process that serves the mount cannot be started: %w", err)
	}
	// If it gets no answer, it undoes what it made.
	wanted := context.AfterFunc(ctx, func() { _ = unix.Shutdown(pair[0], unix.SHUT_RDWR) })
	ready, err = awaitOutcome(conn)
	if !wanted() {
		err = errInterrupted
	}
	if err == nil {
		_, err = conn.Write([]byte{answer})
	}
	if err != nil {
		conn.Close()
		_ = cmd.Wait() // the outcome says more than the exit status
		return nil, "", err
	}
	go func() { // keeps the connection open until this process or the other ends
		_, _ = io.Copy(io.Discard, conn)
		conn.Close()
	}()
	return cmd, ready, nil
}

// daemonLog opens the daemon's log: the file asked for; or standard error if that is the journal; or a file named after
// the mountpoint. name is a text for the user. discard removes what this call made.
func (m *mountPlan) daemonLog() (log *os.File, name string, discard func(), err error) {
	unmakeDir := func() {}
	path := m.logFile
	if path == "" {
		if isJournal(os.Stderr, os.Getenv("JOURNAL_STREAM")) {
			fd, err := unix.FcntlInt(os.Stderr.Fd(), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				return nil, "", nil, err
			}
			return os.NewFile(uintptr(fd), "journal"), "the journal", func() {}, nil
		}
		dir, err := logDirectory()
		if err != nil {
			return nil, "", nil, err
		}
		if unmakeDir, err = makeDirectories(dir, 0o750); err != nil {
			return nil, "", nil, fmt.Errorf("the folder for the log cannot be made: %w; choose a file with --log-file",
				err)
		}
		path = filepath.Join(dir, logName(m.mountpoint))
	}
	f, unmake, err := makeLog(path)
	if err != nil {
		unmakeDir()
		return nil, "", nil, err
	}
	return f, path, func() { unmake(); unmakeDir() }, nil
}

// isJournal reports whether f is the stream to the journal that the variable names by device and inode
// (systemd.exec(5), $JOURNAL_STREAM).
func isJournal(f *os.File, stream string) bool {
	var dev, ino uint64
	if n, err := fmt.Sscanf(stream, "%d:%d", &dev, &ino); n != 2 || err != nil {
		return false
	}
	var st unix.Stat_t
	return unix.Fstat(int(f.Fd()), &st) == nil && st.Dev == dev && st.Ino == ino
}

func logDirectory() (string, error) {
	if dir := "/var/log/gaiafs"; os.Geteuid() == 0 && control.CanFill(dir) {
		return dir, nil
	}
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "gaiafs"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("there is no place for the log: %w; choose a file with --log-file", err)
	}
	return filepath.Join(home, ".local", "state", "gaiafs"), nil
}

// logName makes a file name from a mountpoint, as systemd does from a path: - stands for /.
func logName(mountpoint string) string {
	name := strings.NewReplacer("-", `\x2d`, "/", "-").Replace(strings.Trim(mountpoint, "/"))
	if len(name) > 200 {
		sum := sha256.Sum256([]byte(mountpoint))
		name = fmt.Sprintf("%.100s-%x", name, sum[:8])
	}
	return name + ".log"
}
