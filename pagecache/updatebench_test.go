package pagecache

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/pagecache/view"
)

// BenchmarkUpdate stores into one page in four of a file in a group, and acquires a view of it on the same device. It
// measures the cost for each page without the device's work. Released bytes come home between the rounds.
func BenchmarkUpdate(b *testing.B) {
	for _, what := range []string{"release", "acquire"} {
		b.Run(what, func(b *testing.B) {
			r := newRig(b, 1)
			n := r.rangeBytes()
			s := r.file(n)
			m := r.mapAll(s, 0, n, true)
			v, err := r.cache.mapView(r.ctx, []Source{s}, ViewRequest{Alignment: 256,
				Segments: []view.Segment{bytesOf(0, n)}})
			require.NoError(b, err)
			pages := scattered(n, 4)
			value := uint64(0)
			store := func() (g *Group) {
				require.NoError(b, r.cache.Lookup(s.id).collectAll(r.ctx, nil))
				_, err := v.Acquire(r.ctx, 0, n, false)
				require.NoError(b, err)
				g, err = r.cache.BeginGroup(r.ctx, []GroupRange{{Of: m, Len: n}})
				require.NoError(b, err)
				value++
				r.store(m, pages, value)
				return g
			}
			release := func(g *Group) {
				_, _, err := g.Release(r.ctx)
				require.NoError(b, err)
			}
			acquire := func() {
				got, err := v.Acquire(r.ctx, 0, n, false)
				require.NoError(b, err)
				require.EqualValues(b, len(pages), got)
			}
			var g *Group
			if what == "release" {
				r.timed(0, func() { g = store() }, func() { release(g) }, acquire)
			} else {
				r.timed(0, func() { release(store()) }, acquire, nil)
			}
			b.ReportMetric(float64(len(pages)), "pages")
			require.NoError(b, v.Unmap(r.ctx))
		})
	}
}
