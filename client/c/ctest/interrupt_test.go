package ctest

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/control/controltest"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

// patience is how long a client may take before the test fails instead of hanging.
const patience = 60 * time.Second

// stopped waits until a process is stopped.
func stopped(t *testing.T, pid int) {
	require.Eventually(t, func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		require.NoError(t, err)
		_, after, _ := strings.Cut(string(stat), ") ")
		return strings.HasPrefix(after, "T")
	}, patience, time.Millisecond)
}

// whyStopped returns what the library says about a stopped daemon. Linux before 6.18 does not say which process serves
// a mount.
func whyStopped(t *testing.T, pid int) string {
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", pid))
	require.NoError(t, err)
	who := "'gaiafs status' of the mountpoint says why"
	for _, fd := range fds {
		if text, _ := os.ReadFile(fd); strings.Contains(string(text), "fuse_connection:") {
			who = fmt.Sprintf("process %d is stopped, and 'kill -CONT %d' continues it", pid, pid)
		}
	}
	return "the daemon has not answered for 1 s: " + who
}

// TestInterrupted stops a daemon under a client.
func TestInterrupted(t *testing.T) {
	for build := range builds {
		t.Run(build, func(t *testing.T) {
			client := compile(t, "client", build)
			m := testmount.Start(t, testmount.Options{})
			d := &daemon{t: t, dir: m.Dir}
			cmd, expect, answer := d.talk(client, "interrupted", d.file())
			defer time.AfterFunc(patience, func() { cmd.Process.Kill() }).Stop()
			say := func() {
				_, err := answer.Write([]byte{1})
				require.NoError(t, err)
			}
			expect("mapped")
			require.NoError(t, m.Process.Signal(syscall.SIGSTOP))
			defer m.Process.Signal(syscall.SIGCONT)
			stopped(t, m.Process.Pid)
			say()
			expect(whyStopped(t, m.Process.Pid))
			expect("interrupted")
			require.NoError(t, m.Process.Signal(syscall.SIGCONT))
			say()
			expect("done")
			s, err := gaiafs.Status(m.Dir)
			require.NoError(t, err)
			require.NotContains(t, string(s), `"mappings":1`)
			say()
			require.NoError(t, cmd.Wait())
		})
	}
}

func TestInterruptedMapping(t *testing.T) {
	for build := range builds {
		t.Run(build, func(t *testing.T) {
			open := make(chan struct{})
			d := startDaemon(t, &controltest.Cache{MapGate: func(context.Context) error {
				<-open
				return nil
			}})
			cmd, expect, answer := d.talk(compile(t, "client", build), "interrupted-mmap", d.file())
			defer time.AfterFunc(patience, func() { cmd.Process.Kill() }).Stop()
			expect("interrupted")
			close(open)
			require.Eventually(t, func() bool {
				live, ended := d.cache.Mapped()
				return live == 0 && ended == 2
			}, patience, time.Millisecond)
			_, err := answer.Write([]byte{1})
			require.NoError(t, err)
			require.NoError(t, cmd.Wait())
		})
	}
}

// TestPieces makes a client wait for a daemon in steps.
func TestPieces(t *testing.T) {
	for build := range builds {
		t.Run(build, func(t *testing.T) {
			open := make(chan struct{})
			d := startDaemon(t, &controltest.Cache{Gate: func(context.Context) error {
				<-open
				return nil
			}})
			cmd, expect, answer := d.talk(compile(t, "client", build), "pieces", d.file())
			defer time.AfterFunc(patience, func() { cmd.Process.Kill() }).Stop()
			expect("waiting")
			close(open)
			_, err := answer.Write([]byte{1})
			require.NoError(t, err)
			expect("dropped")
			d.waitMapped(0)
			_, err = answer.Write([]byte{1})
			require.NoError(t, err)
			require.NoError(t, cmd.Wait())
		})
	}
}

// TestNoThread checks that a client that forks can avoid the library's threads.
func TestNoThread(t *testing.T) {
	d := startDaemon(t, &controltest.Cache{})
	d.run(compile(t, "client", "plain"), "no-thread", d.file())
	d.waitMapped(0)
}

// TestStatus asks a mount for its status.
func TestStatus(t *testing.T) {
	m := testmount.Start(t, testmount.Options{})
	d := &daemon{t: t, dir: m.Dir}
	want, err := gaiafs.Status(m.Dir)
	require.NoError(t, err)
	got := d.run(compile(t, "client", "address"), "status", m.Dir)
	require.Contains(t, got, `"devices"`)
	require.InDelta(t, len(want), len(got), 100, "%s\n%s", want, got) // their counters differ
	out, err := d.command(compile(t, "client", "plain"), "status", t.TempDir()).CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "not on a gaiafs mount")
}

func TestInterruptedThreads(t *testing.T) {
	for build := range builds {
		t.Run(build, func(t *testing.T) {
			d := startDaemon(t, &controltest.Cache{})
			cmd, expect, answer := d.talk(compile(t, "client", build), "interrupted-threads", d.file())
			defer time.AfterFunc(patience, func() { cmd.Process.Kill() }).Stop()
			expect("done")
			d.waitMapped(0)
			_, err := answer.Write([]byte{1})
			require.NoError(t, err)
			require.NoError(t, cmd.Wait())
		})
	}
}

// frame encodes a frame of the daemon's.
func frame(typ, flags uint16, id uint64, body ...any) []byte {
	var b []byte
	for _, v := range body {
		b, _ = binary.Append(b, binary.LittleEndian, v)
	}
	head, _ := binary.Append(nil, binary.LittleEndian, struct {
		Length      uint32
		Type, Flags uint16
		ID          uint64
	}{uint32(16 + len(b)), typ, flags, id})
	return append(head, b...)
}

// TestLostConnectionEnds makes a daemon break the protocol. It must see the connection end while the client lives.
func TestLostConnectionEnds(t *testing.T) {
	client := compile(t, "client", "address")
	d := startDaemon(t, &controltest.Cache{})
	path := filepath.Join(d.dir, "strange")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	require.NoError(t, err)
	defer l.Close()
	memory, err := unix.MemfdCreate("extent", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	defer unix.Close(memory)
	require.NoError(t, unix.Ftruncate(memory, controltest.ExtentSize))
	d.env = []string{"GAIAFS_TEST_SOCKET=" + path}
	cmd, expect, answer := d.talk(client, "breach", d.file())
	defer time.AfterFunc(patience, func() { cmd.Process.Kill() }).Stop()

	c, err := l.AcceptUnix()
	require.NoError(t, err)
	defer c.Close()
	receive := func() uint64 {
		b := make([]byte, 4096)
		n, err := c.Read(b)
		require.NoError(t, err)
		require.GreaterOrEqual(t, n, 16)
		return binary.LittleEndian.Uint64(b[8:])
	}
	send := func(frame []byte, fds ...int) {
		_, _, err := c.WriteMsgUnix(frame, unix.UnixRights(fds...), nil)
		require.NoError(t, err)
	}
	receive()
	send(frame(0x8001, 0, 0, [2]uint16{1, 0}, [5]uint32{128, 4096, 128, 1, 0}))
	id := receive()
	send(frame(0x8002, 1, id, uint64(7), [2]uint32{1, 0}, int64(1<<20), [2]uint32{1, 0}, [16]byte{}))
	send(frame(0x8003, 0, id, [2]uint32{0, 1}, [2]int64{0, controltest.ExtentSize}), memory)
	receive()
	send(frame(0x8004, 0, 12345, [2]uint32{0, 0}, int64(0))) // answers no request
	expect("lost")
	n, err := c.Read(make([]byte, 4096))
	require.Zero(t, n, "the connection goes on")
	_ = err
	_, err = answer.Write([]byte{1})
	require.NoError(t, err)
	require.NoError(t, cmd.Wait())
}
