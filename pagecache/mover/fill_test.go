package mover

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover/schedule"
)

// bytesHome is a Home in memory, of which reads behind a byte fail.
type bytesHome struct {
	data  []byte
	wrong int64 // 0: nothing fails
}

var errHome = errors.New("home cannot be read")

func (h *bytesHome) ReadAt(p []byte, off int64) (int, error) {
	if h.wrong > 0 && off+int64(len(p)) > h.wrong {
		return 0, errHome
	}
	return copy(p, h.data[min(off, int64(len(h.data))):]), nil
}

// flat is a Target: the file's bytes are at their offsets in one Memory.
type flat struct {
	mem     gpubackend.Memory
	mu      sync.Mutex
	settled []page.Range // protected by mu
}

func (f *flat) Placer() Placer { return f }

func (f *flat) AppendCopies(list []gpubackend.Copy, pages page.Range, buf []byte) []gpubackend.Copy {
	return append(list, gpubackend.Copy{Mem: f.mem, Off: pages.Offset(), Host: buf})
}

func (f *flat) AppendPatches([]gpubackend.Patch, *Step, []byte, []gpubackend.Digest) ([]gpubackend.Patch, error) {
	panic("nothing is patched")
}

func (f *flat) Settle(pieces []*Piece) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, x := range pieces {
		for _, s := range x.Steps {
			f.settled = append(f.settled, s.Pages)
		}
	}
}

// filler fills memory of an emulated device from a home of random bytes.
type filler struct {
	home  *bytesHome
	dev   *faulty.Device
	moves *Device
	into  *flat
}

func newFiller(t testing.TB, size int64) *filler {
	inner, err := emulated.New(emulated.Options{Memory: max(size, 2<<20)})
	require.NoError(t, err)
	f := &filler{home: &bytesHome{data: make([]byte, size)}, dev: faulty.Wrap(inner)}
	rnd := rand.NewChaCha8([32]byte{1})
	_, _ = rnd.Read(f.home.data)
	mem, err := f.dev.Alloc(max(size, 2<<20))
	require.NoError(t, err)
	f.into = &flat{mem: mem}
	f.moves = NewDevice(f.dev, new(schedule.FCFS), func(error) {})
	t.Cleanup(func() {
		require.NoError(t, mem.Free())
		require.NoError(t, f.dev.Close())
	})
	return f
}

func (f *filler) fill() *Fill {
	all := page.Range{End: page.Count(int64(len(f.home.data)))}
	return &Fill{
		Device: f.moves, Class: Acquire, From: &Source{Home: f.home}, Into: f.into,
		Pieces: Pieces(1, func(int) Update { return Update{Pages: all} }, []Run{{Pages: all}}, nil),
	}
}

// TestFill brings pieces by several workers, and reports each once.
func TestFill(t *testing.T) {
	f := newFiller(t, 64<<20)
	x := f.fill()
	require.NoError(t, x.Run(t.Context()))
	for i := range x.Pieces {
		require.True(t, x.Pieces[i].Done)
	}
	got := make([]byte, len(f.home.data))
	require.NoError(t, f.moves.Out(t.Context(), CPURead, []gpubackend.Copy{{Mem: f.into.mem, Host: got}}))
	require.True(t, bytes.Equal(f.home.data, got))
	slices.SortFunc(f.into.settled, func(a, b page.Range) int { return int(a.Start - b.Start) })
	at := page.Index(0)
	for _, rg := range f.into.settled {
		require.Equal(t, at, rg.Start)
		at = rg.End
	}
	require.EqualValues(t, 64<<20, at.Offset())
}

// TestFillFails: what was brought before an error is there, and nothing is under way after it.
func TestFillFails(t *testing.T) {
	f := newFiller(t, 64<<20)
	f.home.wrong = 32 << 20
	x := f.fill()
	require.ErrorIs(t, x.Run(t.Context()), errHome)
	require.False(t, x.Pieces[len(x.Pieces)-1].Done)
	require.Empty(t, x.ready)
	require.Zero(t, x.busy)

	f.home.wrong = 0
	f.dev.Fail(faulty.CopyIn, 2, gpubackend.ErrDeviceLost)
	require.ErrorIs(t, f.fill().Run(t.Context()), gpubackend.ErrDeviceLost)

	ctx, cancel := context.WithCancel(t.Context())
	gate := f.dev.Hold(faulty.CopyIn)
	ended := make(chan error)
	go func() { ended <- f.fill().Run(ctx) }()
	<-gate.Arrived()
	cancel()
	require.ErrorIs(t, <-ended, context.Canceled, "the wait for the device ends with the context")
	gate.Open()
}

// TestScatter fills memory with segments of a file that begin and end anywhere, overlap, or lie past its end.
func TestScatter(t *testing.T) {
	for seed := range uint64(20) {
		const size = 4 << 20
		f := newFiller(t, size)
		rnd := rand.New(rand.NewPCG(seed, 1))
		want := make([]byte, size)
		var segments []Segment
		for at := int64(0); ; {
			p := Segment{Off: rnd.Int64N(size + 8*page.Size), Mem: f.into.mem, At: at + rnd.Int64N(300)}
			p.Len = rnd.Int64N(1 << (1 + rnd.IntN(19)))
			if at = p.At + p.Len; at > size {
				break
			}
			copy(want[p.At:at], f.home.data[min(p.Off, size):])
			segments = append(segments, p)
		}
		slices.SortFunc(segments, func(a, b Segment) int { return cmp.Compare(a.Off, b.Off) })
		into := NewScatter(segments)
		x := &Fill{Device: f.moves, Class: Acquire, From: &Source{Home: f.home}, Into: into, Pieces: into.Pieces(nil)}
		require.NoError(t, x.Run(t.Context()))
		read := map[page.Index]bool{}
		for i := range x.Pieces {
			require.True(t, x.Pieces[i].Done)
			for _, s := range x.Pieces[i].Steps {
				for at := s.Pages.Start; at < s.Pages.End; at++ {
					require.False(t, read[at], "page %d is read twice", at)
					read[at] = true
				}
			}
		}
		got := make([]byte, size)
		require.NoError(t, f.moves.Out(t.Context(), CPURead, []gpubackend.Copy{{Mem: f.into.mem, Host: got}}))
		require.True(t, bytes.Equal(want, got), "seed %d", seed)
	}
}
