package fs

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
)

// "once" makes one system call on a file. Before it, it prints the number of the calling thread.
func init() {
	programs["once"] = func(args []string) error {
		handled := make(chan os.Signal, 8)
		signal.Notify(handled, unix.SIGUSR1)
		call, flags := args[0], unix.O_RDWR
		if strings.HasPrefix(call, "direct ") {
			flags |= unix.O_DIRECT
		}
		fd, err := unix.Open(args[1], flags, 0)
		if err != nil {
			return err
		}
		b, err := unix.Mmap(-1, 0, page.Size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			return err
		}
		runtime.LockOSThread()
		fmt.Println(unix.Gettid())
		switch strings.TrimPrefix(call, "direct ") {
		case "read":
			if _, err = unix.Pread(fd, b, 0); err == nil && b[0] != 'd' {
				err = fmt.Errorf("read %q", b[0])
			}
		case "write":
			b[1] = 'w'
			_, err = unix.Pwrite(fd, b, 0)
		case "sync":
			err = unix.Fsync(fd)
		case "seek":
			_, err = unix.Seek(fd, 0, unix.SEEK_DATA)
		case "times":
			err = unix.UtimesNanoAt(unix.AT_FDCWD, args[1], make([]unix.Timespec, 2), 0)
		}
		return err
	}
}

var interruptible = []string{"read", "direct read", "write", "direct write", "sync", "seek", "times"}

// whileTheDeviceHangs starts a program whose call needs released bytes of a device that does not answer.
func whileTheDeviceHangs(t *testing.T, call string, then func(pid int, end func() error, hung *faulty.Gate,
	home func() string)) {
	s, cache, n := mountWithDevices(t, 1)
	dev := faulty.Wrap(n.devices[0].Device)
	n.devices[0].Device = dev
	path := filepath.Join(s.mnt, "f")
	require.NoError(t, os.WriteFile(path, make([]byte, page.Size), 0o666))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	w := mapOn(t, cache, n, f, 0, page.Size)
	defer w.close(t)
	w.store(t, 0, []byte("d"))
	w.release(t, page.Size)

	gate := dev.Hold(faulty.CopyOut)
	defer gate.Open()
	cmd := program("once", call, path)
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	thread, err := strconv.Atoi(strings.TrimSpace(line))
	require.NoError(t, err)
	<-gate.Arrived()
	require.NoError(t, unix.Tgkill(cmd.Process.Pid, thread, unix.SIGUSR1))
	end := func() error {
		if err := cmd.Wait(); err != nil {
			return fmt.Errorf("%w: %s", err, said.String())
		}
		return nil
	}
	then(cmd.Process.Pid, end, gate, func() string {
		require.NoError(t, f.Sync())
		b, err := os.ReadFile(filepath.Join(s.source, "f"))
		require.NoError(t, err)
		return string(b[:2])
	})
}

// TestKilledProgramsEnd: a program is killed while the daemon waits for a device on its behalf. It ends at once, and
// nothing is lost. The kernel announces only the first signal, which was an earlier one.
func TestKilledProgramsEnd(t *testing.T) {
	for _, call := range interruptible {
		t.Run(call, func(t *testing.T) {
			whileTheDeviceHangs(t, call, func(pid int, end func() error, hung *faulty.Gate, home func() string) {
				require.NoError(t, unix.Kill(pid, unix.SIGKILL))
				require.ErrorContains(t, end(), "signal: killed")
				hung.Open()
				require.Equal(t, "d\x00", home())
			})
		})
	}
}

// TestSignalsFailNoCall: a signal that a program handles fails none of its calls.
func TestSignalsFailNoCall(t *testing.T) {
	for _, call := range interruptible {
		t.Run(call, func(t *testing.T) {
			whileTheDeviceHangs(t, call, func(_ int, end func() error, hung *faulty.Gate, home func() string) {
				hung.Open()
				require.NoError(t, end())
				want := "d\x00"
				if strings.HasSuffix(call, "write") {
					want = "\x00w"
				}
				require.Equal(t, want, home())
			})
		})
	}
}

// TestRequestOutlivesSignals does the same without the kernel: the request's thread is alive.
func TestRequestOutlivesSignals(t *testing.T) {
	cancel := make(chan struct{})
	r := newRequest(cancel, &fuse.Caller{Pid: uint32(unix.Gettid())})
	defer r.end()
	require.NoError(t, r.Err())
	done := r.Done()
	close(cancel)
	require.NoError(t, r.Err())
	select {
	case <-done:
		t.Error("the context of a request ended with a signal")
	default:
	}
	require.EqualValues(t, syscall.EINTR, toErrno(fmt.Errorf("copy: %w", context.Canceled)))
}
