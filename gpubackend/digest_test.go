package gpubackend

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"math/big"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

func testKey(t testing.TB, seed uint64) *DigestKey {
	k, err := NewDigestKey(&splitMix{seed})
	require.NoError(t, err)
	return k
}

// splitMix generates the test vectors, as documented: SplitMix64, with little-endian words.
type splitMix struct{ state uint64 }

func (g *splitMix) next() uint64 {
	g.state += 0x9e3779b97f4a7c15
	z := g.state
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// Read fills p, whose length is a multiple of 8.
func (g *splitMix) Read(p []byte) (int, error) {
	for i := 0; i < len(p); i += 8 {
		binary.LittleEndian.PutUint64(p[i:], g.next())
	}
	return len(p), nil
}

// digestTwin computes the digest by the comment of DigestKey, with big integers.
func digestTwin(k *DigestKey, p []byte) Digest {
	two64, two128 := new(big.Int).Lsh(big.NewInt(1), 64), new(big.Int).Lsh(big.NewInt(1), 128)
	word := func(i int) *big.Int {
		s := new(big.Int).SetUint64(binary.LittleEndian.Uint64(p[8*i:]))
		s.Add(s, new(big.Int).SetUint64(k.nh[i]))
		return s.Mod(s, two64)
	}
	h := new(big.Int)
	for i := 0; i < pageWords; i += 2 {
		h.Add(h, new(big.Int).Mul(word(i), word(i+1)))
	}
	h.Mod(h, two128)
	sum := new(big.Int)
	two60 := new(big.Int).Lsh(big.NewInt(1), 60)
	for i := range 3 {
		piece := new(big.Int).Rsh(h, uint(60*i))
		piece.Mod(piece, two60)
		sum.Add(sum, piece.Mul(piece, new(big.Int).SetUint64(k.fold[i])))
	}
	return Digest(sum.Mod(sum, big.NewInt(foldPrime)).Uint64())
}

func TestDigestIsTheTwin(t *testing.T) {
	k := testKey(t, 1)
	pages := map[string][]byte{
		"zeros": make([]byte, page.Size),
		"ones":  bytes.Repeat([]byte{0xff}, page.Size),
		"one":   append([]byte{1}, make([]byte, page.Size-1)...),
	}
	for i := range 200 {
		p := make([]byte, page.Size)
		_, _ = (&splitMix{uint64(i)}).Read(p)
		pages[fmt.Sprint(i)] = p
	}
	extreme := testKey(t, 1)
	for i := range extreme.nh { // every product and every carry at its largest
		extreme.nh[i] = 1<<64 - 1
	}
	for i := range extreme.fold {
		extreme.fold[i] = foldPrime - 1
	}
	for name, p := range pages {
		for _, k := range []*DigestKey{k, extreme} {
			require.Equal(t, digestTwin(k, p), k.Sum(p), name)
		}
	}
}

func FuzzDigest(f *testing.F) {
	f.Add(uint64(1), []byte("page"))
	f.Fuzz(func(t *testing.T, seed uint64, data []byte) {
		k := testKey(t, seed)
		p := make([]byte, page.Size)
		for n := 0; n < len(p) && len(data) > 0; {
			n += copy(p[n:], data)
		}
		require.Equal(t, digestTwin(k, p), k.Sum(p))
	})
}

func TestSumPages(t *testing.T) {
	k := testKey(t, 2)
	pages := make([]byte, 9*page.Size)
	_, _ = (&splitMix{3}).Read(pages)
	out := make([]Digest, 9)
	k.SumPages(pages, out)
	for i := range out {
		require.Equal(t, k.Sum(pages[i*page.Size:(i+1)*page.Size]), out[i])
	}
	k.SumPages(nil, nil)
	require.Panics(t, func() { k.SumPages(pages, out[:8]) })
	require.Panics(t, func() { k.SumPages(pages[1:], out) })
	require.Panics(t, func() { k.Sum(pages) })
	require.Panics(t, func() { k.Sum(pages[:page.Size-1]) })
}

// TestEveryBitCounts changes each single bit of a page, and pairs of words in ways that a plain sum would not notice.
func TestEveryBitCounts(t *testing.T) {
	k := testKey(t, 4)
	p := make([]byte, page.Size)
	_, _ = (&splitMix{5}).Read(p)
	seen := map[Digest]bool{k.Sum(p): true}
	for bit := range page.Size * 8 {
		p[bit/8] ^= 1 << (bit % 8)
		d := k.Sum(p)
		require.Less(t, d, Digest(foldPrime))
		require.False(t, seen[d], "bit %d", bit)
		seen[d] = true
		p[bit/8] ^= 1 << (bit % 8)
	}
	for i := 0; i+16 <= len(p); i += 16 { // neighbours swapped
		q := slices.Clone(p)
		copy(q[i:], p[i+8:i+16])
		copy(q[i+8:], p[i:i+8])
		d := k.Sum(q)
		require.False(t, seen[d], "words at %d", i)
		seen[d] = true
	}
}

func TestDigestKeys(t *testing.T) {
	p := make([]byte, page.Size)
	a, b := testKey(t, 1), testKey(t, 2)
	require.NotEqual(t, a.Sum(p), b.Sum(p))
	enc, err := a.AppendBinary([]byte("x"))
	require.NoError(t, err)
	require.Len(t, enc, 1+DigestKeySize)
	back, err := DecodeDigestKey(enc[1:])
	require.NoError(t, err)
	require.Equal(t, a, back)
	_, err = DecodeDigestKey(enc)
	require.Error(t, err)
	_, err = DecodeDigestKey(bytes.Repeat([]byte{0xff}, DigestKeySize))
	require.Error(t, err)
	// A word whose lower bits are the prime is drawn again.
	draw := make([]byte, page.Size, page.Size+32)
	draw = append(draw, bytes.Repeat([]byte{0xff}, 8)...)
	draw = append(draw, bytes.Repeat([]byte{1, 0, 0, 0, 0, 0, 0, 0xff}, 3)...)
	k, err := NewDigestKey(bytes.NewReader(draw))
	require.NoError(t, err)
	require.Equal(t, [3]uint64{0x1f00000000000001, 0x1f00000000000001, 0x1f00000000000001}, k.fold)
	for _, n := range []int{0, 4095, 4096, 4096 + 8*2} {
		_, err = NewDigestKey(bytes.NewReader(make([]byte, n)))
		require.Error(t, err)
	}
}

// vectorFile has test vectors for other implementations of the digest. The file describes itself.
type vectorFile struct {
	About   []string       `json:"about"`
	Vectors []digestVector `json:"vectors"`
}

type digestVector struct {
	KeySeed uint64 `json:"key_seed"`
	Page    string `json:"page"`
	Digest  string `json:"digest"`
}

var writeVectors = flag.Bool("write-vectors", false, "write testdata/digests.json anew")

// vectorPage makes the page that a vector names.
func vectorPage(name string) ([]byte, error) {
	p := make([]byte, page.Size)
	var n uint64
	switch {
	case name == "zeros":
	case name == "ones":
		copy(p, bytes.Repeat([]byte{0xff}, page.Size))
	case name == "counting":
		for i := range p {
			p[i] = byte(i)
		}
	default:
		if _, err := fmt.Sscanf(name, "bit %d", &n); err == nil && n < page.Size*8 {
			p[n/8] = 1 << (n % 8)
			return p, nil
		}
		if _, err := fmt.Sscanf(name, "splitmix64 %d", &n); err != nil {
			return nil, fmt.Errorf("page %q: %w", name, err)
		}
		_, _ = (&splitMix{n}).Read(p)
	}
	return p, nil
}

func TestVectors(t *testing.T) {
	const path = "testdata/digests.json"
	if *writeVectors {
		f := vectorFile{About: []string{
			"Digests of pages of 4096 bytes, as DigestKey in digest.go defines them, in hexadecimal.",
			"key_seed: the key is drawn by NewDigestKey from SplitMix64 with that state (Steele, Lea, Flood 2014), its",
			"words read little-endian: 512 words k, then 3 words f, each the lower 61 bits of a word.",
			"page: 'zeros', 'ones' (0xff), 'counting' (byte i is i mod 256), 'bit N' (zeros but for bit N mod 8 of byte",
			"N/8), 'splitmix64 S' (512 words of SplitMix64 with state S, little-endian).",
		}}
		names := []string{"zeros", "ones", "counting", "bit 0", "bit 63", "bit 64", "bit 16384", "bit 32767"}
		for i := range 24 {
			names = append(names, fmt.Sprintf("splitmix64 %d", i))
		}
		for _, seed := range []uint64{0, 1, 0xfeedfacecafebeef} {
			for _, name := range names {
				p, err := vectorPage(name)
				require.NoError(t, err)
				d := digestTwin(testKey(t, seed), p)
				f.Vectors = append(f.Vectors, digestVector{seed, name, fmt.Sprintf("%016x", uint64(d))})
			}
		}
		b, err := json.MarshalIndent(f, "", "  ")
		require.NoError(t, err)
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, append(b, '\n'), 0o644))
	}
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	var f vectorFile
	require.NoError(t, json.Unmarshal(b, &f))
	require.Len(t, f.Vectors, 96)
	for _, v := range f.Vectors {
		p, err := vectorPage(v.Page)
		require.NoError(t, err)
		require.Equal(t, v.Digest, fmt.Sprintf("%016x", uint64(testKey(t, v.KeySeed).Sum(p))), "key %d, page %q",
			v.KeySeed, v.Page)
	}
}

func BenchmarkDigest(b *testing.B) {
	k := testKey(b, 1)
	p := make([]byte, page.Size)
	_, _ = (&splitMix{1}).Read(p)
	b.SetBytes(page.Size)
	for b.Loop() {
		k.Sum(p)
	}
}
