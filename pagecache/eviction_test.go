package pagecache

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/internal/page"
)

// TestEvictionRules: acquires and releases of programs feed the eviction rules, and the rule can be changed at any
// time.
func TestEvictionRules(t *testing.T) {
	m := newMachine(t, 1, memory(3*emulated.Granularity), func(o *Options, _ *int64) { o.Eviction = "lru" })
	var files []*source
	for range 3 {
		files = append(files, m.file(page.Size))
	}
	keep := func(src *source) *Mapping {
		x, err := m.cache.Map(t.Context(), src, MapRequest{Len: page.Size, Writable: true})
		require.NoError(t, err)
		return x
	}
	use := func(i int) { require.NoError(t, keep(files[i]).Unmap(t.Context())) }
	there := func() (list []int) {
		for i, src := range files {
			if f := m.cache.Lookup(src.id); f != nil && len(f.holdings[m.cache.devices[0].owner].extents) > 0 {
				list = append(list, i)
			}
		}
		return list
	}
	need := func() {
		files = append(files, m.file(page.Size))
		use(len(files) - 1)
	}
	use(0)
	use(1)
	use(2)
	use(0)
	need()
	require.Equal(t, []int{0, 2, 3}, there())
	require.NoError(t, m.cache.SetEviction("allocated"))
	need()
	require.Equal(t, []int{2, 3, 4}, there())
	require.NoError(t, m.cache.SetEviction("lfu"))
	x := keep(files[2])
	for range 3 {
		_, err := x.Acquire(t.Context(), 0, page.Size, false)
		require.NoError(t, err)
	}
	require.NoError(t, x.Unmap(t.Context()))
	use(3)
	use(4)
	need()
	require.Equal(t, []int{2, 4, 5}, there(), "2 has been unused for longest, and was acquired most often")
	require.ErrorContains(t, m.cache.SetEviction("none"), "there is no rule")
	require.Equal(t, "lfu", m.cache.Status().Devices[0].Eviction)
}
