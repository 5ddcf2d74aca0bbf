package gaiafs

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/control/controltest"
	"github.com/gaiafs/gaiafs/pagecache"
)

// The device has room for four extents, pinned memory for two. The file has 16.
const (
	brick       = controltest.MovingExtent
	fileBricks  = 16
	brickBudget = 4
)

// startMoving starts a daemon over a page cache, and makes the file.
func startMoving(t *testing.T, set ...func(*control.Options)) (*os.File, *pagecache.Cache) {
	t.Helper()
	dir := t.TempDir()
	_, cache := controltest.StartMoving(t, dir, brickBudget, 2, set...)
	old := requestGrant
	useGrants(filepath.Join(dir, "grants"))
	t.Cleanup(func() { requestGrant = old })
	d := &daemon{dir: dir}
	return d.file(t, fileBricks*brick), cache
}

func mapMoving(t *testing.T, f *os.File, options ...Option) *Mapping {
	t.Helper()
	m, err := Map(f, 0, fileBricks*brick, ProtRead|ProtWrite, 0, options...)
	require.NoError(t, err)
	t.Cleanup(func() { _ = m.Close() })
	require.True(t, m.Movable())
	return m
}

// TestRandomBrackets opens brackets on random parts of a file that is four times as large as the device, and checks
// every byte.
func TestRandomBrackets(t *testing.T) {
	f, _ := startMoving(t)
	m := mapMoving(t, f, Movable())
	want := make([]byte, fileBricks*brick)
	_, err := f.ReadAt(want, 0)
	require.NoError(t, err)
	rng := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		off := rng.Int64N(fileBricks*brick - 100)
		n := 1 + rng.Int64N(100)
		b, err := m.Use(t.Context(), off, n)
		require.NoError(t, err)
		got := m.Bytes()[off : off+n]
		require.Equal(t, want[off:off+n], append([]byte(nil), got...))
		for i := range got {
			got[i] = byte(rng.Uint32())
		}
		copy(want[off:], got)
		require.NoError(t, b.Done())
		require.NoError(t, b.Done())
	}
	got := make([]byte, len(want))
	for off := int64(0); off < m.Len(); off += brick { // WriteAt needs no bracket
		_, err = m.ReadAt(got[off:off+brick], off)
		require.NoError(t, err)
	}
	require.Equal(t, want, got)
	_, err = m.WriteAt([]byte("abc"), 9*brick)
	require.NoError(t, err)
	copy(want[9*brick:], "abc")
	require.NoError(t, m.Sync(0, m.Len()))
	_, err = f.ReadAt(got, 0)
	require.NoError(t, err)
	require.Equal(t, want, got)
}

// TestLargerThanTheDevice: a mapping that is larger than the device moves without being asked to; no other mapping
// does.
func TestLargerThanTheDevice(t *testing.T) {
	f, _ := startMoving(t)
	m := mapMoving(t, f)
	_, err := Map(f, 0, fileBricks*brick, ProtRead, 0, Stays())
	require.ErrorIs(t, err, syscall.ENOMEM)
	small, err := Map(f, 0, brick, ProtRead, 0)
	require.NoError(t, err)
	require.False(t, small.Movable())
	b, err := Use(t.Context(), small.Whole(), Range{m, 5 * brick, brick}, Range{m, 9 * brick, 1})
	require.NoError(t, err)
	require.Equal(t, byte(5*brick/7&0xff), m.Bytes()[5*brick])
	inner, err := b.Use(t.Context(), small.Whole())
	require.NoError(t, err)
	require.NoError(t, inner.Done())
	_, err = b.Use(t.Context(), Range{m, 10 * brick, 4 * brick})
	require.ErrorIs(t, err, syscall.EDEADLK)
	require.NoError(t, b.Done())
	require.NoError(t, small.Close())

	_, err = m.Use(t.Context(), 0, m.Len())
	require.ErrorIs(t, err, syscall.ENOMEM)
	_, err = m.Use(t.Context(), m.Len(), 1)
	require.ErrorIs(t, err, syscall.EINVAL)
	_, err = Use(t.Context())
	require.ErrorIs(t, err, syscall.EINVAL)
	b, err = m.Use(t.Context(), 0, 6*brick)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = m.Use(ctx, 8*brick, brick)
	require.Error(t, err) // ETIMEDOUT or ECANCELED, whichever is first
	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	_, err = m.Use(ctx, 8*brick, brick)
	require.ErrorIs(t, err, syscall.ECANCELED)
	require.NoError(t, b.Done())
	b, err = m.Use(t.Context(), 8*brick, 6*brick) // the failed Use left nothing behind
	require.NoError(t, err)
	require.NoError(t, m.Close())
	require.NoError(t, b.Done())
	_, err = m.Use(t.Context(), 0, 1)
	require.ErrorIs(t, err, syscall.EBADF)
}

// TestEndWhileOthersWait: more brackets wait than the daemon takes requests. The bracket that they wait for still ends,
// and its goroutine can release first. A bracket that is given up before it was asked for leaves nothing.
func TestEndWhileOthersWait(t *testing.T) {
	const most, waiters = 4, 6
	f, cache := startMoving(t, func(o *control.Options) { o.MaxRequests = most })
	m := mapMoving(t, f, Movable())
	b, err := m.Use(t.Context(), 0, 6*brick)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	results := make(chan error)
	for range waiters {
		go func() {
			_, err := m.Use(ctx, 8*brick, brick)
			results <- err
		}()
	}
	waiting := func() int { return cache.Status().Devices[0].BracketsWaiting }
	require.Eventually(t, func() bool { return waiting() == most/2 }, time.Minute, time.Millisecond)
	_, err = m.Release(0, brick)
	require.NoError(t, err)
	require.Equal(t, most/2, waiting())
	cancel()
	for range waiters {
		require.ErrorIs(t, <-results, syscall.ECANCELED)
	}
	_, err = m.Use(ctx, 8*brick, brick)
	require.ErrorIs(t, err, syscall.ECANCELED)
	require.NoError(t, b.Done())
	require.Eventually(t, func() bool { return cache.Status().Devices[0].Brackets == 0 }, time.Minute, time.Millisecond)
}

// TestBracketsOfManyGoroutines lets each goroutine add to its own bytes, all over the file.
func TestBracketsOfManyGoroutines(t *testing.T) {
	const goroutines, rounds = 6, 4
	f, cache := startMoving(t)
	m := mapMoving(t, f)
	want := make([]byte, fileBricks*brick)
	_, err := f.ReadAt(want, 0)
	require.NoError(t, err)
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			for i := range rounds * fileBricks {
				at := int64(i%fileBricks*brick + 16 + g)
				b, err := m.Use(t.Context(), at, 1)
				if err != nil {
					panic(fmt.Sprint("goroutine ", g, ": ", err))
				}
				m.Bytes()[at]++
				if err := b.Done(); err != nil {
					panic(err)
				}
			}
		})
	}
	wg.Wait()
	require.NoError(t, m.Sync(0, m.Len()))
	got := make([]byte, len(want))
	_, err = f.ReadAt(got, 0)
	require.NoError(t, err)
	for i := range fileBricks {
		for g := range goroutines {
			want[i*brick+16+g] += rounds
		}
	}
	require.Equal(t, want, got)
	require.Eventually(t, func() bool { return cache.Status().Devices[0].Brackets == 0 }, time.Minute, time.Millisecond)
	require.Positive(t, cache.Status().Counters["evictions"])
}

// TestGPUsOnAMountWithout: emulated devices stand in for GPUs only if the user asks for it.
func TestGPUsOnAMountWithout(t *testing.T) {
	d := startDaemon(t, &controltest.Cache{})
	f := d.file(t, 4096)
	_, err := Map(f, 0, 4096, ProtRead, 0, OnKind(KindCUDA))
	require.ErrorIs(t, err, syscall.ENODEV)
	require.ErrorContains(t, err, "the mount has no GPUs, only emulated devices")
	t.Setenv("GAIAFS_EMULATED", "1")
	m, err := Map(f, 0, 4096, ProtRead, 0, OnKind(KindCUDA))
	require.NoError(t, err)
	require.Equal(t, KindEmulated, m.Kind())
	require.NoError(t, m.Close())
}

// TestThousandMappingsOf100GiB: each mapping has only addresses until a bracket uses a part of it. All together have
// 50,000 times as much as there is of memory.
func TestThousandMappingsOf100GiB(t *testing.T) {
	const size, mappings = 100 << 30, 1000
	f, cache := startMoving(t)
	require.NoError(t, f.Truncate(size))
	var all []*Mapping
	for range mappings {
		m, err := Map(f, 0, size, ProtRead|ProtWrite, 0, Movable())
		require.NoError(t, err)
		all = append(all, m)
	}
	for i, m := range all {
		at := int64(i) * 97 % 100 << 30
		b, err := m.Use(t.Context(), at, brick)
		require.NoError(t, err)
		require.Equal(t, byte(i/100), m.Bytes()[at])
		m.Bytes()[at] = byte(i/100 + 1)
		require.NoError(t, b.Done())
	}
	for _, m := range all {
		require.NoError(t, m.Close())
	}
	require.Zero(t, cache.Status().Devices[0].MappedBytes)
}

// TestBudgetBelowOpenBrackets: a budget becomes smaller than what open brackets have. They keep that, and nobody gets
// more of the device until the rest fits.
func TestBudgetBelowOpenBrackets(t *testing.T) {
	f, cache := startMoving(t)
	m := mapMoving(t, f, Movable())
	b, err := m.Use(t.Context(), 0, 3*brick)
	require.NoError(t, err)
	require.NoError(t, cache.SetBudget(t.Context(), brick, "a test"))
	copy(m.Bytes(), "abc")
	other, err := m.Use(t.Context(), 8*brick, brick)
	require.NoError(t, err)
	d := cache.Status().Devices[0]
	require.EqualValues(t, 3*brick, d.UsedBytes)
	require.EqualValues(t, brick, d.PinnedBytes)
	require.NoError(t, other.Done())
	require.NoError(t, b.Done())
	b, err = m.Use(t.Context(), 12*brick, brick)
	require.NoError(t, err)
	require.LessOrEqual(t, cache.Status().Devices[0].UsedBytes, int64(3*brick))
	require.NoError(t, b.Done())
	got := make([]byte, 3)
	_, err = m.ReadAt(got, 0)
	require.NoError(t, err)
	require.Equal(t, "abc", string(got))
}
