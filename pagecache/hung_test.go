package pagecache

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
)

// patient is how long tests wait for background work.
const patient = 20 * time.Second

// briefly is a time after which files count as stuck in tests with hung files. It is much longer than the holds of
// other files, also on a busy machine.
const briefly = 200 * time.Millisecond

func stuckAfter(d time.Duration) machineOption {
	return func(o *Options, _ *int64) { o.stuckAfter = d }
}

// hungFile makes a file whose home answers no write until the test ends or answer is called.
func (m *machine) hungFile(name string) (src *source, answer func()) {
	src = m.file(page.Size)
	src.name = name
	src.home.hung = make(chan struct{})
	answered := false
	answer = func() {
		if !answered {
			answered = true
			close(src.home.hung)
		}
	}
	m.t.Cleanup(answer)
	return src, answer
}

// TestAHungFileHoldsUpNoOther: files of one backing filesystem hang, more than the background works on at once. The
// others come home, the status shows which files hang, and a close that must not wait names them.
func TestAHungFileHoldsUpNoOther(t *testing.T) {
	book := &logbook{}
	m := newMachine(t, 1, interval(20*time.Millisecond), stuckAfter(briefly), logTo(book))
	var answers []func()
	for i := range laneWorkers + 2 {
		src, answer := m.hungFile(fmt.Sprint("hung", i))
		answers = append(answers, answer)
		p := m.run(src, 0, 0, page.Size, true)
		p.store(0, 7)
		p.release()
	}
	stuck := func() (names []string) {
		began := time.Now()
		for _, f := range m.cache.Status().Files {
			if f.BusySeconds > 0 {
				names = append(names, f.Name)
				require.Equal(t, 1, f.Mappings, "as it was when it began to hang")
				require.Positive(t, f.PendingSeconds)
				require.EqualValues(t, 1, f.Holders[0].Dirty)
				require.EqualValues(t, 1, f.Counters["releases"])
			}
		}
		require.Less(t, time.Since(began), patient)
		return names
	}
	require.Eventually(t, func() bool { return len(stuck()) == len(answers) }, patient, 5*time.Millisecond)

	src := m.file(page.Size)
	src.name = "good"
	p := m.run(src, 0, 0, page.Size, true)
	p.store(0, 9)
	p.release()
	require.Eventually(t, func() bool { return src.home.bytes(0, 1)[0] == 9 }, patient, time.Millisecond)
	require.Contains(t, book.String(),
		"a file waits for a backing filesystem or device that does not answer; other files are unaffected")

	done := make(chan struct{})
	go func() {
		m.cache.Forget(FileID{1, 1})
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(patient):
		t.Error("a FORGET waits for a hung file")
	}

	p.store(0, 10)
	p.release()
	err := m.cache.Flush(t.Context())
	require.ErrorContains(t, err, "hung3: its backing filesystem, or a device, has not answered for")
	require.NotContains(t, err.Error(), "good")
	require.EqualValues(t, 10, src.home.bytes(0, 1)[0], "everything else comes home")
	waiting := m.cache.Waiting()
	require.Len(t, waiting, len(answers))
	require.Contains(t, waiting[0].String(),
		"4096 bytes of hung0: its backing filesystem, or a device, has not answered for")

	p.store(0, 11)
	p.release()
	ctx, cancel := context.WithTimeout(t.Context(), 10*briefly)
	defer cancel()
	err = m.cache.Close(ctx)
	for i := range answers {
		require.ErrorContains(t, err, fmt.Sprintf("bytes of hung%d that devices wrote may be lost: its backing filesystem, or a device, has not answered for", i))
	}
	require.NotContains(t, err.Error(), "good")
	require.EqualValues(t, 11, src.home.bytes(0, 1)[0], "everything else comes home")
	for _, answer := range answers {
		answer()
	}
	m.cache.lanes.work.Wait()
	m.cache.background.Wait()
	for _, d := range m.devices {
		require.NoError(t, d.Close())
	}
}

// TestNoFlushWaitsBehindHungFiles: so many files hang that no other work on their filesystem can begin. A flush says
// so, and leaves nothing behind however often it is called.
func TestNoFlushWaitsBehindHungFiles(t *testing.T) {
	const files = laneMost + 2
	m := newMachine(t, 1, memory(files*emulated.Granularity), stuckAfter(10*time.Millisecond))
	for i := range files {
		src, _ := m.hungFile(fmt.Sprint("hung", i))
		p := m.run(src, 0, 0, page.Size, true)
		p.store(0, 7)
		p.release()
	}
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	for range 3 {
		require.ErrorContains(t, m.cache.Flush(ctx),
			"it waits behind other files of its backing filesystem, which do not answer")
		require.NoError(t, ctx.Err())
		require.Len(t, m.cache.Waiting(), files)
	}
	m.cache.lanes.mu.Lock()
	defer m.cache.lanes.mu.Unlock()
	for _, n := range m.cache.lanes.lanes {
		for _, task := range n.waiting {
			require.NotEqual(t, choreFlush, task.what)
		}
	}
}

// TestReadersWhoTakeTurnsAreNotStuck: concurrent writes of a file hold its lock without a gap, but each only briefly.
func TestReadersWhoTakeTurnsAreNotStuck(t *testing.T) {
	var l fileLock
	l.RLock()
	l.since.Store(1)
	before := l.now()
	require.GreaterOrEqual(t, l.heldFor(), time.Duration(before-1), "one hold that does not end")
	func() {
		l.RLock()
		defer l.RUnlock()
	}()
	held := l.heldFor()
	require.LessOrEqual(t, held, time.Duration(l.now()-before), "counted from the end of the other hold")
	l.RUnlock()
	require.Zero(t, l.heldFor())
}

// TestNoEvictionWaitsForAHungFile: the oldest extent belongs to a file that hangs. Another extent makes room.
func TestNoEvictionWaitsForAHungFile(t *testing.T) {
	m := newMachine(t, 1, memory(2*emulated.Granularity), stuckAfter(briefly))
	hung, answer := m.hungFile("hung")
	p := m.run(hung, 0, 0, page.Size, true)
	p.store(0, 7)
	p.release()
	p.unmap()
	m.run(m.file(page.Size), 0, 0, page.Size, false).unmap()

	for range 3 {
		m.run(m.file(page.Size), 0, 0, page.Size, false).unmap()
	}
	f := hung.attached
	require.False(t, f.Detached(), "it still waits, and keeps its extent")
	answer()
	require.NoError(t, f.Sync(context.Background(), nil))
	require.EqualValues(t, 7, hung.home.bytes(0, 1)[0])
}

// TestEvictionsWaitOnceForAHungFilesystem: the oldest extents belong to files of a filesystem that hangs, as one stuck
// file shows. Evictions do not wait until each of the files counts as stuck.
func TestEvictionsWaitOnceForAHungFilesystem(t *testing.T) {
	const files = 3
	m := newMachine(t, 1, memory((files+2)*emulated.Granularity), stuckAfter(patient))
	told := m.file(page.Size)
	m.run(told, 0, 0, page.Size, false)
	for i := range files {
		hung, _ := m.hungFile(fmt.Sprint("hung", i))
		p := m.run(hung, 0, 0, page.Size, true)
		p.store(0, 7)
		p.release()
		p.unmap()
	}
	m.run(m.file(page.Size), 0, 0, page.Size, false).unmap()
	lock := &told.attached.mu
	lock.since.Store(-int64(time.Hour))
	lock.ended.Store(-int64(time.Hour))
	require.True(t, told.attached.stuck())

	began := time.Now()
	m.run(m.file(page.Size), 0, 0, page.Size, false).unmap()
	require.Less(t, time.Since(began), patient)
	lock.since.Store(0)
}

// TestASlowFileMakesRoom: one file of a backing filesystem is stuck, and only a slow file of it can make room. The
// eviction waits for the slow file, longer than if others could make room.
func TestASlowFileMakesRoom(t *testing.T) {
	const short = 200 * time.Millisecond
	m := newMachine(t, 1, memory(2*emulated.Granularity), stuckAfter(impatience*short))
	told := m.file(page.Size)
	m.run(told, 0, 0, page.Size, false)
	slow, answer := m.hungFile("slow")
	p := m.run(slow, 0, 0, page.Size, true)
	p.store(0, 7)
	p.release()
	p.unmap()
	lock := &told.attached.mu
	lock.since.Store(-int64(time.Hour))
	lock.ended.Store(-int64(time.Hour))
	defer lock.since.Store(0)
	f := slow.attached
	go func() {
		for range time.Tick(time.Millisecond) {
			if f.mu.heldFor() > 4*short {
				answer()
				return
			}
		}
	}()
	m.run(m.file(page.Size), 0, 0, page.Size, false).unmap()
	require.EqualValues(t, 7, slow.home.bytes(0, 1)[0])
}

// TestNoFlushWaitsBehindReleases: the kernel does not drop the pages of several files' releases. Meanwhile other files
// are flushed, and so are the other pages of these files.
func TestNoFlushWaitsBehindReleases(t *testing.T) {
	m := newMachine(t, 1)
	drop := make(chan struct{})
	var releases sync.WaitGroup
	var all []*source
	for range 2 * laneWorkers {
		src := m.file(2 * page.Size)
		all = append(all, src)
		p := m.run(src, 0, 0, 2*page.Size, true)
		p.store(page.Size, 8)
		p.release()
		src.read(t, 0, 1)
		dropping := make(chan struct{})
		src.kernel.hook = func(int64, int64) {
			close(dropping)
			<-drop
		}
		p.store(0, 7)
		releases.Go(func() { p.release() })
		<-dropping
	}
	flushed := make(chan error, 1)
	go func() { flushed <- m.cache.Flush(t.Context()) }()
	for _, src := range all {
		require.Eventually(t, func() bool { return src.home.bytes(page.Size, 1)[0] == 8 }, patient, time.Millisecond)
	}
	select {
	case err := <-flushed:
		t.Error("a flush does not wait for releases", err)
	default:
	}
	close(drop)
	require.NoError(t, <-flushed)
	releases.Wait()
	for _, src := range all {
		require.EqualValues(t, 7, src.home.bytes(0, 1)[0])
	}
	require.Empty(t, m.cache.Waiting())
}

// TestForgetWaitsForNoDevice: a device does not answer. The caller of Forget holds locks that others need.
func TestForgetWaitsForNoDevice(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	m.run(src, 0, 0, page.Size, false).unmap()
	gate := m.devices[0].Hold(faulty.Free)
	m.cache.Forget(src.id)
	require.True(t, src.attached.Detached())
	require.Nil(t, m.cache.Lookup(src.id), "a removed file is no longer found")
	src.home.mu.Lock()
	require.Zero(t, src.home.open, "its space is free at once")
	src.home.mu.Unlock()
	<-gate.Arrived()
	gate.Open()
	m.cache.lanes.work.Wait()
	require.Zero(t, m.devices[0].Used())
}

// TestWhatIsDueIsNotAllThatWaits: while a file's lane is busy, a tick of the background asks for due pages, and then
// everything is asked for.
func TestWhatIsDueIsNotAllThatWaits(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	p.store(0, 7)
	p.release()
	f, busy := src.attached, make(chan struct{})
	m.cache.lanes.do(f, choreRefresh, func() { <-busy })
	m.cache.lanes.do(f, choreDue, func() { f.collectDue(t.Context()) })
	p.unmap() // the last mapping: everything is brought home
	m.cache.collectUnused(t.Context())
	close(busy)
	m.cache.lanes.work.Wait()
	require.EqualValues(t, 7, src.home.bytes(0, 1)[0])
}

// slowEviction makes a machine whose device 0 has an unmapped extent of a file whose home is slow to take its bytes.
func slowEviction(t *testing.T, size int64) (m *machine, mapped func(device int) <-chan error, answer func()) {
	m = newMachine(t, 2, memory(size), stuckAfter(time.Hour))
	slow, answer := m.hungFile("slow")
	p := m.run(slow, 0, 0, page.Size, true)
	p.store(0, 7)
	p.release()
	p.unmap()
	mapped = func(device int) <-chan error {
		src, done := m.file(page.Size), make(chan error, 1)
		go func() {
			x, err := m.cache.Map(t.Context(), src, MapRequest{Device: device, Len: page.Size})
			if err == nil {
				err = x.Unmap(t.Context())
			}
			done <- err
		}()
		return done
	}
	t.Cleanup(func() { require.EqualValues(t, 7, slow.home.bytes(0, 1)[0]) })
	return m, mapped, answer
}

// soon waits for done, but fails the test with late after a while.
func soon(t *testing.T, done <-chan error, late string) {
	t.Helper()
	select {
	case err := <-done:
		require.NoError(t, err)
	case <-time.After(patient):
		t.Fatal(late)
	}
}

// TestNoDeviceWaitsForAnothersEviction: an extent has to leave one device, and its home is slow. Another device is not
// delayed.
func TestNoDeviceWaitsForAnothersEviction(t *testing.T) {
	m, mapped, answer := slowEviction(t, emulated.Granularity)
	before := m.devices[0].Calls(faulty.Alloc)
	waits := mapped(0)
	require.Eventually(t, func() bool { return m.devices[0].Calls(faulty.Alloc) > before }, patient, time.Millisecond)
	for range 3 {
		soon(t, mapped(1), "a reservation waits for another device's eviction")
	}
	select {
	case <-waits:
		t.Fatal("there was nothing else to make room")
	default:
	}
	answer()
	soon(t, waits, "there is room")
}
