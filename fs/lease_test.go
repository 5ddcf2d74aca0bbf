package fs

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// leased makes a file in SOURCE and takes a lease on it that any open breaks.
func (s *scene) leased(t *testing.T, name, text string) *os.File {
	return s.leasedAs(t, name, text, unix.F_WRLCK)
}

// leasedAs is leased with the given kind of lease: opens for reading do not break F_RDLCK.
func (s *scene) leasedAs(t *testing.T, name, text string, kind int) *os.File {
	t.Helper()
	path := filepath.Join(s.source, name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	f, err := os.Open(path)
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, kind); err != nil {
		t.Skip("leases do not work here:", err)
	}
	return f
}

// breaks waits until an open is about to break a lease of the given kind.
func breaks(t *testing.T, f *os.File, was int) {
	t.Helper()
	require.Eventually(t, func() bool {
		kind, err := unix.FcntlInt(f.Fd(), unix.F_GETLEASE, 0)
		return err == nil && kind != was
	}, eventually, tick, "no open broke the lease")
}

// TestOpenWaitsForLease: an open on the mount waits while a process has a lease on the file in SOURCE, as in SOURCE
// itself.
func TestOpenWaitsForLease(t *testing.T) {
	for name, change := range map[string]func(*Options){"mount": func(*Options) {}, "kernel opens": kernelOpens} {
		t.Run(name, func(t *testing.T) {
			s := mount(t, change)
			f := s.leased(t, "f", "text")
			require.NoError(t, os.WriteFile(filepath.Join(s.source, "other"), []byte("other"), 0o644))
			path := filepath.Join(s.mnt, "f")
			type outcome struct {
				text []byte
				err  error
			}
			done := make(chan outcome, 1)
			go func() {
				text, err := os.ReadFile(path)
				done <- outcome{text, err}
			}()
			breaks(t, f, unix.F_WRLCK)
			got, err := os.ReadFile(filepath.Join(s.mnt, "other")) // other files are not affected
			require.NoError(t, err)
			assert.Equal(t, "other", string(got))
			if !s.fs.kernelOpens {
				_, err = unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK, 0)
				assert.Equal(t, syscall.EWOULDBLOCK, err)
			}
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			var st unix.Stat_t
			require.NoError(t, unix.Fstat(int(f.Fd()), &st))
			_, errno := s.fs.openContent(ctx, s.fs.table.byInode(inodeKey{st.Dev, st.Ino}), unix.O_RDONLY, false)
			assert.Equal(t, syscall.EINTR, errno)
			assert.Empty(t, done)
			_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_UNLCK)
			require.NoError(t, err)
			o := <-done
			require.NoError(t, o.err)
			assert.Equal(t, "text", string(o.text))
		})
	}
}

func init() {
	programs["truncate"] = func(args []string) error { return unix.Truncate(args[0], 3) }
	programs["open to truncate"] = func(args []string) error {
		fd, err := unix.Open(args[0], unix.O_RDONLY|unix.O_TRUNC, 0)
		if err == nil {
			unix.Close(fd)
		}
		return err
	}
}

// TestTruncationWaitsForLease: a truncation waits while a process has a lease on the file in SOURCE. Readers and
// devices do not wait with it, and a program that waits can be killed.
func TestTruncationWaitsForLease(t *testing.T) {
	for name, left := range map[string]string{"truncate": "tex", "open to truncate": ""} {
		t.Run(name, func(t *testing.T) {
			s := mount(t)
			f := s.leasedAs(t, "f", "text", unix.F_RDLCK)
			path := filepath.Join(s.mnt, "f")
			cmds := []*exec.Cmd{program(name, path), program(name, path)}
			ended := make([]chan error, len(cmds))
			for i, cmd := range cmds {
				require.NoError(t, cmd.Start())
				ended[i] = make(chan error, 1)
				go func() { ended[i] <- cmd.Wait() }()
				if i == 0 {
					breaks(t, f, unix.F_RDLCK)
				}
			}
			got, err := os.ReadFile(path)
			require.NoError(t, err)
			assert.Equal(t, "text", string(got))
			var st unix.Stat_t
			require.NoError(t, unix.Fstat(int(f.Fd()), &st))
			gate := &s.fs.table.byInode(inodeKey{st.Dev, st.Ino}).content().gate
			require.True(t, gate.TryLock(), "a device would wait")
			gate.Unlock()
			require.NoError(t, cmds[1].Process.Kill())
			assert.Error(t, <-ended[1])
			require.Empty(t, ended[0])
			_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_UNLCK)
			require.NoError(t, err)
			require.NoError(t, <-ended[0])
			got, err = os.ReadFile(filepath.Join(s.source, "f"))
			require.NoError(t, err)
			assert.Equal(t, left, string(got))
		})
	}
}
