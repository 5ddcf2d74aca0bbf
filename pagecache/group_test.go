package pagecache

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

var tornFlag = flag.Int("torn", 100, "acquires of each reader beside a writer of groups")

// whole is a program's whole mapping as a range of a group.
func (p *program) whole() GroupRange { return GroupRange{p.Mapping, 0, p.len} }

func (m *machine) group(ranges ...GroupRange) *Group {
	m.t.Helper()
	g, err := m.cache.BeginGroup(context.Background(), ranges)
	require.NoError(m.t, err)
	return g
}

func (m *machine) releaseGroup(g *Group) uint64 {
	m.t.Helper()
	version, _, err := g.Release(context.Background())
	require.NoError(m.t, err)
	return version
}

// fill stores one byte value into all of a program's memory.
func (p *program) fill(c byte) {
	if p.host != nil {
		for i := range p.host {
			p.host[i] = c
		}
		return
	}
	require.NoError(p.t, p.gpu.CopyIn(context.Background(), p.copies(0, bytes.Repeat([]byte{c}, p.end()))))
}

// TestGroupIsPublishedAtOnce: readers see nothing of a group before its release, and all of it after.
func TestGroupIsPublishedAtOnce(t *testing.T) {
	m := newMachine(t, 2)
	a, b := m.file(16*page.Size), m.file(16*page.Size)
	pa, pb := m.run(a, 0, 0, 16*page.Size, true), m.run(b, 0, 0, 16*page.Size, true)
	v := m.view(ViewRequest{Segments: []view.Segment{bytesOf(0, 16*page.Size),
		{File: 1, Offset: 0, Length: 16 * page.Size, Count: 1}}}, a, b)
	far := m.run(b, 1, 0, 16*page.Size, false)
	for k := byte(1); k < 5; k++ {
		g := m.group(pa.whole(), pb.whole())
		pa.fill(k)
		pb.fill(k)
		version, _, err := m.cache.AcquireAll(context.Background(),
			[]AcquireRange{{v.ViewMapping, 0, v.Size()}, {far.Mapping, 0, far.len}}, false)
		require.NoError(t, err)
		require.EqualValues(t, k-1, version)
		require.Equal(t, bytes.Repeat([]byte{k - 1}, 32*page.Size), v.all())
		require.Equal(t, bytes.Repeat([]byte{k - 1}, 16*page.Size), far.all())
		require.Equal(t, bytes.Repeat([]byte{k - 1}, 16*page.Size), a.read(t, 0, 16*page.Size))
		require.EqualValues(t, k, m.releaseGroup(g))
		version, _, err = m.cache.AcquireAll(context.Background(),
			[]AcquireRange{{v.ViewMapping, 0, v.Size()}, {far.Mapping, 0, far.len}}, false)
		require.NoError(t, err)
		require.EqualValues(t, k, version)
		require.Equal(t, bytes.Repeat([]byte{k}, 32*page.Size), v.all())
		require.Equal(t, bytes.Repeat([]byte{k}, 16*page.Size), far.all())
		require.Equal(t, bytes.Repeat([]byte{k}, 16*page.Size), a.read(t, 0, 16*page.Size))
		_, _, err = g.Release(context.Background())
		require.ErrorIs(t, err, syscall.EINVAL)
	}
}

// TestGroupOfAWriterThatDies: nobody sees the group's stores, not even programs on its device.
func TestGroupOfAWriterThatDies(t *testing.T) {
	m := newMachine(t, 2)
	a, b := m.noisyFile(9*page.Size+77), m.noisyFile(300*page.Size)
	was := [][]byte{a.home.bytes(0, 9*page.Size+77), b.home.bytes(0, 300*page.Size)}
	pa, pb := m.run(a, 0, 0, 9*page.Size+77, true), m.run(b, 1, 0, 300*page.Size, true)
	beside := m.run(a, 0, 0, 9*page.Size+77, true)
	v := m.view(ViewRequest{Segments: []view.Segment{bytesOf(0, 9*page.Size+77)}}, a)
	g := m.group(pa.whole(), pb.whole())
	pa.fill(200)
	pb.fill(201)
	a.write(t, 2*page.Size+5, []byte("a program on the CPU wrote this"))
	copy(was[0][2*page.Size+5:], "a program on the CPU wrote this")
	pa.unmap()
	_, _, err := g.Release(context.Background())
	require.ErrorIs(t, err, syscall.ECANCELED)
	pb.unmap()
	beside.acquire()
	require.Equal(t, was[0], beside.all()[:len(was[0])])
	require.Zero(t, beside.release(), "nothing is left to be released")
	v.acquire()
	require.Equal(t, was[0], v.all())
	require.Equal(t, was[0], a.read(t, 0, len(was[0])))
	require.Equal(t, was[1], b.read(t, 0, len(was[1])))
	again := m.run(b, 1, 0, 300*page.Size, true)
	require.Equal(t, was[1], again.all())
	require.Zero(t, m.cache.memory.classes[memoryGroups].Load())
}

// TestGroupThatCannotBeTakenBack: home fails to return the former bytes of a page. The device gives the page up, and
// nobody sees the group.
func TestGroupThatCannotBeTakenBack(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(4 * page.Size)
	p, beside := m.run(src, 0, 0, 4*page.Size, true), m.run(src, 0, 0, 4*page.Size, true)
	g := m.group(p.whole())
	p.fill(9)
	src.home.failReads(errors.New("the disk is broken"))
	g.Abort(context.Background())
	require.Equal(t, make([]byte, 4*page.Size), beside.all())
	src.home.failReads(nil)
	beside.store(5, 77)
	beside.release()
	beside.acquire()
	want := src.home.bytes(0, 4*page.Size)
	want[5] = 77
	require.Equal(t, want, beside.all())
	require.Equal(t, want, src.read(t, 0, 4*page.Size))
}

// TestNobodyElseReleasesAGroup: releases, syncs and ends of other programs leave out the group's pages.
func TestNobodyElseReleasesAGroup(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(8 * page.Size)
	p, beside := m.run(src, 0, 0, 8*page.Size, true), m.run(src, 0, 0, 8*page.Size, true)
	g := m.group(GroupRange{p.Mapping, page.Size, 2 * page.Size})
	p.store(page.Size, 1)
	beside.store(5*page.Size, 2)
	n, err := beside.Release(context.Background(), 0, 8*page.Size)
	require.ErrorIs(t, err, syscall.EBUSY)
	require.EqualValues(t, 1, n)
	require.ErrorIs(t, beside.Sync(context.Background(), 0, 8*page.Size, false), syscall.EBUSY)
	beside.unmap()
	require.NoError(t, src.attached.Sync(context.Background(), nil))
	require.Equal(t, []byte{0}, src.home.bytes(page.Size, 1))
	require.Equal(t, []byte{2}, src.home.bytes(5*page.Size, 1))
	_, err = m.cache.BeginGroup(context.Background(), []GroupRange{p.whole()})
	require.ErrorIs(t, err, syscall.EBUSY)
	m.releaseGroup(g)
	require.Equal(t, []byte{1}, src.read(t, page.Size, 1))
	m.group(p.whole()).Abort(context.Background())
}

// TestGroupThatCannotBegin: a group that fails to begin leaves no pages behind that others cannot use.
func TestGroupThatCannotBegin(t *testing.T) {
	m := newMachine(t, 1)
	a, b := m.file(page.Size), m.file(page.Size)
	pa, pb := m.run(a, 0, 0, page.Size, true), m.run(b, 0, 0, page.Size, true)
	g := m.group(pb.whole())
	_, err := m.cache.BeginGroup(t.Context(), []GroupRange{pb.whole(), pa.whole()})
	require.ErrorIs(t, err, syscall.EBUSY)
	m.group(pa.whole()).Abort(t.Context())
	g.Abort(t.Context())
	require.Zero(t, m.cache.memory.classes[memoryGroups].Load())
}

// TestAbortThatNobodyWaitsFor: an abort takes everything back, even if its caller has given up, and even if the device
// fails once while it looks for the stores.
func TestAbortThatNobodyWaitsFor(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(4 * page.Size)
	want := src.home.bytes(0, 4*page.Size)
	p := m.run(src, 0, 0, 4*page.Size, true)
	now, cancel := context.WithCancel(t.Context())
	cancel()
	for _, fails := range []bool{false, true} {
		g := m.group(p.whole())
		p.fill(9)
		if fails {
			m.devices[0].Fail(faulty.Modified, 1, errors.New("injected"))
		}
		g.Abort(now)
		require.Equal(t, want, p.all(), "a scan fails: %v", fails)
		require.Zero(t, p.release())
	}
}

// whileReadersRead begins to release g while an acquire of the file is steady, so that the release waits for it. It
// calls do once the release waits, and then lets the release go on.
func (m *machine) whileReadersRead(f *File, g *Group, do func()) (pages int64, err error) {
	m.t.Helper()
	_, _, err = m.cache.publications.between(m.t.Context(), []*File{f}, true)
	require.NoError(m.t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, pages, err = g.Release(m.t.Context())
	}()
	require.Eventually(m.t, func() bool {
		m.cache.publications.mu.Lock()
		defer m.cache.publications.mu.Unlock()
		return m.cache.publications.moved != nil
	}, time.Minute, time.Millisecond)
	do()
	m.cache.publications.unsteady([]*File{f})
	<-done
	return pages, err
}

// TestGroupOfAFileThatIsCutAtTheLastMoment: pages that were cut off while a group waited for readers are not released.
func TestGroupOfAFileThatIsCutAtTheLastMoment(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(8*page.Size + 100)
	p := m.run(src, 0, 0, 8*page.Size+100, true)
	g := m.group(p.whole())
	p.store(8*page.Size+200, 5) // past the end
	_, pages, err := g.Release(t.Context())
	require.NoError(t, err)
	require.Zero(t, pages)
	g = m.group(p.whole())
	p.fill(5)
	pages, err = m.whileReadersRead(src.attached, g, func() { src.truncate(t, 3*page.Size) })
	require.NoError(t, err)
	require.EqualValues(t, 3, pages)
	src.truncate(t, 8*page.Size)
	require.Equal(t, append(bytes.Repeat([]byte{5}, 3*page.Size), make([]byte, 5*page.Size)...),
		src.read(t, 0, 8*page.Size))
}

// TestGroupOfADeviceThatIsLostAtTheLastMoment: nothing of the group is published, and no version counts.
func TestGroupOfADeviceThatIsLostAtTheLastMoment(t *testing.T) {
	m := newMachine(t, 2)
	a, b := m.noisyFile(4*page.Size), m.noisyFile(4*page.Size)
	pa, pb := m.run(a, 0, 0, 4*page.Size, true), m.run(b, 1, 0, 4*page.Size, true)
	want := b.home.bytes(0, 4*page.Size)
	g := m.group(pa.whole(), pb.whole())
	pa.fill(1)
	pb.fill(1)
	_, err := m.whileReadersRead(b.attached, g, func() {
		m.devices[0].Lose()
		m.cache.lose(m.cache.devices[0], gpubackend.ErrDeviceLost)
	})
	require.ErrorIs(t, err, syscall.ENODEV)
	version, err := b.attached.Version(t.Context())
	require.NoError(t, err)
	require.Zero(t, version)
	require.Equal(t, want, b.read(t, 0, 4*page.Size))
	_ = pa.Unmap(t.Context())
	pa.giveUp()
	pb.unmap()
	require.Equal(t, want, b.read(t, 0, 4*page.Size))
}

// TestGroupsWaitForAnAcquireThatStartsAgain: if groups are published during an acquire, it starts again, and the next
// group waits for its third turn.
func TestGroupsWaitForAnAcquireThatStartsAgain(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	files, turns := []*File{src.attached}, 0
	waiting := func() bool {
		m.cache.publications.mu.Lock()
		defer m.cache.publications.mu.Unlock()
		return m.cache.publications.moved != nil
	}
	released := make(chan struct{}, 1)
	version, _, err := m.cache.atOneVersion(t.Context(), files, func() (int64, error) {
		g := m.group(p.whole())
		if turns++; turns <= steadyTurn {
			m.releaseGroup(g)
			return 0, nil
		}
		require.Equal(t, steadyTurn+1, turns)
		go func() {
			m.releaseGroup(g)
			released <- struct{}{}
		}()
		require.Eventually(t, func() bool { return waiting() || len(released) > 0 }, time.Minute, time.Millisecond)
		require.Empty(t, released)
		return 0, nil
	})
	require.NoError(t, err)
	require.EqualValues(t, steadyTurn, version)
	m.cache.publications.mu.Lock()
	steady := src.attached.published.steady
	m.cache.publications.mu.Unlock()
	if !assert.Zero(t, steady, "the group would wait for ever") {
		m.cache.publications.unsteady(files)
	}
	<-released
}

// TestEachRangeOfAGroupIsHeldBack: a release by another program leaves out every range of an open group.
func TestEachRangeOfAGroupIsHeldBack(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(8 * page.Size)
	p, beside := m.run(src, 0, 0, 8*page.Size, true), m.run(src, 0, 0, 8*page.Size, true)
	g := m.group(GroupRange{p.Mapping, page.Size, 1}, GroupRange{p.Mapping, 4 * page.Size, 1},
		GroupRange{p.Mapping, 6*page.Size + 9, 1})
	p.fill(3)
	_, err := beside.Release(context.Background(), 0, 8*page.Size)
	require.ErrorIs(t, err, syscall.EBUSY)
	for i := range 8 {
		want := byte(3)
		if i == 1 || i == 4 || i == 6 {
			want = 0
		}
		require.Equal(t, want, src.read(t, i*page.Size, 1)[0], "page %d", i)
	}
	m.releaseGroup(g)
	require.Equal(t, bytes.Repeat([]byte{3}, 8*page.Size), src.read(t, 0, 8*page.Size))
}

// TestVersionIsToldLast: while the kernel has old pages of a group's last file, the version is not announced.
func TestVersionIsToldLast(t *testing.T) {
	m := newMachine(t, 1)
	a, b := m.file(page.Size), m.file(page.Size)
	pa, pb := m.run(a, 0, 0, page.Size, true), m.run(b, 0, 0, page.Size, true)
	g := m.group(pa.whole(), pb.whole())
	pa.fill(1)
	pb.fill(1)
	b.read(t, 0, 1) // gives the kernel a page to drop
	dropped, told := 0, 0
	now, cancel := context.WithCancel(context.Background())
	cancel()
	b.kernel.hook = func(int64, int64) {
		dropped++
		if _, err := a.attached.Version(now); err == nil {
			told++
		}
	}
	require.EqualValues(t, 1, m.releaseGroup(g))
	require.Positive(t, dropped)
	require.Zero(t, told)
	version, err := a.attached.Version(now)
	require.NoError(t, err)
	require.EqualValues(t, 1, version)
}

func TestWrongGroups(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(4 * page.Size)
	p, reader := m.run(src, 0, 0, 4*page.Size, true), m.run(src, 0, 0, 4*page.Size, false)
	for _, x := range []struct {
		ranges []GroupRange
		errno  syscall.Errno
	}{
		{nil, syscall.EINVAL},
		{[]GroupRange{{p.Mapping, 0, 0}}, syscall.EINVAL},
		{[]GroupRange{{p.Mapping, -1, 2}}, syscall.EINVAL},
		{[]GroupRange{p.whole(), {p.Mapping, 3 * page.Size, page.Size + 1}}, syscall.EINVAL},
		{[]GroupRange{reader.whole()}, syscall.EACCES},
		{make([]GroupRange, MaxGroupRanges+1), syscall.EINVAL},
	} {
		_, err := m.cache.BeginGroup(context.Background(), x.ranges)
		require.ErrorIs(t, err, x.errno)
	}
	many := make([]GroupRange, 100_000)
	for i := range many {
		many[i] = GroupRange{p.Mapping, int64(i*8) % (4 * page.Size), 16 - int64(i%2)*8}
		many[i].Len = min(many[i].Len, 4*page.Size-many[i].Off)
	}
	g := m.group(many...)
	p.fill(3)
	m.releaseGroup(g)
	require.Equal(t, bytes.Repeat([]byte{3}, 4*page.Size), src.read(t, 0, 4*page.Size))
	p.unmap()
	_, err := m.cache.BeginGroup(context.Background(), []GroupRange{p.whole()})
	require.ErrorIs(t, err, syscall.EINVAL)
}

// TestGroupOfAFileThatIsCut: stores past the new end are not part of the file.
func TestGroupOfAFileThatIsCut(t *testing.T) {
	m := newMachine(t, 2)
	src := m.noisyFile(8 * page.Size)
	p := m.run(src, 0, 0, 8*page.Size, true)
	v := m.view(ViewRequest{Device: 1, Segments: []view.Segment{bytesOf(0, 8*page.Size)}}, src)
	g := m.group(p.whole())
	p.fill(5)
	src.truncate(t, 3*page.Size+10)
	m.releaseGroup(g)
	v.acquire()
	want := append(bytes.Repeat([]byte{5}, 3*page.Size+10), make([]byte, 5*page.Size-10)...)
	require.Equal(t, want, v.all())
	src.truncate(t, 8*page.Size)
	g = m.group(p.whole())
	p.fill(6)
	src.truncate(t, 2*page.Size)
	g.Abort(context.Background())
	v.acquire()
	require.Equal(t, append(bytes.Repeat([]byte{5}, 2*page.Size), make([]byte, 6*page.Size)...), v.all())
}

// TestGroupOfALostDevice: nothing of the group is published, and readers continue.
func TestGroupOfALostDevice(t *testing.T) {
	m := newMachine(t, 2)
	a, b := m.noisyFile(4*page.Size), m.noisyFile(4*page.Size)
	pa, pb := m.run(a, 0, 0, 4*page.Size, true), m.run(b, 1, 0, 4*page.Size, true)
	want := b.home.bytes(0, 4*page.Size)
	g := m.group(pa.whole(), pb.whole())
	pa.fill(1)
	pb.fill(1)
	m.devices[0].Lose()
	_, _, err := g.Release(context.Background())
	require.ErrorIs(t, err, syscall.ENODEV)
	_ = pa.Unmap(context.Background())
	pa.giveUp()
	pb.unmap()
	require.Equal(t, want, b.read(t, 0, 4*page.Size))
	version, err := b.attached.Version(context.Background())
	require.NoError(t, err)
	require.Zero(t, version)
}

func TestWaitingForAVersion(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	p, reader := m.run(src, 0, 0, page.Size, true), m.run(src, 0, 0, page.Size, false)
	wait := func(r *program, least uint64) <-chan error {
		end := make(chan error, 1)
		m.cache.publications.mu.Lock()
		m.cache.publications.movedLocked() // later waiters create another one
		m.cache.publications.mu.Unlock()
		go func() {
			ranges := []AcquireRange{{r.Mapping, 0, 1}}
			err := m.cache.AwaitVersion(context.Background(), ranges, least)
			if err == nil {
				var version uint64
				if version, _, err = m.cache.AcquireAll(context.Background(), ranges, false); err == nil &&
					version < least {
					err = errors.New("too old")
				}
			}
			end <- err
		}()
		return end
	}
	ended := func(end <-chan error) error {
		t.Helper()
		select {
		case err := <-end:
			return err
		case <-time.After(time.Minute):
			require.Fail(t, "it waits still")
			return nil
		}
	}
	waits := func() {
		t.Helper()
		require.Eventually(t, func() bool {
			m.cache.publications.mu.Lock()
			defer m.cache.publications.mu.Unlock()
			return m.cache.publications.moved != nil
		}, time.Minute, time.Millisecond)
	}
	first := wait(reader, 1)
	waits()
	m.releaseGroup(m.group(p.whole()))
	require.NoError(t, ended(first))
	require.NoError(t, ended(wait(reader, 1)), "it is there")

	late, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	err := m.cache.AwaitVersion(late, []AcquireRange{{reader.Mapping, 0, 1}}, 2)
	require.ErrorIs(t, err, context.DeadlineExceeded)

	second := wait(reader, 2)
	waits()
	p.unmap()
	require.ErrorIs(t, ended(second), syscall.EPIPE)

	require.ErrorIs(t, ended(wait(reader, 2)), syscall.EPIPE, "nobody waited when the writer ended")
	newer := m.run(src, 0, 0, page.Size, false)
	third := wait(newer, 2) // for a writer that begins later
	waits()
	newer.unmap()
	require.ErrorIs(t, ended(third), syscall.EINVAL)
	reader.unmap()

	again := m.run(src, 0, 0, page.Size, false)
	require.NoError(t, ended(wait(again, 1)), "the version outlives the mappings")
}

// TestViewTakesWhatIsReleasedStraight: a view does not wait until released bytes are home.
func TestViewTakesWhatIsReleasedStraight(t *testing.T) {
	m := newMachine(t, 2)
	src := m.noisyFile(64*page.Size + 100)
	p := m.run(src, 0, 0, 64*page.Size+100, true)
	views := []*viewer{
		m.view(ViewRequest{Segments: []view.Segment{bytesOf(3, 60*page.Size)}}, src),
		m.view(ViewRequest{Device: 1, Segments: []view.Segment{bytesOf(3, 60*page.Size)}}, src),
	}
	src.home.fail(syscall.ENOSPC)
	store := func(k byte) {
		for at := 5 * page.Size; at < 50*page.Size; at += 3*page.Size + 1 {
			p.store(at, k)
		}
		p.release()
	}
	for k := byte(1); k < 4; k++ {
		store(k)
		for _, v := range views {
			require.EqualValues(t, 15, v.acquire())
			v.check()
			require.Zero(t, v.acquire(), "nothing is copied twice")
		}
	}
	src.home.fail(nil)
	src.write(t, 10*page.Size+9, []byte("written since")) // also in a page that was released
	p.store(6*page.Size, 99)                              // not released
	for _, v := range views {
		v.acquire()
		require.Equal(t, "written since", string(v.all()[10*page.Size+6:][:13]))
		require.NotEqual(t, byte(99), v.all()[6*page.Size-3])
	}
	require.NoError(t, src.attached.Sync(context.Background(), nil))
	p.release()
	for _, v := range views {
		v.acquire()
		v.check()
		require.Equal(t, byte(99), v.all()[6*page.Size-3])
	}
	store(9)
	for _, v := range views {
		v.acquire()
	}
	src.truncate(t, 20*page.Size)
	for _, v := range views {
		v.acquire()
		v.check()
	}
}

// TestAbortedStoresWithoutAnAcquire: an aborted group takes back stores into pages that the mapping never acquired.
func TestAbortedStoresWithoutAnAcquire(t *testing.T) {
	const size = 8 * page.Size
	m := newMachine(t, 1)
	src := m.noisyFile(size)
	want := src.home.bytes(0, size)
	p := m.attach(m.mapping(src, MapRequest{Len: size, Lazy: true, Writable: true}), 0, size, true)
	_, err := p.Acquire(t.Context(), 2*page.Size, page.Size, false)
	require.NoError(t, err)
	g := m.group(p.whole())
	p.fill(7)
	g.Abort(t.Context())
	require.Equal(t, make([]byte, 2*page.Size), p.load(0, 2*page.Size))
	require.Equal(t, want[2*page.Size:3*page.Size], p.load(2*page.Size, 3*page.Size))
	require.Zero(t, p.release())
	require.Equal(t, want, src.read(t, 0, size))
	p.acquire()
	require.Equal(t, want, p.all())
}

// TestViewOfReleasedPages: what a view copies straight from a device is what the file has: nothing past its end, and
// what others wrote into the page, on the CPU or in SOURCE. If it cannot copy, the bytes come over home.
func TestViewOfReleasedPages(t *testing.T) {
	const size = page.Size + 100
	for name, change := range map[string]func(t *testing.T, m *machine, src *source, p *program){
		"past the end": func(_ *testing.T, _ *machine, _ *source, p *program) {
			p.store(page.Size+5, 9)
			p.store(size+50, 9)
			p.release()
		},
		"CPU": func(t *testing.T, _ *machine, src *source, p *program) {
			src.write(t, 20, []byte("written"))
			p.release()
		},
		"SOURCE": func(_ *testing.T, _ *machine, src *source, p *program) {
			p.release()
			src.home.editAt(20, []byte("in SOURCE"))
		},
		"no way between the devices": func(_ *testing.T, m *machine, _ *source, p *program) {
			p.release()
			m.devices[1].Fail(faulty.CopyPeer, 1, gpubackend.ErrNoPeer)
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, 2)
			src := m.noisyFile(size)
			p := m.run(src, 0, 0, size, true)
			p.store(3, p.byteAt(3)+1)
			changed := p.byteAt(3)
			change(t, m, src, p)
			v := m.view(ViewRequest{Device: 1, Segments: []view.Segment{bytesOf(0, 2*page.Size)}}, src)
			require.Equal(t, changed, v.all()[3])
			require.Equal(t, make([]byte, 2*page.Size-size), v.all()[size:])
			require.NoError(t, src.attached.Sync(t.Context(), nil))
			require.Equal(t, src.home.bytes(0, size), v.all()[:size])
		})
	}
}

// TestViewOfWhatALostDeviceReleased: the bytes are not part of the file any more.
func TestViewOfWhatALostDeviceReleased(t *testing.T) {
	m := newMachine(t, 2)
	src := m.noisyFile(8 * page.Size)
	p := m.run(src, 0, 0, 8*page.Size, true)
	v := m.view(ViewRequest{Device: 1, Segments: []view.Segment{bytesOf(0, 8*page.Size)}}, src)
	p.store(5, ^src.home.bytes(5, 1)[0])
	p.release()
	v.acquire()
	require.NotEqual(t, src.home.bytes(5, 1)[0], v.all()[5])
	m.devices[0].Lose()
	_, err := p.Acquire(context.Background(), 0, 1, false)
	src.write(t, 3*page.Size, []byte("x"))
	_, err2 := p.Release(context.Background(), 0, 1)
	require.Error(t, errors.Join(err, err2))
	v.acquire()
	v.check()
	_ = p.Unmap(context.Background())
	p.giveUp()
	require.ErrorContains(t, m.cache.Close(context.Background()), "lost with device 0")
}

// TestTornVersions: while groups over two files are written, readers see all of a version or nothing of it.
func TestTornVersions(t *testing.T) {
	const pages = 20
	m := newMachine(t, 2)
	a, b := m.file(pages*page.Size), m.file(pages*page.Size)
	pa, pb := m.run(a, 0, 0, pages*page.Size, true), m.run(b, 0, 0, pages*page.Size, true)
	both := []view.Segment{bytesOf(0, pages*page.Size), {File: 1, Offset: 1, Length: page.Size - 2, Stride: page.Size,
		Count: pages}}
	near, far := m.view(ViewRequest{Segments: both}, a, b), m.view(ViewRequest{Device: 1, Segments: both}, a, b)
	ma, mb := m.run(a, 1, 0, pages*page.Size, false), m.run(b, 1, 0, pages*page.Size, false)

	stop := make(chan struct{})
	var group sync.WaitGroup
	read := func(bytesNow func() []byte, ranges ...AcquireRange) {
		group.Go(func() {
			last := uint64(0)
			for k := range *tornFlag {
				err := m.cache.AwaitVersion(context.Background(), ranges, last+uint64(k%2))
				version, _, err2 := m.cache.AcquireAll(context.Background(), ranges, false)
				if err = errors.Join(err, err2); err != nil || version < last {
					t.Errorf("version %d after %d: %v", version, last, err)
					return
				}
				last = version
				for i, c := range bytesNow() {
					if c != byte(version) {
						t.Errorf("byte %d of version %d is of %d", i, byte(version), c)
						return
					}
				}
			}
		})
	}
	read(near.all, AcquireRange{near.ViewMapping, 0, near.Size()})
	read(far.all, AcquireRange{far.ViewMapping, 0, far.Size()})
	read(func() []byte { return append(bytes.Clone(ma.all()), mb.all()...) },
		AcquireRange{ma.Mapping, 0, ma.len}, AcquireRange{mb.Mapping, 0, mb.len})
	var writer sync.WaitGroup
	writer.Go(func() {
		for turn := 1; ; turn++ {
			select {
			case <-stop:
				return
			default:
			}
			g, err := m.cache.BeginGroup(context.Background(), []GroupRange{pb.whole(), pa.whole()})
			if err != nil {
				t.Error(err)
				return
			}
			m.cache.publications.mu.Lock()
			next := byte(m.cache.publications.last + 1)
			m.cache.publications.mu.Unlock()
			pa.fill(next)
			pb.fill(next)
			if turn%7 == 0 {
				g.Abort(context.Background())
				continue
			}
			if _, _, err := g.Release(context.Background()); err != nil {
				t.Error(err)
				return
			}
			m.cache.collectDue(context.Background())
		}
	})
	group.Wait()
	close(stop)
	writer.Wait()
}

// TestVersionsOutliveFiles: a file that left the cache comes back with its version. A new file with the number of a
// deleted one begins at 0.
func TestVersionsOutliveFiles(t *testing.T) {
	m := newMachine(t, 1)
	src := m.file(page.Size)
	version := func() uint64 {
		t.Helper()
		p := m.run(src, 0, 0, page.Size, true)
		v, err := p.f.Version(t.Context())
		require.NoError(t, err)
		m.releaseGroup(m.group(p.whole()))
		p.unmap()
		_, err = m.cache.Evict(t.Context(), src.id, -1)
		require.NoError(t, err)
		require.Eventually(t, func() bool { return m.cache.Lookup(src.id) == nil }, time.Minute, time.Millisecond)
		return v
	}
	require.Zero(t, version())
	require.EqualValues(t, 1, version())
	require.EqualValues(t, 2, version())
	m.cache.Forget(src.id)
	require.Zero(t, version())
}

// TestVersionsAreBounded: versions of files that nobody uses take a bounded part of memory.
func TestVersionsAreBounded(t *testing.T) {
	var p publications
	for i := range uint64(mostLeft + 10) {
		f := &File{id: FileID{1, i}}
		f.published.state.Store(2)
		p.leave(f)
	}
	require.Len(t, p.left, mostLeft)
}
