package mounttest

import (
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/internal/fakecuda"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

// viewOf returns the expected bytes of a view of files: each row as a read returns it, with zeros past end of file and
// in padding.
func viewOf(t *testing.T, files []*os.File, segments []gaiafs.Segment, align int64) []byte {
	t.Helper()
	var want []byte
	for _, s := range segments {
		for int64(len(want))%align != 0 {
			want = append(want, 0)
		}
		for row := range max(s.Count, 1) {
			b := make([]byte, s.Length)
			if _, err := files[s.File].ReadAt(b, s.Offset+row*s.Stride); err != nil {
				require.ErrorIs(t, err, io.EOF)
			}
			want = append(want, b...)
		}
	}
	return want
}

// requireView compares a view with the files' bytes, and reports the first difference.
func requireView(t *testing.T, v *gaiafs.View, files []*os.File, segments []gaiafs.Segment, align int64) {
	t.Helper()
	want, got := viewOf(t, files, segments, align), make([]byte, v.Len())
	_, err := v.ReadAt(got, 0)
	require.NoError(t, err)
	require.Len(t, got, len(want))
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("byte %d of %d is %d, not %d", i, len(want), got[i], want[i])
		}
	}
}

// TestViews makes views of files that the CPU and two devices write. After an acquire, a view shows the files' bytes.
func TestViews(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	m := testmount.Start(t, testmount.Options{Devices: 2, Poison: true})
	files := make([]*os.File, 3)
	var writers []*gaiafs.Mapping
	const size = 6 << 20
	for i := range files {
		f, err := os.OpenFile(m.Path(string(rune('a'+i))), os.O_RDWR|os.O_CREATE, 0o600)
		require.NoError(t, err)
		defer f.Close()
		content := make([]byte, size/(i+1)+i*13)
		for j := range content {
			content[j] = byte(r.Uint32())
		}
		_, err = f.WriteAt(content, 0)
		require.NoError(t, err)
		files[i] = f
	}
	for device := range 2 {
		w, err := gaiafs.Map(files[0], 0, size, gaiafs.ProtWrite, testdevice.Number(device))
		require.NoError(t, err)
		defer w.Close()
		writers = append(writers, w)
	}
	for round := range 20 {
		align := int64(1) << r.IntN(14)
		var segments []gaiafs.Segment
		for range 1 + r.IntN(30) {
			length := 1 + r.Int64N(30000)
			segments = append(segments, gaiafs.Segment{File: r.IntN(3), Offset: r.Int64N(size), Length: length,
				Stride: length + r.Int64N(5000), Count: r.Int64N(10)})
		}
		var opts []gaiafs.Option
		if round%2 == 0 {
			opts = append(opts, gaiafs.Lazy())
		}
		v, err := gaiafs.MapView(files, segments, testdevice.Number(round%3%2), append(opts, gaiafs.Align(align))...)
		require.NoError(t, err)
		if round%2 == 0 {
			_, err = v.Acquire(0, v.Len())
			require.NoError(t, err)
		}
		requireView(t, v, files, segments, align)
		for range 5 {
			for device, w := range writers {
				b := bytes.Repeat([]byte{byte(r.Uint32())}, 1+r.IntN(10000))
				off := r.Int64N(size - int64(len(b)))
				_, err := w.WriteAt(b, off)
				require.NoError(t, err, device)
				_, err = w.Release(off, int64(len(b)))
				require.NoError(t, err)
			}
			f := files[r.IntN(3)]
			_, err := f.WriteAt([]byte{1, 2, 3}, r.Int64N(size))
			require.NoError(t, err)
			if r.IntN(4) == 0 {
				require.NoError(t, files[2].Truncate(r.Int64N(size)))
			}
			i := r.IntN(len(segments))
			n := segments[i].Length * max(segments[i].Count, 1)
			_, err = v.Acquire(v.Offset(i), n) // a part shows the files' bytes,
			require.NoError(t, err)
			got := make([]byte, n)
			_, err = v.ReadAt(got, v.Offset(i))
			require.NoError(t, err)
			require.True(t, bytes.Equal(viewOf(t, files, segments[i:i+1], 1), got))
			_, err = v.Acquire(0, v.Len()) // and then the whole does
			require.NoError(t, err)
			requireView(t, v, files, segments, align)
		}
		require.NoError(t, v.Close())
	}
}

// TestAcquireOfAViewCopiesWhatChanged counts the pages that an acquire copies.
func TestAcquireOfAViewCopiesWhatChanged(t *testing.T) {
	m := testmount.Start(t, testmount.Options{Poison: true})
	f, err := os.OpenFile(m.Path("f"), os.O_RDWR|os.O_CREATE, 0o600)
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Truncate(1<<20))
	segments := []gaiafs.Segment{{Offset: 100_010, Length: 100_000}, {Offset: 100_010, Length: 100_000},
		{Offset: 400_000, Length: 1, Stride: 8192, Count: 9}, {Offset: 10, Length: 1}}
	v, err := gaiafs.MapView([]*os.File{f}, segments, 0)
	require.NoError(t, err)
	defer v.Close()
	pages, err := v.Acquire(0, v.Len())
	require.NoError(t, err)
	require.Zero(t, pages)
	_, err = f.WriteAt([]byte("new"), 150_000)
	require.NoError(t, err)
	_, err = f.WriteAt([]byte("in a gap"), 300_000)
	require.NoError(t, err)
	pages, err = v.Acquire(0, v.Len())
	require.NoError(t, err)
	require.EqualValues(t, 1, pages, "of the file, though it is twice in the view")
	requireView(t, v, []*os.File{f}, segments, 256)

	// Stores through a program's mapping, at both ends of the view's part of the file.
	stores, err := unix.Mmap(int(f.Fd()), 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	stores[10], stores[400_000+8*8192] = 'X', 'Y'
	pages, err = v.Acquire(0, v.Len())
	require.NoError(t, err)
	require.EqualValues(t, 2, pages)
	requireView(t, v, []*os.File{f}, segments, 256)
	require.NoError(t, unix.Munmap(stores))

	// Operations that a view does not support.
	_, err = v.WriteAt([]byte{1}, 0)
	require.ErrorIs(t, err, syscall.EACCES)
	pages, err = v.Release(0, v.Len())
	require.NoError(t, err)
	require.Zero(t, pages)
	require.NoError(t, v.Sync(0, v.Len()))
	require.NoError(t, v.Advise(0, v.Len(), gaiafs.AdviceWillNeed))
	_, err = v.Acquire(v.Len()+4096, 1)
	require.ErrorIs(t, err, syscall.EINVAL)
}

// TestViewsOfManyFiles makes a view of many files, with more segments than fit into one frame.
func TestViewsOfManyFiles(t *testing.T) {
	m := testmount.Start(t, testmount.Options{Poison: true})
	files := make([]*os.File, 1024)
	segments := make([]gaiafs.Segment, 0, 1<<14)
	for i := range files {
		f, err := os.OpenFile(m.Path(string(rune('a'+i/32))+string(rune('a'+i%32))), os.O_RDWR|os.O_CREATE, 0o600)
		require.NoError(t, err)
		defer f.Close()
		_, err = f.Write(bytes.Repeat([]byte{byte(i), byte(i >> 8), 7}, 100+i))
		require.NoError(t, err)
		files[i] = f
	}
	for i := range cap(segments) {
		segments = append(segments, gaiafs.Segment{File: i * 7 % len(files), Offset: int64(i % 500), Length: 90})
	}
	v, err := gaiafs.MapView(files, segments, 0, gaiafs.Align(128))
	require.NoError(t, err)
	requireView(t, v, files, segments, 128)
	_, err = files[1023].WriteAt([]byte("changed"), 0)
	require.NoError(t, err)
	_, err = v.Acquire(0, v.Len())
	require.NoError(t, err)
	requireView(t, v, files, segments, 128)
	require.NoError(t, v.Close())
}

// fakeCUDA is set in a process of this test that loads the fake libcuda.
const fakeCUDA = "GAIAFS_TEST_FAKE_CUDA"

// inProcessWithCUDA runs the test in another process, which loads the fake libcuda, and returns true there. The library
// must be in the loader's path before the process starts.
func inProcessWithCUDA(t *testing.T) bool {
	if os.Getenv(fakeCUDA) != "" {
		return true
	}
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe, "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), fakeCUDA+"=1", "LD_LIBRARY_PATH="+fakecuda.Dir(t))
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "--- PASS: "+t.Name())
	return false
}

func TestViewsOnAGPU(t *testing.T) {
	if !inProcessWithCUDA(t) {
		return
	}
	m := testmount.Start(t, testmount.Options{Devices: 2, Disguised: true, Poison: true})
	f, err := os.OpenFile(m.Path("f"), os.O_RDWR|os.O_CREATE, 0o600)
	require.NoError(t, err)
	defer f.Close()
	_, err = f.Write(bytes.Repeat([]byte("gaia"), 1<<18))
	require.NoError(t, err)
	segments := []gaiafs.Segment{{Offset: 3, Length: 70_001}, {Offset: 9, Length: 5, Stride: 4097, Count: 100}}
	v, err := gaiafs.MapView([]*os.File{f}, segments, 1)
	require.NoError(t, err)
	require.Equal(t, gaiafs.KindCUDA, v.Kind())
	require.Zero(t, v.DevicePointer()%256)
	require.Nil(t, v.Bytes())
	requireView(t, v, []*os.File{f}, segments, 256)
	_, err = f.WriteAt([]byte("news"), 4)
	require.NoError(t, err)
	_, err = v.Acquire(0, 1)
	require.NoError(t, err)
	requireView(t, v, []*os.File{f}, segments, 256)
	require.NoError(t, v.Close())
}
