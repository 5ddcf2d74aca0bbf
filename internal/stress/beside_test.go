package stress

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/fs"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

// everyWitness runs a test in each write mode, with each kind of events of SOURCE.
func everyWitness(t *testing.T, test func(t *testing.T, o testmount.Options)) {
	t.Helper()
	for _, events := range []string{fs.EventsFanotify, fs.EventsInotify, fs.EventsOff} {
		t.Run(events, func(t *testing.T) {
			bothModes(t, func(t *testing.T, o testmount.Options) {
				o.Events = events
				test(t, o)
			})
		})
	}
}

// beside is a file in SOURCE, with what is done to it there.
type beside struct {
	t    *testing.T
	m    *testmount.Mount
	name string
}

func newBeside(t *testing.T, m *testmount.Mount, name string, content []byte) beside {
	t.Helper()
	b := beside{t, m, name}
	require.NoError(t, os.WriteFile(b.source(), content, 0o600))
	return b
}

func (b beside) source() string { return filepath.Join(b.m.Source, b.name) }
func (b beside) path() string   { return b.m.Path(b.name) }

// write stores bytes in SOURCE.
func (b beside) write(off int64, p string) {
	b.t.Helper()
	f, err := os.OpenFile(b.source(), os.O_WRONLY, 0)
	require.NoError(b.t, err)
	_, err = f.WriteAt([]byte(p), off)
	require.NoError(b.t, err)
	require.NoError(b.t, f.Close())
}

// open opens the file on the mount.
func (b beside) open() *os.File {
	b.t.Helper()
	f, err := os.OpenFile(b.path(), os.O_RDWR, 0)
	require.NoError(b.t, err)
	b.t.Cleanup(func() { f.Close() })
	return f
}

// put writes through an open on the mount, and makes it durable.
func (b beside) put(f *os.File, off int64, p string) {
	b.t.Helper()
	_, err := f.WriteAt([]byte(p), off)
	require.NoError(b.t, err)
	require.NoError(b.t, f.Sync())
}

// sees fails unless the bytes at off are p for a new reader on the mount, in SOURCE and, after an acquire, on the
// device.
func (b beside) sees(g *gaiafs.Mapping, off int64, p string) {
	b.t.Helper()
	got := make([]byte, len(p))
	f := b.open()
	defer f.Close()
	_, err := f.ReadAt(got, off)
	require.NoError(b.t, err)
	require.Equal(b.t, p, string(got), "on the mount")
	require.Equal(b.t, p, string(mustRead(b.t, b.source())[off:][:len(p)]), "in SOURCE")
	if g == nil {
		return
	}
	_, err = g.Acquire(0, g.Len())
	require.NoError(b.t, err)
	require.Equal(b.t, p, string(load(b.t, g)[off:][:len(p)]), "on the device")
}

// TestMetadataIsNotData changes attributes in SOURCE while a device has stored into a page that a CPU program wrote and
// synced.
func TestMetadataIsNotData(t *testing.T) {
	everyWitness(t, func(t *testing.T, o testmount.Options) {
		m := testmount.Start(t, o)
		for name, change := range map[string]func(b beside) error{
			"chmod":  func(b beside) error { return os.Chmod(b.source(), 0o640) },
			"chown":  func(b beside) error { return os.Chown(b.source(), 1, 1) },
			"link":   func(b beside) error { return os.Link(b.source(), b.source()+".link") },
			"unlink": func(b beside) error { return os.Remove(b.source() + ".second") },
			"xattr":  func(b beside) error { return unix.Setxattr(b.source(), "user.gaiafs", []byte("x"), 0) },
			"rename": func(b beside) error { return os.Rename(b.source()+".second", b.source()+".third") },
			"times": func(b beside) error {
				st, err := os.Stat(b.source())
				require.NoError(t, err)
				return os.Chtimes(b.source(), time.Now(), st.ModTime())
			},
		} {
			for _, look := range []string{"open", "acquire"} {
				b := newBeside(t, m, name+look, make([]byte, 8192))
				require.NoError(t, os.Link(b.source(), b.source()+".second"))
				g := gpu(t, b.path(), 8192, 0)
				store(t, g, 0, 'd')
				b.put(b.open(), 8, "cpu")
				if err := change(b); err == unix.EOPNOTSUPP {
					continue
				} else {
					require.NoError(t, err)
				}
				if look == "open" {
					require.NoError(t, b.open().Close())
				} else {
					_, err := g.Acquire(0, 8192)
					require.NoError(t, err)
				}
				_, err := g.Release(0, 8192)
				require.NoError(t, err)
				require.NoError(t, fsync(t, b.path()))
				b.sees(g, 0, "d\x00\x00\x00\x00\x00\x00\x00cpu")
				require.NoError(t, g.Close())
			}
		}
		require.Zero(t, status(t, m).Counters["baseless_pages"])
	})
}

// TestOwnChangesHideNothing changes a page in SOURCE, and then something else through the mount before anybody looks.
func TestOwnChangesHideNothing(t *testing.T) {
	const size = 4 * 4096
	everyWitness(t, func(t *testing.T, o testmount.Options) {
		m := testmount.Start(t, o)
		for name, change := range map[string]func(b beside, f *os.File, g *gaiafs.Mapping){
			"write": func(b beside, f *os.File, _ *gaiafs.Mapping) { b.put(f, 0, "other page") },
			"chmod": func(b beside, _ *os.File, _ *gaiafs.Mapping) { require.NoError(t, os.Chmod(b.path(), 0o640)) },
			"utimes": func(b beside, _ *os.File, _ *gaiafs.Mapping) {
				require.NoError(t, os.Chtimes(b.path(), time.Now(), time.Now()))
			},
			"append": func(b beside, f *os.File, _ *gaiafs.Mapping) { b.put(f, size, "longer") },
			"grow": func(b beside, _ *os.File, _ *gaiafs.Mapping) {
				require.NoError(t,
					os.Truncate(b.path(), 2*size))
			},
			"cut": func(b beside, _ *os.File, _ *gaiafs.Mapping) {
				require.NoError(t,
					os.Truncate(b.path(), 3*4096+5))
			},
			"link": func(b beside, _ *os.File, _ *gaiafs.Mapping) {
				require.NoError(t,
					os.Link(b.path(), b.path()+".link"))
			},
			"rename": func(b beside, _ *os.File, _ *gaiafs.Mapping) {
				require.NoError(t, os.Rename(b.path()+".second", b.path()+".third"))
			},
			"collect": func(b beside, _ *os.File, g *gaiafs.Mapping) {
				store(t, g, 5, 'c')
				_, err := g.Release(0, size)
				require.NoError(t, err)
				eventually(t, func() error {
					if got := mustRead(t, b.source())[5]; got != 'c' {
						return fmt.Errorf("the released byte is %q in SOURCE", got)
					}
					return nil
				})
			},
		} {
			b := newBeside(t, m, name, pattern(size, 7))
			require.NoError(t, os.Link(b.source(), b.source()+".second"))
			g := gpu(t, b.path(), size, 0)
			f := b.open()
			mustRead(t, b.path())
			b.write(2*4096, "beside")
			change(b, f, g)
			b.sees(g, 2*4096, "beside")
			require.NoError(t, g.Close())
		}
	})
}

// TestChangesInSource makes every kind of change to the bytes of a file in SOURCE, hides it where that is possible, and
// has the mount change another page before anybody looks.
func TestChangesInSource(t *testing.T) {
	const size, at = 6 * 4096, 3*4096 + 100
	everyWitness(t, func(t *testing.T, o testmount.Options) {
		m := testmount.Start(t, o)
		for name, change := range map[string]func(b beside, path string){
			"write":       func(b beside, _ string) { b.write(at, "beside") },
			"second name": func(b beside, _ string) { beside{t, m, b.name + ".second"}.write(at, "beside") },
			"mtime set back": func(b beside, path string) {
				st, err := os.Stat(path)
				require.NoError(t, err)
				b.write(at, "beside")
				require.NoError(t, os.Chtimes(path, time.Now(), st.ModTime()))
			},
			"cut and made longer": func(_ beside, path string) {
				require.NoError(t, os.Truncate(path, at))
				require.NoError(t, os.Truncate(path, size))
			},
			"punch": func(_ beside, path string) {
				f, err := os.OpenFile(path, os.O_WRONLY, 0)
				require.NoError(t, err)
				defer f.Close()
				require.NoError(t, unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE,
					3*4096, 4096))
			},
			"copy_file_range": func(b beside, path string) {
				from, err := os.Open(newBeside(t, m, b.name+" from", pattern(size, 9)).source())
				require.NoError(t, err)
				defer from.Close()
				f, err := os.OpenFile(path, os.O_WRONLY, 0)
				require.NoError(t, err)
				defer f.Close()
				src, dst := int64(4096), int64(3*4096)
				_, err = unix.CopyFileRange(int(from.Fd()), &src, int(f.Fd()), &dst, 4096, 0)
				require.NoError(t, err)
			},
			"mmap": func(_ beside, path string) {
				f, err := os.OpenFile(path, os.O_RDWR, 0)
				require.NoError(t, err)
				defer f.Close()
				p, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
				require.NoError(t, err)
				copy(p[at:], "beside")
				require.NoError(t, unix.Munmap(p))
			},
		} {
			b := newBeside(t, m, name, pattern(size, 7))
			require.NoError(t, os.Link(b.source(), b.source()+".second"))
			g := gpu(t, b.path(), size, 0)
			f := b.open()
			mustRead(t, b.path())
			store(t, g, 10, 'd') // not released, in a page that nobody else changes
			change(b, b.source())
			want := mustRead(t, b.source())
			require.NotEqual(t, pattern(size, 7), want, name)
			b.put(f, 4096, "mount")
			copy(want[4096:], "mount")
			b.sees(g, at, string(want[at:][:100]))
			got := load(t, g)
			require.Equal(t, byte('d'), got[10], name)
			got[10] = want[10]
			requireBytes(t, want, got, "on the device, after "+name)
			requireBytes(t, want, mustRead(t, b.path()), "on the mount, after "+name)
			_, err := g.Release(0, size)
			require.NoError(t, err)
			require.NoError(t, fsync(t, b.path()))
			want[10] = 'd'
			requireBytes(t, want, mustRead(t, b.source()), "in SOURCE, after "+name)
			require.NoError(t, g.Close())
		}
		require.Zero(t, status(t, m).Counters["baseless_pages"])
	})
}

// TestLazyStoresSurviveAChangeInSource: a program stores into a lazy mapping, somebody changes another page in SOURCE,
// and a third one opens the file.
func TestLazyStoresSurviveAChangeInSource(t *testing.T) {
	const size = 4 * 4096
	everyWitness(t, func(t *testing.T, o testmount.Options) {
		m := testmount.Start(t, o)
		for _, kept := range []bool{false, true} { // without and with a base that is a copy
			b := newBeside(t, m, fmt.Sprint("lazy", kept), pattern(size, 7))
			f := b.open()
			g, err := gaiafs.Map(f, 0, size, gaiafs.ProtRead|gaiafs.ProtWrite, 0, gaiafs.Lazy())
			require.NoError(t, err)
			_, err = g.Acquire(0, 4096)
			require.NoError(t, err)
			store(t, g, 10, 'd')
			if kept {
				b.put(f, 20, "cpu")
			}
			b.write(3*4096, "beside")
			require.NoError(t, b.open().Close())
			_, err = g.Release(0, size)
			require.NoError(t, err)
			require.NoError(t, f.Sync())
			want := pattern(size, 7)
			want[10] = 'd'
			copy(want[3*4096:], "beside")
			if kept {
				copy(want[20:], "cpu")
			}
			requireBytes(t, want, mustRead(t, b.source()), "in SOURCE")
			requireBytes(t, want, mustRead(t, b.path()), "on the mount")
			_, err = g.Acquire(0, size)
			require.NoError(t, err)
			requireBytes(t, want, load(t, g), "on the device")
			require.NoError(t, g.Close())
		}
	})
}

// TestAppendedInSource appends in SOURCE while the kernel has the page of the end, and looks at it in every way.
func TestAppendedInSource(t *testing.T) {
	everyWitness(t, func(t *testing.T, o testmount.Options) {
		if o.WriteBack {
			t.Skip("the kernel keeps its own size, see docs/write-back.md")
		}
		m := testmount.Start(t, o)
		for name, look := range map[string]func(b beside, f *os.File) (size int64){
			"fstat": func(_ beside, f *os.File) int64 {
				st, err := f.Stat()
				require.NoError(t, err)
				return st.Size()
			},
			"stat": func(b beside, _ *os.File) int64 {
				st, err := os.Stat(b.path())
				require.NoError(t, err)
				return st.Size()
			},
			"read": func(_ beside, f *os.File) int64 {
				n, _ := f.ReadAt(make([]byte, 20000), 0)
				return int64(n)
			},
			"list": func(b beside, f *os.File) int64 {
				entries, err := os.ReadDir(m.Dir)
				require.NoError(t, err)
				require.NotEmpty(t, entries)
				st, err := f.Stat()
				require.NoError(t, err)
				return st.Size()
			},
			"open": func(b beside, _ *os.File) int64 { return int64(len(mustRead(t, b.path()))) },
		} {
			for _, more := range []int{10, 3 * 4096} {
				b := newBeside(t, m, fmt.Sprint(name, more), []byte("the beginning"))
				f := b.open()
				p, err := unix.Mmap(int(f.Fd()), 0, 4*4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
				require.NoError(t, err)
				require.Equal(t, "the beginning", string(p[:13]))
				out, err := os.OpenFile(b.source(), os.O_WRONLY|os.O_APPEND, 0)
				require.NoError(t, err)
				_, err = out.WriteString(strings.Repeat("x", more))
				require.NoError(t, err)
				require.NoError(t, out.Close())
				want := []byte("the beginning" + strings.Repeat("x", more))
				eventually(t, func() error {
					if n := look(b, f); n != int64(len(want)) {
						return fmt.Errorf("the size is %d", n)
					}
					return nil
				})
				requireBytes(t, want, bytes.Clone(p[:len(want)]), "mapped")
				got := make([]byte, len(want))
				_, err = f.ReadAt(got, 0)
				require.NoError(t, err)
				requireBytes(t, want, got, "read")
				p[0], want[0] = 'T', 'T'
				require.NoError(t, unix.Msync(p, unix.MS_SYNC))
				requireBytes(t, want, mustRead(t, b.source()), "in SOURCE, after a store")
				require.NoError(t, unix.Munmap(p))
				require.NoError(t, f.Close())
			}
		}
	})
}

// TestFollowedInSource follows a file as `tail -f` does, while it is appended to in SOURCE.
func TestFollowedInSource(t *testing.T) {
	everyWitness(t, func(t *testing.T, o testmount.Options) {
		if o.WriteBack {
			t.Skip("the kernel keeps its own size, see docs/write-back.md")
		}
		m := testmount.Start(t, o)
		b := newBeside(t, m, "log", []byte("line 0\n"))
		f := b.open()
		p, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		require.NoError(t, err)
		defer func() { require.NoError(t, unix.Munmap(p)) }()
		want := "line 0\n"
		var got []byte
		buf := make([]byte, 4096)
		out, err := os.OpenFile(b.source(), os.O_WRONLY|os.O_APPEND, 0)
		require.NoError(t, err)
		defer out.Close()
		for i := 1; i <= 5; i++ {
			eventually(t, func() error {
				n, _ := f.Read(buf)
				if got = append(got, buf[:n]...); len(got) < len(want) {
					return fmt.Errorf("%d bytes", len(got))
				}
				return nil
			})
			require.Equal(t, want, string(got))
			p[0]++ // the page is dirty
			line := fmt.Sprintf("line %d\n", i)
			_, err = out.WriteString(line)
			require.NoError(t, err)
			want += line
		}
		require.NoError(t, unix.Msync(p, unix.MS_SYNC))
		require.Equal(t, want[1:], string(mustRead(t, b.source())[1:]))
	})
}
