package mover

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/gpubackend/faulty"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/mover/schedule"
)

// TestOffers: a Fill is offered as much as its device can take soon. What is read for it may be far more: it may want
// only a few bytes of each page.
func TestOffers(t *testing.T) {
	p := new(Fill)
	offer := func() bool {
		_, ok := p.Offer(func() []page.Range { return []page.Range{{End: PieceBytes >> page.Shift}} })
		return ok
	}
	const each = 512 << 10
	n := 0
	for range 100 { // readers of several Fills, each with a piece
		require.True(t, offer(), "nothing has come yet")
		n++
	}
	for ; n > 0; n-- {
		p.inbox.came(each)
	}
	for int64(n+100) < mostInbox/each {
		require.True(t, offer())
		n++
	}
	require.False(t, offer(), "what has come and what is on its way is enough")
	p.inbox.came(0)
	require.True(t, offer(), "one share does not come")
	p.inbox.took(each)
	require.True(t, offer(), "the device has one share")
	require.False(t, offer())
	_, ok := new(Fill).Offer(func() []page.Range { return nil })
	require.False(t, ok, "it wants none of the pages")
}

// countedBuffers is a device that counts the buffers that are in use, and takes each back once.
type countedBuffers struct {
	*faulty.Device
	t          *testing.T
	taken, out atomic.Int32
}

func (d *countedBuffers) HostBuffer(n int) ([]byte, func(), error) {
	buf, giveBack, err := d.Device.HostBuffer(n)
	if err != nil {
		return nil, nil, err
	}
	d.taken.Add(1)
	d.out.Add(1)
	var back atomic.Bool
	return buf, func() {
		assert.False(d.t, back.Swap(true), "a buffer is given back once")
		d.out.Add(-1)
		giveBack()
	}, nil
}

// rankRow is the part of each page that one of the ranks has.
const rankRow = page.Size / ranks

const ranks = 4

// board has the Fills that read one file together.
type board struct {
	mu   sync.Mutex
	open []*rankTarget // protected by mu
}

// rankTarget is a Sharer that gets one of the rows of each page.
type rankTarget struct {
	*board
	number  int
	mem     gpubackend.Memory
	fill    *Fill
	claimed map[page.Index]bool // protected by board.mu
	arrived map[page.Index]bool // protected by board.mu
}

func (r *rankTarget) Placer() Placer { return r }

func (r *rankTarget) AppendCopies(list []gpubackend.Copy, pages page.Range, buf []byte) []gpubackend.Copy {
	return append(list, gpubackend.Copy{Mem: r.mem, Off: int64(pages.Start) * rankRow,
		Host: buf[r.number*rankRow:][:(pages.Len()-1)*page.Size+rankRow], Row: rankRow, Stride: page.Size})
}

func (*rankTarget) AppendPatches([]gpubackend.Patch, *Step, []byte, []gpubackend.Digest) ([]gpubackend.Patch, error) {
	panic("nothing is patched")
}

func (r *rankTarget) Sent(pieces []*Piece) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, x := range pieces {
		for _, s := range x.Steps {
			for i := s.Pages.Start; i < s.Pages.End; i++ {
				r.arrived[i] = true
			}
		}
	}
}

func (*rankTarget) Arrived([]*Piece) {}

func (r *rankTarget) Claim(pieces [][]page.Range) []Claim {
	r.mu.Lock()
	defer r.mu.Unlock()
	claims := make([]Claim, len(pieces))
	for i := range pieces {
		c := &claims[i]
		c.Pages = r.claimLocked(pieces[i])
		for _, o := range r.open {
			if o == r || len(c.Pages) == 0 {
				continue
			}
			if s, ok := o.fill.Offer(func() []page.Range { return o.claimLocked(c.Pages) }); ok {
				c.Shares = append(c.Shares, s)
			}
		}
	}
	return claims
}

func (r *rankTarget) claimLocked(pages []page.Range) (claimed []page.Range) {
	for _, rg := range pages {
		for i := rg.Start; i < rg.End; i++ {
			if !r.claimed[i] {
				r.claimed[i] = true
				claimed = page.AppendRange(claimed, page.Range{Start: i, End: i + 1})
			}
		}
	}
	return claimed
}

func (r *rankTarget) Return(pages []page.Range) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rg := range pages {
		for i := rg.Start; i < rg.End; i++ {
			delete(r.claimed, i)
		}
	}
}

func (r *rankTarget) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open = slices.DeleteFunc(r.open, func(o *rankTarget) bool { return o == r })
}

// rankFills is a Fill for each rank, each with its own device.
type rankFills struct {
	t       *testing.T
	home    *bytesHome
	dev     [ranks]*countedBuffers
	targets [ranks]*rankTarget
}

func newRankFills(t *testing.T, size int64) *rankFills {
	f := &rankFills{t: t, home: &bytesHome{data: make([]byte, size)}}
	rnd := rand.NewChaCha8([32]byte{2})
	_, _ = rnd.Read(f.home.data)
	b := new(board)
	for i := range ranks {
		inner, err := emulated.New(emulated.Options{Memory: size, Poison: true})
		require.NoError(t, err)
		d := &countedBuffers{Device: faulty.Wrap(inner), t: t}
		mem, err := d.Alloc(size / ranks)
		require.NoError(t, err)
		f.dev[i], f.targets[i] = d, &rankTarget{board: b, number: i, mem: mem}
		t.Cleanup(func() {
			require.NoError(t, mem.Free())
			require.NoError(t, d.Close())
		})
		f.prepare(i)
	}
	return f
}

// prepare makes a new Fill of everything for a rank.
func (f *rankFills) prepare(i int) {
	r, all := f.targets[i], page.Range{End: page.Count(int64(len(f.home.data)))}
	moves := NewDevice(f.dev[i], new(schedule.FCFS), nil, func(error) {})
	r.mu.Lock()
	defer r.mu.Unlock()
	r.claimed, r.arrived = make(map[page.Index]bool), make(map[page.Index]bool)
	r.fill = &Fill{Device: moves, Class: Acquire, From: &Source{Home: f.home}, Into: r,
		Pieces: Pieces(1, func(int) Update { return Update{Pages: all} }, []Run{{Pages: all}}, nil)}
	r.open = append(r.open, r)
}

// run runs a rank's Fill, and checks the rows of all pages that came.
func (f *rankFills) run(i int) error {
	r := f.targets[i]
	err := r.fill.Run(f.t.Context(), nil)
	got := make([]byte, r.mem.Size())
	assert.NoError(f.t, f.dev[i].CopyOut(f.t.Context(), []gpubackend.Copy{{Mem: r.mem, Host: got}}))
	r.mu.Lock()
	defer r.mu.Unlock()
	for p := range r.arrived {
		want := f.home.data[p.Offset()+int64(i*rankRow):][:rankRow]
		if !assert.True(f.t, bytes.Equal(want, got[int64(p)*rankRow:][:rankRow]), "page %d of rank %d", p, i) {
			break
		}
	}
	return err
}

// TestSharesUseOneBuffer: ranks that read together need one buffer for each piece, and give it back when all have it.
func TestSharesUseOneBuffer(t *testing.T) {
	f := newRankFills(t, 64<<20)
	var group sync.WaitGroup
	for i := range ranks {
		group.Go(func() { assert.NoError(t, f.run(i)) })
	}
	group.Wait()
	taken := int32(0)
	for i, d := range f.dev {
		require.Zero(t, d.out.Load())
		require.Len(t, f.targets[i].arrived, 64<<20/page.Size)
		taken += d.taken.Load()
	}
	require.LessOrEqual(t, int(taken), len(f.targets[0].fill.Pieces), "each piece is read once")
}

// TestSharesAreCounted: when all shares were sent, none count any more. Each counts for more than its device gets,
// because three use a buffer of which each wants a quarter.
func TestSharesAreCounted(t *testing.T) {
	f := newRankFills(t, 16<<20)
	f.targets[ranks-1].Close()
	var group sync.WaitGroup
	for i := range ranks - 1 {
		group.Go(func() { assert.NoError(t, f.run(i)) })
	}
	group.Wait()
	for _, r := range f.targets {
		require.Zero(t, r.fill.inbox.bytes)
		require.Zero(t, r.fill.inbox.offered)
	}
}

// TestSharesBesideADeviceThatHangs: while one device hangs, the others get all that they read. The buffers stay until
// that device has them, too, also if it fails then.
func TestSharesBesideADeviceThatHangs(t *testing.T) {
	for name, fails := range map[string]error{"and goes on": nil, "and fails": gpubackend.ErrDeviceLost} {
		t.Run(name, func(t *testing.T) {
			f := newRankFills(t, 64<<20)
			gate := f.dev[1].Hold(faulty.CopyIn)
			if fails != nil {
				f.dev[1].Fail(faulty.CopyIn, 1, fails)
			}
			ended := make(chan error, 1)
			go func() { ended <- f.run(1) }()
			<-gate.Arrived()
			var group sync.WaitGroup
			for _, i := range []int{0, 2, 3} {
				group.Go(func() { assert.NoError(t, f.run(i)) })
			}
			others := make(chan struct{})
			go func() { group.Wait(); close(others) }()
			out := func() (n int32) {
				for _, d := range f.dev {
					n += d.out.Load()
				}
				return n
			}
			require.Eventually(t, func() bool { // what the hanging device reads for the others has come
				f.targets[0].mu.Lock()
				defer f.targets[0].mu.Unlock()
				return len(f.targets[0].arrived) > 0
			}, time.Minute, time.Millisecond)
			require.Positive(t, out())
			gate.Open()
			<-others
			require.ErrorIs(t, <-ended, fails)
			require.Zero(t, out())
		})
	}
}

// TestPackLeavesALentBuffer: the many copies of a share are gathered, or stay as they are. The buffer, which others
// use, does not change.
func TestPackLeavesALentBuffer(t *testing.T) {
	f := newFiller(t, 4<<20)
	for _, fails := range []bool{false, true} {
		if fails {
			f.dev.Fail(faulty.HostBuffer, 1, gpubackend.ErrNoMemory)
		}
		buf, back := bytes.Clone(f.home.data[:64<<10]), 0
		x := &Piece{buf: buf, bytes: 64 << 10, lent: true, giveBack: func() { back++ }}
		x.copies = thinTarget{f.into}.AppendCopies(nil, page.Covering(0, 64<<10), buf)
		f.fill().pack(x)
		require.Equal(t, f.home.data[:64<<10], buf)
		require.EqualValues(t, 64_000, x.bytes)
		require.Equal(t, thin(buf), hostBytes(x.copies))
		if fails {
			require.Zero(t, back)
			continue
		}
		require.Len(t, x.copies, 1)
		require.Equal(t, 1, back, "it does not need the buffer any more")
		x.giveBack()
	}
}

// Workers may ask for their pieces in any order. Each piece is claimed once.
func TestPiecesInAnyOrder(t *testing.T) {
	p := newRankFills(t, ranks<<21).targets[0].fill
	p.startSharing()
	last := len(p.Pieces) - 1
	require.Greater(t, last, 2)
	for _, i := range []int{last - 1, 0, last, 1, 0} {
		x := p.piece(i)
		require.NotEmpty(t, x.Steps, i)
		require.Equal(t, p.Pieces[i].first(), x.first())
	}
}
