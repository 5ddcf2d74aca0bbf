package pagecache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/view"
)

const ranks = 4

// shardOf returns rank r's part of each row of 16 KiB of a file.
func shardOf(r int, size int64) view.Segment {
	const row = 4 << 10
	return view.Segment{Offset: 140 + int64(r)*row, Length: row, Stride: ranks * row,
		Count: (size - 140) / (ranks * row)}
}

// shards makes the views of all ranks at once, each on its own device.
type shards struct {
	m     *machine
	src   *source
	views [ranks]*viewer
	errs  [ranks]error
	group sync.WaitGroup
}

func (s *shards) begin(ctx context.Context, r int) {
	shard := shardOf(r, int64(len(s.src.home.data)))
	s.group.Go(func() {
		req := ViewRequest{Device: r, Segments: []view.Segment{shard}, Alignment: 256}
		vm, err := s.m.cache.mapView(ctx, []Source{s.src}, req)
		if s.errs[r] = err; err == nil {
			s.views[r] = &viewer{vm, s.m, []*source{s.src}}
		}
	})
}

// expected waits until so many views are about to read; sharing waits until so many are reading.
func (s *shards) expected(n int) {
	s.await(func(f *File) bool { return f.views.expected == n })
}

func (s *shards) sharing(n int) {
	s.await(func(f *File) bool {
		for _, p := range f.views.parts {
			if p.shares != nil {
				n--
			}
		}
		return n <= 0
	})
}

func (s *shards) await(is func(f *File) bool) {
	s.m.t.Helper()
	require.Eventually(s.m.t, func() bool {
		f := s.m.cache.Lookup(s.src.id)
		if f == nil {
			return false
		}
		f.views.mu.Lock()
		defer f.views.mu.Unlock()
		return is(f)
	}, time.Minute, time.Millisecond)
}

func newShards(t *testing.T, size int) *shards {
	m := newMachine(t, ranks)
	m.cache.gather = func(int64) time.Duration { return time.Minute }
	return &shards{m: m, src: m.noisyFile(size)}
}

// check compares the views with home, except those that failed.
func (s *shards) check() {
	s.m.t.Helper()
	for _, v := range s.views {
		if v != nil {
			v.check()
		}
	}
}

// TestShardsReadTheFileOnce: views of all ranks, made at once, read the file only once in all, from memory and from the
// disk.
func TestShardsReadTheFileOnce(t *testing.T) {
	for name, cold := range map[string]bool{"cached": false, "on the disk": true} {
		t.Run(name, func(t *testing.T) {
			s := newShards(t, 12<<20+100)
			if cold {
				s.src.disk = newDisk(s.src.home)
			}
			var gates [ranks]*faulty.Gate
			for r := range ranks {
				gates[r] = s.m.devices[r].Hold(faulty.Alloc)
				s.begin(t.Context(), r)
			}
			s.expected(ranks)
			for _, g := range gates {
				g.Open()
			}
			s.group.Wait()
			require.NoError(t, errors.Join(s.errs[:]...))
			s.check()
			all := page.Count(12 << 20).Offset()
			require.LessOrEqual(t, float64(s.m.fromHome()*page.Size), 1.05*float64(all))
			require.Greater(t, s.m.cache.counters.ViewPages.Load(), s.m.fromHome(),
				"a shared page counts for each view")
		})
	}
}

// TestShardsOfALargeFileAreOneTransfer: a view of rows takes the pages of a large file at once. Between two transfers
// the ranks would not read for each other.
func TestShardsOfALargeFileAreOneTransfer(t *testing.T) {
	const size = 4 << 30
	for r := range ranks {
		l, err := view.New(1, []view.Segment{shardOf(r, size)}, 256)
		require.NoError(t, err)
		all := page.Range{End: page.Count(size)}
		taken, pages, next := view.NewState(l.File(0)).Take(all, viewPages, viewRuns, bridgePages, 1)
		require.Equal(t, all.End, next)
		require.Greater(t, pages, int64(100*len(taken)), "ranges are not the rows")
	}
}

// TestViewThatJoinsLate: a late view gets the pages that the others still have to read, and reads those that they had
// begun.
func TestViewThatJoinsLate(t *testing.T) {
	s := newShards(t, 16<<20)
	gate := s.m.devices[0].Hold(faulty.HostBuffer) // the first view has claimed a piece for each reader, and read none
	s.begin(t.Context(), 0)
	<-gate.Arrived()
	for r := 1; r < ranks; r++ {
		s.begin(t.Context(), r)
	}
	s.sharing(ranks)
	gate.Open()
	s.group.Wait()
	require.NoError(t, errors.Join(s.errs[:]...))
	s.check()
}

// TestViewsOfAHomeThatRefusesDirectReads: the first view finds that out, and reads for the others all the same.
func TestViewsOfAHomeThatRefusesDirectReads(t *testing.T) {
	const size = 64 << 20
	s := newShards(t, size)
	s.src.disk = newDisk(s.src.home)
	s.src.disk.hidden = &NoDirect{Reason: "planned"}
	var gates [ranks]*faulty.Gate
	for r := range ranks {
		gates[r] = s.m.devices[r].Hold(faulty.HostBuffer)
		s.begin(t.Context(), r)
		<-gates[r].Arrived() // it has claimed a piece for each reader, and read none
	}
	for _, g := range gates {
		g.Open()
	}
	s.group.Wait()
	require.NoError(t, errors.Join(s.errs[:]...))
	s.check()
	require.Less(t, float64(s.m.fromHome()*page.Size), 1.5*size)
}

// TestMappingWithoutPagesDoesNotCutTransfers: only pages that a view may copy from a mapping limit a transfer.
func TestMappingWithoutPagesDoesNotCutTransfers(t *testing.T) {
	const size = (heldRuns + 1000) * 2 * page.Size
	s := newShards(t, size)
	mp, err := s.m.cache.Map(t.Context(), s.src, MapRequest{Len: 1 << 20, Device: 1, Lazy: true})
	require.NoError(t, err)
	defer func() { require.NoError(t, mp.Unmap(context.Background())) }()
	transfers := func(at int64) uint64 {
		f := s.m.cache.Lookup(s.src.id)
		before := f.views.turn
		rows := view.Segment{Offset: at, Length: 16, Stride: 2 * page.Size, Count: size / (2 * page.Size)}
		v := s.m.view(ViewRequest{Segments: []view.Segment{rows}}, s.src)
		defer v.unmap()
		v.check()
		return f.views.turn - before
	}
	require.EqualValues(t, 1, transfers(0))
	_, err = mp.Acquire(t.Context(), 0, 1<<20, false)
	require.NoError(t, err)
	require.EqualValues(t, 2, transfers(100))
}

// TestPagesThatNobodyReadForAView: a view reads the pages itself that another reader claimed for it and did not read.
func TestPagesThatNobodyReadForAView(t *testing.T) {
	s := newShards(t, 64<<20)
	gate := s.m.devices[0].Hold(faulty.HostBuffer) // the view has claimed the first pieces
	s.begin(t.Context(), 0)
	<-gate.Arrived()
	f := s.m.cache.Lookup(s.src.id)
	f.views.mu.Lock()
	p, end := f.views.parts[0], page.Count(64<<20)
	share, ok := p.shares.fill.Offer(func() []page.Range { return p.claim([]page.Range{{Start: end - 16, End: end}}) })
	f.views.mu.Unlock()
	require.True(t, ok)
	gate.Open()
	s.await(func(*File) bool { return p.shares == nil }) // it has begun all its reads
	share.Withdraw()
	s.group.Wait()
	require.NoError(t, s.errs[0])
	s.check()
}

// TestShardsBesideFaults: if one view fails, or its client gives up, the others still get everything they asked for.
func TestShardsBesideFaults(t *testing.T) {
	broken := errors.New("the bus is broken")
	for _, op := range []faulty.Op{faulty.CopyIn, faulty.HostBuffer} {
		for calls := range 2 {
			t.Run(fmt.Sprintf("%v, call %d", op, calls), func(t *testing.T) {
				s := newShards(t, 4<<20)
				s.m.devices[1].Fail(op, calls+1, broken)
				for r := range ranks {
					s.begin(t.Context(), r)
				}
				s.group.Wait()
				for r, err := range s.errs {
					if r != 1 {
						require.NoError(t, err)
					} else if err != nil {
						require.ErrorIs(t, err, broken)
					}
				}
				s.check()
				for r, err := range s.errs {
					if err != nil {
						s.begin(t.Context(), r)
					}
				}
				s.group.Wait()
				require.NoError(t, errors.Join(s.errs[:]...))
				s.check()
			})
		}
	}
	t.Run("a client gives up", func(t *testing.T) {
		s := newShards(t, 16<<20)
		gate := s.m.devices[0].Hold(faulty.HostBuffer)
		ctx, stop := context.WithCancel(t.Context())
		s.begin(ctx, 0)
		<-gate.Arrived()
		for r := 1; r < ranks; r++ {
			s.begin(t.Context(), r)
		}
		s.sharing(ranks)
		stop()
		gate.Open()
		s.group.Wait()
		require.ErrorIs(t, s.errs[0], context.Canceled)
		require.NoError(t, errors.Join(s.errs[1:]...))
		s.check()
	})
	t.Run("home fails", func(t *testing.T) {
		s := newShards(t, 4<<20)
		s.src.home.mu.Lock()
		s.src.home.rerr = broken
		s.src.home.mu.Unlock()
		for r := range ranks {
			s.begin(t.Context(), r)
		}
		s.group.Wait()
		for _, err := range s.errs {
			require.Error(t, err)
		}
		s.src.home.mu.Lock()
		s.src.home.rerr = nil
		s.src.home.mu.Unlock()
		for r := range ranks {
			s.begin(t.Context(), r)
		}
		s.group.Wait()
		require.NoError(t, errors.Join(s.errs[:]...))
		s.check()
	})
}

// TestShardsBesideChanges: bytes that are written, cut off, or changed in SOURCE while all ranks load are there after
// the next acquire, wherever they were when they changed.
func TestShardsBesideChanges(t *testing.T) {
	for k := range 6 {
		t.Run(fmt.Sprint(k), func(t *testing.T) {
			s := newShards(t, 8<<20)
			held := k % ranks
			gate := s.m.devices[held].Hold([]faulty.Op{faulty.HostBuffer, faulty.CopyIn}[k%2])
			s.begin(t.Context(), held)
			<-gate.Arrived() // if others began before, they might read all that this view needs
			for r := range ranks {
				if r != held {
					s.begin(t.Context(), r)
				}
			}
			again := &source{id: s.src.id, home: s.src.home, kernel: s.src.kernel, attached: s.m.cache.Lookup(s.src.id)}
			for i := range 64 {
				again.write(t, i*100_000, []byte("new bytes"))
			}
			switch k / 2 {
			case 1:
				again.truncate(t, 5<<20)
				again.write(t, 6<<20, []byte("and more"))
			case 2:
				s.src.home.editAt(3<<20, []byte("in SOURCE"))
			}
			gate.Open()
			s.group.Wait()
			require.NoError(t, errors.Join(s.errs[:]...))
			var group sync.WaitGroup
			for _, v := range s.views {
				group.Go(func() {
					if _, err := v.Acquire(t.Context(), 0, v.Size(), false); err != nil {
						t.Error(err)
					}
				})
			}
			group.Wait()
			s.check()
		})
	}
}

// TestNobodyWaitsForViewsThatDoNotCome: a view reads alone after a while.
func TestNobodyWaitsForViewsThatDoNotCome(t *testing.T) {
	require.Zero(t, gatherTime(0))
	require.Equal(t, 5*time.Millisecond, gatherTime(1e9), "a quarter of the time at 50 GB/s")
	require.Equal(t, 50*time.Millisecond, gatherTime(1<<40))
	s := newShards(t, 1<<20)
	s.m.cache.gather = func(int64) time.Duration { return time.Millisecond }
	gate := s.m.devices[1].Hold(faulty.Alloc)
	s.begin(t.Context(), 1)
	<-gate.Arrived()
	s.begin(t.Context(), 0)
	s.await(func(*File) bool { return s.m.cache.counters.ViewPages.Load() > 0 })
	gate.Open()
	s.group.Wait()
	require.NoError(t, errors.Join(s.errs[:]...))
	s.check()
}

// TestNobodyWaitsForTheSameView: two programs map one view at once. The one that fills it does not wait for the other
// one, which waits for it.
func TestNobodyWaitsForTheSameView(t *testing.T) {
	s := newShards(t, 1<<20)
	req := ViewRequest{Segments: []view.Segment{shardOf(0, 1<<20)}, Alignment: 256}
	var mappings [2]*ViewMapping
	for i := range mappings {
		m, err := s.m.cache.OpenView(t.Context(), []Source{s.src}, req)
		require.NoError(t, err)
		mappings[i] = m
	}
	ctx, stop := context.WithTimeout(t.Context(), 10*time.Second)
	defer stop()
	for i, m := range mappings {
		s.group.Go(func() { s.errs[i] = m.Fill(ctx) })
	}
	s.group.Wait()
	require.NoError(t, errors.Join(s.errs[:]...))
	s.expected(0)
	for _, m := range mappings {
		v := &viewer{m, s.m, []*source{s.src}}
		v.check()
		v.unmap()
	}
}

// TestNobodyWaitsTwiceForAViewThatDoesNotCome: what holds a view up for long delays others only a few times, until it
// comes or goes. Views that are made afterwards are waited for.
func TestNobodyWaitsTwiceForAViewThatDoesNotCome(t *testing.T) {
	const limit = mostVain / 4
	f := new(File)
	synctest.Test(t, func(t *testing.T) {
		waits := func(times int) (now time.Time) {
			for range times {
				began := time.Now()
				f.views.gather(t.Context(), limit)
				require.Equal(t, limit, time.Since(began))
			}
			return time.Now()
		}
		f.views.expect(1) // it never comes
		waits(3)
		f.views.expect(1) // another view comes meanwhile
		f.views.expect(-1)
		now := waits(1)
		f.views.gather(t.Context(), limit)
		require.Equal(t, now, time.Now(), "the patience is used up")

		f.views.expect(1) // it takes half of the limit
		time.AfterFunc(limit/2, func() { f.views.expect(-1) })
		f.views.gather(t.Context(), limit)
		require.Equal(t, limit/2, time.Since(now), "and the first view is not waited for")

		f.views.expect(-1) // it has come, and is expected again
		f.views.expect(1)
		waits(4)
		now = time.Now()
		f.views.gather(t.Context(), limit)
		require.Equal(t, now, time.Now())
	})
}

// TestEndsOfGathering: a view waits until all others have come, until its program gives up, or until others have waited
// long enough.
func TestEndsOfGathering(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := new(File)
		waits := func(ctx context.Context, limit time.Duration) time.Duration {
			began := time.Now()
			f.views.gather(ctx, limit)
			return time.Since(began)
		}
		require.Zero(t, waits(t.Context(), time.Minute), "nobody is expected")
		f.views.expect(2)
		require.Zero(t, waits(t.Context(), leastGather-1))
		ctx, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		require.Equal(t, time.Second, waits(ctx, time.Minute))

		time.AfterFunc(time.Second, func() { f.views.expect(-1) })
		time.AfterFunc(2*time.Second, func() { f.views.expect(-1) })
		require.Equal(t, 2*time.Second, waits(t.Context(), time.Minute))

		f.views.expect(1)
		f.views.waitedInVain(make(chan struct{}), mostVain) // for views that have come meanwhile
		time.AfterFunc(time.Second, func() { f.views.gather(t.Context(), mostVain) })
		require.Equal(t, time.Second+mostVain, waits(t.Context(), time.Minute))
	})
}

// TestRandomShards: views of random segments on several devices are acquired at once, while writes and failures go on.
// Each successful acquire has brought the bytes written before it.
func TestRandomShards(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { randomShards(t, seed) })
	}
}

func randomShards(t *testing.T, seed uint64) {
	rnd := rand.New(rand.NewPCG(seed, 12))
	m := newMachine(t, 3)
	const size = 3 << 20
	src := m.noisyFile(size)
	if seed%2 == 0 {
		src.disk = newDisk(src.home)
	}
	var views []*viewer
	for i := range 6 {
		var segments []view.Segment
		for range 1 + rnd.IntN(3) {
			s := view.Segment{Offset: rnd.Int64N(size / 2), Length: 1 + rnd.Int64N(20000), Count: 1}
			s.Stride, s.Count = s.Length+rnd.Int64N(40000), 1+rnd.Int64N(24)
			segments = append(segments, s)
		}
		views = append(views, m.view(ViewRequest{Device: i % 3, Segments: segments, Lazy: true}, src))
	}
	for range 8 {
		for range 1 + rnd.IntN(6) {
			src.write(t, rnd.IntN(size-200_000), bytes.Repeat([]byte{byte(rnd.Uint32())}, 1+rnd.IntN(200_000)))
		}
		if rnd.IntN(2) == 0 {
			m.devices[rnd.IntN(3)].Fail([]faulty.Op{faulty.CopyIn, faulty.HostBuffer}[rnd.IntN(2)], 1+rnd.IntN(5),
				errors.New("broken"))
		}
		var group sync.WaitGroup
		for _, v := range views {
			group.Go(func() {
				for { // until the faults are over
					if _, err := v.Acquire(t.Context(), 0, v.Size(), false); err == nil {
						return
					}
				}
			})
		}
		group.Wait()
		for _, v := range views {
			v.check()
		}
	}
}

// TestTruncationDuringAFill: a fill that reads on while the file is being truncated has the earlier bytes, so the pages
// are stale once the file is truncated.
func TestTruncationDuringAFill(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(8 << 20)
	gate := m.devices[0].Hold(faulty.HostBuffer)
	var v *viewer
	var err error
	var group sync.WaitGroup
	group.Go(func() { v, err = m.tryView(ViewRequest{Segments: []view.Segment{bytesOf(0, 8<<20)}}, src) })
	<-gate.Arrived()
	f := src.attached
	state := f.views.snapshot()[0].parts[0].state
	require.NoError(t, f.ChangeHome(t.Context(), Change{Kind: ChangeTruncate, Len: 1 << 20}, func(size, _ int64) error {
		gate.Open()
		require.Eventually(t, func() bool { return len(state.Coming()) == 0 }, 10*time.Second, time.Millisecond)
		return src.home.truncate(size)
	}))
	group.Wait()
	require.NoError(t, err)
	v.acquire()
	v.check()
	v.unmap()
}
