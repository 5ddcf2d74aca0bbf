package pagecache

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

const (
	// digestBlock is the number of digests in a page of host memory.
	digestBlock = page.Size / 8
	// leastMapped is the number of digests from which they get a memory mapping of their own. Most digests of a large
	// extent may never be needed.
	leastMapped = 16 * digestBlock
)

// digests has a digest for each page of an extent. It takes and charges memory only for blocks that were asked for; all
// others stand for zero pages. Protected by File.mu.
type digests struct {
	memory *account
	zero   gpubackend.Digest
	users  int // the extent, and scans that read the digests
	sums   []gpubackend.Digest
	blocks []uint64 // one bit for each block that is present
	bytes  int64    // size of the blocks present
	mapped []byte   // the memory mapping of sums; nil if it is on Go's heap
}

func newDigests(memory *account, pages int64, zero gpubackend.Digest) *digests {
	d := &digests{memory: memory, zero: zero, users: 1, blocks: make([]uint64, pages/digestBlock/64+1)}
	if pages >= leastMapped {
		mapped, err := unix.Mmap(-1, 0, int(pages)*8, unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
		if err == nil {
			// drop unmaps the memory once the last user is gone, so no slice of it is used afterwards.
			d.mapped, d.sums = mapped, unsafe.Slice((*gpubackend.Digest)(unsafe.Pointer(&mapped[0])), pages)
			return d
		}
	}
	d.sums = make([]gpubackend.Digest, pages)
	return d
}

func (d *digests) has(block page.Index) bool { return d.blocks[block/64]>>(block%64)&1 != 0 }

// take returns the digests [from, to), and adds their blocks if they are missing.
func (d *digests) take(from, to page.Index) []gpubackend.Digest {
	before := d.bytes
	for k := from / digestBlock; k*digestBlock < to; k++ {
		if d.has(k) {
			continue
		}
		d.blocks[k/64] |= 1 << (k % 64)
		block := d.block(k)
		for i := range block {
			block[i] = d.zero
		}
		d.bytes += int64(len(block)) * 8
	}
	d.memory.charge(memoryDigests, d.bytes-before)
	return d.sums[from:to]
}

func (d *digests) block(k page.Index) []gpubackend.Digest {
	return d.sums[k*digestBlock : min((k+1)*digestBlock, page.Index(len(d.sums)))]
}

// run reports whether the block of from is present, and where that changes, up to to.
func (d *digests) run(from, to page.Index) (there bool, end page.Index) {
	k := from / digestBlock
	there = d.has(k)
	for k++; k*digestBlock < to && d.has(k) == there; k++ {
	}
	return there, min(k*digestBlock, to)
}

// clone returns a copy, with one user.
func (d *digests) clone() *digests {
	c := newDigests(d.memory, int64(len(d.sums)), d.zero)
	for k := page.Index(0); k*digestBlock < page.Index(len(d.sums)); k++ {
		if d.has(k) {
			copy(c.take(k*digestBlock, k*digestBlock+page.Index(len(d.block(k)))), d.block(k))
		}
	}
	return c
}

// drop ends one user's use. The last user frees the memory.
func (d *digests) drop() {
	if d == nil {
		return
	}
	if d.users--; d.users > 0 {
		return
	}
	d.memory.charge(memoryDigests, -d.bytes)
	d.sums = nil
	if d.mapped != nil {
		_ = unix.Munmap(d.mapped)
		d.mapped = nil
	}
}
