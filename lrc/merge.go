package lrc

import (
	"encoding/binary"
	"math/bits"
)

// Merge3 stores into dst the byte of mine where it differs from base, and the byte of theirs elsewhere. It returns the
// number of bytes that both mine and theirs changed, to different values. mine is the higher owner: if both changed a
// byte, mine wins (DESIGN rule 6).
//
// All four must have the same length; otherwise Merge3 panics. dst may be the same slice as mine, theirs or base, but
// must not overlap them in any other way. The slices must not change during the call.
func Merge3(dst, base, mine, theirs []byte) (overlap int) {
	n := len(dst)
	if len(base) != n || len(mine) != n || len(theirs) != n {
		panic("lrc: merge of different lengths")
	}
	versions := [2][]byte{theirs, mine}
	return mergeMany(dst, base, versions[:])
}

// MergeMany stores into dst, for every byte, the value of the last version that differs from base, or the value of base
// if none differs. The versions are in ascending order of their owners. It returns the number of bytes to which at
// least two versions gave different values, neither being that of base. Without versions, dst becomes base.
//
// Lengths and overlapping memory are as for Merge3.
func MergeMany(dst, base []byte, versions [][]byte) (overlap int) {
	for _, v := range versions {
		if len(v) != len(dst) {
			panic("lrc: merge of different lengths")
		}
	}
	if len(base) != len(dst) {
		panic("lrc: merge of different lengths")
	}
	if len(versions) == 0 {
		copy(dst, base)
		return 0
	}
	return mergeMany(dst, base, versions)
}

// wordsAtOnce is the number of words that mergeWords merges over all versions before it goes on to the next words.
const wordsAtOnce = 32

// mergeWords is mergeMany for any machine: eight bytes at a time, and the rest one by one. It has no branch on the
// bytes, so its cost does not depend on how many changed.
func mergeWords(dst, base []byte, versions [][]byte) (overlap int) {
	const size = wordsAtOnce * 8
	var b, merged, changed, conflict [wordsAtOnce]uint64 // merged is what was changed, xor base
	i := 0
	for ; i+size <= len(dst); i += size {
		for w := range b {
			b[w] = binary.LittleEndian.Uint64(base[i+8*w:])
		}
		clear(merged[:])
		clear(changed[:])
		clear(conflict[:])
		for _, v := range versions {
			block := (*[size]byte)(v[i:])
			for w := range b {
				x := binary.LittleEndian.Uint64(block[8*w:]) ^ b[w]
				mask := nonzeroBytes(x)
				conflict[w] |= (x ^ merged[w]) & mask & changed[w]
				merged[w] = merged[w]&^mask | x
				changed[w] |= mask
			}
		}
		block := (*[size]byte)(dst[i:])
		for w := range b {
			binary.LittleEndian.PutUint64(block[8*w:], b[w]^merged[w])
			overlap += bits.OnesCount64(nonzeroBytes(conflict[w]))
		}
	}
	return overlap/8 + mergeBytes(dst[i:], base[i:], versions, i)
}

// mergeBytes merges the remaining bytes, from byte off of the versions on.
func mergeBytes(dst, base []byte, versions [][]byte, off int) (overlap int) {
	for i, b := range base {
		d, changed, conflict := b, false, false
		for _, v := range versions {
			if x := v[off+i]; x != b {
				conflict = conflict || changed && d != x
				d, changed = x, true
			}
		}
		dst[i] = d
		if conflict {
			overlap++
		}
	}
	return overlap
}

// nonzeroBytes returns a word with 0xff in the place of every byte of x that is not 0.
func nonzeroBytes(x uint64) uint64 {
	const low = 0x7f7f7f7f7f7f7f7f
	high := ((x&low + low) | x) &^ low // 0x80 in the place of every such byte
	return high<<1 - high>>7
}
