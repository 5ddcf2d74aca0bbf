package lrc

import "golang.org/x/sys/cpu"

// mergeBlock is the bytes that mergeBlocks takes at a time.
const mergeBlock = 64

// wideMerge is true if the processor has what mergeBlocks needs. It is a variable so that tests can try both ways.
var wideMerge = cpu.X86.HasAVX2 && cpu.X86.HasPOPCNT

// mergeBlocks is mergeWords for n bytes, a positive multiple of mergeBlock, and at least one version. Every byte of a
// block is read before the block is stored. It needs AVX2 and POPCNT.
//
//go:noescape
func mergeBlocks(dst, base *byte, versions *[]byte, count, n int) (overlap int)

func mergeMany(dst, base []byte, versions [][]byte) (overlap int) {
	n := len(dst) &^ (mergeBlock - 1)
	if n == 0 || !wideMerge {
		return mergeWords(dst, base, versions)
	}
	overlap = mergeBlocks(&dst[0], &base[0], &versions[0], len(versions), n)
	return overlap + mergeBytes(dst[n:], base[n:], versions, n)
}
