package gpubackend

import (
	"bytes"
	"encoding/binary"
	"math/bits"

	"github.com/gaiafs/gaiafs/internal/page"
)

// GranuleSize is the size in bytes of one granule of a page.
const GranuleSize = 16

// Granules is a set of parts of a page: bit i%64 of word i/64 stands for the bytes [i·GranuleSize, (i+1)·GranuleSize).
type Granules [page.Size / GranuleSize / 64]uint64

// Differing returns the granules in which two pages differ.
func Differing(a, b []byte) (g Granules) {
	const step = 256 // bytes that are compared at once, most of which are equal
	a, b = a[:page.Size], b[:page.Size]
	for off := 0; off < page.Size; off += step {
		x, y := a[off:off+step], b[off:off+step]
		if bytes.Equal(x, y) {
			continue
		}
		for i := 0; i < step; i += GranuleSize {
			if binary.LittleEndian.Uint64(x[i:]) != binary.LittleEndian.Uint64(y[i:]) ||
				binary.LittleEndian.Uint64(x[i+8:]) != binary.LittleEndian.Uint64(y[i+8:]) {
				k := (off + i) / GranuleSize
				g[k/64] |= 1 << (k % 64)
			}
		}
	}
	return g
}

// Count returns the number of members.
func (g *Granules) Count() (n int) {
	for _, w := range g {
		n += bits.OnesCount64(w)
	}
	return n
}

// Each calls fn with the bytes [from, to) of each run of members, in ascending order.
func (g *Granules) Each(fn func(from, to int)) {
	const all = page.Size / GranuleSize
	for i := 0; i < all; {
		rest := g[i/64] >> (i % 64)
		if rest == 0 {
			i = (i/64 + 1) * 64
			continue
		}
		i += bits.TrailingZeros64(rest)
		from := i
		for i < all {
			n, left := bits.TrailingZeros64(^(g[i/64] >> (i % 64))), 64-i%64
			if i += min(n, left); n < left {
				break
			}
		}
		fn(from*GranuleSize, i*GranuleSize)
	}
}

// Differing returns Changed, or the granules in which Base and Next differ if Changed is empty.
func (p *Patch) Differing() Granules {
	if p.Changed != (Granules{}) {
		return p.Changed
	}
	return Differing(p.Base, p.Next)
}
