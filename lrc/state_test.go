package lrc

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gaiafs/gaiafs/versions"
)

// drawState draws a state that satisfies the invariants, with up to limit devices.
func drawState(t *rapid.T, limit int) *state {
	s := &state{cpu: rapid.Bool().Draw(t, "cpu")}
	devices := rapid.SliceOfNDistinct(rapid.IntRange(0, 160), 0, limit, rapid.ID[int]).Draw(t, "devices")
	count := rapid.OneOf(rapid.Uint64Range(0, 3), rapid.Uint64Range(0, 200), rapid.Just(uint64(1)<<40))
	if len(devices) == 0 {
		return s
	}
	s.home = s.home.With(versions.CPU, versions.Version(count.Draw(t, "home of cpu")))
	for _, d := range devices {
		s.home = s.home.With(versions.GPU(d), versions.Version(count.Draw(t, "home")))
	}
	s.released = s.home
	for _, d := range devices {
		o := versions.GPU(d)
		if rapid.IntRange(0, 3).Draw(t, "holds") == 0 {
			continue
		}
		r := s.add(o)
		r.tracked = rapid.Bool().Draw(t, "tracked")
		if r.tracked && rapid.Bool().Draw(t, "pending") {
			s.released = s.released.With(o, s.released.Get(o)+1+versions.Version(count.Draw(t, "ahead")))
		}
	}
	for i := range s.replicas {
		r := &s.replicas[i]
		r.v = s.home.With(r.owner, s.released.Get(r.owner))
		for o := range s.home.Owners() {
			if o != r.owner && rapid.IntRange(0, 2).Draw(t, "stale") == 0 {
				r.v = r.v.With(o, 0)
			}
		}
		if r.tracked && (r.stale(s.home) || rapid.Bool().Draw(t, "own base")) {
			r.base = Base(rapid.IntRange(1, 300).Draw(t, "base"))
		}
	}
	if len(s.replicas) == 0 {
		s.released, s.home = versions.Vector{}, versions.Vector{}
	}
	return s
}

func TestEncodingRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawState(t, rapid.SampledFrom([]int{1, 8, 160}).Draw(t, "limit"))
		enc := s.encode(nil)
		require.Equal(t, s.String(), decode(enc).String())
		require.Equal(t, s, decode(enc))
		require.Equal(t, enc, decode(enc).encode(nil), "two encodings of one state")
	})
}

// TestEncodingForgetsLags: the encoding does not keep by how many releases a replica is behind.
func TestEncodingForgetsLags(t *testing.T) {
	var v versions.Vector
	s := &state{released: v.With(versions.CPU, 9), home: v.With(versions.CPU, 9)}
	s.add(versions.GPU(0)).v = v.With(versions.CPU, 5)
	back := decode(s.encode(nil))
	require.True(t, back.replicas[0].stale(back.home))
	require.Equal(t, v, back.replicas[0].v)
	require.Equal(t, s.home, back.replicas[0].v.Join(back.home), "an update makes it exact again")
}

func TestMalformedEncodingPanics(t *testing.T) {
	s := &state{cpu: true}
	s.add(versions.GPU(3)).tracked = true
	enc := s.encode(nil)
	for n := range enc {
		require.Panics(t, func() { decode(enc[:n]) })
	}
}
