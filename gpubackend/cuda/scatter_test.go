package cuda

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
)

// everyOther returns pieces of single pages, for every other page of m.
func everyOther(m gpubackend.Memory, host []byte) (pieces []gpubackend.Copy) {
	for i := range len(host) / pageSize {
		pieces = append(pieces, gpubackend.Copy{Mem: m, Off: int64(2 * i * pageSize),
			Host: host[i*pageSize : (i+1)*pageSize]})
	}
	return pieces
}

// returned returns the device's bytes of pieces, by copies that are too large for kernels.
func returned(t *testing.T, d *device, m gpubackend.Memory, pieces []gpubackend.Copy) []byte {
	whole := make([]byte, m.Size())
	require.NoError(t, d.CopyOut(t.Context(), []gpubackend.Copy{{Mem: m, Host: whole}}))
	var got []byte
	for _, p := range pieces {
		got = append(got, whole[p.Off:][:len(p.Host)]...)
	}
	return got
}

// TestScatterByKernel: a kernel scatters many pages, alone and together with a few others that copy engines copy.
func TestScatterByKernel(t *testing.T) {
	d, g := openFake(t, 64<<20, true)
	d.worker.slow.patience = time.Hour
	m, err := d.Alloc(8 << 20)
	require.NoError(t, err)
	host := make([]byte, (leastScatter+100)*pageSize)
	noise(host, 1)
	for _, x := range []struct {
		name              string
		pieces            []gpubackend.Copy
		launches, batches int
	}{
		{"enough", everyOther(m, host[:leastScatter*pageSize]), 1, 0},
		{"too few", everyOther(m, host[:(leastScatter-1)*pageSize]), 0, 1},
		{"beside others", append(everyOther(m, host[:leastScatter*pageSize]),
			gpubackend.Copy{Mem: m, Off: 6 << 20, Host: host[leastScatter*pageSize:][:50*pageSize]},
			gpubackend.Copy{Mem: m, Off: 7<<20 + 5, Host: host[:100]},
			gpubackend.Copy{Mem: m, Off: 7<<20 + 105, Host: host[5:6]},
			gpubackend.Copy{Mem: m, Off: 7<<20 + 999, Host: host[7:99]},
			gpubackend.Copy{Mem: m, Off: 7<<20 + 1999, Host: host[7:99]}), 1, 1},
	} {
		t.Run(x.name, func(t *testing.T) {
			require.NoError(t, d.Zero(t.Context(), m, 0, m.Size()))
			var want []byte
			for _, p := range x.pieces {
				want = append(want, p.Host...)
			}
			for _, call := range []func() error{
				func() error { return d.CopyIn(t.Context(), x.pieces) },
				func() error {
					for i := range x.pieces {
						x.pieces[i].Host = make([]byte, len(x.pieces[i].Host))
					}
					return d.CopyOut(t.Context(), x.pieces)
				},
			} {
				clear(g.calls)
				require.NoError(t, call())
				require.Equal(t, x.launches, g.calls["cuLaunchKernel"])
				require.Equal(t, x.batches, g.calls["cuMemcpyBatchAsync"])
			}
			for _, p := range x.pieces {
				require.Equal(t, want[:len(p.Host)], p.Host)
				want = want[len(p.Host):]
			}
		})
	}
	require.NoError(t, m.Free())
	require.NoError(t, d.Close())
}

// TestScatterOnBusyGPU: once a kernel had to wait, copy engines do the rest of that call and the following calls.
func TestScatterOnBusyGPU(t *testing.T) {
	d, g := openFake(t, 64<<20, true)
	const pages = roundScatter + 500
	m, err := d.Alloc(32 << 20)
	require.NoError(t, err)
	host := make([]byte, pages*pageSize)
	noise(host, 1)
	pieces := everyOther(m, host)
	g.busy = slowRound + 2*roundScatter*slowPage
	require.NoError(t, d.CopyIn(t.Context(), pieces))
	require.Equal(t, 1, g.calls["cuLaunchKernel"], "the first round found out")
	require.Positive(t, g.calls["cuMemcpyBatchAsync"])
	require.True(t, bytes.Equal(host, returned(t, d, m, pieces)))
	d.worker.slow.lasts(time.Hour)
	noise(host, 2)
	require.NoError(t, d.CopyIn(t.Context(), pieces))
	require.Equal(t, 1, g.calls["cuLaunchKernel"])
	require.True(t, bytes.Equal(host, returned(t, d, m, pieces)))
	d.worker.slow.lasts(0)
	noise(host, 3)
	require.NoError(t, d.CopyIn(t.Context(), pieces[:leastScatter]))
	require.Equal(t, 2, g.calls["cuLaunchKernel"], "and then it is tried again")
	require.True(t, bytes.Equal(host[:leastScatter*pageSize], returned(t, d, m, pieces[:leastScatter])))
	require.NoError(t, m.Free())
	require.NoError(t, d.Close())
}

// TestScatterOfNeighbours: pages that are side by side in page-locked memory are one copy, however the pieces divide
// them.
func TestScatterOfNeighbours(t *testing.T) {
	d, g := openFake(t, 64<<20, true)
	d.worker.slow.patience = time.Hour
	m, err := d.Alloc(32 << 20)
	require.NoError(t, err)
	locked, giveBack, err := d.HostBuffer(2000 * pageSize)
	require.NoError(t, err)
	noise(locked, 1)
	pieces := everyOther(m, locked)
	clear(g.calls)
	require.NoError(t, d.CopyIn(t.Context(), pieces))
	require.Equal(t, 2, g.calls["cuMemcpyHtoDAsync"], "the addresses, and the pages")
	require.Equal(t, 1, g.calls["cuLaunchKernel"])
	require.True(t, bytes.Equal(locked, returned(t, d, m, pieces)))
	giveBack()
	require.NoError(t, m.Free())
	require.NoError(t, d.Close())
}

// TestScatterFails makes each driver call of a round fail: when the error is returned nothing uses the caller's memory
// any more, and the next call works.
func TestScatterFails(t *testing.T) {
	d, g := openFake(t, 64<<20, true)
	d.worker.slow.patience = time.Hour
	m, err := d.Alloc(8 << 20)
	require.NoError(t, err)
	locked, giveBack, err := d.HostBuffer(leastScatter * pageSize)
	require.NoError(t, err)
	other := make([]byte, leastScatter*pageSize)
	for _, host := range [][]byte{locked, other} {
		in := everyOther(m, host)
		out := everyOther(m, make([]byte, len(host)))
		if &host[0] == &locked[0] {
			out = in
		}
		for _, x := range []struct {
			call   string
			after  int
			toHost bool
		}{
			{"cuMemcpyHtoDAsync", 0, false}, {"cuMemcpyHtoDAsync", 1, false}, {"cuLaunchKernel", 0, false},
			{"cuEventRecord", 0, false}, {"cuEventQuery", 0, false},
			{"cuMemcpyHtoDAsync", 0, true}, {"cuLaunchKernel", 0, true}, {"cuMemcpyDtoHAsync", 0, true},
			{"cuEventRecord", 0, true}, {"cuEventQuery", 1, true},
		} {
			g.mu.Lock()
			g.fail[x.call], g.after[x.call] = invalidValue, x.after
			g.mu.Unlock()
			if x.toHost {
				err = d.CopyOut(t.Context(), out)
			} else {
				err = d.CopyIn(t.Context(), in)
			}
			require.ErrorContains(t, err, x.call)
			require.NotErrorIs(t, err, gpubackend.ErrDeviceLost)
			require.Zero(t, g.queued(), "%s: something is on its way", x.call)
			g.setFail(x.call, success)
			noise(host, uint64(x.after)+7)
			require.NoError(t, d.CopyIn(t.Context(), in))
			require.Equal(t, host, returned(t, d, m, in))
			want := bytes.Clone(host)
			clear(out[0].Host)
			require.NoError(t, d.CopyOut(t.Context(), out))
			for i, p := range out {
				require.Equal(t, want[i*pageSize:(i+1)*pageSize], p.Host)
			}
		}
	}
	giveBack()
	require.NoError(t, m.Free())
	require.NoError(t, d.Close())
	require.Zero(t, g.left())
}
