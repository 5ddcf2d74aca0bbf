package conformance

import (
	"bytes"
	"os"
	"slices"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

func (f *fixture) export(m gpubackend.Memory, writable bool) *os.File {
	f.Helper()
	x, err := m.Export(writable)
	require.NoError(f, err)
	return x
}

func testExport(f *fixture) {
	m, other := f.alloc(f.info.Granularity), f.alloc(f.info.Granularity)
	ro, rw := f.export(m, false), f.export(m, true)
	require.Same(f, ro, f.export(m, false), "exported once")
	require.Same(f, rw, f.export(m, true))
	require.NotSame(f, ro, rw)
	require.NotSame(f, rw, f.export(other, true))
	_, err := rw.SyscallConn()
	require.NoError(f, err, "an open descriptor")
	require.NoError(f, m.Free())
	require.ErrorIs(f, rw.Close(), os.ErrClosed, "Free closed the exports")
	require.ErrorIs(f, ro.Close(), os.ErrClosed)
}

// testShared: the daemon and two processes see each other's stores.
func testShared(f *fixture) {
	m, n := f.alloc(f.info.Granularity), f.alloc(2*f.info.Granularity)
	first, second := []byte("from the daemon"), []byte("from a process")
	f.write(m, 5, first)
	f.write(n, 0, make([]byte, n.Size()))
	a := f.startPeer(f.export(m, true), f.export(n, true))
	b := f.startPeer(f.export(n, false), f.export(m, false))
	a.importView(0, m, true)
	a.importView(1, n, true)
	b.importView(0, n, false)
	b.importView(1, m, false)
	require.Equal(f, first, a.load(0, 5, len(first)))
	require.Equal(f, first, b.load(1, 5, len(first)))
	end := n.Size() - int64(len(second))
	a.store(1, end, second)
	require.Equal(f, second, f.read(n, end, int64(len(second))))
	require.Equal(f, second, b.load(0, end, len(second)))

	// Stores of a process are found, and patched away byte by byte.
	agreed := make([]gpubackend.Digest, n.Size()/page.Size)
	f.dev.Key().SumPages(make([]byte, n.Size()), agreed)
	got, err := f.dev.Modified(f.ctx, []gpubackend.Scan{{Mem: n, Agreed: agreed}})
	require.NoError(f, err)
	last := page.Index(len(agreed) - 1)
	require.Equal(f, [][]page.Range{{{Start: last, End: last + 1}}}, got)
	base := f.read(n, last.Offset(), page.Size)
	next := make([]byte, page.Size)
	require.NoError(f, f.dev.Patch(f.ctx, []gpubackend.Patch{{Mem: n, Off: last.Offset(), Base: base, Next: next}}))
	require.Equal(f, next, b.load(0, last.Offset(), page.Size))
	require.NoError(f, f.dev.Zero(f.ctx, m, 0, page.Size))
	require.Equal(f, make([]byte, page.Size), a.load(0, 0, page.Size))
}

// testReadOnly: a process tries to write through a read-only export.
func testReadOnly(f *fixture) {
	m := f.alloc(f.info.Granularity)
	want := f.random(m.Size())
	f.write(m, 0, want)
	p := f.startPeer(f.export(m, false), f.export(m, false))
	p.importView(0, m, false)
	require.Equal(f, want[:page.Size], p.load(0, 0, page.Size))
	_, err := p.try(request{Op: "store", View: 0, Data: []byte("forbidden")})
	require.Error(f, err, "store into a view for reading")
	if !slices.Contains(f.allowed, ReadOnlyIsAdvice) {
		_, err = p.try(request{Op: "import", View: 1, Size: m.Size(), Writable: true})
		if err == nil {
			_, err = p.try(request{Op: "store", View: 1, Data: []byte("forbidden")})
		}
		require.Error(f, err, "write access by a read-only export")
	}
	require.True(f, bytes.Equal(want, f.read(m, 0, m.Size())), "memory as it was")
	require.Equal(f, want[:page.Size], p.load(0, 0, page.Size), "and still readable")
}

// testFreedUnderImporter frees memory that a process still maps, and then allocates all memory. Neither side sees the
// other's stores.
func testFreedUnderImporter(f *fixture) {
	g := f.info.Granularity
	m := f.alloc(g)
	f.write(m, 0, make([]byte, g))
	ro := f.alloc(g)
	f.write(ro, 0, make([]byte, g))
	p := f.startPeer(f.export(m, true), f.export(ro, false))
	p.importView(0, m, true)
	p.importView(1, ro, false)
	require.NoError(f, m.Free())
	require.NoError(f, ro.Free())
	kept := 2 * g
	if slices.Contains(f.allowed, ImportersAreUnknown) {
		kept = 0
	}
	require.Equal(f, kept, f.dev.Used(), "who knows of importers counts what they keep")

	secret := bytes.Repeat([]byte("secret! "), page.Size/8)
	var all []gpubackend.Memory
	for range 8 {
		x := f.alloc(g)
		for off := int64(0); off < g; off += 16 * page.Size {
			f.write(x, off, secret)
		}
		all = append(all, x)
	}
	for view := range 2 {
		for off := int64(0); off < g; off += 1 << 20 {
			got := p.load(view, off, int(min(g-off, 1<<20)))
			require.NotContains(f, string(got), "secret!", "an importer sees memory that was allocated later")
		}
	}
	p.do(request{Op: "stamp", Off: 0, Stride: 1, N: int(g), Rounds: 1})
	for _, x := range all {
		require.Equal(f, secret, f.read(x, 0, page.Size), "an importer's stores reach memory that was allocated later")
	}
	p.do(request{Op: "close", View: 0})
	p.kill()
	require.Equal(f, 8*g, f.dev.Used(), "no process keeps memory")
}

// testHeld tests whether Held knows that another process may still have exported memory.
func testHeld(f *fixture) {
	m := f.alloc(f.info.Granularity)
	require.False(f, m.Held(), "no process got it")
	f.export(m, true)
	unknown := slices.Contains(f.allowed, ImportersAreUnknown)
	require.Equal(f, unknown, m.Held(), "exported, but sent to no process")
	for _, writable := range []bool{true, false} {
		p := f.startPeer(f.export(m, writable))
		require.True(f, m.Held(), "a process has the descriptor")
		p.importView(0, m, writable)
		require.True(f, m.Held(), "a process maps it")
		q := f.startPeer(f.export(m, true), f.export(m, false))
		p.kill()
		require.True(f, m.Held(), "another one has the descriptors")
		q.kill()
		require.Equal(f, unknown, m.Held(), "both are gone")
	}
	require.NoError(f, m.Free())
	require.False(f, m.Held())
	require.Zero(f, f.dev.Used())
}

func testImporterDies(f *fixture) {
	m := f.alloc(f.info.Granularity)
	f.write(m, 0, make([]byte, m.Size()))
	p := f.startPeer(f.export(m, true))
	p.importView(0, m, true)
	p.store(0, 100, []byte("last words"))
	p.kill()
	require.Equal(f, "last words", string(f.read(m, 100, 10)), "stores outlive their process")
	q := f.startPeer(f.export(m, true))
	q.importView(0, m, true)
	require.Equal(f, "last words", string(q.load(0, 100, 10)))
	for name, err := range f.uses(m) {
		require.NoError(f, err, name)
	}
}

// testPatchBesideStores patches the even bytes of pages while a process stores into the odd ones. No store of either
// side is lost, with and without the agreed digest of the pages before the stores.
func testPatchBesideStores(f *fixture, agreed bool) {
	const pages = 16
	m := f.alloc(f.info.Granularity)
	f.write(m, 0, make([]byte, m.Size()))
	p := f.startPeer(f.export(m, true))
	p.importView(0, m, true)
	state := make([]byte, pages*page.Size) // the even bytes, as patched so far
	const rounds = 700
	p.send(request{Op: "stamp", Off: 1, Stride: 2, N: len(state) / 2, Rounds: rounds})
	answered := make(chan answer, 1)
	go func() {
		var a answer
		if err := p.hear.Decode(&a); err != nil {
			a.Err = err.Error()
		}
		answered <- a
	}()
	var a answer
	for patches, done := 0, false; !done; patches++ {
		next := slices.Clone(state)
		for i := 0; i < len(next); i += 2 {
			next[i]++
		}
		var call []gpubackend.Patch
		for i := range pages {
			p := gpubackend.Patch{Mem: m, Off: int64(i) * page.Size, Base: pageAt(state, i), Next: pageAt(next, i)}
			if agreed {
				p.Agreed = new(f.dev.Key().Sum(p.Base))
			}
			call = append(call, p)
		}
		require.NoError(f, f.dev.Patch(f.ctx, call))
		state = next
		select {
		case a = <-answered:
			done = patches > 0
			require.True(f, done, "the process ended before anything was patched")
		default:
		}
	}
	require.Empty(f, a.Err)
	require.Zero(f, a.Lost, "stores undone by a patch")
	got := f.read(m, 0, int64(len(state)))
	const last = rounds % 256
	for i := 1; i < len(state); i += 2 {
		state[i] = last
	}
	require.True(f, bytes.Equal(state, got), "patches undone by stores")
}

// testDigestsBesideStores takes digests of a page while a process stores into it. One byte changes between two values,
// so each digest must be that of one of two pages.
func testDigestsBesideStores(f *fixture) {
	m := f.alloc(f.info.Granularity)
	data := f.random(2 * page.Size)
	const at = 1234
	f.write(m, 0, data)
	p := f.startPeer(f.export(m, true))
	p.importView(0, m, true)
	const rounds = 250 // the value is the round
	known := map[gpubackend.Digest]bool{f.dev.Key().Sum(data[:page.Size]): true}
	for round := 1; round <= rounds; round++ {
		data[at] = byte(round)
		known[f.dev.Key().Sum(data[:page.Size])] = true
	}
	steady := f.dev.Key().Sum(data[page.Size:])
	for range 20 {
		p.send(request{Op: "stamp", Off: at, Stride: 1, N: 1, Rounds: rounds})
		for range 50 {
			sums := make([]gpubackend.Digest, 2)
			require.NoError(f, f.dev.Digests(f.ctx, m, 0, sums))
			require.True(f, known[sums[0]], "a digest of bytes that the page never had")
			require.Equal(f, steady, sums[1])
		}
		require.Zero(f, p.receive().Lost)
		sums := make([]gpubackend.Digest, 1)
		require.NoError(f, f.dev.Digests(f.ctx, m, 0, sums))
		require.Equal(f, f.dev.Key().Sum(data[:page.Size]), sums[0])
	}
}
