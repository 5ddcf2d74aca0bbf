package fs

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

// released is a file of two pages of x. A device maps all of it, and has released some bytes of g that are not home
// yet.
type released struct {
	*scene
	*os.File
	window
	at   int64
	want []byte // the file's expected bytes
}

// releasedAt makes a released with the bytes of g at at.
func releasedAt(t *testing.T, at int64, change ...func(*Options)) *released {
	t.Helper()
	s, cache, n := mountWithDevices(t, 1, change...)
	r := &released{scene: s, at: at, want: bytes.Repeat([]byte("x"), 2*page.Size)}
	path := filepath.Join(s.mnt, "f")
	require.NoError(t, os.WriteFile(path, r.want, 0o644))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	r.File = f
	r.window = mapOn(t, cache, n, f, 0, int64(len(r.want)))
	r.release(t)
	return r
}

func (r *released) release(t *testing.T) {
	t.Helper()
	r.store(t, r.at, []byte("ggg"))
	copy(r.want[r.at:], "ggg")
	pages, err := r.Release(context.Background(), 0, int64(len(r.want)))
	require.NoError(t, err)
	require.EqualValues(t, 1, pages)
	home, err := os.ReadFile(filepath.Join(r.source, "f"))
	require.NoError(t, err)
	require.NotEqual(t, r.want, home, "the bytes are home already, so the test shows nothing")
}

// agree checks that the file, the device and home end up with the same bytes.
func (r *released) agree(t *testing.T) {
	t.Helper()
	got, err := os.ReadFile(r.Name())
	require.NoError(t, err)
	assert.Equal(t, r.want, got, "read")
	_, err = r.Acquire(context.Background(), 0, 2*page.Size, true)
	require.NoError(t, err)
	padded := append(bytes.Clone(r.want), make([]byte, 2*page.Size-len(r.want))...)
	assert.Equal(t, string(padded), r.load(t, 2*page.Size), "the device")
	require.NoError(t, r.Sync())
	got, err = os.ReadFile(filepath.Join(r.source, "f"))
	require.NoError(t, err)
	assert.Equal(t, r.want, got, "home")
}

// Sync syncs the file.
func (r *released) Sync() error { return r.File.Sync() }

// TestReadersSeeWhatDevicesReleased reads the same page before and after each release, so that the kernel has it
// cached.
func TestReadersSeeWhatDevicesReleased(t *testing.T) {
	for name, change := range map[string]func(*Options){"write-through": func(*Options) {}, "write-back": writeBack} {
		t.Run(name, func(t *testing.T) {
			r := releasedAt(t, 100, change)
			for i := range 3 {
				got, err := os.ReadFile(r.Name())
				require.NoError(t, err)
				assert.Equal(t, r.want, got)
				r.at = int64(200 + 10*i)
				r.release(t)
			}
			r.agree(t)
		})
	}
}

func TestCopiesSeeWhatDevicesReleased(t *testing.T) {
	r := releasedAt(t, 100)
	to, err := os.Create(filepath.Join(r.mnt, "copy"))
	require.NoError(t, err)
	defer to.Close()
	var from, into int64
	for from < int64(len(r.want)) {
		n, err := unix.CopyFileRange(int(r.Fd()), &from, int(to.Fd()), &into, len(r.want)-int(from), 0)
		require.NoError(t, err)
		require.Positive(t, n)
	}
	got, err := os.ReadFile(to.Name())
	require.NoError(t, err)
	assert.Equal(t, r.want, got)
	r.agree(t)
}

func TestCopiesOverWhatDevicesReleased(t *testing.T) {
	r := releasedAt(t, 100)
	from, err := os.Create(filepath.Join(r.mnt, "other"))
	require.NoError(t, err)
	defer from.Close()
	_, err = from.Write(bytes.Repeat([]byte("c"), 101))
	require.NoError(t, err)
	var off, into int64
	n, err := unix.CopyFileRange(int(from.Fd()), &off, int(r.Fd()), &into, 101, 0)
	require.NoError(t, err)
	require.Equal(t, 101, n)
	copy(r.want, bytes.Repeat([]byte("c"), 101))
	r.agree(t)
}

func TestTruncationAtOpenReachesDevices(t *testing.T) {
	r := releasedAt(t, 100)
	f, err := os.OpenFile(r.Name(), os.O_RDWR|os.O_TRUNC, 0)
	require.NoError(t, err)
	defer f.Close()
	assert.Equal(t, string(make([]byte, 2*page.Size)), r.load(t, 2*page.Size),
		"a mapping has zeros past end of file at once")
	_, err = f.WriteAt([]byte("new"), 200)
	require.NoError(t, err)
	r.want = append(make([]byte, 200), "new"...)
	r.agree(t)
}

// TestCutPagesReachDevices cuts the file inside a page. Behind the new end, the device has zeros, and still has them
// when the file grows again.
func TestCutPagesReachDevices(t *testing.T) {
	r := releasedAt(t, 100)
	require.NoError(t, r.Truncate(101))
	assert.Equal(t, "xg\x00", r.load(t, 102)[99:], "the device")
	require.NoError(t, r.Truncate(2*page.Size))
	clear(r.want[101:])
	r.agree(t)
}

func TestZeroedRangesReachDevices(t *testing.T) {
	for name, mode := range map[string]uint32{
		"punch": unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE,
		"zero":  unix.FALLOC_FL_ZERO_RANGE,
	} {
		for part, rg := range map[string][2]int64{"inside a page": {90, 11}, "over both": {101, page.Size},
			"all": {0, 2 * page.Size}} {
			t.Run(name+", "+part, func(t *testing.T) {
				r := releasedAt(t, 100)
				switch err := unix.Fallocate(int(r.Fd()), mode, rg[0], rg[1]); err {
				case nil:
				case unix.EOPNOTSUPP:
					t.Skip("the backing filesystem cannot do this")
				default:
					require.NoError(t, err)
				}
				clear(r.want[rg[0] : rg[0]+rg[1]])
				r.agree(t)
			})
		}
	}
}

// unmapped mounts with a device. A program has stored a byte into a page of the file at path, and has unmapped it.
func unmapped(t *testing.T) (s *scene, cache *pagecache.Cache, n *notary, path string) {
	t.Helper()
	s, cache, n = mountWithDevices(t, 1)
	path = filepath.Join(s.mnt, "f")
	require.NoError(t, os.WriteFile(path, make([]byte, page.Size), 0o644))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	w := mapOn(t, cache, n, f, 0, page.Size)
	w.store(t, 10, []byte("g"))
	w.close(t)
	return s, cache, n, path
}

func TestUnmappingReleases(t *testing.T) {
	_, _, _, path := unmapped(t)
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, byte('g'), got[10])
}

// TestEvictedBytesComeHome fills the device with another file.
func TestEvictedBytesComeHome(t *testing.T) {
	s, cache, n, path := unmapped(t)
	const all = 64 << 20 // the device's memory
	big, err := os.Create(filepath.Join(s.mnt, "big"))
	require.NoError(t, err)
	defer big.Close()
	require.NoError(t, big.Truncate(all))
	for off := int64(0); off < all; off += 8 << 20 {
		require.NoError(t, askGrant(big, make([]byte, GrantSize)))
		m, err := cache.Map(context.Background(), n.last(), pagecache.MapRequest{Off: off, Len: 8 << 20})
		require.NoError(t, err)
		defer func() { assert.NoError(t, m.Unmap(context.Background())) }()
	}
	home, err := os.ReadFile(filepath.Join(s.source, "f"))
	require.NoError(t, err)
	assert.Equal(t, byte('g'), home[10], "home")
	var st unix.Stat_t
	require.NoError(t, unix.Stat(path, &st))
	node := s.fs.table.byInode(inodeKey{s.fs.root.key.dev, st.Ino})
	assert.Nil(t, node.data.Load().file.Load(), "it takes memory for as long as the kernel knows the file")
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, byte('g'), got[10], "read")
}

func TestDirectReadsSeeWhatDevicesReleased(t *testing.T) {
	r := releasedAt(t, 100)
	fd, err := unix.Open(r.Name(), unix.O_RDONLY|unix.O_DIRECT, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	got := aligned(page.Size)
	n, err := unix.Pread(fd, got, 0)
	require.NoError(t, err)
	assert.Equal(t, r.want[:page.Size], got[:n])
	r.agree(t)
}

// TestMappingsOfDirectOpens: the kernel fills its pages for a mapping, whatever the flags of the mapped open. So a
// release makes it drop them, and a store into such a page takes nothing from what devices released.
func TestMappingsOfDirectOpens(t *testing.T) {
	for _, mode := range deviceModes() {
		t.Run(mode.name, func(t *testing.T) {
			r := releasedAt(t, 100, mode.change)
			m, end := r.mapsAs(t, r.Name(), 2*page.Size, os.O_RDWR|unix.O_DIRECT)
			for i := range 3 {
				assert.Equal(t, byte('g'), m.do("load", r.at, 0))
				r.at = int64(200 + 10*i)
				r.release(t)
			}
			assert.Equal(t, byte('g'), m.do("load", r.at, 0))
			m.do("store", 300, 's')
			r.want[300] = 's'
			r.at = 400
			r.release(t)
			m.do("store", 500, 's')
			r.want[500] = 's'
			m.do("sync", 0, 0)
			r.agree(t)
			end()
		})
	}
}

// hookedKernel calls hook before it drops pages.
type hookedKernel struct {
	notifier
	hook func()
}

func (k *hookedKernel) InodeNotify(node uint64, off, n int64) fuse.Status {
	if n > 0 {
		k.hook()
	}
	return k.notifier.InodeNotify(node, off, n)
}

// TestDirectReadBesideADirtyPage makes a direct read come while a release waits for the kernel to write a page home.
// That page may still arrive, with old bytes in place of the released ones. So the released bytes must not be home
// before it.
func TestDirectReadBesideADirtyPage(t *testing.T) {
	r := releasedAt(t, 100)
	_, err := os.ReadFile(r.Name()) // gives the kernel a page to drop
	require.NoError(t, err)
	r.store(t, 200, []byte("h"))
	copy(r.want[200:], "h")
	reads := 0
	kernel := &hookedKernel{notifier: r.fs.notify, hook: func() {
		reads++
		in := fuse.ReadIn{Fh: r.fs.files.all()[0].handle, Size: page.Size, ReadFlags: fuse.READ_LOCKOWNER}
		_, status := r.fs.Read(nil, &in, make([]byte, page.Size))
		assert.Equal(t, fuse.OK, status)
		home, err := os.ReadFile(filepath.Join(r.scene.source, "f"))
		assert.NoError(t, err)
		assert.Equal(t, byte('x'), home[200], "a direct read brought home what the kernel may still overwrite")
	}}
	r.fs.notify = kernel
	_, err = r.Release(context.Background(), 0, page.Size)
	require.NoError(t, err)
	r.fs.notify = kernel.notifier
	assert.Positive(t, reads)
	r.agree(t)
}

// TestReadersOfMuchThatWasReleased reads large releases in several places at once, one release after the other.
func TestReadersOfMuchThatWasReleased(t *testing.T) {
	const size = 2 << 20
	s, cache, n := mountWithDevices(t, 1)
	path := filepath.Join(s.mnt, "f")
	want := bytes.Repeat([]byte("0123456"), size/7+1)[:size]
	require.NoError(t, os.WriteFile(path, want, 0o644))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	w := mapOn(t, cache, n, f, 0, size)
	for round := range 4 {
		for at := int64(round); at < size; at += page.Size {
			w.store(t, at, []byte{byte(round), byte(at >> page.Shift)})
			copy(want[at:], []byte{byte(round), byte(at >> page.Shift)})
		}
		_, err := w.Release(context.Background(), 0, size)
		require.NoError(t, err)
		var group sync.WaitGroup
		for k := range 4 {
			group.Go(func() {
				from := int64(k) * size / 4
				got := make([]byte, size/4)
				_, err := f.ReadAt(got, from)
				assert.NoError(t, err)
				assert.True(t, bytes.Equal(want[from:from+size/4], got), "round %d, part %d", round, k)
			})
		}
		group.Wait()
	}
	require.Greater(t, cache.Status().Counters["flight_read_bytes"], int64(size))
	require.NoError(t, f.Sync())
	home, err := os.ReadFile(filepath.Join(s.source, "f"))
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, home))
}
