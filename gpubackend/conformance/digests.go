package conformance

import (
	"bytes"
	"slices"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// patched is the contract of Patch, byte by byte.
func patched(mem, base, next []byte) []byte {
	out := slices.Clone(mem)
	for i := range out {
		if base[i] != next[i] && mem[i] == base[i] {
			out[i] = next[i]
		}
	}
	return out
}

// testPatch patches pages that are partly as in base, and more pages than fit into a batch.
func testPatch(f *fixture) {
	const pages = 700
	m := f.alloc(pages * page.Size)
	mem := f.random(pages * page.Size)
	base := slices.Clone(mem)
	next := slices.Clone(mem)
	for i := range mem {
		switch f.rnd.IntN(12) {
		case 0, 1:
			next[i] ^= byte(1 + f.rnd.IntN(255)) // changed at home
		case 2:
			mem[i] ^= byte(1 + f.rnd.IntN(255)) // changed by the device
		case 3:
			next[i] ^= byte(1 + f.rnd.IntN(255)) // by both
			mem[i] ^= byte(1 + f.rnd.IntN(255))
		}
	}
	copy(pageAt(next, 5), pageAt(base, 5)) // nothing to do
	f.write(m, 0, mem)
	var patches []gpubackend.Patch
	for _, i := range f.rnd.Perm(pages)[:pages-3] {
		off := int64(i) * page.Size
		patches = append(patches, gpubackend.Patch{Mem: m, Off: off, Base: pageAt(base, i), Next: pageAt(next, i)})
	}
	want := slices.Clone(mem)
	for _, p := range patches {
		i := int(p.Off / page.Size)
		copy(pageAt(want, i), patched(pageAt(mem, i), p.Base, p.Next))
	}
	require.NoError(f, f.dev.Patch(f.ctx, patches))
	require.True(f, bytes.Equal(want, f.read(m, 0, int64(len(want)))))
	require.NoError(f, f.dev.Patch(f.ctx, nil))
}

// patches stores mem into m, and patches each of its pages from base to next, in any order.
func (f *fixture) patches(m gpubackend.Memory, mem, base, next []byte, patches []gpubackend.Patch) {
	f.write(m, 0, mem)
	f.rnd.Shuffle(len(patches), func(a, b int) { patches[a], patches[b] = patches[b], patches[a] })
	require.NoError(f, f.dev.Patch(f.ctx, patches))
	got := f.read(m, 0, int64(len(mem)))
	for i := range patches {
		require.True(f, bytes.Equal(patched(pageAt(mem, i), pageAt(base, i), pageAt(next, i)), pageAt(got, i)),
			"page %d", i)
	}
}

// testPatchOfGranules patches pages that differ a little or everywhere, with and without Changed, in several rounds.
func testPatchOfGranules(f *fixture) {
	const pages = 3000
	m := f.alloc(pages * page.Size)
	base := f.random(pages * page.Size)
	mem, next := slices.Clone(base), slices.Clone(base)
	var patches []gpubackend.Patch
	for i := range pages {
		p := gpubackend.Patch{Mem: m, Off: int64(i) * page.Size, Base: pageAt(base, i), Next: pageAt(next, i)}
		switch f.rnd.IntN(4) {
		case 0:
			copy(p.Next, f.random(page.Size))
		case 1: // a run that begins and ends anywhere
			from := f.rnd.IntN(page.Size)
			copy(p.Next[from:from+f.rnd.IntN(page.Size-from)], f.random(page.Size))
		default: // the edges of granules, and of the words of their numbers
			for range 1 + f.rnd.IntN(5) {
				at := []int{0, 15, 16, 1023, 1024, 2047, 2048, page.Size - 1, f.rnd.IntN(page.Size)}[f.rnd.IntN(9)]
				p.Next[at] ^= byte(1 + f.rnd.IntN(255))
			}
		}
		for range f.rnd.IntN(20) { // what the device has else
			pageAt(mem, i)[f.rnd.IntN(page.Size)]++
		}
		switch f.rnd.IntN(3) {
		case 0:
			p.Changed = gpubackend.Differing(p.Base, p.Next)
		case 1: // more than differs
			p.Changed = gpubackend.Differing(p.Base, p.Next)
			for k := range p.Changed {
				p.Changed[k] |= f.rnd.Uint64()
			}
		}
		patches = append(patches, p)
	}
	f.patches(m, mem, base, next, patches)
}

// testPatchOfAgreed patches pages with an agreed digest, some of them unchanged, in several rounds, from page-locked
// and from other memory.
func testPatchOfAgreed(f *fixture) {
	const pages = 5000
	m := f.alloc(pages * page.Size)
	base := f.random(pages * page.Size)
	mem := slices.Clone(base)
	next, giveBack, err := f.dev.HostBuffer(pages * page.Size)
	require.NoError(f, err)
	defer giveBack()
	copy(next, base)
	var patches []gpubackend.Patch
	for i := range pages {
		p := gpubackend.Patch{Mem: m, Off: int64(i) * page.Size, Base: pageAt(base, i), Next: pageAt(next, i)}
		p.Agreed = new(f.dev.Key().Sum(p.Base))
		switch f.rnd.IntN(3) {
		case 0:
			copy(p.Next, f.random(page.Size))
		case 1:
			for range 1 + f.rnd.IntN(5) {
				p.Next[f.rnd.IntN(page.Size)]++
			}
		}
		if i%3 == 0 {
			for range 1 + f.rnd.IntN(20) { // what the device has else
				pageAt(mem, i)[f.rnd.IntN(page.Size)]++
			}
		}
		switch f.rnd.IntN(4) {
		case 0:
			p.Next = slices.Clone(p.Next)
		case 1:
			p.Agreed = nil
		}
		patches = append(patches, p)
	}
	f.patches(m, mem, base, next, patches)
}

func testDigests(f *fixture) {
	const pages = 1500
	m := f.alloc(pages * page.Size)
	data := f.random(pages * page.Size)
	clear(pageAt(data, 0))
	copy(pageAt(data, 1), bytes.Repeat([]byte{0xff}, page.Size))
	f.write(m, 0, data)
	for _, r := range [][2]int{{0, pages}, {0, 1}, {1, 1}, {pages - 1, 1}, {255, 2}, {17, 513}, {3, 0}} {
		got, want := make([]gpubackend.Digest, r[1]), make([]gpubackend.Digest, r[1])
		require.NoError(f, f.dev.Digests(f.ctx, m, int64(r[0])*page.Size, got))
		f.dev.Key().SumPages(data[r[0]*page.Size:(r[0]+r[1])*page.Size], want)
		require.Equal(f, want, got, "%d pages from %d", r[1], r[0])
	}
}

// testModified changes single bits in some pages. Exactly these pages are found, in as few ranges as possible.
func testModified(f *fixture) {
	const pages = 1500
	mems := []gpubackend.Memory{f.alloc(pages * page.Size), f.alloc(pages * page.Size)}
	data := f.random(pages * page.Size)
	agreed := make([]gpubackend.Digest, pages)
	f.dev.Key().SumPages(data, agreed)
	for _, m := range mems {
		f.write(m, 0, data)
	}
	scan := func(m gpubackend.Memory, from, n int) gpubackend.Scan {
		return gpubackend.Scan{Mem: m, Off: int64(from) * page.Size, Agreed: agreed[from : from+n]}
	}
	got, err := f.dev.Modified(f.ctx, []gpubackend.Scan{scan(mems[0], 0, pages), scan(mems[1], 0, pages)})
	require.NoError(f, err)
	require.Len(f, got, 2)
	require.Empty(f, got[0])
	require.Empty(f, got[1])
	got, err = f.dev.Modified(f.ctx, nil)
	require.NoError(f, err)
	require.Empty(f, got)

	changed := map[int]bool{0: true, pages - 1: true}
	for i := 250; i < 520; i++ { // one range across batches
		changed[i] = true
	}
	for range 60 {
		changed[f.rnd.IntN(pages)] = true
	}
	for i := range changed {
		off := int64(i)*page.Size + f.rnd.Int64N(page.Size)
		f.write(mems[1], off, []byte{data[off] ^ 1<<f.rnd.IntN(8)})
	}
	var scans []gpubackend.Scan
	var want [][]page.Range
	add := func(m gpubackend.Memory, from, n int) {
		scans = append(scans, scan(m, from, n))
		var ranges []page.Range
		for i := range n {
			if m == mems[1] && changed[from+i] {
				ranges = page.AppendRange(ranges, page.Range{Start: page.Index(i), End: page.Index(i + 1)})
			}
		}
		want = append(want, ranges)
	}
	add(mems[1], 0, pages)
	add(mems[0], 0, pages)
	add(mems[1], 3, 0)
	for _, n := range []int{1, 255, 256, 257, 512, 513} { // around what a batch may be
		add(mems[1], pages-n, n) // the last page is modified
	}
	for range 30 {
		from := f.rnd.IntN(pages)
		add(mems[1], from, f.rnd.IntN(pages-from))
	}
	got, err = f.dev.Modified(f.ctx, scans)
	require.NoError(f, err)
	require.Len(f, got, len(scans))
	for i := range got {
		require.True(f, slices.Equal(want[i], got[i]), "scan %d: want %v, got %v", i, want[i], got[i])
	}
}
