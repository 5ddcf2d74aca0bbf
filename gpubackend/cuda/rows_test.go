package cuda

import (
	"bytes"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// TestRowsLayout: the description of rows has the layout of CUDA_MEMCPY2D.
func TestRowsLayout(t *testing.T) {
	var x copyRows
	require.EqualValues(t, 16, unsafe.Offsetof(x.from.kind))
	require.EqualValues(t, 24, unsafe.Offsetof(x.from.host))
	require.EqualValues(t, 48, unsafe.Offsetof(x.from.pitch))
	require.EqualValues(t, 56, unsafe.Offsetof(x.to))
	require.EqualValues(t, 112, unsafe.Offsetof(x.width))
	require.EqualValues(t, 128, unsafe.Sizeof(x))
}

// TestRowsAreOneCall: the driver gets all rows of a piece in one call, if their memory is page-locked. A shorter last
// row is a second call. If a call fails, nothing is on its way when the error is returned.
func TestRowsAreOneCall(t *testing.T) {
	d, g := openFake(t, 64<<20, true)
	m, err := d.Alloc(8 << 20)
	require.NoError(t, err)
	const row, stride, rows = 4096, 16384, 120
	locked, giveBack, err := d.HostBuffer(rows * stride)
	require.NoError(t, err)
	noise(locked, 1)
	whole := gpubackend.Copy{Mem: m, Off: 100, Host: locked[140:][:(rows-2)*stride+row], Row: row, Stride: stride}
	short := gpubackend.Copy{Mem: m, Off: 4 << 20, Host: locked[5000:][:(rows-2)*stride+7], Row: row, Stride: stride}
	pageable := whole
	pageable.Host = bytes.Clone(whole.Host)
	for _, x := range []struct {
		name         string
		pieces       []gpubackend.Copy
		calls, plain int
	}{
		{"whole rows", []gpubackend.Copy{whole}, 1, 0},
		{"a shorter last row", []gpubackend.Copy{short}, 1, 1},
		{"both", []gpubackend.Copy{whole, short}, 2, 1},
		{"pageable memory", []gpubackend.Copy{pageable}, 0, 1},
	} {
		clear(g.calls)
		require.NoError(t, d.CopyIn(t.Context(), x.pieces), x.name)
		require.Equal(t, x.calls, g.calls["cuMemcpy2DAsync"], x.name)
		require.Equal(t, x.plain, g.calls["cuMemcpyHtoDAsync"], x.name)
		require.Zero(t, g.calls["cuMemcpyBatchAsync"], x.name)
		for _, c := range x.pieces {
			got := make([]byte, c.Bytes())
			require.NoError(t, d.CopyOut(t.Context(), []gpubackend.Copy{{Mem: m, Off: c.Off, Host: got}}))
			for off, row := range c.Rows() {
				require.True(t, bytes.Equal(row, got[off-c.Off:][:len(row)]), x.name)
			}
		}
	}
	for _, call := range []string{"cuMemcpy2DAsync", "cuMemcpyHtoDAsync", "cuEventRecord", "cuEventQuery"} {
		g.setFail(call, invalidValue)
		require.ErrorContains(t, d.CopyIn(t.Context(), []gpubackend.Copy{whole, short}), call)
		require.Zero(t, g.queued(), "%s: something is on its way", call)
		g.setFail(call, success)
		require.NoError(t, d.CopyIn(t.Context(), []gpubackend.Copy{whole, short}))
	}
	giveBack()
	require.NoError(t, m.Free())
	require.NoError(t, d.Close())
	require.Zero(t, g.left())
}

// TestRowsOfManyMoves: rows that are too many for one move go in several.
func TestRowsOfManyMoves(t *testing.T) {
	var look lookup
	host := newFake().anonymous(1 << 30) // nobody touches it
	defer func() { require.NoError(t, unix.Munmap(host)) }()
	p := pinned{base: unsafe.Pointer(unsafe.SliceData(host)), size: len(host)}
	look.last = p
	c := gpubackend.Copy{Mem: &memory{base: 1000}, Off: 24, Host: host[:1<<30-8192+5], Row: 4096, Stride: 8192}
	total, dev, at := 0, address(1024), 0
	for _, m := range cutRows(nil, &look, &c) {
		require.LessOrEqual(t, m.bytes(), directSize)
		require.Equal(t, dev, m.dev)
		require.Equal(t, unsafe.Add(p.base, at), unsafe.Pointer(unsafe.SliceData(m.host)))
		total, dev = total+m.bytes(), dev+address(m.bytes())
		at += m.bytes() * 2
	}
	require.EqualValues(t, c.Bytes(), total)
}
