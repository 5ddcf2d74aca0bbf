package fs

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func init() {
	// "write and fsync by lines" opens args[0], and reads lines: with w it writes more than brokenDisk takes, else it
	// calls fsync. It prints an errno.
	programs["write and fsync by lines"] = func(args []string) error {
		f, err := os.OpenFile(args[0], os.O_RDWR, 0)
		if err != nil {
			return err
		}
		fmt.Println(0)
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			errno := syscall.Errno(0)
			if lines.Text() == "w" {
				_, err = f.WriteAt(incompressible(diskRoom*3/2), 0)
			} else {
				err = f.Sync()
			}
			if errors.As(err, &errno); err != nil && errno == 0 {
				return err
			}
			fmt.Println(int(errno))
		}
		return nil
	}
}

// incompressible returns bytes that are not zeros.
func incompressible(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i) | 1
	}
	return b
}

// diskRoom is how much brokenDisk takes, in bytes.
const diskRoom = 12 << 20

// brokenDisk mounts a disk that fails when more than diskRoom bytes are on it.
func brokenDisk(t *testing.T) string {
	t.Helper()
	small, err := os.MkdirTemp("", testPrefix)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.Remove(small)) })
	require.NoError(t, unix.Mount("tmpfs", small, "tmpfs", 0, fmt.Sprint("mode=755,size=", diskRoom)))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(small, unix.MNT_DETACH)) })
	t.Setenv("TMPDIR", small)
	return newDisk(t, "ext4", 64<<20, "-O", "^has_journal", "-E", "nodiscard")
}

// syncs starts "write and fsync by lines" for a file. The function that it returns sends a line and returns the
// answer.
func (s *scene) syncs(t *testing.T, name string) func(line string) unix.Errno {
	t.Helper()
	cmd := program("write and fsync by lines", filepath.Join(s.mnt, name))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		in.Close()
		require.NoError(t, cmd.Wait())
	})
	answer := func() (errno int) {
		_, err := fmt.Fscanln(out, &errno)
		require.NoError(t, err)
		return errno
	}
	require.Zero(t, answer())
	return func(line string) unix.Errno {
		_, err := io.WriteString(in, line+"\n")
		require.NoError(t, err)
		return unix.Errno(answer())
	}
}

// TestUnseenOpensLearnOfDiskErrors: each process that has the file open is told that the disk failed, although the
// daemon had closed the file, another process in SOURCE was told before, and processes share the daemon's opens.
func TestUnseenOpensLearnOfDiskErrors(t *testing.T) {
	for _, idle := range []bool{false, true} {
		t.Run(fmt.Sprint("idle ", idle), func(t *testing.T) {
			s := mountUnseen(t, on(brokenDisk(t)), withFiles(t, map[string]string{"f": ""}))
			first, second := s.syncs(t, "f"), s.syncs(t, "f")
			require.Zero(t, first("w"))
			if idle {
				s.idle()
				require.Zero(t, s.fs.kept.count())
			}
			f, err := os.Open(filepath.Join(s.source, "f"))
			require.NoError(t, err)
			assert.Error(t, f.Sync(), "in SOURCE")
			require.NoError(t, f.Close())
			s.idle()
			assert.NotZero(t, first("s"))
			assert.NotZero(t, second("s"))
			s.fs.late.sweep(time.Now())
			assert.NotEmpty(t, s.fs.late.m)
			s.fs.late.sweep(time.Now().Add(errorsFor + time.Second))
			assert.Empty(t, s.fs.late.m)
		})
	}
}

// TestDiskErrorsKeepNoSpace: no descriptor is kept of a file that another process removed, even if a program has it
// open.
func TestDiskErrorsKeepNoSpace(t *testing.T) {
	s := mountUnseen(t)
	f, err := os.Create(filepath.Join(s.mnt, "f"))
	require.NoError(t, err)
	defer f.Close()
	_, err = f.WriteString("text")
	require.NoError(t, err)
	s.idle()
	late := func() int {
		s.fs.late.sweep(time.Now())
		s.fs.late.mu.Lock()
		defer s.fs.late.mu.Unlock()
		return len(s.fs.late.m)
	}
	require.Equal(t, 1, late())
	sh(t, s.source, "rm f")
	require.Zero(t, late())
}

// TestDiskErrorsAreOwedOnce: processes that were running when an error was found are told once.
func TestDiskErrorsAreOwedOnce(t *testing.T) {
	cmd := shell("/", "read line")
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	defer func() {
		_, err := io.WriteString(in, "\n")
		require.NoError(t, err)
		require.NoError(t, cmd.Wait())
	}()
	me, other := uint32(unix.Gettid()), uint32(cmd.Process.Pid)
	c := newContent(new(witness))
	require.NoError(t, c.owed(me))
	c.failed(unix.ENOSPC, os.Getpid())
	require.NoError(t, c.owed(me))
	require.ErrorIs(t, c.owed(other), unix.ENOSPC)
	require.NoError(t, c.owed(other))
	c.failed(unix.EIO, 0)
	require.ErrorIs(t, c.owed(me), unix.EIO)
	_, started := processOf(other)
	c.failure.Load().at = started - time.Second
	require.NoError(t, c.owed(other), "it began after the error")
}

func TestProcessOf(t *testing.T) {
	process, started := processOf(uint32(unix.Gettid()))
	require.Equal(t, os.Getpid(), process)
	require.Positive(t, started)
	require.Less(t, started, sinceBoot())
	process, _ = processOf(1 << 30)
	require.Zero(t, process)
}
