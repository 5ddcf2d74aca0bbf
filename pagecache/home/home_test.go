package home

import (
	"bytes"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// file is a Backing in memory.
type file struct {
	data         []byte
	mtime, ctime time.Time
	changes      uint64 // made directly in SOURCE
	looks        int
	closed       bool
	// written is called after each WriteAt.
	written func()
}

func newFile(size int) *file {
	return &file{data: make([]byte, size), mtime: time.Unix(100, 0), ctime: time.Unix(100, 0)}
}

func (f *file) ReadAt(p []byte, off int64) (int, error) { return copy(p, f.data[off:]), nil }

func (f *file) WriteAt(p []byte, off int64) (int, error) {
	f.mtime, f.ctime = time.Unix(200, 0), time.Unix(200, 0)
	n := copy(f.data[off:], p)
	if f.written != nil {
		f.written()
	}
	return n, nil
}

func (f *file) Writable() bool { return true }

func (f *file) Signature() (Signature, error) {
	return Signature{Size: int64(len(f.data)), Mtime: f.mtime, Ctime: f.ctime}, nil
}

func (f *file) Look() (uint64, error) {
	f.looks++
	return f.changes, nil
}

func (f *file) BeginWrites() (uint64, func(), error) {
	changes, err := f.Look()
	return changes, func() {}, err
}

func (f *file) ChangedBeside()  { f.changes++ }
func (f *file) Noticed() uint64 { return f.changes }
func (f *file) Sync() error     { return nil }

func (f *file) Close() error {
	f.closed = true
	return nil
}

// Modified implements Timed.
func (f *file) Modified() error { return f.SetModified(time.Unix(300, 0)) }

// SetModified implements Timed. It changes ctime, as filesystems do.
func (f *file) SetModified(mtime time.Time) error {
	f.mtime, f.ctime = mtime, time.Unix(400, 0)
	return nil
}

// newHome returns a Home of f, which has met it.
func newHome(t *testing.T, f *file) *Home {
	h := New(&Mount{Log: slog.New(slog.DiscardHandler), LeastParallel: LeastParallelFor(1)}, f, Options{
		Name: func() string { return "file" }, Parallel: func(int64) {},
	})
	require.NoError(t, h.Meet())
	return h
}

// pages returns n pages from first on that are full of b, as Write wants them.
func pages(first page.Index, n int64, b byte) ([]page.Range, [][]byte) {
	rg := page.Range{Start: first, End: first + page.Index(n)}
	return []page.Range{rg}, [][]byte{bytes.Repeat([]byte{b}, int(rg.Bytes()))}
}

func TestTheBackingFileIsClosedAfterItsReads(t *testing.T) {
	f := newFile(1)
	h := newHome(t, f)
	h.BeginRead()
	h.BeginRead()
	require.NoError(t, h.Close())
	h.EndRead()
	require.False(t, f.closed)
	h.EndRead()
	require.True(t, f.closed)

	next := newFile(1)
	h.Replace(next)
	require.NoError(t, h.Close())
	require.True(t, next.closed, "nothing reads it")
}

func TestWritesEndWhereTheFileEnds(t *testing.T) {
	f := newFile(page.Size + 100)
	h := newHome(t, f)
	f.data = append(f.data, make([]byte, 100)...) // appended directly in SOURCE
	ranges, bufs := pages(0, 2, 7)
	written, err := h.Write(ranges, bufs, false, page.Size*2)
	require.NoError(t, err)
	require.Equal(t, 1, written)
	want := append(bytes.Repeat([]byte{7}, page.Size+100), make([]byte, 100)...)
	require.Equal(t, want, f.data, "what was appended stays")
}

func TestCarefulWritesNoticeDirectChanges(t *testing.T) {
	f := newFile(4 << 20)
	h := newHome(t, f)
	ranges, bufs := pages(0, WriteSize>>page.Shift, 1)
	more, others := pages(WriteSize>>page.Shift, WriteSize>>page.Shift, 2)
	f.written = func() { f.ChangedBeside() }
	written, err := h.Write(append(ranges, more...), append(bufs, others...), true, 4<<20)
	require.ErrorAs(t, err, new(*Changed))
	require.Equal(t, 1, written, "home is looked at again after WriteSize")
	require.Error(t, h.AsSeen())
	h.HasLookedAt(f.changes)
	require.NoError(t, h.AsSeen())
}

func TestWritesStopAtTheirLimit(t *testing.T) {
	f := newFile(4 << 20)
	h := newHome(t, f)
	ranges, bufs := pages(0, WriteSize>>page.Shift, 1)
	more, others := pages(WriteSize>>page.Shift, WriteSize>>page.Shift, 2)
	written, err := h.Write(append(ranges, more...), append(bufs, others...), false, 1)
	require.NoError(t, err)
	require.Equal(t, 1, written)
}

func TestWritesRestoreTheTimeOfModification(t *testing.T) {
	f := newFile(page.Size)
	h := newHome(t, f)
	mtime, ctime := f.mtime, f.ctime
	ranges, bufs := pages(0, 1, 1)
	f.written = func() {
		m, c := h.ShownTimes(f.mtime, f.ctime)
		require.Equal(t, []time.Time{mtime, ctime}, []time.Time{m, c}, "meanwhile")
	}
	_, err := h.Write(ranges, bufs, false, page.Size)
	require.NoError(t, err)
	require.Equal(t, mtime, f.mtime)
	require.NotEqual(t, ctime, f.ctime)
	_, shown := h.ShownTimes(f.mtime, f.ctime)
	require.Equal(t, ctime, shown)

	require.NoError(t, h.Modified())
	require.NotEqual(t, mtime, f.mtime)
	f.ctime = time.Unix(500, 0) // changed by a program
	_, shown = h.ShownTimes(f.mtime, f.ctime)
	require.Equal(t, f.ctime, shown)

	f.written = func() { f.ChangedBeside() }
	f.mtime = mtime
	_, err = h.Write(ranges, bufs, false, page.Size)
	require.NoError(t, err)
	require.NotEqual(t, mtime, f.mtime, "others changed home meanwhile")
}
