package gaiafs

import (
	"os"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/require"
)

// stream is a stream of the first GPU. The GPU's primary context is the thread's current one while do runs, as in a
// program that uses it.
type stream struct {
	t            *testing.T
	drv          *cudaDriver
	handle       uintptr
	beginCapture func(s uintptr, mode int32) cudaResult
	endCapture   func(s uintptr, graph *uintptr) cudaResult
	destroyGraph func(graph uintptr) cudaResult
}

func withStream(t *testing.T, do func(s *stream)) {
	drv, err := loadCUDA()
	require.NoError(t, err)
	lib, err := purego.Dlopen(cudaLibrary, purego.RTLD_NOW)
	require.NoError(t, err)
	s := &stream{t: t, drv: drv}
	var create func(s *uintptr, flags uint32) cudaResult
	var destroy func(s uintptr) cudaResult
	for name, function := range map[string]any{
		"cuStreamCreate": &create, "cuStreamDestroy_v2": &destroy,
		"cuStreamBeginCapture_v2": &s.beginCapture, "cuStreamEndCapture": &s.endCapture,
		"cuGraphDestroy": &s.destroyGraph,
	} {
		purego.RegisterLibFunc(function, lib, name)
	}
	g := &gpu{drv: drv}
	require.Zero(t, drv.contextRetain(&g.context, 0))
	defer drv.contextRelease(0)
	require.NoError(t, g.use(func() *Error {
		require.Zero(t, create(&s.handle, 1))
		do(s)
		require.Zero(t, destroy(s.handle))
		return nil
	}))
}

// store starts to store text at the start of a mapping, as a kernel would. In the fake, the bytes arrive when somebody
// waits for the context, and no sooner.
func (s *stream) store(m *Mapping, text string) {
	b := []byte(text)
	require.Zero(s.t, s.drv.copyToDevice(cudaAddress(m.DevicePointer()), unsafe.Pointer(&b[0]), uintptr(len(b))))
}

// Release, Sync, Flush and Close wait for the work that was started.
func TestGPUReleaseWaits(t *testing.T) {
	if !underFake(t) {
		return
	}
	d := startGPUs(t)
	f := d.file(t, 4096)
	m, err := Map(f, 0, 4096, ProtWrite, 0)
	require.NoError(t, err)
	withStream(t, func(s *stream) {
		for text, let := range map[string]func() error{
			"release": func() error { _, err := m.Release(0, 4096); return err },
			"sync":    func() error { return m.Sync(0, 4096) },
			"flush":   func() error { return m.Flush(0, 4096) },
		} {
			s.store(m, text)
			require.NoError(t, let())
			home, err := os.ReadFile(f.Name())
			require.NoError(t, err)
			require.Equal(t, text, string(home[:len(text)]))
		}
		s.store(m, "closed")
		require.NoError(t, m.Close()) // and the store does not reach freed memory
	})
	home, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.Equal(t, "closed", string(home[:6]))
}

// Close works, too, on a GPU so full that no block could be allocated to wait with.
func TestGPUCloseWaitsOnFullGPU(t *testing.T) {
	if !underFake(t, "FAKECUDA_FAIL=cuMemAlloc:2") {
		return
	}
	d := startGPUs(t)
	f := d.file(t, 4096)
	m, err := Map(f, 0, 4096, ProtWrite, 0)
	require.NoError(t, err)
	withStream(t, func(s *stream) {
		s.store(m, "closed")
		require.NoError(t, m.Close())
	})
	home, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.Equal(t, "closed", string(home[:6]))
}

// Mapping, copying and unmapping do not end a stream capture.
func TestGPUCaptureGoesOn(t *testing.T) {
	if !underFake(t) {
		return
	}
	d := startGPUs(t)
	f := d.file(t, 4096)
	withStream(t, func(s *stream) {
		require.Zero(t, s.beginCapture(s.handle, 0))
		m, err := Map(f, 0, 4096, ProtWrite, 0)
		require.NoError(t, err)
		_, err = m.WriteAt([]byte("captured"), 0)
		require.NoError(t, err)
		require.NoError(t, m.Close())
		var graph uintptr
		require.Zero(t, s.endCapture(s.handle, &graph))
		require.Zero(t, s.destroyGraph(graph))
	})
}
