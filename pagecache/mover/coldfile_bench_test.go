package mover

import (
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/internal/page"
)

// diskFile is a DirectReader of a file on a disk.
type diskFile struct{ through, past int }

func newDiskFile(b *testing.B, path string) *diskFile {
	b.Helper()
	f := new(diskFile)
	for fd, flags := range map[*int]int{&f.through: 0, &f.past: unix.O_DIRECT} {
		var err error
		*fd, err = unix.Open(path, unix.O_RDONLY|flags, 0)
		require.NoError(b, err)
		b.Cleanup(func() { _ = unix.Close(*fd) })
	}
	return f
}

func (f *diskFile) ReadAt(p []byte, off int64) (int, error)     { return unix.Pread(f.through, p, off) }
func (f *diskFile) ReadDirect(p []byte, off int64) (int, error) { return unix.Pread(f.past, p, off) }
func (f *diskFile) ReadCached(p []byte, off int64) (int, error) { return f.ReadAt(p, off) }
func (f *diskFile) WillNeed(int64, int64)                       {}

func (f *diskFile) Drop(off, n int64) { _ = unix.Fadvise(f.through, off, n, unix.FADV_DONTNEED) }

func (f *diskFile) Cached(off, n int64) (int64, error) {
	var stat unix.Cachestat_t
	err := unix.Cachestat(uint(f.through), &unix.CachestatRange{Off: uint64(off), Len: uint64(n)}, &stat, 0)
	return int64(stat.Cache) << page.Shift, err
}

// BenchmarkColdWays fills a device with a file of 1 GiB that only the disk has: past the page cache, through it, and by
// the way that ColdWay learns meanwhile. They take turns. It reports medians of GB/s, and how many MiB were left in the
// page cache at most.
func BenchmarkColdWays(b *testing.B) {
	const size = 1 << 30
	all := page.Range{End: size >> page.Shift}
	path := filepath.Join(b.TempDir(), "f")
	writeRandom(b, path, size)
	f := newDiskFile(b, path)
	to := newFiller(b, size)
	ways := []struct {
		name   string
		speeds [2]float64
	}{{"past", [2]float64{1e15, 1}}, {"through", [2]float64{1, 1e15}}, {"learnt", [2]float64{}}}
	speeds, left := make([][]float64, len(ways)), make([]int64, len(ways))
	var holds sync.WaitGroup
	for b.Loop() {
		for _, i := range rand.Perm(len(ways)) {
			f.Drop(0, 0)
			to.into.arrived = nil
			start := time.Now()
			fill := &Fill{
				Device: to.moves, Into: to.into, Reads: new(Reads),
				From: &Source{
					Home: f, Direct: f, Cold: NewColdFile(&ColdWay{speeds: ways[i].speeds}), Size: size,
					Hold: func() func() { holds.Add(1); return holds.Done },
				},
				Pieces: Pieces(1, func(int) Update { return Update{Pages: all} }, []Run{{Pages: all}}, nil),
			}
			fill.Reads.Enter()
			require.NoError(b, fill.Run(context.Background(), nil))
			speeds[i] = append(speeds[i], size/1e9/time.Since(start).Seconds())
			fill.Reads.Leave()
			holds.Wait() // pages are dropped in the background
			n, err := f.Cached(0, size)
			require.NoError(b, err)
			left[i] = max(left[i], n>>20)
		}
	}
	for i, w := range ways {
		b.Logf("%s: %.2f", w.name, speeds[i])
		slices.Sort(speeds[i])
		b.ReportMetric(speeds[i][len(speeds[i])/2], w.name+"-GB/s")
		b.ReportMetric(float64(left[i]), w.name+"-MiB-left")
	}
}

func writeRandom(b *testing.B, path string, size int) {
	b.Helper()
	f, err := os.Create(path)
	require.NoError(b, err)
	defer f.Close()
	rnd, p := rand.NewChaCha8([32]byte{1}), make([]byte, 4<<20)
	for at := 0; at < size; at += len(p) {
		_, _ = rnd.Read(p)
		_, err := f.Write(p)
		require.NoError(b, err)
	}
	require.NoError(b, f.Sync())
}

var _ DirectReader = (*diskFile)(nil)
