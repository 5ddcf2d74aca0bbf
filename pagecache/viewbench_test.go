package pagecache

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"testing"

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

func (h fileHome) Signature() (Signature, error) { return Signature{Size: 256 << 20}, nil }
func (h fileHome) OpenHome(bool) (Home, error)   { return h, nil }

type fileSource struct {
	*source
	home fileHome
}

func (s fileSource) OpenHome(bool) (Home, error) { return s.home, nil }

// BenchmarkView fills views of a file that the host's page cache has: all of it in one segment, in segments of 40 MiB
// that begin anywhere, and a quarter of it in rows of 4 KiB.
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
	for name, segments := range map[string][]view.Segment{
		"whole":   {bytesOf(0, size)},
		"tensors": tensors,
		"rows":    {{Offset: 140, Length: 4 << 10, Stride: 16 << 10, Count: size>>14 - 1}},
	} {
		b.Run(name, func(b *testing.B) {
			t := &testing.T{}
			m := newMachine(t, 1, memory(2*size))
			defer m.cache.Close(context.Background())
			src := fileSource{m.file(0), fileHome{newHome(0), f}}
			v, err := m.cache.MapView(context.Background(), []Source{src},
				ViewRequest{Alignment: 256, Segments: segments})
			require.NoError(b, err)
			b.SetBytes(v.Size())
			for b.Loop() {
				v.v.parts[0].state.Mark(page.From(0).Pages())
				_, err := v.Acquire(context.Background(), 0, v.Size(), false)
				require.NoError(b, err)
			}
			require.NoError(b, v.Unmap(context.Background()))
		})
	}
}
