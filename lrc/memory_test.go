//go:build !slowtwin

package lrc

import (
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/versions"
)

const memoryPages = 16 * segmentPages

func perPage(f *File) float64 { return float64(f.Memory()) / memoryPages }

func TestMemoryWherePagesAgree(t *testing.T) {
	whole := page.Range{End: memoryPages}
	var f File
	for d := range 8 {
		f.updated([]page.Range{whole}, versions.GPU(d), true)
	}
	t.Logf("held by 8 devices: %.3f bytes per page", perPage(&f))
	require.Less(t, perPage(&f), 1.0)
	for d := range 8 {
		f.release([]page.Range{whole}, versions.GPU(d))
	}
	f.keepBases([]page.Range{whole}, versions.CPU)
	f.cpuChanged(whole, whole)
	t.Logf("all released, stale, with bases: %.3f bytes per page", perPage(&f))
	require.Less(t, perPage(&f), 1.0)

	// One page in each segment that differs makes a table of the segment.
	for p := page.Index(0); p < memoryPages; p += segmentPages {
		f.release([]page.Range{{Start: p, End: p + 1}}, versions.GPU(3))
	}
	t.Logf("one page in %d differs: %.3f bytes per page", segmentPages, perPage(&f))
	require.Less(t, perPage(&f), 3.0)

	for d := range 8 {
		f.evicted(whole, versions.GPU(d))
	}
	require.Less(t, f.Memory(), int64(4096), "what is not held costs nothing")
}

// TestMemoryWorstCase: 8 devices hold every page, and no two pages of a segment agree. They differ in counters, bases,
// and in which replicas are stale and pending.
func TestMemoryWorstCase(t *testing.T) {
	for _, c := range []struct {
		name     string
		releases uint64 // of each owner, at most
		limit    float64
	}{
		{"few releases", 100, 64},
		{"thousands of releases", 16_000, 64},
		{"a million releases", 1 << 20, 80},
	} {
		t.Run(c.name, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(1, 2))
			var f File
			for p := range page.Index(memoryPages) {
				one := page.Range{Start: p, End: p + 1}
				for d := range 8 {
					f.updated([]page.Range{one}, versions.GPU(d), true)
				}
				f.pages.update([]page.Range{one}, nil, unremembered, func(s *state) {
					// The state after that many releases that came home; each replica lacks a different selection of
					// them.
					for o := range versions.Owner(9) {
						s.home = s.home.With(o, versions.Version(c.releases/2+rnd.Uint64N(c.releases/2)))
					}
					s.released = s.home
					for d := range 8 {
						r := s.find(versions.GPU(d))
						if rnd.IntN(2) == 0 {
							s.released = s.released.With(r.owner, s.home.Get(r.owner)+1+versions.Version(rnd.IntN(100)))
						}
						r.v = s.home.With(r.owner, s.released.Get(r.owner))
						for o := range versions.Owner(9) {
							if o != r.owner && rnd.IntN(2) == 0 {
								r.v = r.v.With(o, 0)
							}
						}
						r.base = Base(1 + rnd.IntN(8))
					}
				})
			}
			f.checkInvariants(page.Range{End: memoryPages})
			t.Logf("%.1f bytes per page", perPage(&f))
			require.LessOrEqual(t, perPage(&f), c.limit)
		})
	}
}

// TestMemoryOfScratch: the scratch memory of updates of segments with many states is counted exactly.
func TestMemoryOfScratch(t *testing.T) {
	var f File
	for p := range page.Index(segmentPages) {
		f.updated([]page.Range{{Start: 0, End: p + 1}}, versions.GPU(0), true)
		f.keepBases([]page.Range{{Start: 0, End: p + 1}}, versions.CPU)
		f.cpuChanged(page.Range{Start: 0, End: p + 1}, page.Range{Start: 0, End: p + 1})
	}
	before := f.Memory()
	scratch := f.pages.moved
	require.Greater(t, cap(scratch), segmentPages/2)
	f.pages.moved = nil
	require.GreaterOrEqual(t, before-f.Memory(), int64(cap(scratch))*int64(unsafe.Sizeof(scratch[0])))
}

// TestPagesFarApart: a device holds the first and the last page that a file can have. The pages between take neither
// memory nor time.
func TestPagesFarApart(t *testing.T) {
	const last = page.Index(1<<51 - 1)
	whole := page.Range{End: last + 1}
	gpu := versions.GPU(0)
	f := new(File)
	ends := []page.Range{{Start: 0, End: 1}, {Start: last, End: last + 1}}
	f.updated(ends, gpu, true)
	assert.Less(t, f.Memory(), int64(16<<10))
	assert.Equal(t, last+1, f.End())
	assert.Equal(t, ends, f.Tracked(whole, gpu))
	_, id := f.release(ends, gpu)
	f.drained(id)
	pending := f.Pending(whole, false)
	require.Len(t, pending, 2)
	assert.Equal(t, ends[1], pending[1].Range)
	f.collected(ends, gpu, true)
	assert.Empty(t, f.Pending(whole, false))
	f.keepBases([]page.Range{whole}, versions.CPU)
	f.cpuChanged(whole, page.Range{})
	assert.Less(t, f.Memory(), int64(16<<10))
	assert.NotContains(t, f.Tracked(whole, versions.GPU(1)), ends[0])
	f.evicted(ends[1], gpu)
	assert.Less(t, f.End(), last)
	f.evicted(ends[0], gpu)
	assert.Zero(t, f.End())
}
