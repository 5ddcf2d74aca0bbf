package versions

import (
	"encoding/json"
	"maps"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// naive is the obvious twin of a Vector: a map without zeros.
type naive map[Owner]Version

func (a naive) with(o Owner, n Version) naive {
	b := maps.Clone(a)
	b[o] = n
	if n == 0 {
		delete(b, o)
	}
	return b
}

func (a naive) join(b naive) naive {
	j := maps.Clone(a)
	for o, n := range b {
		j[o] = max(j[o], n)
	}
	return j
}

func (a naive) dominates(b naive) bool {
	for o, n := range b {
		if a[o] < n {
			return false
		}
	}
	return true
}

func (a naive) compare(b naive) Order {
	switch ab, ba := a.dominates(b), b.dominates(a); {
	case ab && ba:
		return Equal
	case ba:
		return Before
	case ab:
		return After
	}
	return Concurrent
}

func (a naive) vector() Vector {
	var v Vector
	for o, n := range a { // in any order: the outcome must not depend on it
		v = v.With(o, n)
	}
	return v
}

func fromVector(v Vector) naive { return maps.Collect(v.Owners()) }

// small draws from few owners and versions, so that vectors often share some; wide draws from all.
func small(t *rapid.T, label string) naive {
	return rapid.MapOfN(rapid.Map(rapid.IntRange(0, 4), func(i int) Owner { return Owner(i) }),
		rapid.Map(rapid.IntRange(1, 3), func(i int) Version { return Version(i) }), 0, 5).Draw(t, label)
}

func wide(t *rapid.T, label string) naive {
	return rapid.MapOfN(rapid.Map(rapid.Byte(), func(b byte) Owner { return Owner(b) }),
		rapid.Map(rapid.Uint64Min(1), func(n uint64) Version { return Version(n) }), 0, 40).Draw(t, label)
}

func draw(t *rapid.T, label string) naive {
	if rapid.Bool().Draw(t, label+" is wide") {
		return wide(t, label)
	}
	return small(t, label)
}

func TestVectorIsTheMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := draw(t, "a"), draw(t, "b")
		v, w := a.vector(), b.vector()
		require.Equal(t, a, fromVector(v))
		require.Equal(t, len(a), v.Len())
		require.Equal(t, maps.Equal(a, b), v == w)
		require.Equal(t, fromVector(v.Join(w)), a.join(b))
		require.True(t, v.Join(w) == a.join(b).vector(), "one encoding for each vector")
		require.Equal(t, a.dominates(b), v.Dominates(w))
		require.Equal(t, a.compare(b), v.Compare(w))
		o := Owner(rapid.Byte().Draw(t, "o"))
		if rapid.Bool().Draw(t, "known") && len(a) > 0 {
			o = rapid.SampledFrom(slices.Sorted(maps.Keys(a))).Draw(t, "one of a")
		}
		n := Version(rapid.Uint64().Draw(t, "n"))
		require.Equal(t, a[o], v.Get(o))
		require.Equal(t, a.with(o, n), fromVector(v.With(o, n)))
		require.Equal(t, a.with(o, 0), fromVector(v.With(o, 0)))
		require.Equal(t, a, fromVector(v), "vectors do not change")
		if a[o] < math.MaxUint64 {
			next := v.Next(o)
			require.Equal(t, a.with(o, a[o]+1), fromVector(next))
			require.Equal(t, After, next.Compare(v))
			require.Equal(t, Before, v.Compare(next))
		}
		owners := []Owner{}
		for o := range v.Owners() {
			owners = append(owners, o)
		}
		require.True(t, slices.IsSorted(owners))
	})
}

func TestLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b, c := draw(t, "a").vector(), draw(t, "b").vector(), draw(t, "c").vector()
		// Join is the least upper bound of a partial order.
		require.True(t, a.Join(a) == a, "idempotent")
		require.True(t, a.Join(b) == b.Join(a), "commutative")
		require.True(t, a.Join(b).Join(c) == a.Join(b.Join(c)), "associative")
		require.True(t, a.Join(Vector{}) == a, "the zero Vector is neutral")
		require.True(t, a.Join(b).Dominates(a) && a.Join(b).Dominates(b), "an upper bound")
		if c.Dominates(a) && c.Dominates(b) {
			require.True(t, c.Dominates(a.Join(b)), "the least one")
		}
		require.True(t, a.Dominates(a), "reflexive")
		if a.Dominates(b) && b.Dominates(a) {
			require.True(t, a == b, "antisymmetric")
		}
		if a.Dominates(b) && b.Dominates(c) {
			require.True(t, a.Dominates(c), "transitive")
		}
		require.Equal(t, a.Dominates(b), a.Join(b) == a)
	})
}

func TestEncodings(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := draw(t, "a").vector()
		prefix := []byte("prefix")
		b, err := v.AppendBinary(slices.Clone(prefix))
		require.NoError(t, err)
		require.Equal(t, prefix, b[:len(prefix)])
		got, err := Decode(b[len(prefix):])
		require.NoError(t, err)
		require.True(t, got == v)

		text, err := json.Marshal(v)
		require.NoError(t, err)
		require.Equal(t, `"`+v.String()+`"`, string(text))
		var back Vector
		require.NoError(t, json.Unmarshal(text, &back))
		require.True(t, back == v)
	})
}

func TestEncodingIsCompact(t *testing.T) {
	var v Vector
	b, _ := v.AppendBinary(nil)
	assert.Empty(t, b)
	for o := range 9 {
		v = v.With(Owner(o), 127)
	}
	b, _ = v.AppendBinary(nil)
	assert.Len(t, b, 18, "two bytes an owner while versions are small")
}

func TestString(t *testing.T) {
	assert.Equal(t, "{}", Vector{}.String())
	assert.Equal(t, "{cpu:3 gpu0:1}", Vector{}.With(GPU(0), 1).With(CPU, 3).String())
	assert.Equal(t, "{gpu7:18446744073709551615 gpu254:1}",
		Vector{}.With(GPU(254), 1).With(GPU(7), math.MaxUint64).String())
}

func TestDecodeRefuses(t *testing.T) {
	for name, b := range map[string][]byte{
		"owner without version":   {0},
		"version cut short":       {0, 0x80},
		"second owner cut short":  {0, 1, 2},
		"version 0":               {1, 0},
		"overlong version":        {1, 0x81, 0},
		"overlong 0":              {1, 0x80, 0},
		"version above 64 bits":   {1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2},
		"version of eleven bytes": {1, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 1},
		"same owner twice":        {1, 1, 1, 2},
		"owners out of order":     {2, 1, 1, 1},
	} {
		_, err := Decode(b)
		assert.ErrorIs(t, err, ErrMalformed, name)
	}
}

func TestUnmarshalTextRefuses(t *testing.T) {
	for _, s := range []string{
		"", "{", "}", "cpu:1", "{cpu}", "{cpu:}", "{cpu:0}", "{cpu:01}", "{cpu:+1}", "{cpu:-1}", "{cpu:1 }", "{ cpu:1}",
		"{cpu:1  gpu0:1}", "{gpu0:1 cpu:1}", "{cpu:1 cpu:2}", "{gpu:1}", "{gpu00:1}", "{gpu255:1}", "{gpu-1:1}",
		"{gpu+1:1}", "{CPU:1}", "{cpu:18446744073709551616}", "{cpu:1:2}", "{}}", "{{}", "{tpu0:1}",
	} {
		v := Vector{}.With(GPU(3), 9)
		assert.ErrorIs(t, v.UnmarshalText([]byte(s)), ErrMalformed, "%q", s)
		assert.Equal(t, "{gpu3:9}", v.String(), "a failed call changes nothing")
	}
}

func TestNextAtTheLastVersion(t *testing.T) {
	assert.Panics(t, func() { Vector{}.With(CPU, math.MaxUint64).Next(CPU) })
}

func TestOwner(t *testing.T) {
	assert.Equal(t, "cpu", CPU.String())
	assert.Equal(t, -1, CPU.Ordinal())
	for ordinal := range MaxGPU + 1 {
		o := GPU(ordinal)
		require.Equal(t, ordinal, o.Ordinal())
		require.Greater(t, o, CPU)
		text, err := o.MarshalText()
		require.NoError(t, err)
		var back Owner
		require.NoError(t, back.UnmarshalText(text))
		require.Equal(t, o, back)
	}
	assert.Panics(t, func() { GPU(-1) })
	assert.Panics(t, func() { GPU(MaxGPU + 1) })
	o := GPU(1)
	for _, s := range []string{"", "gpu", "cpu0", "gpu255", "gpu007", "gpu-0", "GPU0", "gpu0 "} {
		assert.ErrorIs(t, o.UnmarshalText([]byte(s)), ErrNoOwner, "%q", s)
	}
	assert.Equal(t, GPU(1), o, "a failed call changes nothing")
}

func TestEqualVectorsAllocateNothing(t *testing.T) {
	a := Vector{}.With(CPU, 300).With(GPU(0), 7).With(GPU(9), 1)
	enc, _ := a.AppendBinary(nil)
	b, err := Decode(enc) // equal, but not the same string
	require.NoError(t, err)
	low := a.With(GPU(0), 6)
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		if a.Join(b) != a || !a.Dominates(b) || a.Compare(b) != Equal {
			t.Error("equal vectors differ")
		}
		if a.Join(low) != a || low.Join(a) != a || low.Compare(a) != Before || a.With(GPU(0), 7) != a {
			t.Error("a dominates low")
		}
		if (Vector{}).Join(a) != a || a.Get(GPU(9)) != 1 {
			t.Error("lost an owner")
		}
	}))
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{0, 1, 1, 0x80, 1})
	f.Add([]byte{1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := Decode(b)
		if err != nil {
			require.ErrorIs(t, err, ErrMalformed)
			return
		}
		again, _ := v.AppendBinary(nil)
		require.Equal(t, append([]byte{}, b...), append([]byte{}, again...), "what is accepted is canonical")
		require.True(t, fromVector(v).vector() == v)
		require.Equal(t, fromVector(v).vector().String(), v.String())
	})
}

func FuzzUnmarshalText(f *testing.F) {
	f.Add("{}")
	f.Add("{cpu:3 gpu0:1}")
	f.Fuzz(func(t *testing.T, s string) {
		var v Vector
		if err := v.UnmarshalText([]byte(s)); err == nil {
			require.Equal(t, s, v.String(), "what is accepted is canonical")
		}
	})
}

func BenchmarkVector(b *testing.B) {
	v := Vector{}.With(CPU, 1000).With(GPU(0), 20).With(GPU(1), 300)
	w := Vector{}.With(CPU, 999).With(GPU(0), 21).With(GPU(1), 300)
	enc, _ := v.AppendBinary(nil)
	same, _ := Decode(enc)
	var sink Vector
	var yes bool
	b.Run("JoinEqual", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			sink = v.Join(same)
		}
	})
	b.Run("Join", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			sink = v.Join(w)
		}
	})
	b.Run("DominatesEqual", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			yes = v.Dominates(same)
		}
	})
	b.Run("Dominates", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			yes = v.Dominates(w)
		}
	})
	b.Run("Next", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			sink = v.Next(GPU(1))
		}
	})
	_, _ = sink, yes
}
