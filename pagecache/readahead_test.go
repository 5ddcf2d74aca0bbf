package pagecache

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
)

// lacks returns the number of pages of rg that are not up to date on the mapping's device.
func (p *program) lacks(rg page.Range) (pages int64) {
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	for _, u := range p.f.lrc.Stale(rg, p.h.owner) {
		pages += u.Range.Len()
	}
	return pages
}

func (m *machine) lazy(src *source, n int64) *program {
	m.t.Helper()
	mp, err := m.cache.Map(m.t.Context(), src, MapRequest{Len: n, Lazy: true})
	require.NoError(m.t, err)
	return m.attach(mp, 0, n, false)
}

func (p *program) arrives(rg page.Range) {
	p.t.Helper()
	require.Eventually(p.t, func() bool { return p.lacks(rg) == 0 }, 10*time.Second, time.Millisecond, "pages %v", rg)
}

// TestReadAheadFollowsEveryStream: two programs go through one mapping in turns, one of them backward.
func TestReadAheadFollowsEveryStream(t *testing.T) {
	const size = 16 << 20
	m := newMachine(t, 1)
	src := m.noisyFile(size)
	p := m.lazy(src, size)
	for k := range int64(3) {
		for _, off := range []int64{k << 16, size - (k+1)<<16} {
			_, err := p.Acquire(t.Context(), off, 1<<16, false)
			require.NoError(t, err)
		}
	}
	p.arrives(page.Range{End: 3*16 + 32})
	p.arrives(page.Range{Start: size>>page.Shift - 3*16 - 32, End: size >> page.Shift})
	require.NotZero(t, p.lacks(p.pages), "the middle is left out")
	require.NotZero(t, m.cache.counters.PrefetchedPages.Load())
}

// TestReadAheadEndsWithTheFile: neither read-ahead nor advice brings pages past end of file.
func TestReadAheadEndsWithTheFile(t *testing.T) {
	const size, mapped = 1<<20 + 100, 4 << 20
	m := newMachine(t, 1)
	src := m.noisyFile(size)
	p := m.lazy(src, mapped)
	require.NoError(t, p.Advise(t.Context(), 0, mapped, AdviceSequential))
	_, err := p.Acquire(t.Context(), 0, 900<<10, false)
	require.NoError(t, err)
	file := page.Range{End: page.Count(size)}
	p.arrives(file)
	require.NoError(t, p.Advise(t.Context(), 0, mapped, AdviceWillNeed))
	require.NoError(t, p.Unmap(t.Context())) // also ends the mapping's background work
	require.Equal(t, (p.pages.Len() - file.Len()), p.lacks(p.pages))
	require.EqualValues(t, file.Len()-900>>2, m.cache.counters.PrefetchedPages.Load())
}

// TestReadAheadYields: read-ahead is less urgent than acquires of other files, until somebody waits for its file.
func TestReadAheadYields(t *testing.T) {
	const size = 16 << 20
	m := newMachine(t, 1)
	require.NoError(t, m.cache.SetTransfers("preemptive"))
	src := m.noisyFile(size)
	p := m.lazy(src, size)
	moved := func() map[string]int64 {
		bytes := make(map[string]int64)
		for _, x := range m.cache.Status().Devices[0].Moved {
			if x.Way == "in" {
				bytes[x.Class] += x.Bytes
			}
		}
		return bytes
	}
	require.NoError(t, p.Advise(t.Context(), 0, size/2, AdviceWillNeed))
	// Not p.arrives, which waits for the file.
	require.Eventually(t, func() bool {
		return m.cache.counters.PrefetchedPages.Load() == size/2>>page.Shift
	}, 10*time.Second, time.Millisecond)
	require.Equal(t, map[string]int64{"prefetch": size / 2}, moved())

	gate := m.devices[0].Hold(faulty.CopyIn)
	defer gate.Open()
	require.NoError(t, p.Advise(t.Context(), size/2, size/2, AdviceWillNeed))
	<-gate.Arrived()
	seen, due := src.attached.sight.look(src.attached), make(chan struct{}) // work in the background does not count
	go func() {
		defer close(due)
		src.attached.collectDue(t.Context())
	}()
	require.Never(t, src.attached.mu.Awaited, 20*time.Millisecond, time.Millisecond)
	acquired := make(chan error, 1)
	go func() {
		_, err := p.Acquire(t.Context(), size-page.Size, page.Size, false)
		acquired <- err
	}()
	require.Eventually(t, src.attached.mu.Awaited, 10*time.Second, time.Millisecond)
	gate.Open()
	require.NoError(t, <-acquired)
	<-seen
	<-due
	p.arrives(p.pages)
	bytes := moved()
	require.EqualValues(t, size, bytes["prefetch"]+bytes["acquire"])
	require.NotZero(t, bytes["acquire"], "what queued after the acquire began to wait")
}

// TestReadAheadWhileTheFileIsTruncated: the file shrinks and grows while read-ahead fetches.
func TestReadAheadWhileTheFileIsTruncated(t *testing.T) {
	const size = 8 << 20
	m := newMachine(t, 1)
	src := m.noisyFile(size)
	p := m.lazy(src, size)
	require.NoError(t, p.Advise(t.Context(), 0, size, AdviceSequential))
	read := make(chan error, 1)
	go func() {
		for k := range int64(200) {
			if _, err := p.Acquire(t.Context(), k*3<<16%size, 1<<16, false); err != nil {
				read <- err
				return
			}
		}
		close(read)
	}()
	for round := range 20 {
		src.truncate(t, int64(1+round)*100<<10)
		src.truncate(t, size)
	}
	require.NoError(t, <-read)
	src.truncate(t, 3<<20+5)
	p.acquire()
	want := append(bytes.Clone(src.home.data), make([]byte, size-len(src.home.data))...)
	require.True(t, bytes.Equal(want, p.all()))
}

// TestReadAheadDisplacesNothing: on a device that is full of mapped extents, read-ahead fills its mapping's extents and
// makes no room for itself.
func TestReadAheadDisplacesNothing(t *testing.T) {
	const size = 8 << 20
	m := newMachine(t, 1, memory(2*size))
	other := m.run(m.noisyFile(size), 0, 0, size, false)
	src := m.coldFile(size)
	p := m.lazy(src, size)
	require.NoError(t, p.Advise(t.Context(), 0, size, AdviceSequential))
	for at := int64(0); at < size/2; at += 1 << 16 {
		_, err := p.Acquire(t.Context(), at, 1<<16, false)
		require.NoError(t, err)
	}
	p.arrives(page.Range{End: size/2>>page.Shift + 64})
	require.Zero(t, other.lacks(other.pages))
	require.Zero(t, m.cache.counters.Evictions.Load())
	p.unmap()
	require.NoError(t, m.cache.Close(t.Context()))
	require.Zero(t, src.disk.filled, "read-ahead leaves the host's page cache alone, too")
}

// TestReadAheadIsToldWhatWasUnused: a program gives up pages that were fetched ahead.
func TestReadAheadIsToldWhatWasUnused(t *testing.T) {
	const size = 4 << 20
	m := newMachine(t, 1)
	src := m.coldFile(size)
	p := m.lazy(src, size)
	require.NoError(t, p.Advise(t.Context(), 0, size, AdviceSequential))
	_, err := p.Acquire(t.Context(), 0, 1<<16, false)
	require.NoError(t, err)
	ahead := page.Range{Start: 16, End: 16 + 512<<10>>page.Shift}
	p.arrives(ahead)
	require.NoError(t, p.Advise(t.Context(), 0, size, AdviceDontNeed))
	require.EqualValues(t, size>>page.Shift, p.lacks(p.pages))
	_, err = p.Acquire(t.Context(), 1<<16, 1<<16, false)
	require.NoError(t, err)
	_, err = p.Acquire(t.Context(), 2<<16, 1<<16, false)
	require.NoError(t, err)
	p.arrives(page.Range{Start: 16, End: 64})
	p.acquire()
	require.True(t, bytes.Equal(src.home.data, p.all()))
}
