package cuda

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// patchesOver returns patches of the pages of m from base to next.
func patchesOver(m gpubackend.Memory, base, next []byte) (patches []gpubackend.Patch) {
	for off := 0; off < len(base); off += pageSize {
		patches = append(patches, gpubackend.Patch{Mem: m, Off: int64(off), Base: base[off : off+pageSize],
			Next: next[off : off+pageSize]})
	}
	return patches
}

// TestPatchUploads counts the uploaded bytes of a patch: only the differences.
func TestPatchUploads(t *testing.T) {
	d, g := openFake(t, 64<<20, true)
	m, err := d.Alloc(16 << 20)
	require.NoError(t, err)
	base := make([]byte, 2000*pageSize)
	noise(base, 1)
	for _, x := range []struct {
		name            string
		change          func(next []byte)
		uploads, atMost int
	}{
		{"nothing", func([]byte) {}, 0, 0},
		{"a byte of each page", func(next []byte) {
			for off := 77; off < len(next); off += pageSize {
				next[off]++
			}
		}, 1, 2000 * (patchSize + pairSize)},
		{"all", func(next []byte) {
			for i := range next {
				next[i]++
			}
		}, 4, 2000 * (patchSize + 2*pageSize)},
	} {
		next := bytes.Clone(base)
		x.change(next)
		require.NoError(t, d.CopyIn(t.Context(), []gpubackend.Copy{{Mem: m, Host: base}}))
		clear(g.calls)
		g.uploaded = 0
		require.NoError(t, d.Patch(t.Context(), patchesOver(m, base, next)))
		require.Equal(t, x.uploads, g.calls["cuMemcpyHtoDAsync"], x.name)
		require.Equal(t, x.uploads, g.calls["cuLaunchKernel"], x.name)
		require.LessOrEqual(t, g.uploaded, x.atMost, x.name)
		got := make([]byte, len(next))
		require.NoError(t, d.CopyOut(t.Context(), []gpubackend.Copy{{Mem: m, Host: got}}))
		require.True(t, bytes.Equal(next, got), x.name)
	}
	require.NoError(t, m.Free())
	require.NoError(t, d.Close())
}

// TestPatchFails makes the driver calls of a few rounds fail: when the error is returned nothing is under way, and the
// next call works.
func TestPatchFails(t *testing.T) {
	d, g := openFake(t, 64<<20, true)
	m, err := d.Alloc(16 << 20)
	require.NoError(t, err)
	base, next := make([]byte, 2500*pageSize), make([]byte, 2500*pageSize)
	noise(base, 1)
	noise(next, 2)
	for call, times := range map[string]int{"cuMemcpyHtoDAsync": 5, "cuLaunchKernel": 5, "cuEventRecord": 6,
		"cuEventQuery": 3} {
		for after := range times {
			require.NoError(t, d.CopyIn(t.Context(), []gpubackend.Copy{{Mem: m, Host: base}}))
			g.mu.Lock()
			g.fail[call], g.after[call] = invalidValue, after
			g.mu.Unlock()
			err := d.Patch(t.Context(), patchesOver(m, base, next))
			require.ErrorContains(t, err, call)
			require.Zero(t, g.queued(), "%s %d: something is on its way", call, after)
			g.setFail(call, success)
			require.NoError(t, d.Patch(t.Context(), patchesOver(m, base, next)))
			got := make([]byte, len(next))
			require.NoError(t, d.CopyOut(t.Context(), []gpubackend.Copy{{Mem: m, Host: got}}))
			require.True(t, bytes.Equal(next, got), "%s %d", call, after)
		}
	}
	require.NoError(t, m.Free())
	require.NoError(t, d.Close())
	require.Zero(t, g.left())
}
