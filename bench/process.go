package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/bench/loopback"
	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// The parts that Process plays in a separate process.
const (
	partLoopback = "loopback"
	partMap      = "map"
)

// ready is what the loopback prints when its mount is usable.
const ready = "ready"

// Process plays a part for which bench needs another process. args are the arguments of Options.Process. It returns
// when the part is over.
func Process(args []string, out io.Writer) error {
	switch {
	case len(args) == 5 && args[0] == partLoopback:
		maxWrite, err := strconv.Atoi(args[1])
		if err != nil {
			return err
		}
		o := loopback.Options{MaxWrite: maxWrite, ReadOnly: args[2] == "ro"}
		if args[2] == "slow" {
			o.SlowWrites = slowWrite
		}
		return serveLoopback(out, o, args[3], args[4])
	case len(args) == 3 && args[0] == partMap:
		n, err := strconv.ParseInt(args[1], 10, 64)
		if err != nil {
			return err
		}
		return mapOnce(out, args[2], n)
	}
	return fmt.Errorf("this is a part of 'gaiafs bench'")
}

// serveLoopback serves until it is told to end. It ignores Ctrl-C: that goes to bench, which ends its daemons when it
// is done with them.
func serveLoopback(out io.Writer, o loopback.Options, source, mountpoint string) error {
	stop, end := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer end()
	// if bench was killed, nobody reads the output, and the mount must still be removed
	signal.Ignore(syscall.SIGINT, syscall.SIGPIPE)
	server, err := loopback.Mount(source, mountpoint, o)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, ready)
	context.AfterFunc(stop, func() { _ = unmount(mountpoint) })
	server.Wait()
	return nil
}

// mapOnce maps a file on the first device and prints how many nanoseconds that took.
func mapOnce(out io.Writer, path string, n int64) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	start := time.Now()
	m, err := gaiafs.Map(f, 0, n, gaiafs.ProtRead, 0, gaiafs.Stays())
	if err != nil {
		return err
	}
	fmt.Fprintln(out, time.Since(start).Nanoseconds())
	return m.Close()
}

// mapInProcess runs mapOnce in another process.
func (s *session) mapInProcess(ctx context.Context, path string, n int64) (time.Duration, error) {
	cmd := s.Process(ctx, partMap, strconv.FormatInt(n, 10), path)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return 0, fmt.Errorf("mapping in another process: %w", err)
	}
	took, err := strconv.ParseInt(strings.TrimSpace(string(out)), 10, 64)
	return time.Duration(took), err
}

// daemon is a process that serves a mount.
type daemon struct {
	cmd        *exec.Cmd
	mountpoint string
	ended      chan struct{}
	stop       sync.Once
}

// startLoopback mounts and returns when the mount is usable.
func (s *session) startLoopback(o loopback.Options, source, mountpoint string) (*daemon, error) {
	mode := "rw"
	switch {
	case o.ReadOnly:
		mode = "ro"
	case o.SlowWrites > 0:
		mode = "slow"
	}
	// It does not end with the context, but when it is told to: the mount is removed after its users.
	cmd := s.Process(context.Background(), partLoopback, strconv.Itoa(o.MaxWrite), mode, source, mountpoint)
	var said strings.Builder
	cmd.Stderr = &said
	// It ends if bench is killed, but not by the Ctrl-C that ends bench. The kernel sends the signal for each thread of
	// bench that dies, so there may be several.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setpgid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	lines := bufio.NewReader(out)
	first, _ := lines.ReadString('\n')
	d := watch(cmd, mountpoint)
	if strings.TrimSpace(first) != ready {
		<-d.ended
		return nil, fmt.Errorf("go-fuse's loopback cannot be mounted at %s: %s", mountpoint,
			strings.TrimSpace(said.String()))
	}
	return d, nil
}

// startGaiafs mounts with these flags and returns when the mount is usable.
func (s *session) startGaiafs(source, mountpoint string, flags ...string) (*daemon, error) {
	log, err := os.Create(filepath.Join(s.dir, "log-"+filepath.Base(mountpoint)))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd, err := s.Mount(append([]string{"--log-level=warn"}, flags...), source, mountpoint, func(cmd *exec.Cmd) {
		cmd.Stderr = log
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // not ended by the Ctrl-C that ends bench
	})
	if err != nil {
		return nil, fmt.Errorf("gaiafs cannot be mounted: %w", err)
	}
	return watch(cmd, mountpoint), nil
}

// watch waits for the end of a started daemon.
func watch(cmd *exec.Cmd, mountpoint string) *daemon {
	d := &daemon{cmd: cmd, mountpoint: mountpoint, ended: make(chan struct{})}
	go func() {
		_ = cmd.Wait()
		close(d.ended)
	}()
	return d
}

// close ends the daemon and always removes its mount. A second signal ends a gaiafs even if its mount is in use,
// because the work on these files is over.
func (d *daemon) close() {
	d.stop.Do(func() {
		for _, step := range []struct {
			signal   os.Signal
			patience time.Duration
		}{{syscall.SIGTERM, 3 * time.Second}, {syscall.SIGTERM, 15 * time.Second}, {os.Kill, 15 * time.Second}} {
			_ = d.cmd.Process.Signal(step.signal)
			select {
			case <-d.ended:
				_ = unmount(d.mountpoint) // fails with EINVAL if the daemon unmounted, as it should
				return
			case <-time.After(step.patience):
			}
		}
	})
}

// unmount removes a mount even while programs use it. It forces the end, so that their requests fail from then on.
// Otherwise the daemon could not end before these programs do.
func unmount(mountpoint string) error {
	err := unix.Unmount(mountpoint, unix.MNT_DETACH|unix.MNT_FORCE)
	if errors.Is(err, unix.EPERM) {
		return exec.Command("fusermount3", "-u", "-z", mountpoint).Run()
	}
	return err
}
