package fs

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func init() {
	programs["store and sync"] = func(args []string) error {
		return storeAndSync(args[0], func(b []byte) { copy(b, bytes.Repeat([]byte("x"), len(b))) })
	}
	// "store into pages and sync" stores into every other page. The kernel sends these one by one.
	programs["store into pages and sync"] = func(args []string) error {
		return storeAndSync(args[0], func(b []byte) {
			for at := 0; at < len(b); at += 8192 {
				b[at] = 'x'
			}
		})
	}
	programs["write and sync"] = func(args []string) error {
		f, err := os.OpenFile(args[0], os.O_RDWR, 0)
		if err != nil {
			return err
		}
		if _, err = f.Write(bytes.Repeat([]byte("x"), 1<<20)); err != nil {
			return err
		}
		return f.Sync()
	}
}

// storeAndSync maps the first MiB of a file, calls store to change it, and writes it home.
func storeAndSync(path string, store func(b []byte)) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	b, err := unix.Mmap(int(f.Fd()), 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	store(b)
	return f.Sync()
}

// onFullSource makes a file of 1 MiB on a SOURCE with room for less, and returns its paths on the mount and in SOURCE.
func (s *scene) onFullSource(t *testing.T) (path, home string) {
	t.Helper()
	at := filepath.Join(s.source, "at")
	require.NoError(t, os.Mkdir(at, 0o755))
	require.NoError(t, unix.Mount("tmpfs", at, "tmpfs", 0, "size=300k"))
	t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
	path = filepath.Join(s.mnt, "at/f")
	require.NoError(t, os.WriteFile(path, nil, 0o644))
	require.NoError(t, os.Truncate(path, 1<<20))
	return path, filepath.Join(at, "f")
}

// TestSyncTellsOfAPart: if SOURCE takes only a part of the pages that the kernel sends, fsync reports an error. The
// kernel ignores how much of a write-back was done.
func TestSyncTellsOfAPart(t *testing.T) {
	requireRoot(t)
	for _, how := range []string{"store and sync", "write and sync"} {
		t.Run(how, func(t *testing.T) {
			bothModes(t, func(t *testing.T, s *scene) {
				path, home := s.onFullSource(t)
				out, err := program(how, path).CombinedOutput()
				assert.Error(t, err)
				assert.Contains(t, string(out), syscall.ENOSPC.Error())
				got, err := os.ReadFile(home)
				require.NoError(t, err)
				part := bytes.Count(got, []byte("x"))
				assert.True(t, 0 < part && part < len(got), "%d", part)
			})
		})
	}
}

// TestOneLineForPagesThatSourceDoesNotTake: the log has one line for all pages of a file, until the file is opened
// anew.
func TestOneLineForPagesThatSourceDoesNotTake(t *testing.T) {
	requireRoot(t)
	r := new(requests)
	s := mount(t, func(o *Options) { o.Log = slog.New(slog.NewTextHandler(r, nil)) })
	path, _ := s.onFullSource(t)
	for opens := range 2 {
		for _, n := range s.fs.table.byID.all() {
			c := n.data.Load()
			require.Eventually(t, func() bool { return c == nil || c.opens.Load() == 0 }, eventually, tick)
		}
		out, err := program("store into pages and sync", path).CombinedOutput()
		assert.Error(t, err)
		assert.Contains(t, string(out), syscall.ENOSPC.Error())
		r.mu.Lock()
		assert.Equal(t, opens+1, strings.Count(r.text.String(), "could not be written to SOURCE"), r.text.String())
		r.mu.Unlock()
	}
}
