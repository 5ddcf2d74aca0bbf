package pagecache

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

// TestViewStatus: the status says of each file of a view which pages the view has, which of them are stale, and which
// were evicted. Inspect names the processes that map it.
func TestViewStatus(t *testing.T) {
	ctx := context.Background()
	m := newMachine(t, 2)
	a, b := m.noisyFile(64*page.Size), m.noisyFile(8<<20)
	req := ViewRequest{Device: 1, Process: 12, User: 7, Segments: []view.Segment{
		bytesOf(32*page.Size, 16*page.Size), {File: 1, Length: 100, Stride: 2 * page.Size, Count: 4}}}
	first := m.view(req, a, b)
	req.Process, req.Lazy = 11, true
	second := m.view(req, a, b)

	of := func(src *source) ViewStatus {
		t.Helper()
		in := m.cache.Inspect(src.id)
		require.Len(t, in.Views, 1)
		for _, f := range m.cache.Status().Files {
			if f.ID == src.id {
				require.Equal(t, in.Views, f.Views)
			}
		}
		return in.Views[0]
	}
	require.Equal(t, ViewStatus{Device: 1, User: 7, Bytes: 16*page.Size + 400, DeviceBytes: 2 << 20, Segments: 2,
		Files: 2, Mappings: 2, HostBytes: first.v.host, FileBytes: 16 * page.Size, Resident: 16, Clean: 16,
		Map: strings.Repeat(".", 32) + strings.Repeat("c", 16) + strings.Repeat(".", 16)}, of(a))
	rows := of(b)
	require.EqualValues(t, []int64{400, 4, 4, 0}, []int64{rows.FileBytes, rows.Resident, rows.Clean, rows.Stale})
	require.Equal(t, "c"+strings.Repeat(".", 63), rows.Map, "each letter stands for 32 pages")
	clean, stale := rows.Held()
	require.EqualValues(t, []int64{400, 0}, []int64{clean, stale})

	mapped := MappingInfo{Process: 11, User: 7, Device: 1, Bytes: 16*page.Size + 400, Lazy: true, View: true}
	other := mapped
	other.Process, other.Lazy = 12, false
	require.Equal(t, []MappingInfo{mapped, other}, m.cache.Inspect(a.id).MappedBy)

	a.write(t, 40*page.Size, make([]byte, 4*page.Size))
	got := of(a)
	require.EqualValues(t, []int64{16, 12, 4}, []int64{got.Resident, got.Clean, got.Stale})
	require.Equal(t, strings.Repeat("c", 8)+"ssss"+"cccc", strings.Trim(got.Map, "."))
	clean, stale = got.Held()
	require.EqualValues(t, []int64{12 * page.Size, 4 * page.Size}, []int64{clean, stale})
	require.EqualValues(t, 4, of(b).Clean, "the other file did not change")
	first.unmap()
	require.Equal(t, []MappingInfo{mapped}, m.cache.Inspect(a.id).MappedBy)
	second.unmap()
	require.Empty(t, m.cache.Inspect(a.id).MappedBy)
	require.EqualValues(t, 16, of(a).Resident, "the view stays until its memory is needed")

	long := m.view(ViewRequest{Segments: []view.Segment{bytesOf(0, 8<<20)}}, b)
	long.unmap()
	v := long.v
	extents := v.Extents(page.Range{End: 2048})
	require.Greater(t, len(extents), 1)
	require.True(t, v.Clean(ctx, extents[1], true))
	lost := extents[1].Pages()
	for _, s := range m.cache.Inspect(b.id).Views {
		if s.Device == 0 {
			require.EqualValues(t, 2048-lost.Len(), s.Resident)
			require.Equal(t, s.Resident, s.Clean)
			require.Equal(t, strings.Repeat("c", int(lost.Start)/32)+strings.Repeat(".", int(lost.Len())/32)+
				strings.Repeat("c", int(2048-lost.End)/32), s.Map)
		}
	}
}

// TestNamesOfMappings: a mapping names its file, a view the files that it has bytes of.
func TestNamesOfMappings(t *testing.T) {
	m := newMachine(t, 1)
	a, b, c := m.noisyFile(1<<20), m.noisyFile(1<<20), m.noisyFile(1<<20)
	a.name, b.name, c.name = "a", "b", "c"
	v := m.view(ViewRequest{Segments: []view.Segment{bytesOf(0, 9), {File: 2, Length: 9, Count: 1}}}, a, b, c)
	require.Equal(t, []string{"a", "c"}, v.Names(), "the files that it has bytes of")
	require.Equal(t, []string{"b"}, m.run(b, 0, 0, page.Size, false).Names())
}
