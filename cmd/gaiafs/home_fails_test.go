package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/hungfs"
	"github.com/gaiafs/gaiafs/internal/testdisk"
)

// diskPlace returns a place whose SOURCE is a separate ext4, and the file with that filesystem.
func diskPlace(t *testing.T) (p place, image string) {
	t.Helper()
	image, missing := testdisk.Make(t, "ext4", 32*mib)
	if missing != "" {
		t.Skip(missing)
	}
	p = newPlace(t)
	p.mountDisk(t, image)
	return p, image
}

func (p place) mountDisk(t *testing.T, image string) {
	t.Helper()
	if missing := testdisk.Attach(t, image, p.source, "errors=remount-ro"); missing != "" {
		t.Skip(missing)
	}
}

// shutDown makes every further write to SOURCE fail with EIO, as if its disk were gone (FS_IOC_SHUTDOWN of ext4).
func (p place) shutDown(t *testing.T) {
	t.Helper()
	dir, err := os.Open(p.source)
	require.NoError(t, err)
	defer dir.Close()
	const request, withoutLog = 0x8004587d, 2
	flags := uint32(withoutLog)
	// The kernel reads flags before the call returns.
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, dir.Fd(), request, uintptr(unsafe.Pointer(&flags)))
	require.Zero(t, errno)
}

// makeReadOnly makes ext4 find a fault. From then on it accepts no changes, not even through files that are open for
// writing.
func (p place) makeReadOnly(t *testing.T) {
	t.Helper()
	var st unix.Stat_t
	require.NoError(t, unix.Stat(p.source, &st))
	device, err := os.Readlink("/sys/dev/block/" + unixDevice(st.Dev))
	require.NoError(t, err)
	trigger := filepath.Join("/sys/fs/ext4", filepath.Base(device), "trigger_fs_error")
	if err := os.WriteFile(trigger, []byte("1"), 0); err != nil {
		t.Skipf("ext4 cannot be told to find a fault: %v", err)
	}
}

func unixDevice(dev uint64) string {
	return fmt.Sprintf("%d:%d", unix.Major(dev), unix.Minor(dev))
}

// A home that fails is treated like a full one: only force discards bytes.
func TestUmountRefusesWhileSourceFails(t *testing.T) {
	for name, c := range map[string]struct {
		fails func(p place, t *testing.T)
		says  string
	}{
		"EIO":   {place.shutDown, "input/output error"},
		"EROFS": {place.makeReadOnly, "read-only file system"},
	} {
		t.Run(name, func(t *testing.T) {
			p, _ := diskPlace(t)
			s := mountAt(t, p, "--gpus=emulated:1", "--gpu-memory=64M", "--write-back-interval=1h")
			m := p.releases(t, "out", 3*mib)
			c.fails(p, t)
			require.NoError(t, m.Close())
			require.Equal(t, syscall.EBUSY, unix.Unmount(p.mountpoint, 0))
			r := gaiafsCommand(t, "umount", p.mountpoint)
			require.Equal(t, exitFailure, r.code)
			require.Contains(t, r.err, "3145728 bytes of out: "+c.says)
			require.True(t, p.isMounted(t))
			require.Equal(t, int64(3*mib), p.status(t).Files[0].WaitingBytes)
			r = gaiafsCommand(t, "umount", "--force", p.mountpoint)
			require.Equal(t, exitFailure, r.code)
			require.Contains(t, r.err, "3145728 bytes of out that devices wrote are lost: "+c.says)
			require.Equal(t, exitFailure, s.end(t))
			require.False(t, p.isMounted(t))
		})
	}
}

// An unmounted SOURCE still accepts bytes: the daemon has it open.
func TestSourceThatWasUnmounted(t *testing.T) {
	p, image := diskPlace(t)
	s := mountAt(t, p, "--gpus=emulated:1", "--gpu-memory=64M", "--write-back-interval=1h")
	m := p.releases(t, "out", 3*mib)
	require.NoError(t, unix.Unmount(p.source, unix.MNT_DETACH))
	require.NoError(t, m.Close())
	r := gaiafsCommand(t, "umount", p.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.Equal(t, exitOK, s.end(t))
	p.mountDisk(t, image)
	p.requireHome(t, "out", 3*mib)
}

// Bytes of a file that was deleted in SOURCE are not missed.
func TestSourceThatWasDeleted(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1", "--gpu-memory=64M", "--write-back-interval=1h")
	m := s.releases(t, "out", 3*mib)
	require.NoError(t, os.RemoveAll(s.source))
	require.NoError(t, m.Close())
	r := gaiafsCommand(t, "umount", s.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.Equal(t, exitOK, s.end(t))
}

// Whatever the reason, bytes that SOURCE does not accept arrive once it does, and are named when they are discarded.
// This also holds if the kernel collects writes.
func TestReleasedBytesOutlastAFailingSource(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.ENOSPC, syscall.EDQUOT, syscall.EIO} {
		for _, mode := range []string{"", "--write-back"} {
			for _, force := range []bool{false, true} {
				t.Run(fmt.Sprint(errno, mode, force), func(t *testing.T) { outlast(t, errno, mode, force) })
			}
		}
	}
}

func outlast(t *testing.T, errno syscall.Errno, mode string, force bool) {
	p := newPlace(t)
	h := hungfs.Mount(t, t.TempDir(), p.source)
	s := mountAt(t, p, append(strings.Fields(mode), "--gpus=emulated:1", "--gpu-memory=64M")...)
	m := p.releases(t, "out", 3*mib)
	h.Fail(errno)
	copy(m.Bytes(), "again")
	_, err := m.Release(0, 4096)
	require.NoError(t, err)
	require.NoError(t, m.Close())
	f, err := os.OpenFile(filepath.Join(p.mountpoint, "out"), os.O_RDWR, 0)
	require.NoError(t, err)
	_, err = f.WriteAt([]byte("by a program"), 2*mib+100)
	if err == nil {
		err = f.Sync()
	}
	require.ErrorIs(t, err, errno)
	_ = f.Close() // close may report it, too
	require.Equal(t, syscall.EBUSY, unix.Unmount(p.mountpoint, 0))
	r := gaiafsCommand(t, "umount", p.mountpoint)
	require.Equal(t, exitFailure, r.code)
	require.Contains(t, r.err, " bytes of out: "+errno.Error())
	require.True(t, p.isMounted(t))
	if force {
		r = gaiafsCommand(t, "umount", "--force", p.mountpoint)
		require.Equal(t, exitFailure, r.code)
		require.Contains(t, r.err, " bytes of out that devices wrote are lost: "+errno.Error())
		require.Equal(t, exitFailure, s.end(t))
		require.False(t, p.isMounted(t))
		return
	}
	h.Answer()
	require.Eventually(t, func() bool { return p.status(t).Files[0].WaitingBytes == 0 }, 30*time.Second,
		time.Millisecond)
	r = gaiafsCommand(t, "umount", p.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	require.Equal(t, exitOK, s.end(t))
	got, err := os.ReadFile(filepath.Join(p.source, "out"))
	require.NoError(t, err)
	require.Equal(t, "again", string(got[:5]))
	missing := 3*mib - 5 - bytes.Count(got, []byte("x"))
	require.Contains(t, []int{0, len("by a program")}, missing, "the program's write failed, or came late")
}

// info does not wait for ever for a file whose backing filesystem does not answer.
func TestInfoOfAHungFile(t *testing.T) {
	p := newPlace(t)
	h := hungfs.Mount(t, t.TempDir(), p.source)
	s := mountAt(t, p, "--gpus=emulated:1", "--gpu-memory=64M")
	path := filepath.Join(p.mountpoint, "file")
	require.NoError(t, os.WriteFile(path, []byte("x"), 0o600))
	h.Hang("open")
	_, err := inspectWithin(t.Context(), target{path: path}, 10*time.Millisecond)
	h.Answer()
	require.EqualError(t, err, path+": no answer after 10ms: its backing filesystem may not answer; 'gaiafs status' says "+
		"which files wait")
	_, err = inspect(t.Context(), target{path: path})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return gaiafsCommand(t, "umount", p.mountpoint).code == exitOK }, 30*time.Second,
		time.Millisecond, "the abandoned open ends, too")
	require.Equal(t, exitOK, s.end(t))
}

// The status does not wait for SOURCE, although SOURCE is asked when the mountpoint is opened.
func TestStatusOfAHungSource(t *testing.T) {
	p := newPlace(t)
	h := hungfs.Mount(t, t.TempDir(), p.source)
	s := mountAt(t, p, "--gpus=none", "--attr-timeout=0s")
	h.Hang("getattr", "open", "opendir")
	_, err := askStatus(p.mountpoint, 100*time.Millisecond)
	require.ErrorIs(t, err, errNoAnswer)
	for _, line := range [][]string{{"status"}, {"status", p.mountpoint}, {"top", "--once", p.mountpoint}} {
		cmd := command(t, line...)
		late := time.AfterFunc(time.Minute, h.Answer)
		r := execute(t, cmd)
		require.True(t, late.Stop(), "%v waits", line)
		require.Equal(t, exitOK, r.code, "%v: %s", line, r.err)
	}
	h.Answer()
	require.Eventually(t, func() bool { return gaiafsCommand(t, "umount", p.mountpoint).code == exitOK }, 30*time.Second,
		time.Millisecond, "the abandoned open ends, too")
	require.Equal(t, exitOK, s.end(t))
}
