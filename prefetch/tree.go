package prefetch

import (
	"math/bits"

	"github.com/gaiafs/gaiafs/internal/page"
)

const (
	// treeBlock is the size of a block in pages (64 KiB), treeRegion that of a region in blocks (2 MiB).
	treeBlock  = 64 << 10 >> page.Shift
	treeRegion = 32
)

// Tree is the prefetcher of NVIDIA's driver for unified memory, as Ganguly et al. describe it. It fetches whole blocks.
// A part of a region is an aligned power-of-two number of blocks. If more than half of a part is there, Tree fetches
// the rest of it.
type Tree struct {
	// regions has a bit for each block that is there or on its way.
	regions map[page.Index]uint32
	end     page.Index
}

// NewTree makes a Tree.
func NewTree() *Tree { return &Tree{regions: make(map[page.Index]uint32), end: endless} }

// Access implements Predictor.
func (t *Tree) Access(rg page.Range, p Pattern, ahead []page.Range) []page.Range {
	if rg.Empty() || p == Random {
		return ahead
	}
	for b := rg.Start / treeBlock; b <= (rg.End-1)/treeBlock; b++ {
		region, bit := b/treeRegion, int(b%treeRegion)
		had := t.regions[region]
		if had>>bit&1 != 0 {
			continue
		}
		has := had | 1<<bit
		for n := 2; n <= treeRegion; n *= 2 {
			part := uint32(1<<n-1) << (bit / n * n)
			if 2*bits.OnesCount32(has&part) > n {
				has |= part
			}
		}
		t.regions[region] = has
		for k := range treeRegion {
			if (has&^had)>>k&1 != 0 {
				start := (region*treeRegion + page.Index(k)) * treeBlock
				ahead = add(ahead, page.Range{Start: start, End: start + treeBlock}, t.end)
			}
		}
	}
	return ahead
}

// Unused implements Predictor.
func (t *Tree) Unused(rg page.Range) {
	for b := rg.Start / treeBlock; b*treeBlock < rg.End; b++ {
		t.regions[b/treeRegion] &^= 1 << (b % treeRegion)
	}
}

// Resize implements Predictor.
func (t *Tree) Resize(end page.Index) {
	t.end = end
	block := (end + treeBlock - 1) / treeBlock
	for region := range t.regions {
		if region > block/treeRegion {
			delete(t.regions, region)
		}
	}
	if _, ok := t.regions[block/treeRegion]; ok {
		t.regions[block/treeRegion] &= 1<<(block%treeRegion) - 1
	}
}
