package gpubackend

import (
	"encoding/binary"
	"math/bits"

	"github.com/gaiafs/gaiafs/internal/page"
)

// Mixture is a page that has each byte from one of two pages. Computing its digest costs only as much as the swaps, not
// a pass over the page, because H is a sum over pairs of words. A Mixture is not safe for concurrent use.
type Mixture struct {
	key          *DigestKey
	bytes, other [page.Size]byte
	hi, lo       uint64 // H of bytes
}

// Mix returns a Mixture with all bytes from a; Swap takes bytes from b. Mix keeps neither slice, and panics unless both
// have page.Size bytes.
func (k *DigestKey) Mix(a, b []byte) *Mixture {
	if len(a) != page.Size || len(b) != page.Size {
		panic("gpubackend: mixture of something that is not a page")
	}
	m := &Mixture{key: k, bytes: [page.Size]byte(a), other: [page.Size]byte(b)}
	m.hi, m.lo = sumNH(&k.nh, &m.bytes)
	return m
}

// Swap takes the bytes [from, to) from the other page. Swapping them again undoes it.
func (m *Mixture) Swap(from, to int) {
	const pair = 16
	first, end := from/pair*pair, (to+pair-1)/pair*pair
	for at := first; at < end; at += pair {
		m.add(at, false)
	}
	for at := from; at < to; at++ {
		m.bytes[at], m.other[at] = m.other[at], m.bytes[at]
	}
	for at := first; at < end; at += pair {
		m.add(at, true)
	}
}

// add adds the pair of words at a byte to H, or subtracts it.
func (m *Mixture) add(at int, plus bool) {
	p, k := m.bytes[at:at+16:at+16], (*[2]uint64)(m.key.nh[at/8:])
	hi, lo := bits.Mul64(binary.LittleEndian.Uint64(p)+k[0], binary.LittleEndian.Uint64(p[8:])+k[1])
	var carry uint64
	if plus {
		m.lo, carry = bits.Add64(m.lo, lo, 0)
		m.hi, _ = bits.Add64(m.hi, hi, carry)
		return
	}
	m.lo, carry = bits.Sub64(m.lo, lo, 0)
	m.hi, _ = bits.Sub64(m.hi, hi, carry)
}

// Sum returns the digest of the page.
func (m *Mixture) Sum() Digest { return m.key.foldSum(m.hi, m.lo) }

// Bytes returns the page, which changes with the next Swap.
func (m *Mixture) Bytes() []byte { return m.bytes[:] }
