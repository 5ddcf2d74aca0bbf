package pagecache

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

func (m *machine) baseless() int64 { return m.cache.Status().Counters["baseless_pages"] }

// requireSame is require.Equal for byte slices that are too long to print.
func requireSame(t *testing.T, want, got []byte) {
	t.Helper()
	require.Len(t, got, len(want))
	for at := range want {
		if want[at] != got[at] {
			require.FailNow(t, "bytes differ", "byte %d of page %d is %#x, not %#x", at%page.Size, at/page.Size,
				got[at], want[at])
		}
	}
}

// TestBasesSurviveADirectChange changes one page in SOURCE. Other pages have bytes of the CPU and of a device that are
// not merged yet.
func TestBasesSurviveADirectChange(t *testing.T) {
	for _, where := range []int{0, 1, 2} { // the page that both changed, the page that the device changed, another page
		for _, released := range []bool{false, true} {
			m := newMachine(t, 2)
			src := m.file(3 * page.Size)
			p, q := m.run(src, 0, 0, 3*page.Size, true), m.run(src, 1, 0, 3*page.Size, false)
			src.write(t, 8, []byte{2}) // home's page is kept
			p.store(0, 1)
			if released {
				p.release()
			}
			src.home.editAt(where*page.Size+20, []byte{3})
			changed, err := src.attached.CheckHome(context.Background())
			require.NoError(t, err)
			require.True(t, changed)
			p.release()
			want := make([]byte, 3*page.Size)
			want[0], want[8], want[where*page.Size+20] = 1, 2, 3
			requireSame(t, want, src.read(t, 0, 3*page.Size))
			p.acquire()
			q.acquire()
			requireSame(t, want, p.all())
			requireSame(t, want, q.all())
			require.NoError(t, src.attached.Sync(context.Background(), nil))
			requireSame(t, want, src.home.bytes(0, 3*page.Size))
			require.Zero(t, m.baseless())
		}
	}
}

// lookedAt is a home that reports each Look.
type lookedAt struct {
	*memoryHome
	tell func()
}

func (h lookedAt) Look() (uint64, error) {
	h.tell()
	return h.memoryHome.Look()
}

// TestWhoFindsAChangeTellsTheKernel: a program's acquire is the first request to detect a direct change in SOURCE, and
// the program is killed right after that. Others have the file too. The acquire alone must tell the kernel.
func TestWhoFindsAChangeTellsTheKernel(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(page.Size + 100)
	m.run(src, 0, 0, 2*page.Size, true)
	f := src.attached
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan struct{})
	var others sync.WaitGroup
	defer others.Wait()
	defer close(over)
	found := sync.OnceFunc(func() {
		cancel()
		others.Go(func() {
			f.mu.RLock()
			<-over
			f.mu.RUnlock()
		})
		stacks := make([]byte, 1<<20)
		require.Eventually(t, func() bool {
			return bytes.Contains(stacks[:runtime.Stack(stacks, true)], []byte("[sync.RWMutex.RLock"))
		}, patient, time.Millisecond, "it waits")
	})
	told := 0
	src.kernel.hook = func(int64, int64) { told++ }
	src.home.editAt(20, []byte{1})
	f.mu.Lock()
	f.home.SetBackingForTesting(lookedAt{src.home, found})
	f.mu.Unlock()
	require.NoError(t, f.checkHome(ctx))
	require.Error(t, ctx.Err())
	require.Equal(t, 1, told)
}

// TestBaseIsFoundOnAnotherDevice: a device stored into a page that was then changed in SOURCE. Another device has the
// page unchanged.
func TestBaseIsFoundOnAnotherDevice(t *testing.T) {
	for _, writable := range []bool{false, true} {
		m := newMachine(t, 2)
		src := m.noisyFile(page.Size)
		p := m.run(src, 0, 0, page.Size, true)
		q := m.run(src, 1, 0, page.Size, writable)
		want := src.home.bytes(0, page.Size)
		p.add(0)
		src.home.editAt(20, []byte{want[20] + 1})
		want[0]++
		want[20]++
		p.acquire()
		p.release()
		requireSame(t, want, src.read(t, 0, page.Size))
		q.acquire()
		requireSame(t, want, q.all())
		require.Zero(t, m.baseless())
	}
}

// TestBaseIsPutTogether: a device stored into a page, and before the next look several places of it were changed in
// SOURCE.
func TestBaseIsPutTogether(t *testing.T) {
	for _, near := range []int{3, 200} {
		m := newMachine(t, 2)
		src := m.noisyFile(page.Size + 1000)
		p, q := m.run(src, 0, 0, 2*page.Size, true), m.run(src, 1, 0, 2*page.Size, true)
		want := src.home.bytes(0, page.Size+1000)
		for i := range 4 {
			at := 1000 * i
			p.add(at)
			q.add(page.Size + 10 + i)
			p.store(page.Size+2000+i, 1)
			src.home.editAt(at+near, []byte{want[at+near] + 1, want[at+near+1] + 1})
			want[at]++
			want[at+near]++
			want[at+near+1]++
			want[page.Size+10+i]++
		}
		src.home.editAt(page.Size+500, []byte{1, 2, 3})
		copy(want[page.Size+500:], []byte{1, 2, 3})
		p.acquire()
		p.release()
		q.release()
		requireSame(t, want, src.read(t, 0, page.Size+1000))
		q.acquire()
		requireSame(t, want, q.load(0, page.Size+1000))
		require.Zero(t, m.baseless())
	}
}

// TestNeighbouringRecords: a device stored into records of a page, and before the next look the adjacent records were
// changed in SOURCE.
func TestNeighbouringRecords(t *testing.T) {
	for _, records := range []int{1, 2} {
		for _, size := range []int{8, 32, 500} {
			for _, after := range []int{-1, 1} {
				if records > 1 && size == 500 {
					continue // too many combinations
				}
				m := newMachine(t, 1)
				src := m.noisyFile(page.Size)
				p := m.run(src, 0, 0, page.Size, true)
				want := src.home.bytes(0, page.Size)
				for i := range records {
					at := 600 + 2000*i
					theirs := at + after*size
					for k := range size {
						p.add(at + k)
						want[at+k]++
						want[theirs+k]++
					}
					src.home.editAt(theirs, want[theirs:theirs+size])
				}
				p.acquire()
				requireSame(t, want, p.all())
				p.release()
				require.NoError(t, src.attached.Sync(context.Background(), nil))
				requireSame(t, want, src.home.bytes(0, page.Size))
				require.Zero(t, m.baseless())
			}
		}
	}
}

// BenchmarkMixed measures a search for a base that cannot be found.
func BenchmarkMixed(b *testing.B) {
	key, err := gpubackend.NewDigestKey(rand.NewChaCha8([32]byte{}))
	require.NoError(b, err)
	for _, places := range []int{1, 4, 12, 40} {
		b.Run(fmt.Sprint(places), func(b *testing.B) {
			mine, home := make([]byte, page.Size), make([]byte, page.Size)
			for i := range places {
				for k := range 32 {
					mine[i*100+k] = 1
				}
			}
			for b.Loop() {
				base, _ := mixed(key, 1, mine, home, mostTries)
				require.Nil(b, base)
			}
		})
	}
}

// TestLostBase: a device stored into a page, before the next look many places of it were changed in SOURCE, and no
// other replica has the base. The device's bytes are kept, and the page is counted.
func TestLostBase(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(2 * page.Size)
	p := m.run(src, 0, 0, 2*page.Size, true)
	p.add(0)
	mine := bytes.Clone(p.load(0, page.Size))
	for at := 20; at < page.Size; at += 50 {
		src.home.editAt(at, []byte{mine[at] + 1})
	}
	src.home.editAt(page.Size+20, []byte{99})
	p.acquire()
	requireSame(t, mine, bytes.Clone(p.load(0, page.Size)))
	require.EqualValues(t, 99, p.byteAt(page.Size+20))
	require.EqualValues(t, 1, m.baseless())
	p.release()
	requireSame(t, mine, src.read(t, 0, page.Size))
}

// TestChangedSizeInSource changes the size in SOURCE, with and without a change before the end, and with and without
// stores of the device into the last page.
func TestChangedSizeInSource(t *testing.T) {
	const before = page.Size + 100
	for _, after := range []int{50, page.Size, page.Size + 50, page.Size + 200, 2 * page.Size, 3*page.Size + 10} {
		for _, stored := range []bool{false, true} {
			for _, edited := range []bool{false, true} {
				t.Run(fmt.Sprintf("%d, stored %v, edited %v", after, stored, edited), func(t *testing.T) {
					m := newMachine(t, 1)
					src := m.noisyFile(before)
					p := m.run(src, 0, 0, 4*page.Size, true)
					want := src.home.bytes(0, before)
					if stored {
						p.add(page.Size + 10)
					}
					for at := before; at < 4*page.Size; at += 100 {
						p.store(at, 77) // past the end, where it reaches no file
					}
					src.home.resize(after)
					want = append(want[:min(after, before)], make([]byte, max(after-before, 0))...)
					for at := before; at < after; at++ {
						src.home.data[at], want[at] = 5, 5
					}
					if edited && after > page.Size+20 {
						src.home.data[page.Size+20]++
						want[page.Size+20]++
					}
					p.acquire()
					if stored && after > page.Size+10 {
						want[page.Size+10]++
					}
					requireSame(t, want, p.load(0, after))
					requireSame(t, make([]byte, max(before-after, 0)), p.load(after, max(before, after)))
					p.release()
					require.NoError(t, src.attached.Sync(context.Background(), nil))
					requireSame(t, want, src.home.bytes(0, after))
					require.Zero(t, m.baseless())
				})
			}
		}
	}
}

// TestDoubtfulPagesAreNotServed: no CPU program gets bytes that a device has from before the change, settled or not.
func TestDoubtfulPagesAreNotServed(t *testing.T) {
	m := newMachine(t, 1, readsFrom(DeviceReadsAlways))
	src, _ := m.sharedFile(8 * page.Size)
	m.run(src, 0, 0, 8*page.Size, true)
	src.read(t, 0, page.Size)
	src.home.editAt(10, []byte{1, 2, 3})
	_, err := src.attached.CheckHome(context.Background())
	require.NoError(t, err)
	require.Equal(t, []byte{1, 2, 3}, src.read(t, 10, 3))
	require.NoError(t, src.attached.settleDue(t.Context()))
	require.Empty(t, src.attached.doubt)
	require.Equal(t, []byte{1, 2, 3}, src.read(t, 10, 3))
}

// TestBackgroundNoticesDirectChanges: the base of a page is found while the device has not yet stored into it.
func TestBackgroundNoticesDirectChanges(t *testing.T) {
	m := newMachine(t, 1, interval(40*time.Millisecond))
	src := m.file(page.Size)
	p := m.run(src, 0, 0, page.Size, true)
	src.home.editAt(20, []byte{3})
	f := src.attached
	require.Eventually(t, func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.home.LookedAt() > 0 && len(f.doubt) == 0
	}, 10*time.Second, time.Millisecond)
	p.store(0, 1)
	p.release()
	require.Equal(t, []byte{1, 3}, []byte{src.read(t, 0, 1)[0], src.read(t, 20, 1)[0]})
	require.Zero(t, m.baseless())
}

// contest is a file that the CPU and two devices change at random.
type contest struct {
	m        *machine
	src      *source
	programs [2]*program
	want     []byte          // what home has once everything released is there
	stored   [2]map[int]byte // what the programs have not released
}

func newContest(t *testing.T, pages int) *contest {
	t.Helper()
	size := pages * page.Size
	m := newMachine(t, 2, hostMemory(4*page.Size))
	c := &contest{m: m, src: m.file(size), want: make([]byte, size)}
	for d := range c.programs {
		c.programs[d] = m.run(c.src, d, 0, int64(size), true)
		c.release(d)
	}
	return c
}

func (c *contest) release(d int) {
	c.programs[d].release()
	for at, b := range c.stored[d] {
		c.want[at] = b
	}
	c.stored[d] = map[int]byte{}
}

// requireEnd releases everything, and checks what home and both devices have.
func (c *contest) requireEnd(t *testing.T) {
	t.Helper()
	c.release(0)
	c.release(1)
	require.NoError(t, c.src.attached.Sync(context.Background(), nil))
	require.Zero(t, c.m.baseless())
	requireSame(t, c.want, c.src.home.bytes(0, len(c.want)))
	for _, p := range c.programs {
		p.acquire()
		requireSame(t, c.want, p.all())
	}
	require.Zero(t, c.m.baseless())
}

// TestRandomDirectChanges lets the CPU, two devices and a program in SOURCE change a file in turns. Direct changes
// touch only pages without unreleased bytes of a device. Otherwise all change any page, each at bytes of its own.
func TestRandomDirectChanges(t *testing.T) {
	const pages, steps = 12, 3000
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	c := newContest(t, pages)
	src, want := c.src, c.want
	for range steps {
		at := rnd.IntN(pages*page.Size/4) * 4
		b := byte(1 + rnd.IntN(255))
		switch d := rnd.IntN(2); rnd.IntN(9) {
		case 0, 1:
			src.write(t, at, []byte{b})
			want[at] = b
		case 2, 3:
			c.programs[d].store(at+1+d, b)
			c.stored[d][at+1+d] = b
		case 4:
			c.release(d)
		case 5:
			c.programs[d].acquire()
		case 6:
			require.NoError(t, src.attached.Sync(context.Background(), nil))
		case 7:
			p := at / page.Size
			// Otherwise a release would be older than the change.
			require.NoError(t, src.attached.ReadRange(context.Background(), page.Span(int64(p*page.Size), page.Size)))
			modified := false
			for _, s := range c.stored {
				for x := range s {
					modified = modified || x/page.Size == p
				}
			}
			if !modified {
				src.home.editAt(at+3, []byte{b})
				want[at+3] = b
				if rnd.IntN(2) == 0 {
					require.NoError(t, src.attached.settleDue(t.Context()))
				} else { // the other pages are settled later
					_, err := src.attached.CheckHome(context.Background())
					require.NoError(t, err)
					c.programs[d].acquire()
				}
			}
		case 8:
			require.Equal(t, want[at], src.read(t, at, 1)[0])
		}
	}
	c.requireEnd(t)
}
