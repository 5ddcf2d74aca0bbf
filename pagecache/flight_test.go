package pagecache

import (
	"bytes"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

const flightPages = 40

// aloft is a file with bytes that a device released, that a CPU read has seen, and that are not home.
type aloft struct {
	*testing.T
	m    *machine
	src  *source
	p, q *program // on the device that released, and on another one
	want []byte   // what everybody must see
	// land lets the background bring flights home.
	land func()
}

// newAloft makes an aloft. The device stored a byte into each page.
func newAloft(t *testing.T, options ...machineOption) *aloft {
	m := newMachine(t, 2, options...)
	a := &aloft{T: t, m: m, src: m.noisyFile(flightPages * page.Size)}
	a.p = m.run(a.src, 0, 0, flightPages*page.Size, true)
	a.q = m.run(a.src, 1, 0, flightPages*page.Size, true)
	a.want = a.src.home.bytes(0, flightPages*page.Size)
	a.land = m.keepAloft(a.src)
	for i := range flightPages {
		a.p.store(i*page.Size, byte(i+1))
		a.want[i*page.Size] = byte(i + 1)
	}
	before := a.src.home.bytes(0, flightPages*page.Size)
	a.p.release()
	a.seen()
	require.Equal(t, before, a.src.home.bytes(0, flightPages*page.Size), "home was not written")
	require.EqualValues(t, flightPages, m.counter(func(c *Counters) *atomic.Int64 { return &c.FlightPages }))
	require.EqualValues(t, flightPages*page.Size, m.cache.memory.classes[memoryFlights].Load())
	return a
}

// keepAloft stops the background from bringing flights home, until land is called or the test ends.
func (m *machine) keepAloft(src *source) (land func()) {
	block, begun := make(chan struct{}), make(chan struct{})
	m.cache.lanes.do(src.attached, choreForget, func() { // one task of a file at a time
		close(begun)
		<-block
	})
	<-begun
	land = sync.OnceFunc(func() { close(block) })
	m.t.Cleanup(land)
	return land
}

// seen checks the results of reads: buffered and direct, whole and in parts.
func (a *aloft) seen() {
	a.Helper()
	n := len(a.want)
	require.True(a, bytes.Equal(a.want, a.src.read(a.T, 0, n)), "a read of all")
	require.True(a, bytes.Equal(a.want[5*page.Size+9:9*page.Size], a.src.read(a.T, 5*page.Size+9, 4*page.Size-9)),
		"a part")
	got := make([]byte, n)
	read, fromHome, err := a.src.attached.Read(context.Background(), got, 0, true, a.src.reader)
	require.NoError(a, err)
	if fromHome {
		got = a.src.home.bytes(0, n)
		read = n
	}
	require.True(a, bytes.Equal(a.want, got[:read]), "a direct read")
}

// landed checks that all bytes come home and no flight is left.
func (a *aloft) landed() {
	a.Helper()
	a.seen()
	a.land()
	f := a.src.attached
	require.NoError(a, f.Sync(context.Background(), func() error { return nil }))
	require.True(a, bytes.Equal(a.want, a.src.home.bytes(0, len(a.want))), "home")
	require.False(a, f.flights.any())
	require.Zero(a, a.m.cache.memory.classes[memoryFlights].Load())
	require.Empty(a, a.m.cache.Waiting())
	a.seen()
	for _, p := range []*program{a.p, a.q} {
		if !p.dev.lost.Load() {
			p.acquire()
			require.True(a, bytes.Equal(a.want, p.load(0, len(a.want))), "a device")
		}
	}
}

// TestReadsDoNotWaitForHome reads released bytes while home does not answer.
func TestReadsDoNotWaitForHome(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(flightPages * page.Size)
	p := m.run(src, 0, 0, flightPages*page.Size, true)
	for i := range flightPages {
		p.add(i * page.Size)
	}
	p.release()
	src.home.hung = make(chan struct{})
	for range 3 {
		require.True(t, bytes.Equal(p.load(0, p.end()), src.read(t, 0, flightPages*page.Size)))
	}
	close(src.home.hung)
	require.NoError(t, src.attached.Sync(context.Background(), func() error { return nil }))
	require.True(t, bytes.Equal(p.load(0, p.end()), src.home.bytes(0, p.end())))
}

// TestChangeRightBeforeAFlight: a byte that is stored in SOURCE while a read fetches the page's released bytes
// survives.
func TestChangeRightBeforeAFlight(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(flightPages * page.Size)
	p := m.run(src, 0, 0, flightPages*page.Size, true)
	want := src.home.bytes(0, flightPages*page.Size)
	for i := range flightPages {
		p.add(i * page.Size)
		want[i*page.Size]++
	}
	p.release()
	gate := m.devices[0].Hold(faulty.CopyOut)
	read := make(chan []byte)
	go func() { read <- src.read(t, 0, flightPages*page.Size) }()
	<-gate.Arrived()
	const at = 7*page.Size + 50
	want[at]++
	src.home.editAt(at, want[at:at+1])
	gate.Open()
	require.True(t, bytes.Equal(want, <-read))
	require.NoError(t, src.attached.Sync(context.Background(), func() error { return nil }))
	require.True(t, bytes.Equal(want, src.home.bytes(0, len(want))))
	p.unmap()
}

// TestFlights lets various events happen to a file while released bytes that a read has seen are not home yet.
func TestFlights(t *testing.T) {
	for name, happens := range map[string]func(a *aloft){
		"nothing": func(*aloft) {},
		"a CPU write": func(a *aloft) {
			a.src.write(a.T, 3*page.Size+7, []byte{77})
			a.want[3*page.Size+7] = 77
		},
		"a CPU write of whole pages": func(a *aloft) {
			whole := bytes.Repeat([]byte{88}, 2*page.Size)
			a.src.write(a.T, 4*page.Size, whole)
			copy(a.want[4*page.Size:], whole)
		},
		// The kernel was given the page, a CPU program stores into it, and the device stores into it too.
		"a dirty page of the kernel": func(a *aloft) {
			dirty := a.src.read(a.T, 3*page.Size, page.Size)
			dirty[100] = 55
			a.p.store(3*page.Size+200, 66)
			require.NoError(a, a.src.tryWrite(Change{Kind: ChangeWrite, Off: 3 * page.Size, Len: page.Size,
				WriteBack: true}, dirty))
			a.want[3*page.Size+100] = 55
			a.seen()
			a.p.acquire()
			require.EqualValues(a, 66, a.p.byteAt(3*page.Size+200), "the device's store is lost")
			a.p.release()
			a.want[3*page.Size+200] = 66
		},
		"the device stores and releases more": func(a *aloft) {
			a.src.kernel.take()
			a.p.store(3*page.Size+1, 33)
			a.p.store(6*page.Size, 34)
			a.p.release()
			require.Equal(a, []page.Range{{Start: 3, End: 7}}, a.src.kernel.take(), "the kernel may hold what flew")
			a.want[3*page.Size+1], a.want[6*page.Size] = 33, 34
		},
		"another device releases": func(a *aloft) {
			a.q.store(3*page.Size+2, 44)
			a.q.release()
			a.want[3*page.Size+2] = 44
		},
		"both devices release, and the CPU writes": func(a *aloft) {
			for i, p := range []*program{a.p, a.q} {
				p.store(8*page.Size+3+i, byte(90+i))
				p.release()
				a.want[8*page.Size+3+i] = byte(90 + i)
			}
			a.src.write(a.T, 8*page.Size+9, []byte{99})
			a.want[8*page.Size+9] = 99
		},
		"another device acquires": func(a *aloft) {
			a.q.acquire()
			require.True(a, bytes.Equal(a.want, a.q.load(0, len(a.want))))
		},
		"the file is cut and made longer": func(a *aloft) {
			const end = 10*page.Size + 123
			a.src.truncate(a.T, end)
			clear(a.want[end:])
			require.True(a, bytes.Equal(a.want[:end], a.src.read(a.T, 0, len(a.want))))
			a.src.truncate(a.T, int64(len(a.want)))
		},
		"the file is cut while home takes nothing": func(a *aloft) {
			a.src.home.fail(syscall.ENOSPC)
			const end = 10*page.Size + 123
			a.src.truncate(a.T, end)
			clear(a.want[end:])
			require.True(a, bytes.Equal(a.want[:end], a.src.read(a.T, 0, len(a.want))))
			a.src.home.fail(nil)
			a.src.truncate(a.T, int64(len(a.want)))
		},
		"a hole": func(a *aloft) {
			zeros := make([]byte, 2*page.Size)
			require.NoError(a, a.src.tryWrite(Change{Kind: ChangeZero, Off: 5*page.Size + 10, Len: int64(len(zeros))},
				zeros))
			copy(a.want[5*page.Size+10:], zeros)
		},
		"somebody reads home besides": func(a *aloft) {
			require.NoError(a, a.src.attached.ReadRange(context.Background(), page.Span(7*page.Size, page.Size)))
			require.True(a, bytes.Equal(a.want[7*page.Size:8*page.Size], a.src.home.bytes(7*page.Size, page.Size)))
		},
		"home takes nothing": func(a *aloft) {
			a.src.home.fail(syscall.ENOSPC)
			a.land()
			sync := func() error { return a.src.attached.Sync(context.Background(), func() error { return nil }) }
			require.ErrorIs(a, sync(), syscall.ENOSPC)
			waiting := a.m.cache.Waiting()
			require.Len(a, waiting, 1)
			require.EqualValues(a, len(a.want), waiting[0].Bytes)
			require.NotEmpty(a, waiting[0].Error)
			a.seen()
			err := a.src.tryWrite(Change{Kind: ChangeWrite, Off: page.Size, Len: 1}, []byte{1})
			require.ErrorIs(a, err, syscall.ENOSPC)
			a.p.store(3*page.Size+1, 33) // bytes released now do not fly
			a.p.release()
			a.want[3*page.Size+1] = 33
			a.seen()
			a.src.home.fail(nil)
		},
		"home does not take one page": func(a *aloft) {
			a.src.home.mu.Lock()
			a.src.home.werr, a.src.home.werrAt, a.src.home.werrEnd = syscall.EIO, 0, 32*page.Size
			a.src.home.mu.Unlock()
			a.land()
			require.ErrorIs(a, a.m.cache.Flush(context.Background()), syscall.EIO)
			require.True(a, bytes.Equal(a.want[32*page.Size:], a.src.home.bytes(32*page.Size, 8*page.Size)),
				"the rest arrives")
			a.src.home.fail(nil)
		},
		"the device is lost": func(a *aloft) {
			a.m.devices[0].Lose()
			_, err := a.p.Release(context.Background(), 0, a.p.len)
			require.Error(a, err)
			require.Error(a, a.p.Unmap(context.Background()))
			require.Empty(a, a.m.cache.snapshotLosses(), "the flight has it")
		},
		"programs end": func(a *aloft) {
			a.p.unmap()
			a.q.unmap()
			a.m.cache.collectDue(context.Background())
			require.False(a, a.src.attached.Detached())
			a.seen()
			f := a.src.attached
			a.p = a.m.run(a.src, 0, 0, flightPages*page.Size, true)
			a.q = a.m.run(a.src, 1, 0, flightPages*page.Size, true)
			require.Same(a, f, a.src.attached)
		},
		"a view is read": func(a *aloft) {
			v := a.m.view(ViewRequest{Device: 1, Segments: []view.Segment{bytesOf(0, flightPages*page.Size)}}, a.src)
			require.True(a, bytes.Equal(a.want, v.all()[:len(a.want)]))
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAloft(t)
			happens(a)
			a.landed()
		})
	}
}

// TestFlightOfARemovedFile: the flight is dropped, and its memory freed.
func TestFlightOfARemovedFile(t *testing.T) {
	a := newAloft(t)
	a.p.unmap()
	a.q.unmap()
	a.m.cache.Forget(a.src.id)
	a.land()
	a.m.cache.lanes.work.Wait()
	require.True(t, a.src.attached.Detached())
	require.Zero(t, a.m.cache.memory.classes[memoryFlights].Load())
}

// TestReadAheadOfFlights: a program that reads in order finds its next pages already fetched.
func TestReadAheadOfFlights(t *testing.T) {
	const pages, request = 2048, 32
	m := newMachine(t, 1)
	src := m.file(pages * page.Size)
	p := m.run(src, 0, 0, pages*page.Size, true)
	for i := range pages {
		p.store(i*page.Size, byte(i+1))
	}
	p.release()
	f := src.attached
	for at := 0; at < pages; at += request {
		got := src.read(t, at*page.Size, request*page.Size)
		for i := range request {
			require.Equal(t, byte(at+i+1), got[i*page.Size], "page %d", at+i)
		}
		m.cache.lanes.work.Wait() // read-ahead has arrived
	}
	require.Less(t, f.counters.CollectingReads.Load(), int64(pages/request/4))
	require.NoError(t, f.Sync(context.Background(), func() error { return nil }))
	require.True(t, bytes.Equal(p.load(0, p.end()), src.home.bytes(0, p.end())))
}

// TestReadAheadOfFlightsIsDropped: pages that fly ahead of a read are dropped too, because the kernel may hold them:
// other reads get them without the file's lock.
func TestReadAheadOfFlightsIsDropped(t *testing.T) {
	const pages = 512
	m := newMachine(t, 1)
	src := m.file(pages * page.Size)
	p := m.run(src, 0, 0, pages*page.Size, true)
	for i := range pages {
		p.store(i*page.Size, 1)
	}
	p.release()
	m.keepAloft(src)
	src.read(t, 0, 32*page.Size)
	src.kernel.take()
	withoutLock(t, src.attached, func() { require.Equal(t, byte(1), src.read(t, 40*page.Size, 16*page.Size)[0]) })
	p.store(40*page.Size, 2)
	p.release()
	require.Equal(t, []page.Range{{Start: 40, End: 41}}, src.kernel.take())
	require.Equal(t, byte(2), src.read(t, 40*page.Size, 16*page.Size)[0])
}

// TestReadersInSeveralPlaces: each of eight readers finds its next pages fetched, with buffers of one size. Nothing is
// fetched twice, or brought home before it was read.
func TestReadersInSeveralPlaces(t *testing.T) {
	const readers, part, request = 8, 16 << 20, 128 << 10
	for name, places := range map[string]struct{ apart, block int }{
		"parts of a file": {part, part},
		"blocks in order": {4 << 20, 4 << 20},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, 1, memory(2*readers*part), hostMemory(1<<30))
			m.cache.landPause = time.Hour
			src := m.file(readers * part)
			p := m.run(src, 0, 0, readers*part, true)
			for at := 0; at < readers*part; at += page.Size {
				p.store(at, 1)
			}
			p.release()
			m.devices[0].BufferSizes()
			f, dev := src.attached, m.cache.devices[0]
			for begin := 0; begin < readers*part; begin += readers * places.block {
				for at := 0; at < places.block; at += request {
					for r := range readers {
						require.EqualValues(t, 1, src.read(t, begin+r*places.apart+at, request)[0])
						m.cache.lanes.work.Wait() // read-ahead has arrived
					}
					aloft := m.cache.memory.classes[memoryFlights].Load()
					require.LessOrEqual(t, aloft, m.cache.mostAloft()*5/8, "at %d", begin+at)
				}
			}
			require.EqualValues(t, readers*part, f.counters.FlightReadBytes.Load(), "some were home before")
			require.LessOrEqual(t, f.counters.CollectingReads.Load(), int64(5*readers))
			out := int64(0)
			for _, x := range dev.moves.Moved() {
				if x.Way == "out" {
					out += x.Bytes
				}
			}
			require.LessOrEqual(t, float64(out)/(readers*part), 1.05)
			large, all := 0, 0
			for n, times := range m.devices[0].BufferSizes() {
				require.LessOrEqual(t, n, mover.PieceBytes)
				if all += n * times; n > mover.PieceBytes/2 {
					large += n * times
				}
			}
			require.GreaterOrEqual(t, large, all*7/8)
			require.NoError(t, f.Sync(context.Background(), nil))
			require.True(t, bytes.Equal(p.load(0, p.end()), src.home.bytes(0, p.end())))
		})
	}
}

// TestReadAheadOfWhatIsReleasedAgain: read-ahead works again for a program that starts over from the beginning.
func TestReadAheadOfWhatIsReleasedAgain(t *testing.T) {
	const size, request = 64 << 20, 128 << 10
	m := newMachine(t, 1, memory(2*size), hostMemory(1<<30))
	m.cache.landPause = time.Hour
	src := m.file(size)
	p := m.run(src, 0, 0, size, true)
	for round := range 3 {
		for at := 0; at < size; at += page.Size {
			p.store(at, byte(round+1))
		}
		p.release()
		before := m.counter(func(c *Counters) *atomic.Int64 { return &c.CollectingReads })
		for at := 0; at < size/2; at += request {
			require.EqualValues(t, round+1, src.read(t, at, request)[0])
			m.cache.lanes.work.Wait()
		}
		n := m.counter(func(c *Counters) *atomic.Int64 { return &c.CollectingReads }) - before
		require.LessOrEqual(t, n, int64(3), "round %d", round)
	}
}

// TestReadsComeOneByOneToTheLock: reads whose pages another read brings meanwhile need no lock of the file.
func TestReadsComeOneByOneToTheLock(t *testing.T) {
	const size, request, readers = 1 << 20, 128 << 10, 8
	m := newMachine(t, 1)
	m.cache.landPause = time.Hour
	src := m.file(size)
	p := m.run(src, 0, 0, size, true)
	for at := 0; at < size; at += page.Size {
		p.store(at, 1)
	}
	p.release()
	f := src.attached
	f.turn <- struct{}{} // stands for the read that has its turn
	var group sync.WaitGroup
	for r := range readers {
		group.Go(func() {
			got := make([]byte, request)
			_, _, err := f.Read(context.Background(), got, int64(r*request), false, nil)
			if err != nil || got[0] != 1 {
				t.Errorf("read %d, %v", got[0], err)
			}
		})
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, _, err := f.Read(ctx, make([]byte, request), 0, false, nil)
	require.ErrorIs(t, err, context.Canceled, "a program can be killed while it waits")
	_, _, _, err = f.readPending(context.Background(), make([]byte, request), 0, false, false)
	require.NoError(t, err)
	withoutLock(t, f, func() {
		<-f.turn
		group.Wait()
	})
}

// TestFlightsStayUntilReadsPause: a program that reads in order gets everything from flights, however fast home is
// written.
func TestFlightsStayUntilReadsPause(t *testing.T) {
	const size, step = 24 << 20, 128 << 10
	m := newMachine(t, 1)
	m.cache.landPause = time.Hour
	src := m.file(size)
	p := m.run(src, 0, 0, size, true)
	for i := range size / page.Size {
		p.store(i*page.Size, 1)
	}
	p.release()
	for at := 0; at < size; at += step {
		m.cache.lanes.work.Wait()
		require.EqualValues(t, 1, src.read(t, at, step)[0])
	}
	flew := m.counter(func(c *Counters) *atomic.Int64 { return &c.FlightReadBytes })
	require.EqualValues(t, size, flew)
	require.True(t, src.attached.flights.any())
	for src.attached.landNext(true) {
	}
	require.False(t, src.attached.flights.any())
	require.EqualValues(t, 1, src.home.bytes(size-page.Size, 1)[0])
}

// TestFlightsLandWhenReadsPause: flights land on their own when reads pause.
func TestFlightsLandWhenReadsPause(t *testing.T) {
	a := newAloft(t)
	a.land()
	require.Eventually(t, func() bool { return !a.src.attached.flights.any() }, time.Minute, time.Millisecond)
	require.True(t, bytes.Equal(a.want, a.src.home.bytes(0, len(a.want))))
}

// TestFlightOutlivesItsDevice: the file stays until its flights are home.
func TestFlightOutlivesItsDevice(t *testing.T) {
	a := newAloft(t)
	for _, p := range []*program{a.p, a.q} {
		p.unmap()
	}
	for _, d := range a.m.devices {
		d.Lose()
	}
	f := a.src.attached
	f.mu.Lock()
	for _, d := range a.m.cache.devices {
		d.lost.Store(true)
		f.letGoLocked(d)
	}
	f.dropIdleLocked()
	f.mu.Unlock()
	require.False(t, f.Detached())
	a.seen()
	a.land()
	a.m.cache.lanes.work.Wait()
	require.True(t, f.Detached())
	require.True(t, bytes.Equal(a.want, a.src.home.bytes(0, len(a.want))))
}

// TestFlightsKeepToTheirRoom reads more than is allowed to fly.
func TestFlightsKeepToTheirRoom(t *testing.T) {
	const pages = 2048
	m := newMachine(t, 1, hostMemory(4<<20))
	src := m.file(pages * page.Size)
	p := m.run(src, 0, 0, pages*page.Size, true)
	for i := range pages {
		p.store(i*page.Size, byte(i+1))
	}
	p.release()
	for at := 0; at < pages; at += 64 {
		got := src.read(t, at*page.Size, 64*page.Size)
		require.Equal(t, byte(at+1), got[0])
		require.LessOrEqual(t, m.cache.memory.classes[memoryFlights].Load(), int64(1<<20))
	}
	require.Positive(t, m.counter(func(c *Counters) *atomic.Int64 { return &c.FlightReads }))
	require.NoError(t, src.attached.Sync(context.Background(), func() error { return nil }))
	require.True(t, bytes.Equal(p.load(0, p.end()), src.home.bytes(0, p.end())))
}

// TestFlightRuns cuts and replaces random runs.
func TestFlightRuns(t *testing.T) {
	f := &File{c: &Cache{}}
	s := &f.flights
	var users []*flight
	put := func(v byte, runs ...page.Range) {
		x := &flight{f: f, portion: &portion{giveBack: func() {}}}
		x.users.Store(int64(len(runs)))
		users = append(users, x)
		var list []flown
		for _, rg := range runs {
			list = append(list, flown{pages: rg, bytes: bytes.Repeat([]byte{v}, int(rg.Bytes())), of: x})
		}
		s.put(list)
	}
	var want [64]byte
	for n := range 500 {
		rnd := (n*7919 + n/3) % 1009
		rg := page.Range{Start: page.Index(rnd % 50), End: page.Index(rnd%50 + 1 + rnd%13)}
		v := byte(n%250 + 1)
		switch n % 3 {
		case 0:
			s.remove(rg)
			v = 0
			clear(want[rg.Start:rg.End])
		case 1:
			put(v, rg)
			copy(want[rg.Start:rg.End], slices.Repeat([]byte{v}, int(rg.Len())))
		default:
			other := page.Range{Start: rg.End, End: min(rg.End+2, 64)}
			put(v, rg, other)
			copy(want[rg.Start:other.End], slices.Repeat([]byte{v}, int(other.End-rg.Start)))
		}
		var got [64]byte
		parts, _ := s.hold(page.Range{End: 64}, false)
		last := page.Index(0)
		for _, x := range parts {
			require.GreaterOrEqual(t, x.pages.Start, last)
			last = x.pages.End
			for p := x.pages.Start; p < x.pages.End; p++ {
				got[p] = x.bytes[(p - x.pages.Start).Offset()]
			}
		}
		dropParts(parts)
		require.Equal(t, want, got, "step %d", n)
	}
	s.remove(page.Range{End: 64})
	for _, x := range users {
		require.Zero(t, x.users.Load())
	}
}

// TestFlightsUnlockHome: locked pages lack flights, so they are unlocked when these come home.
func TestFlightsUnlockHome(t *testing.T) {
	a := newAloft(t, pinnedMemory(64<<20))
	f := a.m.lock(a.src)
	a.landed()
	require.Nil(t, f.locking.now.Load())
	a.m.unlocked(a.src)
}

// TestFlightBesideAFill: a fill that reads home while released bytes are on their way there has the earlier bytes, so
// the pages are stale once the flights are home.
func TestFlightBesideAFill(t *testing.T) {
	m := newMachine(t, 2)
	const size, at = 4 << 20, 4<<20 - flightPages*page.Size // the fill begins elsewhere
	src := m.noisyFile(size)
	p := m.run(src, 0, 0, size, true)
	gate := m.devices[1].Hold(faulty.HostBuffer)
	var v *viewer
	var err error
	var group sync.WaitGroup
	group.Go(func() {
		v, err = m.tryView(ViewRequest{Device: 1, Segments: []view.Segment{bytesOf(0, size)}}, src)
	})
	<-gate.Arrived()
	land := m.keepAloft(src)
	for i := range flightPages {
		p.store(at+i*page.Size, p.byteAt(at+i*page.Size)+1)
	}
	p.release()
	src.read(t, at, flightPages*page.Size)
	require.True(t, src.attached.flights.any())
	gate.Open()
	state := src.attached.views.snapshot()[0].parts[0].state
	require.Eventually(t, func() bool { return len(state.Coming()) == 0 }, 10*time.Second, time.Millisecond)
	land()
	group.Wait()
	require.NoError(t, err)
	v.acquire()
	v.check()
	p.unmap()
	v.unmap()
}

// TestViewBesideFlights: a view that copies released pages straight from a device reads the rest from home only after
// flights have landed there.
func TestViewBesideFlights(t *testing.T) {
	a := newAloft(t)
	a.p.store(3*page.Size+1, a.want[3*page.Size+1]+1)
	a.want[3*page.Size+1]++
	a.p.release()
	v := a.m.view(ViewRequest{Device: 1, Segments: []view.Segment{bytesOf(0, int64(len(a.want)))}}, a.src)
	require.True(t, bytes.Equal(a.want, v.all()))
	v.unmap()
	a.landed()
}
