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

	"golang.org/x/sys/unix"
)

// startDaemon serves the mount in a new process in a session of its own and returns when the mount can be used, or with
// the reason why it cannot. arguments is the command line of this process: "mount" and what follows. A signal to this
// process until then leaves nothing mounted. ready is what to tell people.
func startDaemon(m *mountPlan, arguments []string) (ready string, err error) {
	log, name, discard, err := m.daemonLog()
	if err != nil {
		return "", err
	}
	defer log.Close()
	ctx, stop := signal.NotifyContext(context.Background(), endingSignals()...)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends this process
	cmd, ready, err := startServing(ctx, goOnAlone, arguments[1:], func(cmd *exec.Cmd) {
		cmd.Stderr = log
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	})
	if errors.Is(err, errDiedSilently) {
		return "", fmt.Errorf("%w; its last words are in %s", err, name)
	}
	if err != nil {
		if !errors.Is(err, errInterrupted) {
			discard() // the error says it all
		}
		return "", err
	}
	return ready, cmd.Process.Release()
}

// errInterrupted says that a signal came before the mount could be used.
var errInterrupted = errors.New("interrupted: nothing is mounted")

// startServing runs "gaiafs mount" with arguments in a new process and waits until its mount can be used. Where it
// cannot, or ctx ends before, the process has ended, and nothing is mounted. answer says whether it ends with this
// process. ready is what it says to people.
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
	// Without an answer it takes away what it made.
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

// daemonLog opens where a daemon logs to: the file that was asked for; standard error where that is the journal; else a
// file named after the mountpoint. name is for people. discard takes away what this call made.
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
	if os.Geteuid() == 0 {
		return "/var/log/gaiafs", nil
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

// logName makes a file name of a mountpoint, as systemd makes one of a path: - for /.
func logName(mountpoint string) string {
	name := strings.NewReplacer("-", `\x2d`, "/", "-").Replace(strings.Trim(mountpoint, "/"))
	if len(name) > 200 {
		sum := sha256.Sum256([]byte(mountpoint))
		name = fmt.Sprintf("%.100s-%x", name, sum[:8])
	}
	return name + ".log"
}
