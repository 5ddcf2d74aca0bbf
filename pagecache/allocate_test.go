package pagecache

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
)

// TestMemoryThatGoesAfterAllocFailed: a device is full. Before the allocation looks for an extent to evict, the only
// unmapped extent is freed on its own, like that of a removed file. The allocation must succeed.
func TestMemoryThatGoesAfterAllocFailed(t *testing.T) {
	m := newMachine(t, 1)
	old := m.file(page.Size)
	m.run(old, 0, 0, page.Size, false).unmap()

	m.devices[0].Fail(faulty.Alloc, 1, gpubackend.ErrNoMemory)
	gate := m.devices[0].Hold(faulty.Alloc)
	mapped := make(chan error, 1)
	go func() {
		_, err := m.cache.Map(context.Background(), m.file(page.Size), MapRequest{Len: page.Size})
		mapped <- err
	}()
	<-gate.Arrived()
	f := old.attached
	f.mu.Lock()
	for _, h := range f.holdings {
		for _, x := range h.sorted() {
			f.loseExtentLocked(x)
		}
	}
	f.mu.Unlock()
	gate.Open()
	require.NoError(t, <-mapped)
}
