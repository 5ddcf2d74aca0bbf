package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"syscall"
	"time"
	"unsafe"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/fs"
)

func newUmount() *cobra.Command {
	timeout := span{Duration: time.Minute}
	cmd := &cobra.Command{
		Use:     "umount MOUNTPOINT",
		Aliases: []string{"unmount"},
		Short:   "Unmount, and wait until everything is written back",
		Long: `umount takes a mount away and returns when its daemon has brought home what devices hold, and has ended. It fails while
programs use the mount, and names them.`,
		Example: `  gaiafs umount /mnt/data
  gaiafs umount --timeout 10m /mnt/data    # wait longer for a slow disk`,
		Args: arguments("MOUNTPOINT"),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return mountpoints(), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return unmount(cmd.ErrOrStderr(), args[0], timeout.Duration)
		},
	}
	cmd.Flags().Var(&timeout, "timeout", "how long to wait for the daemon's end; 0 does not wait")
	return cmd
}

// mountpoints lists those of gaiafs, for completion.
func mountpoints() []string {
	mounts, err := fs.Mounts()
	if err != nil {
		return nil
	}
	var paths []string
	for _, m := range mounts {
		paths = append(paths, m.Mountpoint)
	}
	return paths
}

// unmount takes the mount away and waits for the end of its daemon.
func unmount(notes io.Writer, mountpoint string, timeout time.Duration) error {
	daemon, unknown := findDaemon(mountpoint)
	if daemon != nil {
		defer daemon.close()
	}
	if err := fs.Unmount(mountpoint); err != nil {
		if errors.Is(err, syscall.EBUSY) {
			if users := mountUsers(resolve(mountpoint)); len(users) > 0 {
				return fmt.Errorf("%s is in use by %s: end that, and try again", mountpoint, describe(users))
			}
		}
		return err
	}
	switch {
	case timeout == 0, errors.Is(unknown, syscall.ENOTCONN): // the daemon has ended before
		return nil
	case unknown != nil:
		fmt.Fprintf(notes, "%s is unmounted. Its daemon could not be asked which process it is, so nobody waited for its end: %v\n", mountpoint, unknown)
		return nil
	}
	code, known, err := daemon.wait(timeout)
	switch {
	case errors.Is(err, errStillRuns):
		return fmt.Errorf("%s is unmounted, but process %d still writes back after %s: it goes on, and its log says how far it is",
			mountpoint, daemon.pid, timeout)
	case err != nil:
		return fmt.Errorf("%s is unmounted, but process %d cannot be waited for: %w", mountpoint, daemon.pid, err)
	case known && code != 0:
		return fmt.Errorf("%s is unmounted, but process %d lost bytes or could not write them back: its log says which", mountpoint, daemon.pid)
	}
	return nil
}

var errStillRuns = errors.New("the process still runs")

// daemon is the process behind a mount, held by a descriptor so that its number cannot become another's.
type daemon struct {
	pid, fd int
}

// resolve returns the absolute path without symbolic links, as far as that can be had.
func resolve(path string) string {
	if absolute, err := filepath.Abs(path); err == nil {
		path = absolute
	}
	if resolved, err := filepath.EvalSymlinks(path); err == nil {
		path = resolved
	}
	return path
}

// findDaemon asks the mount for its daemon. It fails with ENOTCONN where that has ended.
func findDaemon(mountpoint string) (*daemon, error) {
	pid, err := daemonPID(mountpoint)
	if err != nil {
		return nil, err
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	// It answers still, so the number was its own when the descriptor was opened.
	if again, err := daemonPID(mountpoint); err != nil || again != pid {
		unix.Close(fd)
		return nil, errors.Join(fmt.Errorf("process %d has just ended", pid), err)
	}
	return &daemon{pid, fd}, nil
}

// daemonPID asks a mount for its daemon's process id.
func daemonPID(mountpoint string) (int, error) {
	doc, err := gaiafs.Status(mountpoint)
	if err != nil {
		return 0, err
	}
	var s struct {
		Mount mountStatus `json:"mount"`
	}
	if err := json.Unmarshal(doc, &s); err != nil {
		return 0, err
	}
	if s.Mount.PID <= 0 {
		return 0, errors.New("the mount does not tell the process of its daemon")
	}
	return s.Mount.PID, nil
}

func (d *daemon) close() { unix.Close(d.fd) }

// wait waits for the end of the process. code is its exit code, where the kernel tells (since Linux 6.15).
func (d *daemon) wait(timeout time.Duration) (code int, known bool, err error) {
	deadline := time.Now().Add(timeout)
	fds := []unix.PollFd{{Fd: int32(d.fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, int(max(time.Until(deadline), 0).Milliseconds()))
		switch {
		case errors.Is(err, syscall.EINTR):
			continue
		case err != nil:
			return 0, false, err
		case n == 0:
			return 0, false, errStillRuns
		}
		code, known = d.exitCode()
		return code, known, nil
	}
}

// exitCode asks for the exit code of a process that has ended. The kernel knows it once the parent has heard of the end,
// which for a daemon is at once; where it is not, the code stays unknown.
func (d *daemon) exitCode() (code int, known bool) {
	fds := []unix.PollFd{{Fd: int32(d.fd)}} // POLLHUP: the parent has heard
	const patience = 200                    // ms
	if n, err := unix.Poll(fds, patience); err != nil || n == 0 {
		return 0, false
	}
	info := unix.PidfdInfo{Mask: unix.PIDFD_INFO_EXIT}
	// The kernel fills info before the call returns and keeps nothing of it.
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(d.fd), unix.PIDFD_GET_INFO, uintptr(unsafe.Pointer(&info)))
	if errno != 0 || info.Mask&unix.PIDFD_INFO_EXIT == 0 {
		return 0, false
	}
	status := syscall.WaitStatus(info.Exit_code)
	if status.Signaled() {
		return 128 + int(status.Signal()), true
	}
	return status.ExitStatus(), true
}
