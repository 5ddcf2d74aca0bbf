package fs

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"
	"time"
	"unsafe"

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
	"fallocate": func(t *testing.T, f *os.File) {
		require.NoError(t, unix.Fallocate(int(f.Fd()), 0, 49_000, 1000))
	},
	"fallocate of a zeroed range": func(t *testing.T, f *os.File) {
		err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_ZERO_RANGE, 49_000, 1000)
		if err == unix.EOPNOTSUPP {
			t.Skip("the filesystem cannot zero a range")
		}
		require.NoError(t, err)
	},
	"copy_file_range": func(t *testing.T, f *os.File) {
		from, err := os.CreateTemp(filepath.Dir(f.Name()), "from")
		require.NoError(t, err)
		defer from.Close()
		require.NoError(t, from.Truncate(1000))
		to := int64(49_000)
		n, err := unix.CopyFileRange(int(from.Fd()), nil, int(f.Fd()), &to, 1000, 0)
		require.NoError(t, err)
		require.Equal(t, 1000, n)
	},
	"direct write": func(t *testing.T, f *os.File) {
		d, err := os.OpenFile(f.Name(), os.O_WRONLY|unix.O_DIRECT, 0)
		require.NoError(t, err)
		defer d.Close()
		block, err := unix.Mmap(-1, 0, page.Size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		require.NoError(t, err)
		defer unix.Munmap(block)
		_, err = d.WriteAt(block, 11*page.Size)
		require.NoError(t, err)
		require.NoError(t, d.Truncate(50_000))
	},
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

// TestStoresPastTheEndStayOutside: bytes that a device stored past the end of a file do not enter it, however it
// becomes longer, and whether or not the kernel knew it to be longer than SOURCE before. Bytes that it stored before
// that end do.
func TestStoresPastTheEndStayOutside(t *testing.T) {
	const text, mapped = "outside", 64 << 10
	at := []int64{7000, 20_000, 48_000}
	for name, grow := range growths {
		t.Run(name, func(t *testing.T) {
			everyModeWithDevices(t, func(t *testing.T, s *scene, cache *pagecache.Cache, n *notary) {
				path := filepath.Join(s.mnt, "f")
				for round := range 8 {
					appended, synced, released := round&1 != 0, round&2 != 0, round&4 != 0
					f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0644)
					require.NoError(t, err)
					require.NoError(t, f.Truncate(17))
					w := mapOn(t, cache, n, f, 0, mapped)
					if appended {
						_, err = f.WriteAt(make([]byte, page.Size), 17)
						require.NoError(t, err)
						w.store(t, 3000, []byte(text))
					}
					if synced {
						require.NoError(t, f.Sync())
					}
					for _, at := range at {
						w.store(t, at, []byte(text))
					}
					if released {
						w.release(t, mapped)
					}
					grow(t, f)
					check := func(when string, load func(at int64) string) {
						t.Helper()
						for _, at := range at {
							assert.Equalf(t, string(make([]byte, len(text))), load(at),
								"%d, %s; appended: %v, synced: %v, released: %v", at, when, appended, synced, released)
						}
					}
					read := func(path string) func(int64) string {
						got, err := os.ReadFile(path)
						require.NoError(t, err)
						require.Len(t, got, 50_000)
						if appended && (path != f.Name() || released) {
							assert.Equal(t, text, string(got[3000:][:len(text)]), "%s: a store before the end is lost", path)
						}
						return func(at int64) string { return string(got[at:][:len(text)]) }
					}
					check("mount", read(path))
					_, err = w.Acquire(t.Context(), 0, mapped, false)
					require.NoError(t, err)
					check("device", func(at int64) string { return w.loadAt(t, at, len(text)) })
					w.release(t, mapped)
					check("mount, after a release", read(path))
					require.NoError(t, f.Sync())
					check("SOURCE", read(filepath.Join(s.source, "f")))
					w.close(t)
					require.NoError(t, f.Close())
					require.NoError(t, os.Remove(path))
				}
			})
		})
	}
}

// TestStoresPastTheEndOfAFileThatWasCutAtOpen: an open with O_TRUNC cuts a file whose attributes the kernel has cached.
// What a device stores past the new end does not enter the file that a write makes longer.
func TestStoresPastTheEndOfAFileThatWasCutAtOpen(t *testing.T) {
	everyModeWithDevices(t, func(t *testing.T, s *scene, cache *pagecache.Cache, n *notary) {
		const size = 64 << 10
		path := filepath.Join(s.mnt, "f")
		require.NoError(t, os.WriteFile(path, make([]byte, size), 0o644))
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		require.NoError(t, err)
		defer f.Close()
		w := mapOn(t, cache, n, f, 0, size)
		defer w.close(t)
		_, err = f.Stat()
		require.NoError(t, err)
		cut, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
		require.NoError(t, err)
		defer cut.Close()
		w.store(t, 20_000, []byte("outside"))
		_, err = cut.WriteAt([]byte("end"), 49_997)
		require.NoError(t, err)
		w.release(t, size)
		require.NoError(t, f.Sync())
		for _, path := range []string{path, filepath.Join(s.source, "f")} {
			got, err := os.ReadFile(path)
			require.NoError(t, err)
			require.Equal(t, string(make([]byte, 49_997))+"end", string(got), path)
		}
	}, func(o *Options) { o.AttrTimeout = time.Hour })
}

// TestStoresPastTheEndThatTheKernelKnows: the kernel has many bytes that it has not sent. A device stores a little past
// their end, and a write makes the file longer.
func TestStoresPastTheEndThatTheKernelKnows(t *testing.T) {
	everyModeWithDevices(t, func(t *testing.T, s *scene, cache *pagecache.Cache, n *notary) {
		const off, size, known = 10 << 20, 2 << 20, 10<<20 + 1000
		path := filepath.Join(s.mnt, "f")
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
		require.NoError(t, err)
		defer f.Close()
		w := mapAs(t, cache, n, f, pagecache.MapRequest{Off: off, Len: size, Writable: true, Launder: true})
		defer w.close(t)
		_, err = f.WriteAt(make([]byte, known), 0)
		require.NoError(t, err)
		w.store(t, known+100_000, []byte("outside"))
		_, err = f.WriteAt([]byte("end"), known+200_000)
		require.NoError(t, err)
		w.release(t, size)
		require.NoError(t, f.Sync())
		for _, path := range []string{path, filepath.Join(s.source, "f")} {
			got, err := os.ReadFile(path)
			require.NoError(t, err)
			require.Equal(t, string(make([]byte, 7)), string(got[known+100_000:][:7]), path)
		}
	})
}

// TestDeviceStoresInAFileBelowAnotherMount: a bind mount of SOURCE covers the directory of an open file. What the
// daemon asks the kernel about the file, and tells it, concerns the file on the mount all the same.
func TestDeviceStoresInAFileBelowAnotherMount(t *testing.T) {
	requireRoot(t)
	everyModeWithDevices(t, func(t *testing.T, s *scene, cache *pagecache.Cache, n *notary) {
		dir := filepath.Join(s.mnt, "dir")
		require.NoError(t, os.Mkdir(dir, 0o755))
		f, err := os.OpenFile(filepath.Join(dir, "f"), os.O_CREATE|os.O_RDWR, 0o644)
		require.NoError(t, err)
		defer f.Close()
		w := mapOn(t, cache, n, f, 0, 64<<10)
		defer w.close(t)
		require.NoError(t, unix.Mount(filepath.Join(s.source, "dir"), dir, "", unix.MS_BIND, ""))
		defer func() { require.NoError(t, unix.Unmount(dir, unix.UMOUNT_NOFOLLOW)) }()

		old := []unix.Timespec{{Sec: 5}, {Sec: 6}}
		require.NoError(t, unix.UtimesNanoAt(int(f.Fd()), "", old, unix.AT_EMPTY_PATH))
		_, err = f.WriteAt(make([]byte, 8000), 0)
		require.NoError(t, err)
		w.store(t, 5000, []byte("inside"))
		require.NoError(t, unix.Fallocate(int(f.Fd()), 0, 9000, 100)) // asks for the size that the kernel knows
		require.NoError(t, unix.UtimesNanoAt(int(f.Fd()), "", old, unix.AT_EMPTY_PATH))
		before := time.Now().Add(-clockStep)
		w.release(t, 64<<10)
		st, err := f.Stat()
		require.NoError(t, err)
		assert.True(t, st.ModTime().After(before), "%v", st.ModTime())
		got := make([]byte, 9100)
		_, err = f.ReadAt(got, 0)
		require.NoError(t, err)
		require.Equal(t, "inside", string(got[5000:5006]))
	})
}

// TestAnAbortedGroupBelowAnEndThatTheKernelKnows: a group stores before an end of the file that home may not have yet.
// If it is aborted, no later release brings these stores into the file.
func TestAnAbortedGroupBelowAnEndThatTheKernelKnows(t *testing.T) {
	everyModeWithDevices(t, func(t *testing.T, s *scene, cache *pagecache.Cache, n *notary) {
		ctx := context.Background()
		f, err := os.OpenFile(filepath.Join(s.mnt, "f"), os.O_CREATE|os.O_RDWR, 0o644)
		require.NoError(t, err)
		defer f.Close()
		w := mapOn(t, cache, n, f, 0, page.Size)
		defer w.close(t)
		_, err = f.WriteAt([]byte("written"), 1000)
		require.NoError(t, err)
		g, err := cache.BeginGroup(ctx, []pagecache.GroupRange{{Of: w.Mapping, Len: page.Size}})
		require.NoError(t, err)
		w.store(t, 500, []byte("aborted"))
		g.Abort(ctx)
		w.release(t, page.Size)
		want := make([]byte, 1007)
		copy(want[1000:], "written")
		require.NoError(t, f.Sync())
		for _, path := range []string{f.Name(), filepath.Join(s.source, "f")} {
			got, err := os.ReadFile(path)
			require.NoError(t, err)
			require.Equal(t, want, got)
		}
	})
}

// backgroundRead reads into p, which is aligned, by io_submit(2). It returns the result.
func backgroundRead(t *testing.T, fd int, p []byte, off int64) int64 {
	t.Helper()
	var ring uintptr
	_, _, errno := unix.Syscall(unix.SYS_IO_SETUP, 1, uintptr(unsafe.Pointer(&ring)), 0)
	require.Zero(t, errno)
	defer unix.Syscall(unix.SYS_IO_DESTROY, ring, 0, 0)
	asked := &struct { // struct iocb; the kernel uses it and p until the event is there
		data              uint64
		key, flags        uint32
		opcode            uint16
		priority          int16
		fd                uint32
		buf, length       uint64
		offset            int64
		_                 uint64
		iocbFlags, notify uint32
	}{fd: uint32(fd), buf: uint64(uintptr(unsafe.Pointer(&p[0]))), length: uint64(len(p)), offset: off}
	_, _, errno = unix.Syscall(unix.SYS_IO_SUBMIT, ring, 1, uintptr(unsafe.Pointer(&asked)))
	require.Zero(t, errno)
	var event struct{ data, asked, result, result2 int64 }
	n, _, errno := unix.Syscall6(unix.SYS_IO_GETEVENTS, ring, 1, 1, uintptr(unsafe.Pointer(&event)), 0, 0)
	require.Zero(t, errno)
	require.EqualValues(t, 1, n)
	runtime.KeepAlive(asked)
	runtime.KeepAlive(p)
	return event.result
}

// TestBackgroundReadsOfAHole: a program makes a file longer, and reads the hole with O_DIRECT in the background. It
// gets zeros up to the file's end, also if only the kernel knows that end.
func TestBackgroundReadsOfAHole(t *testing.T) {
	everyModeWithDevices(t, func(t *testing.T, s *scene, cache *pagecache.Cache, n *notary) {
		for _, mapped := range []bool{false, true} {
			path := filepath.Join(s.mnt, fmt.Sprint("f", mapped))
			f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
			require.NoError(t, err)
			_, err = f.Write([]byte("start"))
			require.NoError(t, err)
			require.NoError(t, f.Sync())
			if mapped {
				defer mapOn(t, cache, n, f, 0, page.Size).close(t)
			}
			const size = 100*page.Size + 3
			_, err = f.WriteAt([]byte("end"), size-3)
			require.NoError(t, err)
			direct, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECT, 0)
			require.NoError(t, err)
			for off, want := range map[int64]int64{
				0: 2 * page.Size, 50 * page.Size: 2 * page.Size, 99 * page.Size: page.Size + 3, 100 * page.Size: 3,
				101 * page.Size: 0,
			} {
				p := aligned(2 * page.Size)
				for i := range p {
					p[i] = 'p'
				}
				require.Equal(t, want, backgroundRead(t, direct, p, off), "at %d", off)
				whole := make([]byte, want)
				_, err := f.ReadAt(whole, off)
				require.NoError(t, err)
				require.Equal(t, whole, p[:want], "at %d", off)
			}
			require.NoError(t, unix.Close(direct))
			require.NoError(t, f.Close())
		}
	})
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
