package gaiafs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/control/controltest"
	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/fakecuda"
)

// fakeVariable is set in a test process that was started with the fake libcuda.
const fakeVariable = "GAIAFS_TEST_FAKE_CUDA"

// underFake runs the test again in a process that finds the fake libcuda; there it returns true. That process fails if
// anything of the fake's is left at its end.
func underFake(t *testing.T, env ...string) bool {
	t.Helper()
	if os.Getenv(fakeVariable) != "" {
		return true
	}
	inProcess(t, append([]string{"LD_LIBRARY_PATH=" + fakecuda.Dir(t), "FAKECUDA_LEAKS=1"}, env...)...)
	return false
}

// inProcess runs the test again in a separate process.
func inProcess(t *testing.T, env ...string) {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	pattern := "^" + strings.ReplaceAll(t.Name(), "/", "$/^") + "$"
	cmd := exec.Command(exe, "-test.run="+pattern, "-test.v")
	cmd.Env = append(append(os.Environ(), fakeVariable+"=1"), env...)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	if strings.Contains(string(out), "--- SKIP: "+t.Name()) {
		t.Skipf("%s", out)
	}
	require.Contains(t, string(out), "--- PASS: "+t.Name())
}

// exitThroughC ends the process as C programs end, so that the fake can look for leaks.
func exitThroughC(code int) {
	libc, err := purego.Dlopen("libc.so.6", purego.RTLD_NOW)
	if err != nil {
		panic(err)
	}
	var exit func(int32)
	purego.RegisterLibFunc(&exit, libc, "exit")
	exit(int32(code))
}

func startGPUs(t *testing.T) *daemon {
	return startDaemon(t, &controltest.Cache{Kind: 2, UUIDs: []gpubackend.UUID{fakecuda.UUID(0), fakecuda.UUID(1)}})
}

// deviceBytes returns what a kernel of the fake would see.
func deviceBytes(m *Mapping) []byte {
	p := m.DevicePointer()
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&p))), m.Len())
}

func TestGPUMemory(t *testing.T) {
	if !underFake(t) {
		return
	}
	d := startGPUs(t)
	const size = 9 << 20
	f := d.file(t, size)
	want, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	descriptors := 0
	for i, r := range []struct{ off, n int64 }{
		{0, size},             // five extents
		{4096, 5},             // within the first
		{2<<20 - 4096, 8192},  // the end of one and the beginning of the next
		{2 << 20, 2 << 20},    // just one
		{6<<20 + 8192, 12345}, // not the first one of the file
	} {
		m, err := Map(f, r.off, r.n, ProtWrite, 1)
		require.NoError(t, err)
		require.Equal(t, KindCUDA, m.Kind())
		require.Equal(t, "cuda", m.Kind().String())
		require.Nil(t, m.Bytes())
		require.Equal(t, uintptr(r.off%4096), m.DevicePointer()%4096)
		require.True(t, bytes.Equal(want[r.off:r.off+r.n], deviceBytes(m)), "%+v", r)
		got := make([]byte, r.n)
		n, err := m.ReadAt(got, 0)
		require.NoError(t, err)
		require.Equal(t, int(r.n), n)
		require.True(t, bytes.Equal(want[r.off:r.off+r.n], got), "%+v", r)

		text := fmt.Sprintf("%5d", r.off%99999)
		_, err = m.WriteAt([]byte(text), r.n-5)
		require.NoError(t, err)
		require.Equal(t, text, string(deviceBytes(m)[r.n-5:]))
		pages, err := m.Release(0, r.n)
		require.NoError(t, err)
		require.Positive(t, pages)
		copy(want[r.off+r.n-5:], text)
		home, err := os.ReadFile(f.Name())
		require.NoError(t, err)
		require.True(t, bytes.Equal(want, home))
		require.NoError(t, m.Close())
		require.Zero(t, m.DevicePointer())
		_, err = m.ReadAt(got, 0)
		require.ErrorIs(t, err, syscall.EBADF)
		require.Eventually(t, func() bool { return d.server.Stats().Sessions == 0 }, 20*time.Second, time.Millisecond)
		if i == 0 {
			descriptors = openDescriptors(t)
		}
		// The grants keep the files that they were shown.
		require.LessOrEqual(t, openDescriptors(t), descriptors+i, "descriptors are closed once imported")
	}
}

// Two devices have separate memory for one file; two mappings on one device share memory.
func TestGPUMemoryIsShared(t *testing.T) {
	if !underFake(t) {
		return
	}
	d := startGPUs(t)
	f := d.file(t, 8192)
	var m [3]*Mapping
	for i, device := range []int{0, 0, 1} {
		var err error
		m[i], err = Map(f, 0, 8192, ProtWrite, device)
		require.NoError(t, err)
		require.Equal(t, device, m[i].Device())
	}
	_, err := m[0].WriteAt([]byte("shared"), 10)
	require.NoError(t, err)
	require.Equal(t, "shared", string(deviceBytes(m[1])[10:16]))
	require.NotEqual(t, "shared", string(deviceBytes(m[2])[10:16]))
	for _, x := range m {
		require.NoError(t, x.Close())
	}
}

func TestGPUMemoryReadOnly(t *testing.T) {
	if !underFake(t) {
		return
	}
	d := startGPUs(t)
	m, err := Map(d.file(t, 5<<20), 4096, 4<<20, ProtRead, 0)
	require.NoError(t, err)
	_, err = m.WriteAt([]byte("x"), 0)
	require.ErrorIs(t, err, syscall.EACCES)
	var b [7]byte
	_, err = m.ReadAt(b[:], 0)
	require.NoError(t, err)
	require.Equal(t, deviceBytes(m)[:7], b[:])
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	require.Regexp(t, fmt.Sprintf("(?m)^%x-[0-9a-f]+ r--s", m.DevicePointer()-4096), string(maps))
	require.NoError(t, m.Close())
}

// The calling thread's contexts do not change.
func TestGPUContextsStay(t *testing.T) {
	if !underFake(t) {
		return
	}
	contextLinger = 100 * time.Millisecond
	d := startGPUs(t)
	f := d.file(t, 4096)
	drv, err := loadCUDA()
	require.NoError(t, err)
	lib, err := purego.Dlopen(cudaLibrary, purego.RTLD_NOW)
	require.NoError(t, err)
	var current func(*cudaContext) cudaResult
	var active func(device int32, flags *uint32, active *int32) cudaResult
	purego.RegisterLibFunc(&current, lib, "cuCtxGetCurrent")
	purego.RegisterLibFunc(&active, lib, "cuDevicePrimaryCtxGetState")
	live := func() (n int32) {
		var flags uint32
		require.Zero(t, active(0, &flags, &n))
		return n
	}
	var mine cudaContext
	require.Zero(t, drv.contextRetain(&mine, 1))
	other := &gpu{drv: drv, device: 1, context: mine}
	require.NoError(t, other.use(func() *Error {
		m, err := Map(f, 0, 4096, ProtWrite, 0)
		require.NoError(t, err)
		_, err = m.WriteAt([]byte("x"), 0)
		require.NoError(t, err)
		require.Equal(t, int32(1), live(), "held while the mapping lives")
		require.NoError(t, m.Close())
		var now cudaContext
		require.Zero(t, current(&now))
		require.Equal(t, mine, now)
		return nil
	}))
	require.Equal(t, int32(1), live(), "kept for a next mapping")
	require.Eventually(t, func() bool { return live() == 0 }, 10*time.Second, time.Millisecond)
	require.Zero(t, drv.contextRelease(1))
}

// Whatever fails, the mapping is gone, with all that was made for it, here and at the daemon.
func TestGPUFailures(t *testing.T) {
	for fail, want := range map[string]syscall.Errno{
		"cuInit:999":                         syscall.ENODEV,
		"cuInit:100":                         syscall.ENODEV,
		"cuDeviceGetCount:999":               syscall.EIO,
		"cuDevicePrimaryCtxRetain:2":         syscall.ENOMEM,
		"cuCtxPushCurrent:201":               syscall.EIO,
		"cuMemImportFromShareableHandle:999": syscall.EIO,
		"cuMemImportFromShareableHandle:2:2": syscall.ENOMEM,
		"cuMemAddressReserve:2":              syscall.ENOMEM,
		"cuMemMap:2":                         syscall.ENOMEM,
		"cuMemMap:801:1":                     syscall.ENOTSUP,
		"cuMemSetAccess:719":                 syscall.EIO,
	} {
		t.Run(fail, func(t *testing.T) {
			if !underFake(t, "FAKECUDA_FAIL="+fail) {
				return
			}
			d := startGPUs(t)
			f := d.file(t, 6<<20)
			_, err := Map(f, 0, 6<<20, ProtWrite, 0)
			require.ErrorIs(t, err, want)
			call, _, _ := strings.Cut(fail, ":")
			require.ErrorContains(t, err, call)
			d.waitMapped(t, 0)
			require.Eventually(t, func() bool { return d.server.Stats().Sessions == 0 }, 20*time.Second,
				time.Millisecond)
		})
	}
	for fail, at := range map[string]func(*Mapping) error{
		"cuMemcpyDtoH:999":        func(m *Mapping) error { _, err := m.ReadAt(make([]byte, 9), 0); return err },
		"cuMemcpyHtoD:999":        func(m *Mapping) error { _, err := m.WriteAt(make([]byte, 9), 0); return err },
		"cuStreamSynchronize:700": func(m *Mapping) error { _, err := m.WriteAt(make([]byte, 9), 0); return err },
	} {
		t.Run(fail, func(t *testing.T) {
			if !underFake(t, "FAKECUDA_FAIL="+fail) {
				return
			}
			d := startGPUs(t)
			m, err := Map(d.file(t, 4096), 0, 4096, ProtWrite, 0)
			require.NoError(t, err)
			err = at(m)
			require.ErrorIs(t, err, syscall.EIO)
			require.ErrorContains(t, err, "CUDA error")
			require.NoError(t, m.Close())
		})
	}
}

// If a GPU fails during Close, Close reports that, and still tells the daemon.
func TestGPUCloseFails(t *testing.T) {
	d := startGPUs(t)
	if os.Getenv(fakeVariable) == "" {
		inProcess(t, "LD_LIBRARY_PATH="+fakecuda.Dir(t), "FAKECUDA_FAIL=cuMemUnmap:700")
		return
	}
	m, err := Map(d.file(t, 4096), 0, 4096, ProtWrite, 0)
	require.NoError(t, err)
	require.ErrorContains(t, m.Close(), "cuMemUnmap")
	d.waitMapped(t, 0)
	require.ErrorIs(t, m.Close(), syscall.EBADF)
}

func TestNoSuchGPU(t *testing.T) {
	if !underFake(t, "FAKECUDA_DEVICES=3") {
		return
	}
	d := startGPUs(t)
	f := d.file(t, 4096)
	_, err := Map(f, 0, 4096, ProtRead, 3)
	require.ErrorIs(t, err, syscall.ENODEV)
	require.ErrorContains(t, err, "there is no CUDA device 3: libcuda.so.1 shows this process 3")
	require.ErrorContains(t, err, "CUDA_VISIBLE_DEVICES")
	_, err = Map(f, 0, 4096, ProtRead, 2)
	require.ErrorIs(t, err, syscall.ENODEV, "the mount does not have it")
	m, err := Map(f, 0, 4096, ProtRead, 1)
	require.NoError(t, err)
	require.NoError(t, m.Close())
}

// Mounts with only emulated devices never load the driver's library.
func TestNoCUDA(t *testing.T) {
	if os.Getenv(fakeVariable) == "" {
		inProcess(t, "LD_LIBRARY_PATH=")
		return
	}
	if _, err := purego.Dlopen(cudaLibrary, purego.RTLD_NOW); err == nil {
		t.Skip("this machine has a libcuda")
	}
	d := startGPUs(t)
	_, err := Map(d.file(t, 4096), 0, 4096, ProtRead, 0)
	require.ErrorIs(t, err, syscall.ENODEV)
	require.ErrorContains(t, err, "libcuda.so.1 cannot be loaded here")
	require.Zero(t, d.server.Stats().Mappings)

	d = startDaemon(t, &controltest.Cache{})
	m, err := Map(d.file(t, 4096), 0, 4096, ProtRead, 0)
	require.NoError(t, err)
	require.Equal(t, KindEmulated, m.Kind())
	require.NoError(t, m.Close())
}

// ReadAt and WriteAt mean the same on both kinds of memory.
func TestReadAtWriteAt(t *testing.T) {
	test := func(t *testing.T, d *daemon) {
		m, err := Map(d.file(t, 3<<20), 0, 5000, ProtWrite, 0)
		require.NoError(t, err)
		defer func() { require.NoError(t, m.Close()) }()
		n, err := m.WriteAt([]byte("abcdef"), 4996)
		require.Equal(t, 4, n)
		require.ErrorIs(t, err, syscall.ENOSPC)
		b := make([]byte, 6)
		n, err = m.ReadAt(b, 4996)
		require.Equal(t, "abcd", string(b[:n]))
		require.Equal(t, io.EOF, err)
		n, err = m.ReadAt(b, 5000)
		require.Zero(t, n)
		require.Equal(t, io.EOF, err)
		n, err = m.ReadAt(b, 1<<62)
		require.Zero(t, n)
		require.Equal(t, io.EOF, err)
		n, err = m.ReadAt(nil, 0)
		require.Zero(t, n)
		require.NoError(t, err)
		_, err = m.ReadAt(b, -1)
		require.ErrorIs(t, err, syscall.EINVAL)
		_, err = m.WriteAt(b, -1)
		require.ErrorIs(t, err, syscall.EINVAL)
		all, err := io.ReadAll(io.NewSectionReader(m, 0, 1<<20))
		require.NoError(t, err)
		require.Len(t, all, 5000)
		var wg sync.WaitGroup
		errs := make([]error, 8)
		for i := range errs {
			wg.Go(func() {
				p := bytes.Repeat([]byte{byte(i)}, 500)
				for range 20 {
					_, err := m.WriteAt(p, int64(500*i))
					got := make([]byte, 500)
					_, err2 := m.ReadAt(got, int64(500*i))
					if errs[i] = errors.Join(err, err2); errs[i] != nil || !bytes.Equal(p, got) {
						errs[i] = errors.Join(errs[i], errors.New("other bytes"))
						return
					}
				}
			})
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs...))
	}
	t.Run("emulated", func(t *testing.T) { test(t, startDaemon(t, &controltest.Cache{})) })
	t.Run("cuda", func(t *testing.T) {
		if underFake(t) {
			test(t, startGPUs(t))
		}
	})
}
