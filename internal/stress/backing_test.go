package stress

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

// pattern makes n bytes that differ from place to place and from seed to seed.
func pattern(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7+i>>8*13) ^ seed
	}
	return b
}

// TestSourceChanged changes files in SOURCE while a device maps them and a CPU program has them open.
func TestSourceChanged(t *testing.T) {
	allModes(t, func(t *testing.T, o testmount.Options) {
		m := testmount.Start(t, o)
		const size = 16 * 4096
		for _, c := range []struct {
			name   string
			change func(t *testing.T, path string) (content []byte)
		}{
			{"written", func(t *testing.T, path string) []byte {
				b := pattern(size, 2)
				f, err := os.OpenFile(path, os.O_WRONLY, 0)
				require.NoError(t, err)
				defer f.Close()
				_, err = f.Write(b)
				require.NoError(t, err)
				return b
			}},
			{"cut", func(t *testing.T, path string) []byte {
				require.NoError(t, os.Truncate(path, 5000))
				return pattern(size, 1)[:5000]
			}},
			{"longer", func(t *testing.T, path string) []byte {
				f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
				require.NoError(t, err)
				defer f.Close()
				_, err = f.Write(pattern(3*4096, 9))
				require.NoError(t, err)
				return append(pattern(size, 1), pattern(3*4096, 9)...)
			}},
			{"emptied", func(t *testing.T, path string) []byte {
				require.NoError(t, os.Truncate(path, 0))
				return nil
			}},
		} {
			t.Run(c.name, func(t *testing.T) {
				path := m.Path(c.name)
				require.NoError(t, os.WriteFile(path, pattern(size, 1), 0o600))
				dropCaches(t, path)
				g := gpu(t, path, size+8*4096, 0)
				requireBytes(t, pattern(size, 1), load(t, g)[:size], "on the device")
				_, err := os.ReadFile(path)
				require.NoError(t, err)

				want := c.change(t, filepath.Join(m.Source, c.name))
				_, err = g.Acquire(0, size+8*4096)
				require.NoError(t, err)
				mapped := make([]byte, size+8*4096)
				copy(mapped, want)
				requireBytes(t, mapped, load(t, g), "on the device, after the change")
				eventually(t, func() error { // the kernel may keep a size for a second
					if o.WriteBack && len(want) != size {
						return nil // it keeps its own as long as it knows the file, see docs/write-back.md
					}
					got, err := os.ReadFile(path)
					if err == nil && !bytes.Equal(want, got) {
						err = fmt.Errorf("%d bytes are read, others than the %d in SOURCE", len(got), len(want))
					}
					return err
				})
				if len(want) > 0 {
					want[1] ^= 0xff
					store(t, g, 1, want[1])
					require.NoError(t, g.Sync(0, size))
				}
				requireBytes(t, want, mustRead(t, filepath.Join(m.Source, c.name)), "in SOURCE")
			})
		}
		assert.GreaterOrEqual(t, status(t, m).Counters["home_replacements"], int64(3))
	})
}

// TestSourceReplaced removes files in SOURCE, and renames others over them, while a device maps them. The mapping keeps
// the file that it was made of.
func TestSourceReplaced(t *testing.T) {
	m := testmount.Start(t, testmount.Options{})
	for _, name := range []string{"replaced", "deleted"} {
		path := m.Path(name)
		require.NoError(t, os.WriteFile(path, pattern(8192, 1), 0o600))
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		require.NoError(t, err)
		defer f.Close()
		g := gpu(t, path, 8192, 0)
		if name == "replaced" {
			other := filepath.Join(m.Source, "other")
			require.NoError(t, os.WriteFile(other, pattern(8192, 5), 0o600))
			require.NoError(t, os.Rename(other, filepath.Join(m.Source, name)))
		} else {
			require.NoError(t, os.Remove(filepath.Join(m.Source, name)))
		}
		_, err = g.Acquire(0, 8192)
		require.NoError(t, err)
		requireBytes(t, pattern(8192, 1), load(t, g), "on the device")
		store(t, g, 0, 200)
		require.NoError(t, g.Sync(0, 8192))
		var b [1]byte
		_, err = f.ReadAt(b[:], 0)
		require.NoError(t, err)
		assert.Equal(t, byte(200), b[0])
		eventually(t, func() error {
			got, err := os.ReadFile(path)
			switch {
			case name == "deleted" && !os.IsNotExist(err):
				return fmt.Errorf("the name is still there: %v", err)
			case name == "replaced" && !bytes.Equal(got, pattern(8192, 5)):
				return fmt.Errorf("the name still leads to the old file: %v", err)
			}
			return nil
		})
		require.NoError(t, g.Close())
		if name == "replaced" {
			again := gpu(t, path, 8192, 0)
			requireBytes(t, pattern(8192, 5), load(t, again), "on the device, of the new file")
			requireBytes(t, pattern(8192, 5), mustRead(t, filepath.Join(m.Source, name)), "in SOURCE")
		}
	}
}

// TestFullDisk lets the backing filesystem run full while released bytes wait to be written.
func TestFullDisk(t *testing.T) {
	source := t.TempDir()
	require.NoError(t, unix.Mount("tmpfs", source, "tmpfs", 0, "size=4m"))
	t.Cleanup(func() { assert.NoError(t, unix.Unmount(source, 0)) })
	allModes(t, func(t *testing.T, o testmount.Options) {
		o.Source = source
		o.WriteBackInterval = 50 * time.Millisecond
		m := testmount.Start(t, o)
		const size = 2 << 20
		filler := filepath.Join(source, "filler")
		require.NoError(t, os.WriteFile(filler, make([]byte, 3<<20), 0o600))
		path := m.Path("file")
		f, err := os.Create(path)
		require.NoError(t, err)
		defer f.Close()
		require.NoError(t, f.Truncate(size))
		g := gpu(t, path, size, 0)
		store(t, g, 0, pattern(size, 3)...)
		_, err = g.Release(0, size)
		require.NoError(t, err, "a release moves no data")
		require.ErrorIs(t, f.Sync(), unix.ENOSPC)
		require.ErrorIs(t, g.Sync(0, size), unix.ENOSPC)
		eventually(t, func() error {
			if s := status(t, m); len(s.Files) != 1 || !strings.Contains(s.Files[0].Error, "space") {
				return fmt.Errorf("the status does not say it: %+v", s.Files)
			}
			return nil
		})
		requireBytes(t, pattern(size, 3), mustRead(t, path), "on the mount, while the disk is full")
		// The device goes on, and what is written elsewhere does.
		store(t, g, 7, 77)
		_, err = g.Release(0, 4096)
		require.NoError(t, err)
		want := pattern(size, 3)
		want[7] = 77
		requireBytes(t, want, mustRead(t, path), "on the mount, still")
		require.NoError(t, os.Remove(filler))
		require.NoError(t, f.Sync())
		sameEverywhere(t, m, "file", want)
		require.NoError(t, g.Close())
		require.NoError(t, f.Close())
		require.NoError(t, os.Remove(path))
		m.Stop()
	})
}

// inject makes system calls of the daemon on one file fail until the function that it returns is called.
func inject(t testing.TB, m *testmount.Mount, path, call string, errno string) (stop func()) {
	t.Helper()
	strace := requireTool(t, "strace")
	cmd := exec.Command(strace, "-f", "-q", "-e", "trace="+call, "-e", "inject="+call+":error="+errno, "-P", path,
		"-o", "/dev/null", "-p", strconv.Itoa(m.Process.Pid))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	var errs bytes.Buffer
	cmd.Stderr = &errs
	require.NoError(t, cmd.Start())
	traced := func() bool {
		all := true
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", m.Process.Pid))
		for _, task := range tasks {
			text, err := os.ReadFile(task)
			all = all && (err != nil || strings.Contains(string(text),
				fmt.Sprintf("TracerPid:\t%d\n", cmd.Process.Pid)))
		}
		return all && len(tasks) > 0
	}
	eventually(t, func() error {
		if !traced() {
			return fmt.Errorf("strace has not attached: %s", errs.String())
		}
		return nil
	})
	ended := false
	stop = func() {
		if ended {
			return
		}
		ended = true
		require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		_ = cmd.Wait() // by the signal
	}
	t.Cleanup(stop)
	return stop
}

// TestWriteBackErrors makes writes of the backing file fail. The next fsync says so, CPU programs see the bytes all the
// same, and once writing works they come home.
func TestWriteBackErrors(t *testing.T) {
	requireTool(t, "strace")
	for _, c := range []struct {
		name  string
		errno syscall.Errno
	}{{"EIO", unix.EIO}, {"EDQUOT", unix.EDQUOT}, {"ENOSPC", unix.ENOSPC}} {
		t.Run(c.name, func(t *testing.T) {
			m := testmount.Start(t, testmount.Options{WriteBackInterval: 50 * time.Millisecond})
			const size = 64 * 4096
			path := m.Path("file")
			require.NoError(t, os.WriteFile(path, pattern(size, 1), 0o600))
			require.NoError(t, os.WriteFile(m.Path("other"), pattern(size, 1), 0o600))
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			require.NoError(t, err)
			defer f.Close()
			g := gpu(t, path, size, 0)
			stop := inject(t, m, filepath.Join(m.Source, "file"), "pwrite64", c.name)

			store(t, g, 4096, pattern(3*4096, 4)...)
			_, err = g.Release(0, size)
			require.NoError(t, err)
			want := pattern(size, 1)
			copy(want[4096:], pattern(3*4096, 4))
			require.ErrorIs(t, f.Sync(), c.errno)
			require.ErrorIs(t, g.Sync(0, size), c.errno)
			requireBytes(t, want, mustRead(t, path), "on the mount, while writing fails")
			_, err = f.WriteAt([]byte("x"), 0)
			require.ErrorIs(t, err, c.errno, "a write of a CPU program")
			require.NoError(t, os.WriteFile(m.Path("other"), pattern(size, 6), 0o600), "another file")

			stop()
			require.NoError(t, f.Sync())
			sameEverywhere(t, m, "file", want)
			eventually(t, func() error {
				for _, f := range status(t, m).Files {
					if f.Error != "" || f.PendingSeconds > 0 {
						return fmt.Errorf("the status still has an error: %+v", f)
					}
				}
				return nil
			})
		})
	}
}

// TestUnreadableHome makes reads of the backing file fail. Programs get the error, nothing is made up, and once reading
// works everything does.
func TestUnreadableHome(t *testing.T) {
	requireTool(t, "strace")
	m := testmount.Start(t, testmount.Options{})
	const size = 16 * 4096
	path := m.Path("file")
	require.NoError(t, os.WriteFile(path, pattern(size, 1), 0o600))
	dropCaches(t, path)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	lazy, err := gaiafs.Map(f, 0, size, gaiafs.ProtRead|gaiafs.ProtWrite, 0, gaiafs.Lazy())
	require.NoError(t, err)
	defer lazy.Close()
	stop := inject(t, m, filepath.Join(m.Source, "file"), "pread64,preadv2", "EIO")
	_, err = lazy.Acquire(0, size)
	require.ErrorIs(t, err, unix.EIO)
	_, err = gaiafs.Map(f, 0, size, gaiafs.ProtRead, 0)
	require.ErrorIs(t, err, unix.EIO)
	var b [4096]byte
	_, err = f.ReadAt(b[:], 0)
	require.ErrorIs(t, err, unix.EIO)
	stop()
	_, err = lazy.Acquire(0, size)
	require.NoError(t, err)
	requireBytes(t, pattern(size, 1), load(t, lazy), "on the device")
	_, err = f.ReadAt(b[:], 0)
	require.NoError(t, err)
	all, err := io.ReadAll(f)
	require.NoError(t, err)
	requireBytes(t, pattern(size, 1), all, "on the mount")
}
