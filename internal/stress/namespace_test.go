package stress

import (
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

// liveFile is a file with a live writable mapping on a device and another of a CPU program, both with bytes that nobody
// released or synced yet, and what it must read.
type liveFile struct {
	t    *testing.T
	m    *testmount.Mount
	name string
	f    *os.File
	gpu  *gaiafs.Mapping
	sync func()
	// close ends both mappings and the open file.
	close func()
	cpu   []byte
	want  []byte
}

const livePages = 8

// newLiveFile makes a file whose pages 0 to 7 the device and the CPU program both wrote to: the device the bytes 100 to
// 199 of each, the CPU program the bytes 200 to 299.
func newLiveFile(t *testing.T, m *testmount.Mount, name string) *liveFile {
	t.Helper()
	l := &liveFile{t: t, m: m, name: name, want: pattern(livePages*4096, 1)}
	require.NoError(t, os.WriteFile(m.Path(name), l.want, 0o600))
	f, err := os.OpenFile(m.Path(name), os.O_RDWR, 0)
	require.NoError(t, err)
	l.f = f
	g := gpu(t, m.Path(name), livePages*4096, 0)
	l.gpu = g
	l.sync = func() { t.Helper(); require.NoError(t, g.Sync(0, livePages*4096)) }
	l.cpu, err = unix.Mmap(int(f.Fd()), 0, livePages*4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	l.close = sync.OnceFunc(func() {
		require.NoError(t, g.Close())
		require.NoError(t, unix.Munmap(l.cpu))
		require.NoError(t, f.Close())
	})
	t.Cleanup(l.close)
	for page := range livePages {
		l.storeGPU(page, 100)
		for i := range 100 {
			l.cpu[page*4096+200+i] = byte(i + 1)
			l.want[page*4096+200+i] = byte(i + 1)
		}
	}
	_, err = g.Release(0, livePages*4096/2) // half of it released, half not
	require.NoError(t, err)
	return l
}

// storeGPU stores a hundred bytes on the device.
func (l *liveFile) storeGPU(page, at int) {
	p := make([]byte, 100)
	for i := range p {
		p[i] = byte(0xff - i)
		if off := page*4096 + at + i; off < len(l.want) {
			l.want[off] = p[i]
		}
	}
	store(l.t, l.gpu, int64(page*4096+at), p...)
}

// check compares the file on the mount and in SOURCE, and the device after an acquire, with what it must be.
func (l *liveFile) check(name string) {
	l.t.Helper()
	l.sync()
	sameEverywhere(l.t, l.m, name, l.want)
	g := gpu(l.t, l.m.Path(name), livePages*4096, 0)
	// What programs stored past the end of the file stays among those on the device.
	in := min(len(l.want), livePages*4096)
	requireBytes(l.t, l.want[:in], load(l.t, g)[:in], "on the device")
	require.NoError(l.t, g.Close())
}

// allocate is fallocate on the mount. Where SOURCE can do it and the mount cannot because the kernel does not pass it
// on, it says so.
func (l *liveFile) allocate(mode uint32, off, n int64) bool {
	l.t.Helper()
	err := unix.Fallocate(int(l.f.Fd()), mode, off, n)
	if err == unix.EOPNOTSUPP {
		return false
	}
	require.NoError(l.t, err)
	return true
}

// TestLiveNamespace changes files, and their names, under live writable mappings. Each time everything that was written
// is where it should be.
func TestLiveNamespace(t *testing.T) {
	cases := []struct {
		name   string
		change func(t *testing.T, l *liveFile) (name string)
	}{
		{"cut", func(t *testing.T, l *liveFile) string {
			l.sync() // so that page 3 has everything before its end goes
			require.NoError(t, os.Truncate(l.m.Path(l.name), 3*4096+150))
			l.want = l.want[:3*4096+150]
			for i, c := range load(t, l.gpu)[len(l.want):] {
				require.Zero(t, c, "byte %d past the end, on the device", i)
			}
			l.storeGPU(5, 700) // goes nowhere
			l.storeGPU(1, 700)
			return l.name
		}},
		{"cut and grown", func(t *testing.T, l *liveFile) string {
			l.sync()
			require.NoError(t, l.f.Truncate(5000))
			l.storeGPU(6, 700) // past the end: never part of the file
			_ = l.cpu[0]
			require.NoError(t, l.f.Truncate(livePages*4096))
			clear(l.want[5000:])
			l.storeGPU(7, 900) // part of it now
			return l.name
		}},
		{"grown", func(t *testing.T, l *liveFile) string {
			require.NoError(t, l.f.Truncate(livePages*4096+777))
			l.want = append(l.want, make([]byte, 777)...)
			return l.name
		}},
		{"hole", func(t *testing.T, l *liveFile) string {
			l.sync()
			if !l.allocate(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 4096+50, 3*4096) {
				t.Skip("the backing filesystem makes no holes")
			}
			clear(l.want[4096+50:][:3*4096])
			l.storeGPU(2, 1000) // into the hole
			return l.name
		}},
		{"zero range", func(t *testing.T, l *liveFile) string {
			l.sync()
			if !l.allocate(unix.FALLOC_FL_ZERO_RANGE, 2*4096+10, 4096) {
				t.Skip("the backing filesystem zeroes no ranges")
			}
			clear(l.want[2*4096+10:][:4096])
			l.storeGPU(2, 3000)
			return l.name
		}},
		{"collapse", func(t *testing.T, l *liveFile) string {
			if !l.allocate(unix.FALLOC_FL_COLLAPSE_RANGE, 4096, 4096) {
				t.Skip("the kernel passes no FALLOC_FL_COLLAPSE_RANGE on to FUSE filesystems")
			}
			l.want = append(l.want[:4096:4096], l.want[2*4096:]...)
			return l.name
		}},
		{"insert", func(t *testing.T, l *liveFile) string {
			if !l.allocate(unix.FALLOC_FL_INSERT_RANGE, 4096, 4096) {
				t.Skip("the kernel passes no FALLOC_FL_INSERT_RANGE on to FUSE filesystems")
			}
			l.want = append(l.want[:4096:4096], append(make([]byte, 4096), l.want[4096:]...)...)
			return l.name
		}},
		{"rename", func(t *testing.T, l *liveFile) string {
			require.NoError(t, os.Mkdir(l.m.Path("dir"), 0o700))
			require.NoError(t, os.Rename(l.m.Path(l.name), l.m.Path("dir", "other")))
			l.storeGPU(3, 2000)
			return "dir/other"
		}},
		{"rename over", func(t *testing.T, l *liveFile) string {
			// The live file is the one that loses its name.
			require.NoError(t, os.WriteFile(l.m.Path("new"), pattern(100, 9), 0o600))
			require.NoError(t, os.Rename(l.m.Path("new"), l.m.Path(l.name)))
			l.storeGPU(3, 2000)
			l.sync()
			got := make([]byte, len(l.want))
			_, err := l.f.ReadAt(got, 0)
			require.NoError(t, err)
			requireBytes(t, l.want, got, "through the open descriptor")
			l.want = pattern(100, 9)
			return l.name
		}},
		{"unlink", func(t *testing.T, l *liveFile) string {
			require.NoError(t, os.Remove(l.m.Path(l.name)))
			l.storeGPU(3, 2000)
			l.sync()
			got := make([]byte, len(l.want))
			_, err := l.f.ReadAt(got, 0)
			require.NoError(t, err)
			requireBytes(t, l.want, got, "through the open descriptor")
			// Another file of the name is another file.
			require.NoError(t, os.WriteFile(l.m.Path(l.name), pattern(5000, 7), 0o600))
			l.want = pattern(5000, 7)
			return l.name
		}},
		{"hard link", func(t *testing.T, l *liveFile) string {
			require.NoError(t, os.Link(l.m.Path(l.name), l.m.Path("linked")))
			l.storeGPU(3, 2000)
			l.sync()
			sameEverywhere(t, l.m, "linked", l.want)
			require.NoError(t, os.Remove(l.m.Path(l.name)))
			l.storeGPU(4, 2000)
			return "linked"
		}},
	}
	allModes(t, func(t *testing.T, o testmount.Options) {
		for _, c := range cases {
			t.Run(c.name, func(t *testing.T) {
				m := testmount.Start(t, o)
				l := newLiveFile(t, m, "live")
				name := c.change(t, l)
				l.check(name)
				l.close()
				m.Stop()
				requireBytes(t, l.want, mustRead(t, filepath.Join(m.Source, name)), "in SOURCE, at the end")
			})
		}
	})
}
