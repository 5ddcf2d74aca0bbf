package pagecache

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/prefetch"
	"github.com/gaiafs/gaiafs/prefetch/trace"
)

// rest ends a recording and returns its events.
func rest(t *testing.T, r *Recording) *trace.Trace {
	t.Helper()
	r.Stop()
	r.Stop()
	var all []byte
	for more := true; more; {
		var b []byte
		b, more = r.Next(t.Context())
		all = append(all, b...)
	}
	got, err := trace.Read(bytes.NewReader(all))
	require.NoError(t, err)
	return got
}

func TestARecordingHasWhatDevicesAcquire(t *testing.T) {
	const size = 1<<20 + 100
	m := newMachine(t, 2)
	src := m.noisyFile(size)
	r, err := m.cache.Record()
	require.NoError(t, err)
	_, err = m.cache.Record()
	require.ErrorIs(t, err, syscall.EBUSY)
	require.Same(t, r, m.cache.Recording())

	whole, err := m.cache.Map(t.Context(), src, MapRequest{Device: 1, Len: 2 << 20, Process: 77})
	require.NoError(t, err)
	lazy, err := m.cache.Map(t.Context(), src, MapRequest{Off: 4096, Len: 1 << 20, Lazy: true, Process: 78})
	require.NoError(t, err)
	require.NoError(t, lazy.Advise(t.Context(), 0, 1, AdviceRandom))
	_, err = lazy.Acquire(t.Context(), 8192, 100, false)
	require.NoError(t, err)
	require.NoError(t, whole.Unmap(t.Context()))
	require.NoError(t, lazy.Unmap(t.Context()))

	got := rest(t, r)
	require.Nil(t, m.cache.Recording())
	require.Equal(t, []trace.File{{Name: "file", Size: size}}, got.Files)
	require.Equal(t, []trace.Source{{Device: 1, Thread: 77}, {Device: 0, Thread: 78}}, got.Sources)
	require.Len(t, got.Events, 2)
	for i := range got.Events {
		require.GreaterOrEqual(t, got.Events[i].Took, time.Duration(0))
		got.Events[i].Time, got.Events[i].Took = 0, 0
	}
	require.Equal(t, []trace.Event{
		{Len: size}, // bytes of the mapping past end of file do not count
		{Source: 1, Off: 4096 + 8192, Len: 100, Pattern: prefetch.Random},
	}, got.Events)
	again, err := m.cache.Record()
	require.NoError(t, err, "the next recording may begin")
	require.Empty(t, rest(t, again).Events)
}

// TestARecordingHasWhatDevicesChange: a recording has the pages that differ, not all released ones.
func TestARecordingHasWhatDevicesChange(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(8 * page.Size)
	x := m.run(src, 0, 0, 8*page.Size, true)
	r, err := m.cache.Record()
	require.NoError(t, err)
	x.store(2*page.Size, 1)
	x.store(5*page.Size+1, 1)
	require.EqualValues(t, 2, x.release())
	require.NoError(t, x.Sync(t.Context(), 0, 8*page.Size, false)) // once they are home they are not found again
	x.store(0, 1)
	x.unmap()
	var changed []int64
	for _, e := range rest(t, r).Events {
		require.True(t, e.Write)
		require.EqualValues(t, page.Size, e.Len)
		changed = append(changed, e.Off/page.Size)
	}
	require.Equal(t, []int64{0, 2, 5}, slices.Compact(slices.Sorted(slices.Values(changed))))
	require.EqualValues(t, 0, changed[len(changed)-1])
}

// read records an access by a program on the CPU.
func (r *Recording) read(file uint64, thread uint32, off, n int64) {
	r.Access(Access{
		File: FileID{1, file}, Describe: func() (string, int64) { return fmt.Sprint("f", file), 1 << 20 },
		Device: OnCPU, Thread: thread, Off: off, Len: n, Size: -1, Began: time.Now(),
	})
}

func TestARecordingKnowsSizes(t *testing.T) {
	m := newMachine(t, 0)
	r, err := m.cache.Record()
	require.NoError(t, err)
	r.Resize(FileID{1, 1}, 5) // of a file that was not accessed
	r.read(1, 1, 0, 4096)
	r.read(1, 1, 1<<20, 100)
	r.read(1, 1, 0, 0)
	r.Resize(FileID{1, 1}, 7)
	r.read(2, 1, 0, 5)
	got := rest(t, r)
	r.read(1, 1, 0, 1) // too late
	require.Len(t, got.Files, 2)
	var what []string
	for _, x := range got.Events {
		what = append(what, fmt.Sprint(x.File, x.Resize, x.Off, x.Len))
	}
	require.Equal(t, []string{"0 false 0 4096", "0 true 0 1048676", "0 false 1048576 100", "0 true 0 7", "1 false 0 5"},
		what)
}

// TestARecordingThatNobodyTakesIsBounded: events that do not fit are counted.
func TestARecordingThatNobodyTakesIsBounded(t *testing.T) {
	m := newMachine(t, 0)
	r, err := m.cache.Record()
	require.NoError(t, err)
	const each = 150_000
	var programs sync.WaitGroup
	for thread := range uint32(4) {
		programs.Go(func() {
			for i := range int64(each) {
				r.read(uint64(thread%2), thread, i<<30, 4096)
			}
		})
	}
	programs.Wait()
	r.mu.Lock()
	require.Less(t, r.enc.Pending(), recordingMost+2<<16)
	r.mu.Unlock()
	got := rest(t, r)
	require.NotZero(t, got.Lost)
	reads := 0
	for _, x := range got.Events {
		if !x.Resize {
			reads++
		}
	}
	require.EqualValues(t, 4*each, uint64(reads)+got.Lost)
}

func TestARecordingIsGivenOutAsItComes(t *testing.T) {
	m := newMachine(t, 0)
	r, err := m.cache.Record()
	require.NoError(t, err)
	header, more := r.Next(t.Context())
	require.True(t, more)
	require.Len(t, header, 32, "at once")
	r.read(1, 1, 0, 4096)
	b, more := r.Next(t.Context())
	require.True(t, more)
	require.NotEmpty(t, b, "after recordingFlush")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, more = r.Next(ended)
	require.False(t, more)
	r.Stop()
	last, more := r.Next(t.Context())
	require.False(t, more)
	got, err := trace.Read(bytes.NewReader(append(append(header, b...), last...)))
	require.NoError(t, err)
	require.Equal(t, 1, got.Accesses())
}
