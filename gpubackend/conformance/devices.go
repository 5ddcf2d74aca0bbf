package conformance

import (
	"bytes"
	"context"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// testPeerCopies copies pieces of any size and alignment from one device to another, and within one.
func testPeerCopies(f *fixture) {
	other := f.openDevice()
	size := 2 * f.info.Granularity
	m := f.alloc(size)
	source, err := other.Alloc(size)
	require.NoError(f, err)
	defer func() { require.NoError(f, source.Free()) }()
	want, theirs := f.random(size), f.random(size)
	f.write(m, 0, want)
	require.NoError(f, other.CopyIn(f.ctx, []gpubackend.Copy{{Mem: source, Host: theirs}}))
	whole := gpubackend.PeerCopy{Mem: m, From: source, N: size}
	err = f.dev.CopyPeer(f.ctx, []gpubackend.PeerCopy{whole})
	if err != nil {
		// There may be no direct way, but then the error says so.
		require.ErrorIs(f, err, gpubackend.ErrNoPeer)
		require.True(f, bytes.Equal(want, f.read(m, 0, size)), "memory as it was")
		f.Skipf("not between these devices: %v", err)
	}
	require.True(f, bytes.Equal(theirs, f.read(m, 0, size)))

	f.write(m, 0, want)
	for range 10 {
		var pieces []gpubackend.PeerCopy
		for range f.rnd.IntN(40) {
			slot := int64(len(pieces)) * (size / 40) // disjoint, since pieces may be copied in any order
			p := gpubackend.PeerCopy{Mem: m, Off: slot + f.rnd.Int64N(size/80), From: source,
				N: f.rnd.Int64N(size / 80)}
			p.FromOff = f.rnd.Int64N(size - p.N)
			copy(want[p.Off:], theirs[p.FromOff:p.FromOff+p.N])
			pieces = append(pieces, p)
		}
		require.NoError(f, f.dev.CopyPeer(f.ctx, pieces))
		require.True(f, bytes.Equal(want, f.read(m, 0, size)))
	}
	require.NoError(f, f.dev.CopyPeer(f.ctx, nil))
	require.NoError(f, f.dev.CopyPeer(f.ctx, []gpubackend.PeerCopy{{Mem: m, Off: size / 2, From: m, N: size / 2}}),
		"within one device")
	require.True(f, bytes.Equal(want[:size/2], f.read(m, size/2, size/2)))
	copy(want[size/2:], want[:size/2])

	for name, bad := range map[string]gpubackend.PeerCopy{
		"before the start":        {Mem: m, Off: -1, From: source, N: page.Size},
		"over the end":            {Mem: m, Off: 1, From: source, N: size},
		"source before the start": {Mem: m, From: source, FromOff: -1, N: page.Size},
		"source over the end":     {Mem: m, From: source, FromOff: size - page.Size + 1, N: page.Size},
		"a negative length":       {Mem: m, From: source, N: -1},
		"another device's":        {Mem: source, From: m, N: page.Size},
		"no memory":               {From: source, N: page.Size},
		"no source":               {Mem: m, N: page.Size},
	} {
		good := gpubackend.PeerCopy{Mem: m, From: source, N: page.Size}
		require.ErrorIs(f, f.dev.CopyPeer(f.ctx, []gpubackend.PeerCopy{good, bad}), gpubackend.ErrRange, name)
	}
	require.True(f, bytes.Equal(want, f.read(m, 0, size)), "memory as it was")
	ctx, cancel := context.WithCancel(f.ctx)
	cancel()
	require.ErrorIs(f, f.dev.CopyPeer(ctx, []gpubackend.PeerCopy{whole}), context.Canceled)
	gone, err := other.Alloc(f.info.Granularity)
	require.NoError(f, err)
	require.NoError(f, gone.Free())
	require.ErrorIs(f, f.dev.CopyPeer(f.ctx, []gpubackend.PeerCopy{{Mem: m, From: gone, N: 1}}), gpubackend.ErrFreed)
}
