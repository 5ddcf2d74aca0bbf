package pagecache

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

// fileHome is a backing file on the host's filesystem that nobody changes.
type fileHome struct {
	*memoryHome
	f *os.File
}

func (h fileHome) ReadAt(p []byte, off int64) (int, error) {
	n, err := h.f.ReadAt(p, off)
	if err == io.EOF {
		err = nil
	}
	return n, err
}

func (h fileHome) ReadCached(p []byte, off int64) (int, error) { return h.ReadAt(p, off) }

func (h fileHome) WillNeed(int64, int64) {}

func (h fileHome) Signature() (Signature, error) { return Signature{Size: 256 << 20}, nil }
func (h fileHome) OpenHome(bool) (Home, error)   { return h, nil }

type fileSource struct {
	*source
	home fileHome
}

func (s fileSource) OpenHome(bool) (Home, error) { return s.home, nil }

// BenchmarkView fills views of a file that is in the host's page cache: all of it in one segment, in segments of 40 MiB
// that begin anywhere, a quarter of it in rows, and all of it in the rows of four ranks at once.
func BenchmarkView(b *testing.B) {
	const size = 256 << 20
	dir := b.TempDir()
	f, err := os.Create(filepath.Join(dir, "file"))
	require.NoError(b, err)
	_, err = f.Write(make([]byte, size))
	require.NoError(b, err)
	var tensors []view.Segment
	for at := int64(140); at+40<<20+24 <= size; at += 40<<20 + 24 {
		tensors = append(tensors, bytesOf(at, 40<<20+24))
	}
	rank := func(r, row int64) []view.Segment {
		return []view.Segment{{Offset: 140 + r*row, Length: row, Stride: 4 * row, Count: size/(4*row) - 1}}
	}
	ranks := func(row int64) [][]view.Segment {
		return [][]view.Segment{rank(0, row), rank(1, row), rank(2, row), rank(3, row)}
	}
	for _, x := range []struct {
		name  string
		views [][]view.Segment
	}{
		{"whole", [][]view.Segment{{bytesOf(0, size)}}},
		{"tensors", [][]view.Segment{tensors}},
		{"rows-1KiB", [][]view.Segment{rank(1, 1<<10)}},
		{"rows-4KiB", [][]view.Segment{rank(1, 4<<10)}},
		{"rows-16KiB", [][]view.Segment{rank(1, 16<<10)}},
		{"ranks-1KiB", ranks(1 << 10)},
		{"ranks-4KiB", ranks(4 << 10)},
		{"ranks-16KiB", ranks(16 << 10)},
	} {
		b.Run(x.name, func(b *testing.B) {
			t := &testing.T{}
			m := newMachine(t, 1, memory(2*size))
			m.cache.gather = func(int64) time.Duration { return time.Minute }
			defer m.cache.Close(context.Background())
			src := fileSource{m.file(0), fileHome{newHome(0), f}}
			var views []*ViewMapping
			bytes := int64(0)
			for _, segments := range x.views {
				v, err := m.cache.mapView(context.Background(), []Source{src},
					ViewRequest{Alignment: 256, Segments: segments})
				require.NoError(b, err)
				views, bytes = append(views, v), bytes+v.Size()
			}
			b.SetBytes(bytes)
			began, read := cpuTime(b), m.fromHome()
			for b.Loop() {
				var group sync.WaitGroup
				for _, v := range views {
					v.v.parts[0].state.Mark(page.From(0).Pages())
					v.files()[0].views.expect(1) // as OpenView does
				}
				for _, v := range views {
					group.Go(func() {
						begun := func() { v.files()[0].views.expect(-1) }
						_, err := v.v.acquire(context.Background(), page.Span(0, v.Size()), false, begun)
						assert.NoError(b, err)
					})
				}
				group.Wait()
			}
			b.ReportMetric((cpuTime(b)-began).Seconds()*1e3/float64(b.N), "processor-ms/op")
			b.ReportMetric(float64((m.fromHome()-read)*page.Size)/float64(size)/float64(b.N), "files-read/op")
			for _, v := range views {
				require.NoError(b, v.Unmap(context.Background()))
			}
		})
	}
}
