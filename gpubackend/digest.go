package gpubackend

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"sync"

	"github.com/gaiafs/gaiafs/internal/page"
)

// pageWords is the number of 64-bit words in a page.
const pageWords = page.Size / 8

// foldPrime is the Mersenne prime 2^61-1.
const foldPrime = 1<<61 - 1

// DigestKey is the key of a device's digests. It is drawn at random, kept secret, and never changes.
//
// # The function
//
// The page is 512 little-endian words m, the key 512 words k and 3 words f.
//
//	H      = Σ (m[2i]+k[2i] mod 2^64) · (m[2i+1]+k[2i+1] mod 2^64)  mod 2^128, over i = 0…255
//	Digest = f[0]·(H mod 2^60) + f[1]·(H/2^60 mod 2^60) + f[2]·(H/2^120)  mod 2^61-1
//
// with H/2^60 and H/2^120 rounded down, and the digest in [0, 2^61-1).
//
// # The bound
//
// Let two pages differ. H is NH with words of 64 bits (Black, Halevi, Krawczyk, Krovetz, Rogaway, "UMAC: Fast and
// Secure Message Authentication", CRYPTO '99, theorem 4.2): over the choice of k, two different messages of the same
// length have the same H with a probability of at most 2^-64. If the values of H differ, so does one of the three
// pieces; all are below the prime, so the difference of the pieces, multiplied by its f and added up, is 0 for exactly
// one in 2^61-1 values of that f, whatever the others are (multilinear hashing, Carter and Wegman 1979). So the digests
// are equal with a probability of at most 2^-64 + 1/(2^61-1), which is below 2^-60.
//
// The bound is for pages that do not depend on the key. Digests and keys therefore never leave the daemon.
type DigestKey struct {
	nh   [pageWords]uint64
	fold [3]uint64 // each below foldPrime
}

// DigestKeySize is the size of an encoded DigestKey in bytes.
const DigestKeySize = (pageWords + 3) * 8

// NewDigestKey draws a key from random, which should be crypto/rand's Reader. It reads 4 KiB for NH, then words for the
// fold. Of these it takes the lower 61 bits, and draws again if they are not residues of foldPrime.
func NewDigestKey(random io.Reader) (*DigestKey, error) {
	var k DigestKey
	var buf [page.Size]byte
	if _, err := io.ReadFull(random, buf[:]); err != nil {
		return nil, fmt.Errorf("draw a digest key: %w", err)
	}
	for i := range k.nh {
		k.nh[i] = binary.LittleEndian.Uint64(buf[8*i:])
	}
	for i := 0; i < len(k.fold); {
		if _, err := io.ReadFull(random, buf[:8]); err != nil {
			return nil, fmt.Errorf("draw a digest key: %w", err)
		}
		if w := binary.LittleEndian.Uint64(buf[:]) & foldPrime; w < foldPrime {
			k.fold[i] = w
			i++
		}
	}
	return &k, nil
}

// SharedKey returns the default key of the devices of this process. The first call draws it. With one key, devices can
// compare digests of each other's pages; this reveals no more about a page than two keys would.
var SharedKey = sync.OnceValues(func() (*DigestKey, error) { return NewDigestKey(rand.Reader) })

// AppendBinary appends the key as a device's kernel takes it: the words k and then f, little-endian. It never fails.
func (k *DigestKey) AppendBinary(buf []byte) ([]byte, error) {
	for _, w := range k.nh {
		buf = binary.LittleEndian.AppendUint64(buf, w)
	}
	for _, w := range k.fold {
		buf = binary.LittleEndian.AppendUint64(buf, w)
	}
	return buf, nil
}

// DecodeDigestKey returns the key that AppendBinary encoded as b.
func DecodeDigestKey(b []byte) (*DigestKey, error) {
	if len(b) != DigestKeySize {
		return nil, fmt.Errorf("digest key of %d bytes, not %d", len(b), DigestKeySize)
	}
	var k DigestKey
	for i := range k.nh {
		k.nh[i] = binary.LittleEndian.Uint64(b[8*i:])
	}
	for i := range k.fold {
		k.fold[i] = binary.LittleEndian.Uint64(b[8*(pageWords+i):])
		if k.fold[i] >= foldPrime {
			return nil, errors.New("digest key has a word that is not a residue")
		}
	}
	return &k, nil
}

// Sum returns the digest of a page. It panics unless p has page.Size bytes.
//
// Other processes may be storing into p. Every word is loaded once, so the digest is that of bytes that p had, each at
// some moment of the call.
func (k *DigestKey) Sum(p []byte) Digest {
	if len(p) != page.Size {
		panic("gpubackend: digest of something that is not a page")
	}
	return k.foldSum(sumNH(&k.nh, (*[page.Size]byte)(p)))
}

// SumPages stores the digests of the pages of p into out. It panics unless p has len(out) pages. It reads p as Sum
// does, and uses one core.
func (k *DigestKey) SumPages(p []byte, out []Digest) {
	if len(p) != len(out)<<page.Shift {
		panic("gpubackend: digests of something that is not as many pages")
	}
	for i := range out {
		out[i] = k.foldSum(sumNH(&k.nh, (*[page.Size]byte)(p[i<<page.Shift:])))
	}
}

// sumNH returns H. It keeps two sums, so that their carries do not wait for each other. Assembly was tried: it was 10 %
// faster from the cache, and no faster from memory.
func sumNH(k *[pageWords]uint64, p *[page.Size]byte) (hi, lo uint64) {
	var hi2, lo2, carry uint64
	for i := 0; i < pageWords; i += 4 {
		m := p[8*i : 8*i+32 : 8*i+32]
		w := (*[4]uint64)(k[i:])
		h, l := bits.Mul64(binary.LittleEndian.Uint64(m)+w[0], binary.LittleEndian.Uint64(m[8:])+w[1])
		lo, carry = bits.Add64(lo, l, 0)
		hi, _ = bits.Add64(hi, h, carry)
		h, l = bits.Mul64(binary.LittleEndian.Uint64(m[16:])+w[2], binary.LittleEndian.Uint64(m[24:])+w[3])
		lo2, carry = bits.Add64(lo2, l, 0)
		hi2, _ = bits.Add64(hi2, h, carry)
	}
	lo, carry = bits.Add64(lo, lo2, 0)
	hi, _ = bits.Add64(hi, hi2, carry)
	return hi, lo
}

// foldSum reduces a sum of NH to 61 bits.
func (k *DigestKey) foldSum(hi, lo uint64) Digest {
	const low60 = 1<<60 - 1
	s := mulFold(k.fold[0], lo&low60)
	s = addFold(s, mulFold(k.fold[1], (hi<<4|lo>>60)&low60))
	s = addFold(s, mulFold(k.fold[2], hi>>56))
	return Digest(s)
}

// mulFold returns a·b mod foldPrime, for a and b below it.
func mulFold(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	// 2^61 is 1 mod the prime: add the bits from 61 on to those below.
	return addFold(lo&foldPrime, hi<<3|lo>>61)
}

// addFold returns a+b mod foldPrime, for a and b up to it.
func addFold(a, b uint64) uint64 {
	s := a + b
	if s >= foldPrime {
		s -= foldPrime
	}
	return s
}
