package fs

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

// growths are ways in which a program makes a file longer, to 50,000 bytes.
var growths = map[string]func(t *testing.T, f *os.File){
	"write": func(t *testing.T, f *os.File) {
		_, err := f.WriteAt([]byte("end"), 49_997)
		require.NoError(t, err)
	},
	"appends": func(t *testing.T, f *os.File) {
		a, err := os.OpenFile(f.Name(), os.O_WRONLY|os.O_APPEND, 0)
		require.NoError(t, err)
		defer a.Close()
		st, err := a.Stat()
		require.NoError(t, err)
		for at := st.Size(); at < 50_000; at += 1000 {
			_, err := a.Write(make([]byte, min(1000, 50_000-at)))
			require.NoError(t, err)
		}
	},
	"ftruncate": func(t *testing.T, f *os.File) { require.NoError(t, f.Truncate(50_000)) },
	"ftruncate, then mmap": func(t *testing.T, f *os.File) {
		require.NoError(t, f.Truncate(50_000))
		run(t, program("store by mmap", f.Name(), "49997", "end"))
	},
}

func init() {
	// "store by mmap" maps the file args[0] and stores the bytes args[2] at args[1]. The process that serves a mount
	// must not fault on a page of it: a garbage collection would wait for the faulting thread, and the daemon for the
	// collection.
	programs["store by mmap"] = func(args []string) error {
		f, err := os.OpenFile(args[0], os.O_RDWR, 0)
		if err != nil {
			return err
		}
		at, err := strconv.Atoi(args[1])
		if err != nil {
			return err
		}
		b, err := unix.Mmap(int(f.Fd()), 0, at+len(args[2]), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		copy(b[at:], args[2])
		return unix.Munmap(b)
	}
}

// TestDeviceStoresInsideAFileThatGrew makes a device map more than the file has, a program make the file longer, and
// the device store there without an acquire. If the kernel caches writes, only the kernel knows the length.
func TestDeviceStoresInsideAFileThatGrew(t *testing.T) {
	for name, grow := range growths {
		t.Run(name, func(t *testing.T) {
			everyModeWithDevices(t, func(t *testing.T, s *scene, cache *pagecache.Cache, n *notary) {
				for _, size := range []int64{0, 100, page.Size} {
					path := filepath.Join(s.mnt, "f")
					f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0644)
					require.NoError(t, err)
					require.NoError(t, f.Truncate(size))
					w := mapOn(t, cache, n, f, 0, 64<<10)

					w.store(t, 6000, []byte("released outside"))
					w.release(t, 64<<10)
					w.store(t, 7000, []byte("outside"))
					w.store(t, 60_000, []byte("outside"))
					grow(t, f)
					w.store(t, 5000, []byte("inside"))
					w.store(t, 40_000, []byte("inside"))
					w.release(t, 64<<10)
					w.store(t, 30_000, []byte("more"))
					w.release(t, 64<<10)

					want := make([]byte, 50_000)
					copy(want[5000:], "inside")
					copy(want[40_000:], "inside")
					copy(want[30_000:], "more")
					check := func(path string) {
						t.Helper()
						got, err := os.ReadFile(path)
						require.NoError(t, err)
						require.Len(t, got, len(want))
						copy(want[49_997:], got[49_997:])
						for i := range want {
							if want[i] != got[i] {
								assert.Failf(t, "wrong byte", "%d of %s, whose size was %d: %q, not %q", i, path, size,
									got[i], want[i])
								return
							}
						}
					}
					check(path)
					require.NoError(t, f.Sync())
					check(path)
					check(filepath.Join(s.source, "f"))
					w.close(t)
					require.NoError(t, f.Sync())
					check(filepath.Join(s.source, "f"))
					require.NoError(t, f.Close())
					require.NoError(t, os.Remove(path))
				}
			})
		})
	}
}

// TestSurpassedPageIsSuspected: a request makes a file longer that grew in SOURCE. What the kernel sends of the page of
// the former end is merged against that page's former bytes, even if the request's descriptor cannot read.
func TestSurpassedPageIsSuspected(t *testing.T) {
	s := mount(t, func(o *Options) { o.AttrTimeout, o.Events = 3600e9, EventsOff })
	home := filepath.Join(s.source, "f")
	require.NoError(t, os.WriteFile(home, []byte("kernel"), 0o644))
	_, err := os.ReadFile(filepath.Join(s.mnt, "f"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(home, []byte("kernel, source"), 0o644))
	for name, flags := range map[string]int{"path": unix.O_PATH, "write": unix.O_WRONLY, "read": unix.O_RDONLY} {
		fd, err := unix.Open(home, flags, 0)
		require.NoError(t, err)
		defer unix.Close(fd)
		var st unix.Stat_t
		require.NoError(t, unix.Fstat(fd, &st))
		n := s.fs.table.byInode(inodeKey{st.Dev, st.Ino})
		told := n.told.Load()
		require.NoError(t, s.fs.lengthen(n, fd, st.Size, 100, func() error {
			x := n.content().hazard.suspects[0]
			if assert.NotNil(t, x, name) {
				assert.Equal(t, "kernel\x00", string(x.base[:7]), name)
			}
			return nil
		}))
		n.told.Store(told)
		require.ErrorIs(t, s.fs.lengthen(n, fd, st.Size, 100, func() error { return unix.ENOSPC }), unix.ENOSPC)
		require.Equal(t, told, n.told.Load(), "a request that failed made nothing longer")
	}
}
