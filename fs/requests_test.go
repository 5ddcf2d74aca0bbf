package fs

import (
	"context"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache"
)

// noKernel is a kernel without pages.
type noKernel struct{}

func (noKernel) InodeNotify(uint64, int64, int64) fuse.Status { return fuse.OK }

func (noKernel) InodeNotifyStoreCache(uint64, int64, []byte) fuse.Status { return fuse.OK }
func (noKernel) EntryNotify(uint64, string) fuse.Status                  { return fuse.OK }
func (noKernel) letGo(*node)                                             {}

// FuzzRequests sends requests with any offset and length for a file that a device holds. Afterwards a read returns
// home's bytes, and these include the bytes that the device released.
func FuzzRequests(f *testing.F) {
	const size = 4*page.Size + 5
	edges := []uint64{0, 1, page.Size, size, 1 << 51, math.MaxInt64 - page.Size, math.MaxInt64, 1 << 63, math.MaxUint64}
	for op := range byte(6) {
		for i, off := range edges {
			f.Add(op, off, edges[len(edges)-1-i])
			f.Add(op, off, uint64(math.MaxInt64)-off)
		}
	}
	ctx := context.Background()
	d, err := emulated.New(emulated.Options{Memory: 8 << 20})
	require.NoError(f, err)
	cache, err := pagecache.New(pagecache.Options{Devices: []gpubackend.Device{d}})
	require.NoError(f, err)
	f.Cleanup(func() { require.NoError(f, cache.Close(ctx)) })
	source := f.TempDir()
	fs, err := newFileSystem(&Options{Source: source, Cache: cache})
	require.NoError(f, err)
	f.Cleanup(fs.close)
	fs.notify = noKernel{}
	path := filepath.Join(source, "f")
	home, err := os.Create(path)
	require.NoError(f, err)
	defer home.Close()

	var entry fuse.EntryOut
	require.Equal(f, fuse.OK, fs.Lookup(nil, &fuse.InHeader{NodeId: uint64(rootID)}, "f", &entry))
	var opened fuse.OpenOut
	open := fuse.OpenIn{InHeader: fuse.InHeader{NodeId: entry.NodeId}, Flags: unix.O_RDWR}
	require.Equal(f, fuse.OK, fs.Open(nil, &open, &opened))
	of := fs.files.get(opened.Fh)
	m, err := cache.Map(ctx, of, pagecache.MapRequest{Len: 8 * page.Size, Writable: true})
	require.NoError(f, err)
	f.Cleanup(func() { require.NoError(f, m.Unmap(ctx)) })

	f.Fuzz(func(t *testing.T, op byte, off, n uint64) {
		resize := func(size uint64) fuse.Status {
			in := fuse.SetAttrIn{SetAttrInCommon: fuse.SetAttrInCommon{
				InHeader: fuse.InHeader{NodeId: entry.NodeId}, Valid: fuse.FATTR_SIZE, Size: size,
			}}
			return fs.SetAttr(nil, &in, new(fuse.AttrOut))
		}
		read := func(off uint64, n int) []byte {
			result, status := fs.Read(nil, &fuse.ReadIn{InHeader: fuse.InHeader{NodeId: entry.NodeId}, Fh: of.handle,
				Offset: off}, make([]byte, n))
			if status != fuse.OK {
				return nil
			}
			b, status := result.Bytes(nil)
			require.Equal(t, fuse.OK, status)
			return b
		}
		require.Equal(t, fuse.OK, resize(size))
		_, err := m.Acquire(ctx, 0, 8*page.Size, false)
		require.NoError(t, err)
		extent := m.Extents()[0].Descriptor
		require.NoError(t, storeIn(extent, []byte("device"), page.Size))
		pages, err := m.Release(ctx, 0, 8*page.Size)
		require.NoError(t, err)
		require.LessOrEqual(t, pages, int64(1))

		switch op % 6 {
		case 0:
			fs.Fallocate(nil, &fuse.FallocateIn{Fh: of.handle, Offset: off, Length: n,
				Mode: unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE})
		case 1:
			fs.Lseek(nil, &fuse.LseekIn{Fh: of.handle, Offset: off, Whence: unix.SEEK_DATA}, new(fuse.LseekOut))
		case 2:
			fs.CopyFileRange(nil, &fuse.CopyFileRangeIn{FhIn: of.handle, FhOut: of.handle, OffIn: off, OffOut: n,
				Len: min(off, n)})
		case 3:
			read(off, int(n%(1<<20)))
		case 4:
			resize(off)
		case 5:
			in := fuse.WriteIn{Fh: of.handle, Offset: max(off, 1<<40), Size: uint32(n % 100)}
			fs.Write(nil, &in, make([]byte, n%100))
		}

		st, err := os.Stat(path)
		require.NoError(t, err)
		got := read(0, 2*size)
		want := make([]byte, min(st.Size(), 2*size))
		_, err = home.ReadAt(want, 0)
		require.NoError(t, err)
		assert.Equal(t, want, got)
		if op%6 == 1 || op%6 == 3 {
			assert.Equal(t, "device", string(got[page.Size:page.Size+6]))
		}
	})
}

// storeIn stores b into an extent, as a program on an emulated device does.
func storeIn(extent *os.File, b []byte, at int64) error {
	memory, err := unix.Mmap(int(extent.Fd()), 0, int(at)+len(b), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	copy(memory[at:], b)
	return unix.Munmap(memory)
}

// TestNobodyWaitsForAnOpenThatCloses: while the kernel is told a new size, an open is in use and cannot be closed.
// Others find it closed already and do not wait: they may hold what the kernel needs for its answer.
func TestNobodyWaitsForAnOpenThatCloses(t *testing.T) {
	of := &openFile{}
	require.True(t, of.use())
	closed := make(chan struct{})
	go func() {
		of.mu.Lock()
		defer of.mu.Unlock()
		of.closed = true
		close(closed)
	}()
	require.Eventually(t, func() bool {
		is := of.use()
		if is {
			of.mu.RUnlock()
		}
		return !is
	}, time.Minute, time.Millisecond)
	_, err := of.OpenHome(false)
	require.Equal(t, unix.EBADF, err)
	of.mu.RUnlock()
	<-closed
	require.False(t, of.use())
}
