package pagecache

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

const (
	// digestBlock is the digests that share a page of host memory.
	digestBlock = page.Size / 8
	// leastMapped is the digests from which they are mapped on their own: of a large extent most may never be needed.
	leastMapped = 16 * digestBlock
)

// digests has one for each page of an extent. Memory is taken, and charged, for the blocks that were asked for; the
// others have those of zeros. Protected by File.mu.
type digests struct {
	memory *account
	zero   gpubackend.Digest
	users  int // the extent, and scans
	sums   []gpubackend.Digest
	blocks []uint64 // a bit for each that is there
	bytes  int64    // of these
	mapped []byte   // what sums are in, nil where that is Go's heap
}

func newDigests(memory *account, pages int64, zero gpubackend.Digest) *digests {
	d := &digests{memory: memory, zero: zero, users: 1, blocks: make([]uint64, pages/digestBlock/64+1)}
	if pages >= leastMapped {
		mapped, err := unix.Mmap(-1, 0, int(pages)*8, unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
		if err == nil {
			// Nobody uses them when the last user is gone, which unmaps them.
			d.mapped, d.sums = mapped, unsafe.Slice((*gpubackend.Digest)(unsafe.Pointer(&mapped[0])), pages)
			return d
		}
	}
	d.sums = make([]gpubackend.Digest, pages)
	return d
}

func (d *digests) has(block page.Index) bool { return d.blocks[block/64]>>(block%64)&1 != 0 }

// take returns the digests [from, to), which are there from now on.
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

// run reports whether the digests from from on are there, and where, up to to, that changes.
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

// drop is what each user calls once.
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
