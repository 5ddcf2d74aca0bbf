package conformance

import (
	"bytes"
	"math"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// anyRows returns a copy of random rows of host, at off.
func (f *fixture) anyRows(m gpubackend.Memory, off int64, host []byte) gpubackend.Copy {
	row := 1 + f.rnd.Int64N([]int64{20, 600, 9000, 1 << 20}[f.rnd.IntN(4)])
	stride := row + f.rnd.Int64N(2)*f.rnd.Int64N(4*row)
	n := (f.rnd.Int64N(300))*stride + 1 + f.rnd.Int64N(row)
	if f.rnd.IntN(2) == 0 {
		n += row - 1 - (n-1)%stride // the last row is whole
	}
	start := f.rnd.Int64N(64)
	if most := int64(len(host)) - start; n > most {
		n = most - max(0, (most-1)%stride-row+1)
	}
	return gpubackend.Copy{Mem: m, Off: off, Host: host[start:][:n:n], Row: row, Stride: stride}
}

// testRows copies rows between both kinds of host memory and a device, alone and beside other copies. It compares them
// with a model, and checks that neither the gaps nor other bytes of the memory change.
func testRows(f *fixture) {
	const size, slot = 16 << 20, 4 << 20
	m := f.alloc(size)
	twin := f.random(size)
	f.write(m, 0, twin)
	buffer, giveBack, err := f.dev.HostBuffer(slot)
	require.NoError(f, err)
	defer giveBack()
	for round := range 40 {
		var pieces []gpubackend.Copy
		for at := int64(0); at < size; at += slot {
			host := buffer // pieces may share host memory that is read
			if f.rnd.IntN(3) == 0 {
				host = make([]byte, slot)
			}
			if at == 0 || f.rnd.IntN(3) == 0 {
				copy(host, f.random(slot))
			}
			if f.rnd.IntN(4) == 0 {
				pieces = append(pieces, gpubackend.Copy{Mem: m, Off: at + 5, Host: host[7 : 7+f.rnd.IntN(9000)]})
			} else {
				pieces = append(pieces, f.anyRows(m, at+f.rnd.Int64N(100), host[:slot-200]))
			}
		}
		for i := range pieces {
			for off, row := range pieces[i].Rows() {
				copy(twin[off:], row)
			}
		}
		require.NoError(f, f.dev.CopyIn(f.ctx, pieces))
		require.True(f, bytes.Equal(twin, f.read(m, 0, size)), "round %d: exactly what was named was stored", round)
		for i, p := range pieces {
			host := p.Host
			if i%2 == 0 {
				host = buffer[:len(host)]
			} else {
				host = make([]byte, len(host))
			}
			noise := f.random(int64(len(host)))
			copy(host, noise)
			want := gpubackend.Copy{Off: p.Off, Host: noise, Row: p.Row, Stride: p.Stride}
			for off, row := range want.Rows() {
				copy(row, twin[off:])
			}
			p.Host = host
			require.NoError(f, f.dev.CopyOut(f.ctx, []gpubackend.Copy{p}))
			require.True(f, bytes.Equal(noise, host), "round %d: rows came, and gaps stayed", round)
		}
	}
	f.testFaultyRows(m, twin)
}

// testFaultyRows checks that a call with rows that do not fit touches nothing.
func (f *fixture) testFaultyRows(m gpubackend.Memory, twin []byte) {
	size := int64(len(twin))
	good := gpubackend.Copy{Mem: m, Host: f.random(page.Size)}
	host := make([]byte, 100)
	for name, bad := range map[string]gpubackend.Copy{
		"rows that overlap":     {Host: host, Row: 10, Stride: 9},
		"no row":                {Host: host, Stride: 10},
		"no stride":             {Host: host, Row: 10},
		"a negative row":        {Host: host, Row: -1, Stride: 10},
		"a negative stride":     {Host: host, Row: 10, Stride: -10},
		"host ends in a gap":    {Host: host[:16], Row: 5, Stride: 10},
		"over the end":          {Off: size - 50, Host: host[:96], Row: 6, Stride: 10},
		"before the start":      {Off: -1, Host: host[:96], Row: 6, Stride: 10},
		"the least stride":      {Host: host, Row: 10, Stride: math.MinInt64},
		"a stride and no bytes": {Stride: 1},
	} {
		bad.Mem = m
		require.ErrorIs(f, f.dev.CopyIn(f.ctx, []gpubackend.Copy{good, bad}), gpubackend.ErrRange, name)
		require.ErrorIs(f, f.dev.CopyOut(f.ctx, []gpubackend.Copy{bad}), gpubackend.ErrRange, name)
	}
	require.True(f, bytes.Equal(twin, f.read(m, 0, size)), "memory as it was")
	fits := gpubackend.Copy{Mem: m, Off: size - 60, Host: f.random(96), Row: 6, Stride: 10}
	none := gpubackend.Copy{Mem: m, Off: size, Row: 6, Stride: math.MaxInt64}
	far := gpubackend.Copy{Mem: m, Host: f.random(9), Row: 9, Stride: math.MaxInt64}
	require.NoError(f, f.dev.CopyIn(f.ctx, []gpubackend.Copy{fits, none, far}))
	for _, c := range []gpubackend.Copy{fits, far} {
		for off, row := range c.Rows() {
			require.True(f, bytes.Equal(row, f.read(m, off, int64(len(row)))))
		}
	}
}

// testRowsOfOtherDevices copies rows from one device's host buffer to two devices at once, as ranks do that share what
// they read.
func testRowsOfOtherDevices(f *fixture) {
	const row, rows = 4096, 200
	other := f.openDevice()
	theirs, err := other.Alloc(max(2<<20, other.Info().Granularity))
	require.NoError(f, err)
	defer func() { require.NoError(f, theirs.Free()) }()
	ours := f.alloc(2 << 20)
	buffer, giveBack, err := f.dev.HostBuffer(2 * row * rows)
	require.NoError(f, err)
	defer giveBack()
	copy(buffer, f.random(int64(len(buffer))))
	host := buffer[140:]
	errs := make(chan error, 2)
	for i, d := range []gpubackend.Device{f.dev, other} {
		mem := []gpubackend.Memory{ours, theirs}[i]
		c := gpubackend.Copy{Mem: mem, Host: host[i*row:][:(rows-2)*2*row+row], Row: row, Stride: 2 * row}
		go func() { errs <- d.CopyIn(f.ctx, []gpubackend.Copy{c}) }()
	}
	require.NoError(f, <-errs)
	require.NoError(f, <-errs)
	for i, d := range []gpubackend.Device{f.dev, other} {
		mem := []gpubackend.Memory{ours, theirs}[i]
		got := make([]byte, (rows-1)*row)
		require.NoError(f, d.CopyOut(f.ctx, []gpubackend.Copy{{Mem: mem, Host: got}}))
		for k := range rows - 1 {
			require.True(f, bytes.Equal(host[(2*k+i)*row:][:row], got[k*row:][:row]), "row %d of device %d", k, i)
		}
	}
}
