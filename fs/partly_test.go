package fs

import (
	"bytes"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func init() {
	// Stores into all pages of the file args[0] by mmap, and brings them home.
	programs["store and sync"] = func(args []string) error {
		f, err := os.OpenFile(args[0], os.O_RDWR, 0)
		if err != nil {
			return err
		}
		b, err := unix.Mmap(int(f.Fd()), 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		copy(b, bytes.Repeat([]byte("x"), len(b)))
		return f.Sync()
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

// TestSyncTellsOfAPart: where SOURCE takes a part of what the kernel sends of its pages, fsync says that it did not
// take the rest. The kernel does not look at how much of a page's write was done.
func TestSyncTellsOfAPart(t *testing.T) {
	requireRoot(t)
	for _, how := range []string{"store and sync", "write and sync"} {
		t.Run(how, func(t *testing.T) {
			bothModes(t, func(t *testing.T, s *scene) {
				at := filepath.Join(s.source, "at")
				require.NoError(t, os.Mkdir(at, 0o755))
				require.NoError(t, unix.Mount("tmpfs", at, "tmpfs", 0, "size=300k"))
				t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
				path := filepath.Join(s.mnt, "at/f")
				require.NoError(t, os.WriteFile(path, nil, 0o644))
				require.NoError(t, os.Truncate(path, 1<<20))
				out, err := program(how, path).CombinedOutput()
				assert.Error(t, err)
				assert.Contains(t, string(out), syscall.ENOSPC.Error())
				got, err := os.ReadFile(filepath.Join(at, "f"))
				require.NoError(t, err)
				part := bytes.Count(got, []byte("x"))
				assert.True(t, 0 < part && part < len(got), "%d", part)
			})
		})
	}
}
