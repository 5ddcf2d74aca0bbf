package lrc

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// mergeTwin is MergeMany by its comment, byte by byte.
func mergeTwin(base []byte, versions [][]byte) (dst []byte, overlap int) {
	dst = slices.Clone(base)
	for i, b := range base {
		values := map[byte]bool{}
		for _, v := range versions {
			if v[i] != b {
				dst[i] = v[i]
				values[v[i]] = true
			}
		}
		if len(values) > 1 {
			overlap++
		}
	}
	return dst, overlap
}

// sources returns a base of n bytes and count versions of it, with about one byte in every changed. It uses few values,
// so that versions often agree.
func sources(rnd *rand.Rand, n, count, every int) (base []byte, versions [][]byte) {
	base = make([]byte, n)
	for i := range base {
		base[i] = byte(rnd.IntN(3)) * 0x7f
	}
	for range count {
		v := slices.Clone(base)
		for i := range v {
			if rnd.IntN(every) == 0 {
				v[i] = byte(rnd.IntN(256) & rnd.IntN(256))
			}
		}
		versions = append(versions, v)
	}
	return base, versions
}

// eachMerge runs a test with every implementation of the merge that the machine supports.
func eachMerge(t *testing.T, f func(t *testing.T)) {
	for _, way := range mergeWays() {
		t.Run(way.name, func(t *testing.T) {
			way.use(t)
			f(t)
		})
	}
}

type mergeWay struct {
	name string
	use  func(testing.TB)
}

func TestMergeIsTheTwin(t *testing.T) {
	eachMerge(t, func(t *testing.T) {
		for seed := range uint64(2000) {
			rnd := rand.New(rand.NewPCG(seed, 1))
			n := rnd.IntN(300)
			if seed%50 == 0 {
				n = 4096
			}
			base, versions := sources(rnd, n, rnd.IntN(6), 1+rnd.IntN(20))
			want, overlap := mergeTwin(base, versions)
			before := slices.Clone(versions)
			dst := make([]byte, n)
			require.Equal(t, overlap, MergeMany(dst, base, versions), "seed %d", seed)
			require.True(t, bytes.Equal(want, dst), "seed %d", seed)
			require.Equal(t, before, versions)
			// dst may be any of the sources.
			for i := range versions {
				again := slices.Clone(versions)
				again[i] = slices.Clone(versions[i])
				require.Equal(t, overlap, MergeMany(again[i], base, again), "seed %d", seed)
				require.True(t, bytes.Equal(want, again[i]), "seed %d onto version %d", seed, i)
			}
			onBase := slices.Clone(base)
			require.Equal(t, overlap, MergeMany(onBase, onBase, versions), "seed %d", seed)
			require.True(t, bytes.Equal(want, onBase), "seed %d onto base", seed)
		}
	})
}

func TestMerge3(t *testing.T) {
	eachMerge(t, func(t *testing.T) {
		base := bytes.Repeat([]byte("base"), 32)
		mine, theirs := slices.Clone(base), slices.Clone(base)
		mine[0], theirs[1] = 'M', 'T'     // different bytes of one word
		mine[70], theirs[70] = 'M', 'T'   // the same byte
		mine[100], theirs[100] = 'S', 'S' // to the same value
		want := slices.Clone(base)
		want[0], want[1], want[70], want[100] = 'M', 'T', 'M', 'S'
		dst := make([]byte, len(base))
		require.Equal(t, 1, Merge3(dst, base, mine, theirs))
		require.Equal(t, string(want), string(dst))
		m, th := slices.Clone(mine), slices.Clone(theirs)
		require.Equal(t, 1, Merge3(m, base, m, theirs))
		require.Equal(t, string(want), string(m))
		require.Equal(t, 1, Merge3(th, base, mine, th))
		require.Equal(t, string(want), string(th))
	})
	require.Zero(t, Merge3(nil, nil, nil, nil))
	dst := []byte("12345")
	require.Zero(t, MergeMany(dst, []byte("basis"), nil))
	require.Equal(t, "basis", string(dst))
}

// TestMergeAllBytePairs tries every base, mine and theirs that a byte can have, in every lane.
func TestMergeAllBytePairs(t *testing.T) {
	eachMerge(t, func(t *testing.T) {
		dst, base, mine, theirs := make([]byte, 256), make([]byte, 256), make([]byte, 256), make([]byte, 256)
		for b := range 256 {
			for m := range 256 {
				overlap := 0
				for i := range 256 {
					base[i], mine[i], theirs[i] = byte(b), byte(m), byte(i+m)
					if m != b && theirs[i] != byte(b) && theirs[i] != byte(m) {
						overlap++
					}
				}
				if got := Merge3(dst, base, mine, theirs); got != overlap {
					t.Fatalf("base %d mine %d: overlap %d, want %d", b, m, got, overlap)
				}
				want := mine
				if m == b {
					want = theirs
				}
				if !bytes.Equal(want, dst) {
					t.Fatalf("base %d mine %d: wrong bytes", b, m)
				}
			}
		}
	})
}

func TestMergeLengths(t *testing.T) {
	four, five := make([]byte, 4), make([]byte, 5)
	require.Panics(t, func() { Merge3(four, five, four, four) })
	require.Panics(t, func() { Merge3(four, four, five, four) })
	require.Panics(t, func() { Merge3(four, four, four, five) })
	require.Panics(t, func() { Merge3(five, four, four, four) })
	require.Panics(t, func() { MergeMany(four, five, nil) })
	require.Panics(t, func() { MergeMany(four, four, [][]byte{four, five}) })
}

// TestMergeStaysInside puts inaccessible memory on both sides of every slice.
func TestMergeStaysInside(t *testing.T) {
	var walled [5][]byte
	for i := range walled {
		mem := mapMemory(t, 3*4096)
		require.NoError(t, unix.Mprotect(mem[:4096], unix.PROT_NONE))
		require.NoError(t, unix.Mprotect(mem[2*4096:], unix.PROT_NONE))
		walled[i] = mem[4096 : 2*4096]
	}
	eachMerge(t, func(t *testing.T) {
		for n := 0; n <= 200; n++ {
			for _, from := range []int{0, 4096 - n} { // against the lower wall and against the upper
				var s [5][]byte
				for i := range s {
					s[i] = walled[i][from : from+n]
					for j := range s[i] {
						s[i][j] = byte(i * j)
					}
				}
				want, overlap := mergeTwin(s[1], s[2:])
				require.Equal(t, overlap, MergeMany(s[0], s[1], s[2:]))
				require.True(t, bytes.Equal(want, s[0]))
			}
		}
	})
}

func FuzzMerge(f *testing.F) {
	f.Add([]byte("base"), byte(3))
	f.Add(bytes.Repeat([]byte{0, 0xff, 0x80}, 70), byte(2))
	f.Fuzz(func(t *testing.T, data []byte, count byte) {
		// The data is base and versions one after the other, so that the fuzzer sees every byte.
		parts := 1 + int(count%5)
		n := len(data) / parts
		base := data[:n]
		var versions [][]byte
		for i := 1; i < parts; i++ {
			versions = append(versions, data[i*n:(i+1)*n])
		}
		want, overlap := mergeTwin(base, versions)
		for _, way := range mergeWays() {
			way.use(t)
			dst := make([]byte, n)
			require.Equal(t, overlap, MergeMany(dst, base, versions), way.name)
			require.True(t, bytes.Equal(want, dst), way.name)
		}
	})
}

// mapMemory returns n bytes outside Go's heap.
func mapMemory(t testing.TB, n int) []byte {
	mem, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(mem)) })
	return mem
}

// The densities of changes: one byte in 64, and every second byte.
var densities = []struct {
	name  string
	every int
}{{"sparse", 64}, {"dense", 2}}

func benchmarkMerge(b *testing.B, f func(b *testing.B, every int)) {
	for _, way := range mergeWays() {
		for _, d := range densities {
			b.Run(fmt.Sprintf("%s/%s", way.name, d.name), func(b *testing.B) {
				way.use(b)
				b.SetBytes(4096)
				f(b, d.every)
			})
		}
	}
}

// BenchmarkMerge3 has three sources: base, home and a replica.
func BenchmarkMerge3(b *testing.B) {
	benchmarkMerge(b, func(b *testing.B, every int) {
		base, v := sources(rand.New(rand.NewPCG(1, 1)), 4096, 2, every)
		dst := make([]byte, 4096)
		for b.Loop() {
			Merge3(dst, base, v[0], v[1])
		}
	})
}

// BenchmarkMergeMany has a base and three versions.
func BenchmarkMergeMany(b *testing.B) {
	benchmarkMerge(b, func(b *testing.B, every int) {
		base, v := sources(rand.New(rand.NewPCG(1, 1)), 4096, 3, every)
		dst := make([]byte, 4096)
		for b.Loop() {
			MergeMany(dst, base, v)
		}
	})
}
