package fs

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A daemon that gets SIGKILL may not die. One of its threads may be telling the kernel to drop pages at that moment. If
// one of these pages is on its way home, the thread waits for a WRITE that will never be answered, and the wait cannot
// be interrupted. The process keeps its descriptors until the thread ends, so the kernel does not notice that the
// daemon is gone. Every program that uses the mount then waits too, and cannot be killed. Only ending the connection
// from outside helps.
//
// So a mount has a guard: a process that does nothing until the daemon begins to die. It exists before the mount shows.
// It cannot wait for the daemon's end, or for a pipe to close, because neither happens. But the kernel sends it a
// signal when the thread that started it ends (PR_SET_PDEATHSIG). That thread does nothing else, so it can always end.
// If the daemon does not end within guardPatience after the signal, the guard ends the connection: requests fail with
// ENOTCONN, and the daemon ends.

// guardVariable makes a process a guard. Its value names the mount: the device number and the mountpoint.
const guardVariable = "GAIAFS_GUARD"

// guardPatience is how long a dying daemon may take before its connection is ended. The wait only spares daemons that
// end by themselves. Ending the connection of a dead daemon loses nothing.
const guardPatience = 250 * time.Millisecond

// guardReady says that this program calls Guard, so it can be started as a guard.
var guardReady atomic.Bool

// Guard must be called first thing in main by a program that calls Mount. It does not return in a process that was
// started as a guard. Without it, Mount makes mounts without a guard: programs may then hang after the daemon is
// killed, until `umount -f`.
func Guard() {
	guardReady.Store(true)
	what, is := os.LookupEnv(guardVariable)
	if !is {
		return
	}
	if err := watch(what); err != nil {
		fmt.Fprintln(os.Stderr, "gaiafs: a mount whose daemon was killed may hang; use `umount -f`:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// watch runs the guard. It returns when the daemon or its connection has ended.
func watch(what string) error {
	dying := make(chan os.Signal, 1)
	signal.Notify(dying, syscall.SIGUSR1)
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	forbidPolling(guardRoot)
	unix.Close(guardRoot)
	fmt.Println("ready")
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		_, _ = io.Copy(io.Discard, os.Stdin)
	}()
	select {
	case <-gone:
		return nil
	case <-dying:
	}
	select {
	case <-gone:
		return nil
	case <-time.After(guardPatience):
	}
	device, mountpoint, _ := strings.Cut(what, " ")
	return endConnection(device, mountpoint)
}

// endConnection makes the kernel answer every request of a mount with an error. The mount itself stays if programs use
// it.
func endConnection(device, mountpoint string) error {
	// Even looking at the mountpoint could wait for the daemon, so only the list of mounts is read.
	all, err := readMounts()
	if err != nil {
		return err
	}
	for _, m := range all {
		if m.Device != device || m.Mountpoint != mountpoint || !m.isFUSE() {
			continue
		}
		_, minor, _ := strings.Cut(device, ":")
		abort := filepath.Join("/sys/fs/fuse/connections", minor, "abort")
		if err := os.WriteFile(abort, []byte("1"), 0); err == nil {
			return nil
		}
		// fusectl is not mounted. A forced unmount ends the connection first, and may then fail because the mount is in
		// use.
		err := unix.Unmount(mountpoint, unix.MNT_FORCE|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, syscall.EBUSY) {
			return nil
		}
		return err
	}
	return nil // unmounted already
}

// guard is the daemon's handle of its guard.
type guard struct {
	cmd  *exec.Cmd
	pipe io.WriteCloser
	done chan struct{} // closed when the guard has ended
}

// guard starts a guard for the mount, if this program can, and returns when it is ready. It may return nil.
func (c *connection) guard(o *Options) *guard {
	if !guardReady.Load() {
		forbidPolling(c.root)
		return nil
	}
	g, err := startGuard(c.device, o.Mountpoint, c.root)
	if err != nil {
		o.Log.Warn("the mount has no guard: programs may hang if the daemon is killed", "error", err)
	}
	return g
}

// forbidPolling makes the kernel never ask the daemon again which files are ready to be read. root is a descriptor of
// the mount's root.
//
// The Go runtime polls each file that it opens, in a system call that it takes for short. If the daemon's process
// opened a file of its own mount, that call could wait for an answer that only another goroutine would give, and the
// runtime would not let it run. Package fuse answers ENOSYS for a file of this name. The guard opens it, because the
// daemon could not be killed while it waits for itself.
func forbidPolling(root int) {
	const name = ".go-fuse-epoll-hack"
	fd, err := unix.Openat(root, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	unix.Close(fd)
}

// guardRoot is the guard's descriptor of the mount's root while it starts.
const guardRoot = 3

// startGuard starts a guard for the mount of a device at mountpoint and returns when it is ready. root is a descriptor
// of the mount's root.
func startGuard(device, mountpoint string, root int) (*guard, error) {
	fd, err := unix.FcntlInt(uintptr(root), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	passed := os.NewFile(uintptr(fd), "root of the mount")
	defer passed.Close()
	cmd := exec.Command("/proc/self/exe")
	cmd.Args[0] = "gaiafs-guard"
	cmd.Env = append(os.Environ(), guardVariable+"="+device+" "+mountpoint)
	cmd.ExtraFiles = []*os.File{passed} // descriptor guardRoot
	cmd.Dir = "/"
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGUSR1, Setpgid: true}
	pipe, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	g := &guard{cmd: cmd, pipe: pipe, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The guard is signalled when the thread that started it ends, so that thread must live as long as the process.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		if err == nil {
			var word [6]byte
			_, err = io.ReadFull(out, word[:])
		}
		started <- err
		if cmd.Process != nil {
			_ = cmd.Wait()
		}
		close(g.done)
	}()
	if err := <-started; err != nil {
		g.stop()
		return nil, err
	}
	return g, nil
}

// stop ends the guard and waits for it. g may be nil.
func (g *guard) stop() {
	if g == nil {
		return
	}
	_ = g.pipe.Close()
	<-g.done
}
