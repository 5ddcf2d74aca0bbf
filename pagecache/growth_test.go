package pagecache

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/internal/page"
)

// TestForgettingWhatIsPastTheEndTakesLittleMemory: however much devices store past end of file, little of it is copied at once.
func TestForgettingWhatIsPastTheEndTakesLittleMemory(t *testing.T) {
	const size = 3 * pastPages * page.Size
	m := newMachine(t, 1, memory(2*size+emulated.Granularity), func(o *Options, _ *int64) { o.WriteBack = true })
	src := m.file(page.Size)
	p := m.run(src, 0, 0, size, true)
	stored := []int{page.Size, pastPages*page.Size - 1, pastPages * page.Size, size - 1}
	for _, at := range append(stored, 0) {
		p.store(at, 7)
	}
	f := src.attached
	f.mu.Lock()
	found, next, err := f.pastEndLocked(t.Context(), page.From(0).Pages())
	f.mu.Unlock()
	require.NoError(t, err)
	require.LessOrEqual(t, next, page.Index(1+pastPages))
	for _, x := range found {
		require.LessOrEqual(t, x.pages.End, next)
	}
	p.release()
	for _, at := range stored {
		require.Zero(t, p.byteAt(at), "byte %d", at)
	}
	require.EqualValues(t, 7, p.byteAt(0))
	p.unmap()
}
