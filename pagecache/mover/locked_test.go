package mover

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover/schedule"
)

// lockedFile is a Locked over a file in memory. It has the bytes before and after a border, but not across it.
type lockedFile struct {
	mem    []byte
	fd     int
	border int64
}

func newLockedFile(t *testing.T, data []byte, border int64) *lockedFile {
	fd, err := unix.MemfdCreate("locked", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	_, err = unix.Write(fd, data)
	require.NoError(t, err)
	mem, err := unix.Mmap(fd, 0, len(data), unix.PROT_READ, unix.MAP_SHARED)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, unix.Munmap(mem))
		require.NoError(t, unix.Close(fd))
	})
	return &lockedFile{mem, fd, border}
}

func (l *lockedFile) At(off, n int64) []byte {
	if off < l.border && off+n > l.border || off+n > int64(len(l.mem)) {
		return nil
	}
	return l.mem[off:][:n:n]
}

// TestFillFromLocked: the host reads nothing that devices can copy from where it is locked. What is not locked in one
// piece, and what the file has lost meanwhile, is read from home.
func TestFillFromLocked(t *testing.T) {
	const size = 32 << 20
	f := newFiller(t, size)
	check := func(x *Fill, locked int64) {
		t.Helper()
		require.NoError(t, f.moves.Zero(t.Context(), Acquire, f.into.mem, 0, size))
		require.NoError(t, x.Run(t.Context(), nil))
		n := int64(0)
		for i := range x.Pieces {
			p := &x.Pieces[i]
			require.True(t, p.Done)
			n += p.Ways.Locked
			for _, s := range p.Steps {
				at, end := s.Pages.Offset(), s.Pages.End.Offset()
				got := make([]byte, end-at)
				require.NoError(t, f.moves.Out(t.Context(), CPURead,
					[]gpubackend.Copy{{Mem: f.into.mem, Off: at, Host: got}}))
				require.Equal(t, f.home.data[at:end], got)
			}
		}
		require.Equal(t, locked, n)
	}
	from := newLockedFile(t, f.home.data, 5*PieceBytes+page.Size)
	fill := func() *Fill {
		x := f.fill()
		x.From.Locked = from
		return x
	}
	x := fill()
	f.dev.BufferSizes()
	check(x, (size-x.Pieces[0].bytes)>>page.Shift)
	require.Len(t, f.dev.BufferSizes(), 1, "one piece was read")

	x = fill()
	scattered := make([]Update, 500)
	for i := range scattered {
		at := page.Index(i * 16)
		scattered[i].Pages = page.Range{Start: at, End: at + 1 + page.Index(i%3)}
	}
	x.Pieces = Pieces(len(scattered), func(i int) Update { return scattered[i] },
		[]Run{{Pages: page.From(0).Pages()}}, nil)
	all := slices.Clone(x.Pieces)
	check(x, pagesOfPieces(all)-pagesOf(all[slices.IndexFunc(all, func(p Piece) bool {
		return from.At(p.first().Offset(), p.Steps[len(p.Steps)-1].Pages.End.Offset()-p.first().Offset()) == nil
	})].Steps))

	require.NoError(t, unix.Ftruncate(from.fd, size/2+page.Size))
	x = fill()
	require.NoError(t, f.moves.Zero(t.Context(), Acquire, f.into.mem, 0, size))
	require.NoError(t, x.Run(t.Context(), nil))
	f.requireFilled(t)
	for i := range x.Pieces {
		w := x.Pieces[i].Ways
		require.Equal(t, pagesOf(x.Pieces[i].Steps), w.Locked+w.Cached+w.Direct+w.Buffered, "each page came one way")
	}
}

// TestStoringIsNotFromLocked: pages into which programs store are read, because the digests must be those of the very
// bytes that are copied.
func TestStoringIsNotFromLocked(t *testing.T) {
	const size, half = 32 << 20, page.Index(16 << 20 >> page.Shift)
	f := newFiller(t, size)
	x := f.fill()
	all := page.Range{End: page.Count(size)}
	x.Pieces = Pieces(1, func(int) Update { return Update{Pages: all} },
		[]Run{{Pages: page.Range{End: half}}, {Pages: page.Range{Start: half, End: all.End}, Storing: true}}, nil)
	x.From.Locked = newLockedFile(t, f.home.data, 0)
	require.NoError(t, x.Run(t.Context(), nil))
	for i := range x.Pieces {
		p := &x.Pieces[i]
		require.Equal(t, p.Ways.Locked == 0, p.Steps[0].Storing)
	}
}

// TestGatheringFromAShorterFile: what a file has lost ends no gathering without giving its buffer back.
func TestGatheringFromAShorterFile(t *testing.T) {
	f := newFiller(t, 2<<20)
	counted := &countedBuffers{Device: f.dev, t: t}
	f.moves = NewDevice(counted, new(schedule.FCFS), nil, func(error) {})
	from := newLockedFile(t, f.home.data, 0)
	require.NoError(t, unix.Ftruncate(from.fd, 0))
	x := f.fill()
	x.From.Locked, x.Into = from, thinTarget{f.into}
	require.False(t, x.readInPlace(&x.Pieces[0]))
	require.EqualValues(t, 1, counted.taken.Load())
	require.Zero(t, counted.out.Load())
}

func pagesOfPieces(pieces []Piece) (n int64) {
	for i := range pieces {
		n += pagesOf(pieces[i].Steps)
	}
	return n
}

// TestRelayOfAShorterFile: a neighbour's link does not fail because a file has become shorter.
func TestRelayOfAShorterFile(t *testing.T) {
	f, by := newFiller(t, 4<<20), newFiller(t, 4<<20)
	r := &Relay{Device: by.moves, Memory: by.into.mem, Failed: func(err error) { t.Error(err) }}
	by.dev.Fail(faulty.CopyIn, 1, gpubackend.ErrHostGone)
	x := f.fill()
	x.ctx = t.Context()
	err := x.in([]gpubackend.Copy{{Mem: f.into.mem, Host: make([]byte, page.Size)}}, r)
	require.ErrorIs(t, err, gpubackend.ErrHostGone)
	require.False(t, r.broken)
}
