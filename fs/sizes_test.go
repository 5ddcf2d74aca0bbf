package fs

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/internal/testdisk"
	"github.com/gaiafs/gaiafs/pagecache"
)

// TestSparseFilesAfterADeviceWroteIntoAHole asks where data is right after a release, as programs that copy sparse
// files do.
func TestSparseFilesAfterADeviceWroteIntoAHole(t *testing.T) {
	everyModeWithDevices(t, func(t *testing.T, s *scene, cache *pagecache.Cache, n *notary) {
		const size, at = 2 << 20, 1 << 20
		written := bytes.Repeat([]byte("gpu!"), 1024)
		for i, copied := range []string{"", "cp --sparse=auto f c", "tar -Scf t f; mkdir d; tar -xSf t -C d; cp d/f c",
			"cat f > c"} {
			name := fmt.Sprintf("f%d", i)
			path := filepath.Join(s.mnt, name)
			f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0644)
			require.NoError(t, err)
			defer f.Close()
			require.NoError(t, f.Truncate(size))
			w := mapOn(t, cache, n, f, 0, size)
			defer w.close(t)
			w.store(t, at, written)
			w.release(t, size)
			if copied == "" {
				fd := int(f.Fd())
				off, err := unix.Seek(fd, 0, unix.SEEK_DATA)
				require.NoError(t, err)
				assert.EqualValues(t, at, off)
				off, err = unix.Seek(fd, at, unix.SEEK_HOLE)
				require.NoError(t, err)
				assert.EqualValues(t, at+len(written), off)
				_, err = unix.Seek(fd, size, unix.SEEK_DATA)
				assert.ErrorIs(t, err, unix.ENXIO)
				_, err = unix.Seek(fd, math.MaxInt64, unix.SEEK_DATA)
				assert.ErrorIs(t, err, unix.ENXIO)
				_, err = unix.Seek(fd, -1, unix.SEEK_DATA)
				assert.Error(t, err)
				continue
			}
			out := t.TempDir()
			sh(t, out, `ln -s "$1" f`+"\n"+"cp() { command cp -L \"$@\"; }; tar() { command tar -h \"$@\"; }\n"+copied,
				path)
			want := make([]byte, size)
			copy(want[at:], written)
			got, err := os.ReadFile(filepath.Join(out, "c"))
			require.NoError(t, err)
			assert.True(t, bytes.Equal(want, got), copied)
		}
	})
}

// sourceOn puts SOURCE on a new filesystem of the given type and size.
func sourceOn(t *testing.T, kind string, size int64) func(*Options) {
	t.Helper()
	requireRoot(t)
	at := t.TempDir()
	if kind == "tmpfs" {
		require.NoError(t, unix.Mount("tmpfs", at, "tmpfs", 0, fmt.Sprintf("size=%d", size)))
		t.Cleanup(func() { testdisk.Detach(t, at) })
	} else {
		at = newDisk(t, kind, size)
	}
	source := filepath.Join(at, "source")
	require.NoError(t, os.Mkdir(source, 0777))
	return on(source)
}

// TestFilesOfTheLargestSize makes a device and programs use the last bytes that a file can have.
func TestFilesOfTheLargestSize(t *testing.T) {
	for _, kind := range []struct {
		name string
		size int64
	}{{"tmpfs", math.MaxInt64}, {"xfs", math.MaxInt64}, {"ext4", 16<<40 - page.Size}} {
		t.Run(kind.name, func(t *testing.T) {
			everyModeWithDevices(t, func(t *testing.T, s *scene, cache *pagecache.Cache, n *notary) {
				useLargest(t, s, cache, n, kind.size)
			}, sourceOn(t, kind.name, 512<<20))
		})
	}
}

func useLargest(t *testing.T, s *scene, cache *pagecache.Cache, n *notary, size int64) {
	f, err := os.OpenFile(filepath.Join(s.mnt, "f"), os.O_CREATE|os.O_RDWR, 0644)
	require.NoError(t, err)
	defer f.Close()
	fd := int(f.Fd())
	require.NoError(t, f.Truncate(size))
	last := (size - 1) &^ (page.Size - 1) // the last page
	punch := math.MaxInt64 - last         // to the largest offset that the filesystem accepts
	require.NoError(t, askGrant(f, make([]byte, GrantSize)))
	if _, err := cache.Map(t.Context(), n.last(), pagecache.MapRequest{Off: last,
		Len: size - last}); size == math.MaxInt64 {
		// The end of such an extent, 2^63, does not fit into an offset.
		assert.ErrorIs(t, err, unix.EOVERFLOW)
		last -= 2 << 20
		size = last + page.Size - 1
		require.NoError(t, f.Truncate(size))
	} else {
		require.NoError(t, err)
		punch = size - last
	}
	off, length := last-2*page.Size, size-last+2*page.Size
	w := mapAs(t, cache, n, f, pagecache.MapRequest{Off: off, Len: length, Writable: true, Launder: true})
	defer w.close(t)

	read := func(at, n int64) string {
		t.Helper()
		b := make([]byte, n)
		got, err := f.ReadAt(b, at)
		require.NoError(t, err)
		return string(b[:got])
	}
	w.store(t, size-3, []byte("GPU"))
	w.store(t, off, []byte("first"))
	w.release(t, length)
	assert.Equal(t, "GPU", read(size-3, 3))
	assert.Equal(t, "\x00GPU", read(size-4, 4))
	w.store(t, off+page.Size, []byte("more"))
	w.release(t, length)
	at, err := unix.Seek(fd, off+page.Size, unix.SEEK_DATA)
	require.NoError(t, err)
	assert.Equal(t, off+page.Size, at)
	assert.Equal(t, "first", read(off, 5))

	_, err = f.WriteAt([]byte("CPU"), size-6)
	require.NoError(t, err)
	_, err = w.Acquire(t.Context(), 0, length, true)
	require.NoError(t, err)
	assert.Equal(t, "CPUGPU", w.loadAt(t, size-6, 6))
	assert.Equal(t, "more", w.loadAt(t, off+page.Size, 4))

	// Bytes that do not fit into a file are cut off, or refused by the kernel.
	w.store(t, size-1, []byte("!"))
	w.release(t, length)
	assert.NoError(t, unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, last, punch))
	assert.Equal(t, "\x00\x00\x00", read(size-3, 3))
	_, err = w.Acquire(t.Context(), 0, length, true)
	require.NoError(t, err)
	assert.Equal(t, "\x00\x00\x00", w.loadAt(t, size-3, 3))
	assert.Equal(t, "first", w.loadAt(t, off, 5))
	assert.NoError(t, unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, last+punch))
	assert.Equal(t, "\x00\x00\x00\x00\x00", read(off, 5))

	// The source of a copy is collected, and so are pages that a copy overwrites in part.
	w.store(t, size-3, []byte("abc"))
	w.release(t, length)
	from, to := size-3, int64(0)
	copied, err := unix.CopyFileRange(fd, &from, fd, &to, 1<<20, 0)
	require.NoError(t, err)
	assert.Equal(t, 3, copied)
	assert.Equal(t, "abc", read(0, 3))
	from, to = 0, size-2
	copied, err = unix.CopyFileRange(fd, &from, fd, &to, 2, 0)
	if err == nil {
		assert.Equal(t, 2, copied)
		assert.Equal(t, "aab", read(size-3, 3))
	}

	// Cut and grow the whole file, while the device holds pages at the far end.
	w.store(t, size-1, []byte("x"))
	require.NoError(t, f.Truncate(5))
	require.NoError(t, f.Truncate(size))
	w.release(t, length)
	assert.Equal(t, "\x00", read(size-1, 1))
	require.NoError(t, f.Truncate(0))
	_, err = f.WriteAt([]byte("z"), size-1)
	require.NoError(t, err)
	_, err = w.Acquire(t.Context(), 0, length, true)
	require.NoError(t, err)
	assert.Equal(t, "\x00z", w.loadAt(t, size-2, 2))
	require.NoError(t, f.Sync())
}

// TestPagesSentBeforeTheFileWasCut: the kernel sends pages of a mapping, and a program opens the file with O_TRUNC
// before they are written. They must not bring back what was cut off. A kernel that caches writes waits for them first,
// and knows a longer file than home.
func TestPagesSentBeforeTheFileWasCut(t *testing.T) {
	everyMode(t, func(t *testing.T, s *scene) {
		path := filepath.Join(s.mnt, "cut")
		require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte("a"), 2*page.Size), 0600))
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		require.NoError(t, err)
		defer f.Close()
		g, err := os.OpenFile(path, os.O_RDWR|os.O_TRUNC, 0)
		require.NoError(t, err)
		defer g.Close()
		_, err = g.WriteString("new")
		require.NoError(t, err)
		require.NoError(t, g.Sync())
		in := fuse.WriteIn{InHeader: fuse.InHeader{NodeId: s.nodeOf(t, path)}, WriteFlags: fuse.WRITE_CACHE}
		if all := s.fs.files.all(); len(all) > 0 {
			in.Fh = all[len(all)-1].handle
		}
		sent := func(off int64) {
			in.Offset = uint64(off)
			n, status := s.fs.Write(nil, &in, bytes.Repeat([]byte("b"), page.Size))
			require.Equal(t, fuse.OK, status)
			require.EqualValues(t, page.Size, n)
		}
		sent(page.Size)
		sent(0)
		got, err := os.ReadFile(filepath.Join(s.source, "cut"))
		require.NoError(t, err)
		if s.fs.writeBack {
			require.Len(t, got, 2*page.Size)
		} else {
			require.Equal(t, "bbb", string(got))
		}
	})
}
