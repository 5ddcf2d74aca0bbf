package pagecache

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
)

func TestMapFillsFromHomeAndPastTheEndWithZeros(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(5000)
	copy(src.home.data, bytes.Repeat([]byte{7}, 5000))
	p := m.run(src, 0, 0, 3*page.Size, false)
	assert.Equal(t, src.home.data, p.load(0, 5000))
	assert.Equal(t, make([]byte, 3*page.Size-5000), p.load(5000, 3*page.Size))
}

func TestReleaseMakesBytesVisibleToTheCPU(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(4 * page.Size)
	p := m.run(src, 0, 0, 4*page.Size, true)
	p.store(page.Size+3, 42)
	assert.Equal(t, make([]byte, 1), src.read(t, page.Size+3, 1), "nothing was released yet")
	assert.EqualValues(t, 1, p.release())
	assert.Equal(t, []page.Range{{Start: 1, End: 2}}, src.kernel.take(), "the kernel drops just the modified page")
	assert.Equal(t, []byte{42}, src.read(t, page.Size+3, 1))
	assert.EqualValues(t, 0, p.release(), "a second release finds nothing new")
	assert.Empty(t, src.kernel.take())
}

func TestWritersOfOnePageMergeByBytes(t *testing.T) {
	m := newMachine(t, 2)
	src := m.file(page.Size)
	a := m.run(src, 0, 0, page.Size, true)
	b := m.run(src, 1, 0, page.Size, true)
	for i := 0; i < page.Size; i += 3 {
		a.store(i, 'a')
		if i+1 < page.Size {
			b.store(i+1, 'b')
		}
		if i+2 < page.Size {
			src.write(t, i+2, []byte{'c'})
		}
	}
	a.release()
	b.release()
	want := bytes.Repeat([]byte("abc"), page.Size/3+1)[:page.Size]
	assert.Equal(t, want, src.read(t, 0, page.Size))
	a.acquire()
	b.acquire()
	assert.Equal(t, want, a.all())
	assert.Equal(t, want, b.all())
	assert.Zero(t, m.cache.counters.OverlappingBytes.Load())
	assert.Zero(t, m.cache.counters.Bases.Load(), "no base outlives the agreement")
}

func TestOverlapGoesToTheHighestOwnerAndIsCounted(t *testing.T) {
	m := newMachine(t, 2)
	src := m.file(page.Size)
	a := m.run(src, 0, 0, page.Size, true)
	b := m.run(src, 1, 0, page.Size, true)
	a.store(0, 1)
	a.store(1, 1)
	b.store(0, 2)
	b.store(2, 2)
	b.release()
	a.release()
	assert.Equal(t, []byte{2, 1, 2}, src.read(t, 0, 3))
	assert.EqualValues(t, 1, src.attached.counters.OverlappingBytes.Load())
}

func TestAcquireKeepsUnreleasedBytes(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	p.store(0, 1)
	src.write(t, 1, []byte{2})
	assert.EqualValues(t, 1, p.acquire())
	assert.Equal(t, []byte{1, 2}, p.load(0, 2))
	assert.Equal(t, []byte{0, 2}, src.read(t, 0, 2), "still unreleased")
	assert.EqualValues(t, 1, p.release())
	assert.Equal(t, []byte{1, 2}, src.read(t, 0, 2))
}

// A device that keeps storing after a release must not bring back bytes that were overwritten since.
func TestOwnTail(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	p.store(0, 1)
	p.release()
	src.write(t, 0, []byte{9}) // collects the 1, then overwrites it
	p.store(5, 5)
	p.release()
	assert.Equal(t, []byte{9, 0, 0, 0, 0, 5}, src.read(t, 0, 6))
	p.acquire()
	assert.Equal(t, []byte{9, 0, 0, 0, 0, 5}, p.load(0, 6))
}

// The kernel writes back whole dirty pages while a release drops them, before the released bytes go home.
func TestStaleWriteBack(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	dirty := make([]byte, page.Size)
	dirty[100] = 'c' // a CPU program stored this through mmap; the rest of the page is old
	src.kernel.hook = func(int64, int64) {
		require.NoError(t, src.tryWrite(Change{Kind: ChangeWrite, Off: 0, Len: page.Size, WriteBack: true}, dirty))
	}
	p.store(0, 'g')
	p.release()
	src.kernel.hook = nil
	got := src.read(t, 0, page.Size)
	assert.Equal(t, byte('g'), got[0])
	assert.Equal(t, byte('c'), got[100])
	p.acquire()
	assert.Equal(t, byte('c'), p.byteAt(100))
}

// While a release drops the kernel's pages, a read that fills the kernel's cache sees the release. A direct read leaves
// home alone.
func TestReadsWhileDraining(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	p.store(0, 1)
	src.kernel.hook = func(int64, int64) {
		_, fromHome, err := src.attached.Read(context.Background(), make([]byte, 10), 0, true, nil)
		require.NoError(t, err)
		assert.True(t, fromHome)
		assert.Equal(t, byte(0), src.home.bytes(0, 1)[0], "a direct read collected a draining page")
		assert.Equal(t, []byte{1}, src.read(t, 0, 1))
	}
	p.release()
}

func TestSecondProcessMovesNoData(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(1 << 20)
	p := m.run(src, 0, 0, 1<<20, true)
	filled := m.cache.counters.FilledPages.Load()
	used := m.cache.devices[0].Used()
	q := m.run(src, 0, 0, 1<<20, true)
	assert.Equal(t, filled, m.cache.counters.FilledPages.Load())
	assert.Equal(t, used, m.cache.devices[0].Used())
	p.store(77, 7)
	assert.Equal(t, byte(7), q.byteAt(77), "one replica for all processes of a device")
	q.release()
	assert.Equal(t, []byte{7}, src.read(t, 77, 1))
}

// One process acquires a page while another one stores into it.
func TestAcquireDoesNotLoseAnotherProcessesStores(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	q := m.run(src, 0, 0, page.Size, true)
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		for i := range page.Size / 2 {
			q.store(2*i, 'q')
		}
	}()
	for i := range page.Size / 2 {
		src.write(t, 2*i+1, []byte{'c'})
		p.acquire()
	}
	wg.Wait()
	p.acquire()
	q.release()
	want := bytes.Repeat([]byte("qc"), page.Size/2)
	assert.Equal(t, want, p.all())
	assert.Equal(t, want, src.read(t, 0, page.Size))
}

func TestUnmapIsARelease(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	p.store(9, 9)
	p.unmap()
	p.unmap()
	assert.Equal(t, []byte{9}, src.read(t, 9, 1))
	_, err := p.Acquire(context.Background(), 0, 1, false)
	assert.ErrorIs(t, err, syscall.EINVAL)
}

func TestTruncate(t *testing.T) {
	m := newMachine(t, 2)
	src := m.file(3 * page.Size)
	copy(src.home.data, bytes.Repeat([]byte{1}, 3*page.Size))
	p := m.run(src, 0, 0, 3*page.Size, true)
	q := m.run(src, 1, 0, 3*page.Size, false)
	p.store(2*page.Size, 2)
	p.release()
	p.store(page.Size+100, 3)
	src.truncate(t, page.Size+10)
	zeros := make([]byte, 2*page.Size-10)
	assert.Equal(t, zeros, p.load(page.Size+10, p.end()), "dropped ranges read as zero at once")
	assert.Equal(t, zeros, q.load(page.Size+10, q.end()))
	p.store(page.Size+200, 4) // past end of file: goes nowhere
	src.truncate(t, 3*page.Size)
	p.store(2*page.Size+1, 5)
	p.store(page.Size+11, 6)
	assert.EqualValues(t, 2, p.release())
	assert.Zero(t, m.cache.Status().Counters["past_end_pages"])
	got := src.read(t, 0, 3*page.Size)
	want := make([]byte, 3*page.Size)
	copy(want, bytes.Repeat([]byte{1}, page.Size+10))
	want[2*page.Size+1], want[page.Size+11] = 5, 6
	assert.True(t, bytes.Equal(want, got))
	q.acquire()
	assert.True(t, bytes.Equal(want, q.all()))
}

func TestPunchHole(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(2 * page.Size)
	copy(src.home.data, bytes.Repeat([]byte{1}, 2*page.Size))
	p := m.run(src, 0, 0, 2*page.Size, true)
	p.store(0, 2)
	require.NoError(t, src.attached.ChangeHome(context.Background(), Change{Kind: ChangeZero, Off: 100, Len: page.Size},
		func(off, _ int64) error {
			_, err := src.home.WriteAt(make([]byte, page.Size), off)
			return err
		}))
	p.acquire()
	assert.Equal(t, make([]byte, page.Size), p.load(100, 100+page.Size))
	assert.Equal(t, byte(2), p.byteAt(0))
}

func TestBytesPastEndOfFileAreNeverWritten(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(100)
	p := m.run(src, 0, 0, page.Size, true)
	p.store(99, 1)
	p.store(100, 1)
	p.release()
	require.NoError(t, src.attached.Sync(context.Background(), func() error { return nil }))
	assert.Len(t, src.home.data, 100)
	assert.Equal(t, byte(1), src.home.data[99])
	src.write(t, 150, []byte{7})
	p.acquire()
	assert.Equal(t, append(make([]byte, 50), 7), p.load(100, 151))
	assert.EqualValues(t, 0, p.release())
}

func TestEvictionMakesRoomAndBringsModifiedBytesHome(t *testing.T) {
	m := newMachine(t, 1, memory(4<<20))
	old, mapped, third := m.file(2<<20), m.file(2<<20), m.file(2<<20)
	p := m.run(old, 0, 0, 2<<20, true)
	p.store(5, 5)
	p.unmap()
	q := m.run(mapped, 0, 0, 2<<20, true)
	r := m.run(third, 0, 0, 2<<20, false)
	assert.Equal(t, byte(5), old.home.data[5], "collected before it was evicted")
	assert.True(t, old.attached.Detached())
	assert.Nil(t, m.cache.Lookup(old.id))
	assert.Equal(t, make([]byte, 2<<20), r.all(), "memory never shows bytes of another file")
	_, err := m.cache.Map(context.Background(), m.file(1), MapRequest{Len: 1})
	require.ErrorIs(t, err, syscall.ENOMEM)
	assert.Contains(t, err.Error(), "4.0 MiB")
	q.unmap()
	m.run(m.file(1), 0, 0, 1, false)
}

func TestMappingLargerThanTheDevice(t *testing.T) {
	m := newMachine(t, 1, memory(4<<20))
	_, err := m.cache.Map(context.Background(), m.file(8<<20), MapRequest{Len: 8 << 20})
	require.ErrorIs(t, err, syscall.ENOMEM)
	assert.Contains(t, err.Error(), "budget")
	assert.Zero(t, m.cache.devices[0].Used())
}

func TestFullDisk(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	p.store(0, 1)
	src.home.fail(syscall.ENOSPC)
	p.release()
	assert.Equal(t, []byte{1}, src.read(t, 0, 1), "released bytes are visible although home cannot take them")
	assert.ErrorIs(t, src.attached.Sync(context.Background(), func() error { return nil }), syscall.ENOSPC)
	assert.ErrorIs(t, src.attached.Sync(context.Background(), func() error { return nil }), syscall.ENOSPC,
		"kept and tried again")
	assert.NotEmpty(t, m.cache.Status().Files[0].Error)
	src.home.fail(nil)
	require.NoError(t, src.attached.Sync(context.Background(), func() error { return nil }))
	assert.Equal(t, byte(1), src.home.data[0])
}

func TestBackgroundCollect(t *testing.T) {
	m := newMachine(t, 1, interval(100*time.Millisecond))
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	p.store(0, 1)
	released := time.Now()
	p.release()
	require.Eventually(t, func() bool { return src.home.bytes(0, 1)[0] == 1 }, 10*time.Second, time.Millisecond)
	t.Logf("home after %v", time.Since(released))
}

func TestHomeChangedDirectly(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(2 * page.Size)
	p := m.run(src, 0, 0, 2*page.Size, true)
	p.store(0, 1)
	src.home.editAt(0, bytes.Repeat([]byte{8}, 2*page.Size))
	p.acquire()
	assert.Equal(t, bytes.Repeat([]byte{8}, page.Size), p.load(page.Size, p.end()))
	assert.Equal(t, byte(1), p.byteAt(0), "the device's stores are not lost")
	p.store(page.Size, 3)
	p.release()
	assert.Equal(t, []byte{1}, src.read(t, 0, 1))
	assert.Equal(t, []byte{3, 8}, src.read(t, page.Size, 2))
}

func TestDeletedFileIsDropped(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	m.cache.Forget(src.id)
	p.store(0, 1)
	p.release()
	assert.False(t, src.attached.Detached(), "it lives until its last mapping ends")
	p.unmap()
	assert.True(t, src.attached.Detached())
	assert.Zero(t, m.cache.devices[0].Used())
	assert.Zero(t, src.home.open)
}

func TestHostMemoryPressureRefreshesReplicas(t *testing.T) {
	m := newMachine(t, 1, hostMemory(4*page.Size))
	src := m.file(64 * page.Size)
	p := m.run(src, 0, 0, 64*page.Size, true)
	for i := range 64 {
		src.write(t, i*page.Size, []byte{9})
	}
	require.Eventually(t, func() bool { return m.cache.counters.Bases.Load() <= 4 }, 10*time.Second, time.Millisecond)
	p.acquire()
	for i := range 64 {
		assert.Equal(t, byte(9), p.byteAt(i*page.Size))
	}
}

func TestAdvise(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(4 << 20)
	copy(src.home.data, bytes.Repeat([]byte{3}, 4<<20))
	mp, err := m.cache.Map(context.Background(), src, MapRequest{Len: 4 << 20, Lazy: true})
	require.NoError(t, err)
	p := m.attach(mp, 0, 4<<20, false)
	assert.Equal(t, make([]byte, page.Size), p.load(0, page.Size),
		"lazy mappings read as zero before they are acquired")
	require.NoError(t, p.Advise(context.Background(), 0, page.Size, AdviceWillNeed))
	require.Eventually(t, func() bool { return p.byteAt(0) == 3 }, 10*time.Second, time.Millisecond)
	require.NoError(t, p.Advise(context.Background(), 0, 4<<20, AdviceSequential))
	_, err = p.Acquire(context.Background(), 1<<20, page.Size, false)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return p.byteAt(1<<20+page.Size) == 3 }, 10*time.Second, time.Millisecond)
	require.NoError(t, p.Advise(context.Background(), 0, 4<<20, AdviceDontNeed))
	n, err := p.Acquire(context.Background(), 0, page.Size, false)
	require.NoError(t, err)
	assert.EqualValues(t, 1, n, "fetched again after DONTNEED")
	assert.ErrorIs(t, p.Advise(context.Background(), 0, 1, 99), syscall.EINVAL)
}

// TestStoresPastTheEndAreNoReasonToStay: bytes stored past the end of the file, in its last page and behind, are not
// part of it. They do not keep memory that is not needed.
func TestStoresPastTheEndAreNoReasonToStay(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(page.Size + 100)
	want := src.home.bytes(0, page.Size+100)
	p := m.run(src, 0, 0, 3*page.Size, true)
	p.store(page.Size+200, 5)
	p.store(2*page.Size, 6)
	require.NoError(t, p.Advise(t.Context(), 0, 3*page.Size, AdviceDontNeed))
	require.Zero(t, p.byteAt(page.Size+50))
	require.Zero(t, p.byteAt(page.Size+200))
	require.Zero(t, p.byteAt(2*page.Size))
	p.acquire()
	requireSame(t, want, p.load(0, page.Size+100))

	mp := newMovingMachine(t, 1, 4, 4)
	src = mp.noisyFile(brick - 100)
	c := mp.travel(src, 0, true)
	c.stores(brick-50, 7)
	mp.crowd(0, 5)
	device, host := c.tiers()
	require.Zero(t, device+host, "it was dropped like bytes that home has")
}

func TestBadRequests(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	ctx := context.Background()
	for _, c := range []struct {
		req  MapRequest
		want syscall.Errno
	}{
		{MapRequest{Off: 1, Len: 1}, syscall.EINVAL},
		{MapRequest{Off: -page.Size, Len: 1}, syscall.EINVAL},
		{MapRequest{Len: 0}, syscall.EINVAL},
		{MapRequest{Len: -1}, syscall.EINVAL},
		{MapRequest{Off: page.Size, Len: 1<<63 - 1}, syscall.EINVAL},
		{MapRequest{Device: 1, Len: 1}, syscall.ENODEV},
		{MapRequest{Device: -1, Len: 1}, syscall.ENODEV},
		{MapRequest{Len: 1 << 50}, syscall.ENOMEM},
	} {
		_, err := m.cache.Map(ctx, src, c.req)
		assert.ErrorIs(t, err, c.want, "%+v", c.req)
	}
	_, err := m.cache.Map(ctx, &source{id: FileID{1, 99}, home: newHome(1), kernel: &testKernel{}, readonly: true},
		MapRequest{Len: 1, Writable: true})
	assert.ErrorIs(t, err, syscall.EACCES)
	p := m.run(src, 0, 0, 100, true)
	for _, r := range [][2]int64{{0, 0}, {-1, 1}, {0, page.Size + 1}, {page.Size, 1}, {1 << 62, 1 << 62}} {
		_, err := p.Acquire(ctx, r[0], r[1], false)
		assert.ErrorIs(t, err, syscall.EINVAL, "%v", r)
		_, err = p.Release(ctx, r[0], r[1])
		assert.ErrorIs(t, err, syscall.EINVAL, "%v", r)
	}
}

// A program writes a whole page while a release makes the kernel drop it. That puts the page back into the kernel
// without the released bytes, so it is dropped once more before the release returns.
func TestPagesWrittenWholeWhileDrainingAreDroppedAgain(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	p.store(0, 'g')
	once := true
	src.kernel.hook = func(int64, int64) {
		if once {
			once = false
			src.write(t, 0, bytes.Repeat([]byte{'c'}, page.Size))
		}
	}
	p.release()
	assert.Len(t, src.kernel.take(), 2)
	assert.Equal(t, []byte("gc"), src.read(t, 0, 2))
	p.acquire()
	assert.Equal(t, []byte("gc"), p.load(0, 2))
}

// With write-back caching the kernel holds pages that it never read. A release drops them, and earlier released bytes
// are home before them.
func TestReleaseWithUnreadDirtyPages(t *testing.T) {
	m := newMachine(t, 1, func(o *Options, _ *int64) { o.WriteBack = true })
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	p.store(0, 1)
	p.release()
	// A program that saw the release overwrites the page; the kernel has it dirty. The device stores elsewhere.
	dirty := bytes.Repeat([]byte{2}, page.Size)
	p.store(9, 9)
	src.kernel.hook = func(int64, int64) {
		require.NoError(t, src.tryWrite(Change{Kind: ChangeWrite, Off: 0, Len: page.Size, WriteBack: true}, dirty))
	}
	src.kernel.take()
	p.release()
	assert.NotEmpty(t, src.kernel.take(), "dropped, although the kernel never asked for the page")
	src.kernel.hook = nil
	assert.Equal(t, []byte{2}, src.read(t, 0, 1), "an overwritten release does not come back")
}

// A release that its client's end cuts short publishes nothing before earlier released bytes are home. The implicit
// release at the client's end does both. A page that a program overwrote after the earlier release keeps the program's
// bytes.
func TestReleaseThatIsCutShort(t *testing.T) {
	var logged bytes.Buffer
	m := newMachine(t, 1, func(o *Options, _ *int64) {
		o.WriteBack, o.Log = true, slog.New(slog.NewTextHandler(&logged, &slog.HandlerOptions{Level: slog.LevelWarn}))
	})
	src := m.file(2 * page.Size)
	p := m.run(src, 0, 0, 2*page.Size, true)
	p.store(0, 1)
	p.release()
	// This page is dirty in the kernel, which does not read a page that a program writes as a whole.
	dirty := bytes.Repeat([]byte{2}, page.Size)
	p.store(9, 9) // the scan finds this, so the release has both pages
	p.store(page.Size, 3)
	src.kernel.take()
	once := true
	src.kernel.hook = func(int64, int64) {
		if once {
			once = false
			require.NoError(t, src.tryWrite(Change{Kind: ChangeWrite, Off: 0, Len: page.Size, WriteBack: true}, dirty))
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	gate := m.devices[0].Hold(faulty.CopyOut)
	defer gate.Open()
	released := make(chan error)
	go func() {
		_, err := p.Release(ctx, 0, 2*page.Size)
		released <- err
	}()
	<-gate.Arrived() // the earlier release is on its way home
	cancel()
	require.ErrorIs(t, <-released, context.Canceled)
	gate.Open()
	assert.Empty(t, src.kernel.take(), "nothing was published")
	assert.Empty(t, m.cache.Status().Files[0].Error, "home took everything that it was given")

	require.NoError(t, p.Unmap(ctx))
	assert.NotEmpty(t, src.kernel.take(), "the implicit release has the kernel drop its page")
	assert.Equal(t, []byte{2}, src.read(t, 0, 1), "overwritten bytes do not come back")
	assert.Equal(t, []byte{3}, src.read(t, page.Size, 1))
	assert.Empty(t, logged.String())
}

// An acquire that its client's end cuts short is no error of home.
func TestCollectThatIsCutShort(t *testing.T) {
	m := newMachine(t, 2)
	src := m.file(page.Size)
	p, q := m.run(src, 0, 0, page.Size, true), m.run(src, 1, 0, page.Size, false)
	p.store(0, 1)
	p.release()
	ctx, cancel := context.WithCancel(context.Background())
	gate := m.devices[0].Hold(faulty.CopyOut)
	defer gate.Open()
	acquired := make(chan error)
	go func() {
		_, err := q.Acquire(ctx, 0, page.Size, false)
		acquired <- err
	}()
	<-gate.Arrived()
	cancel()
	require.ErrorIs(t, <-acquired, context.Canceled)
	gate.Open()
	assert.Empty(t, m.cache.Status().Files[0].Error)
	q.acquire()
	assert.Equal(t, byte(1), q.byteAt(0))
}

// undone is a context like that of a request of the kernel: Done is expensive.
type undone struct {
	context.Context
	t *testing.T
}

func (c undone) Done() <-chan struct{} {
	c.t.Error("Done was called although nothing has to be waited for")
	return nil
}

// TestReadsThatNeedNotWaitStartNoGoroutine reads what a device released.
func TestReadsThatNeedNotWaitStartNoGoroutine(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	p.store(7, 3)
	p.release()
	got := make([]byte, page.Size)
	_, fromHome, err := src.attached.Read(undone{context.Background(), t}, got, 0, true, nil)
	require.NoError(t, err)
	if fromHome {
		got = src.home.bytes(0, page.Size)
	}
	require.EqualValues(t, 3, got[7])
}
