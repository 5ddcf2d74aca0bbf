package pagecache

import (
	"context"
	"math/rand/v2"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// heldWrite is a write that waits after its bases are read and before it changes home.
type heldWrite struct {
	t       *testing.T
	reached chan struct{} // closed when the write waits
	open    chan struct{} // close it to let the write go on
	ended   chan error
}

// hold begins a write at off. fails is the error that home returns after half of the bytes.
func (s *source) hold(t *testing.T, off int, p []byte, fails error) *heldWrite {
	w := &heldWrite{t, make(chan struct{}), make(chan struct{}), make(chan error, 1)}
	c := Change{Kind: ChangeWrite, Off: int64(off), Len: int64(len(p)), WriteBack: true}
	go func() {
		w.ended <- s.attached.ChangeHome(context.Background(), c, func(off, _ int64) error {
			close(w.reached)
			<-w.open
			if fails != nil {
				p = p[:len(p)/2]
			}
			_, err := s.home.WriteAt(p, off)
			assert.NoError(t, err)
			return fails
		})
	}()
	return w
}

// begun returns once the write waits.
func (w *heldWrite) begun() *heldWrite {
	w.t.Helper()
	select {
	case <-w.reached:
	case <-time.After(time.Minute):
		require.Fail(w.t, "the write waits for another one")
	}
	return w
}

// end lets the write go on and returns its error.
func (w *heldWrite) end() error {
	close(w.open)
	return <-w.ended
}

// besides begins do while a write is held, and returns once do waits for the write.
func (f *File) besides(do func()) (ended chan struct{}) {
	ended = make(chan struct{})
	go func() {
		defer close(ended)
		do()
	}()
	for f.mu.rw.TryRLock() {
		f.mu.rw.RUnlock()
		select {
		case <-ended:
			return ended // it did not wait; its effects will show that
		default:
			runtime.Gosched()
		}
	}
	return ended
}

// TestWritesBesideEachOther holds writes of adjacent pages.
func TestWritesBesideEachOther(t *testing.T) {
	const n = 100
	m := newMachine(t, 1)
	src := m.noisyFile(2 * n * page.Size)
	p := m.run(src, 0, 0, 2*n*page.Size, true)
	var held []*heldWrite
	for i := range n {
		held = append(held, src.hold(t, i*2*page.Size, []byte("of the CPU"), nil).begun())
		p.add(i*2*page.Size + 100)
	}
	for _, i := range rand.Perm(n) {
		require.NoError(t, held[i].end())
	}
	changed, err := src.attached.CheckHome(context.Background())
	require.NoError(t, err)
	require.False(t, changed, "the writes were taken for changes by others")
	require.EqualValues(t, n, src.attached.counters.Bases.Load())
	require.EqualValues(t, n, p.release())
	require.NoError(t, src.attached.Sync(context.Background(), nil))
	for i := range n {
		at := i * 2 * page.Size
		require.Equal(t, "of the CPU", string(src.home.bytes(at, 10)))
		require.Equal(t, p.load(at+100, at+101), src.home.bytes(at+100, 1))
	}
	require.EqualValues(t, n, p.acquire())
	require.Zero(t, src.attached.counters.Bases.Load())
}

// TestDirectChangeAfterWrites ends writes in the order in which they began and in reverse, and then changes home
// directly.
func TestDirectChangeAfterWrites(t *testing.T) {
	for first := range 2 {
		m := newMachine(t, 1)
		src := m.noisyFile(2 * page.Size)
		m.run(src, 0, 0, 2*page.Size, true)
		held := [2]*heldWrite{src.hold(t, 0, []byte("a"), nil).begun(),
			src.hold(t, page.Size, []byte("b"), nil).begun()}
		require.NoError(t, held[first].end())
		require.NoError(t, held[1-first].end())
		for _, direct := range []bool{false, true} {
			if direct {
				src.home.editAt(0, []byte("c"))
			}
			changed, err := src.attached.CheckHome(context.Background())
			require.NoError(t, err)
			require.Equal(t, direct, changed)
		}
	}
}

// TestWritesOfOnePage: a write begins while another write of the same page is held. It finds the base kept: the bytes
// of neither are taken for the device's.
func TestWritesOfOnePage(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(2 * page.Size)
	p := m.run(src, 0, 0, 2*page.Size, true)
	p.add(40)
	w := src.hold(t, 0, []byte("first"), nil).begun()
	second := src.attached.besides(func() {
		p := []byte("second")
		assert.NoError(t, src.attached.ChangeHome(context.Background(),
			Change{Kind: ChangeWrite, Off: 20, Len: page.Size}, func(off, _ int64) error {
				assert.Equal(t, "first", string(src.home.bytes(0, 5)), "two writes of one page at once")
				_, err := src.home.WriteAt(p, off)
				return err
			}))
	})
	require.NoError(t, w.end())
	<-second
	require.EqualValues(t, 2, src.attached.counters.Bases.Load())
	require.EqualValues(t, 1, p.release())
	require.NoError(t, src.attached.Sync(context.Background(), nil))
	require.Equal(t, "first", string(src.home.bytes(0, 5)))
	require.Equal(t, "second", string(src.home.bytes(20, 6)))
	require.Equal(t, p.load(40, 41), src.home.bytes(40, 1))
}

// TestNobodySeesHalfAWrite: every other kind of call comes while a write is held. The write's base is read, but not
// kept, and home is not changed.
func TestNobodySeesHalfAWrite(t *testing.T) {
	ctx := context.Background()
	for name, do := range map[string]func(src *source, p *program) error{
		"acquire": func(_ *source, p *program) error { _, err := p.Acquire(ctx, 0, p.len, false); return err },
		"release": func(_ *source, p *program) error { _, err := p.Release(ctx, 0, p.len); return err },
		"fsync": func(src *source, _ *program) error {
			return src.attached.Sync(context.Background(), func() error { return nil })
		},
		"unmap": func(_ *source, p *program) error { return p.Unmap(ctx) },
		"check": func(src *source, _ *program) error {
			_, err := src.attached.CheckHome(context.Background())
			return err
		},
		"evict": func(_ *source, p *program) error { return p.Advise(ctx, 0, p.len, AdviceDontNeed) },
		"read": func(src *source, _ *program) error {
			_, _, err := src.attached.Read(context.Background(), make([]byte, 10), 0, false, nil)
			return err
		},
		"truncate": func(src *source, _ *program) error {
			return src.attached.ChangeHome(context.Background(), Change{Kind: ChangeTruncate, Len: 2 * page.Size},
				func(size, _ int64) error { return src.home.truncate(size) })
		},
		"append": func(src *source, _ *program) error {
			return src.tryWrite(Change{Kind: ChangeAppend, Len: 10}, make([]byte, 10))
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, 1)
			src := m.noisyFile(4*page.Size - 5)
			p := m.run(src, 0, 0, 4*page.Size-5, true)
			other := m.run(src, 0, 0, 4*page.Size-5, true) // keeps the memory
			p.add(40)
			mine := append([]byte(nil), p.load(40, 41)...)
			w := src.hold(t, 0, []byte("of the CPU"), nil).begun()
			ended := src.attached.besides(func() { assert.NoError(t, do(src, p)) })
			require.NoError(t, w.end())
			<-ended
			require.Equal(t, mine, other.load(40, 41), "the device's own byte")
			other.acquire()
			require.Equal(t, "of the CPU", string(other.load(0, 10)))
			other.release()
			require.NoError(t, src.attached.Sync(context.Background(), nil))
			require.Equal(t, "of the CPU", string(src.home.bytes(0, 10)))
			require.Equal(t, mine, src.home.bytes(40, 1))
		})
	}
}

// TestReleaseAndWriteOfOnePage: a write comes for a page that was released while another write was held. The released
// bytes come home before the write.
func TestReleaseAndWriteOfOnePage(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(2 * page.Size)
	p := m.run(src, 0, 0, 2*page.Size, true)
	p.add(page.Size)
	mine := append([]byte(nil), p.load(page.Size, page.Size+1)...)
	require.EqualValues(t, 1, p.release())
	w := src.hold(t, 0, []byte("first"), nil).begun()
	second := src.attached.besides(func() {
		assert.NoError(t, src.attached.ChangeHome(context.Background(),
			Change{Kind: ChangeWrite, Off: page.Size + 1, Len: 1}, func(off, _ int64) error {
				assert.Equal(t, mine, src.home.bytes(page.Size, 1), "the writer saw the released bytes")
				_, err := src.home.WriteAt([]byte("x"), off)
				return err
			}))
	})
	require.NoError(t, w.end())
	<-second
	require.EqualValues(t, 2, p.acquire())
	require.Equal(t, "first", string(p.load(0, 5)))
	require.Equal(t, "x", string(p.load(page.Size+1, page.Size+2)))
}

// TestBaseThatCannotBeReadBesideAWrite: home fails when the base of one write is read, while another write is held. The
// first write is not begun, and the second goes on.
func TestBaseThatCannotBeReadBesideAWrite(t *testing.T) {
	for _, again := range []bool{false, true} {
		m := newMachine(t, 1)
		src := m.noisyFile(100 * page.Size)
		p := m.run(src, 0, 0, 100*page.Size, true)
		w := src.hold(t, 0, []byte("first"), nil).begun()
		src.home.failReads(syscall.EIO)
		for _, n := range []int{1, 90} {
			err := src.attached.ChangeHome(context.Background(), Change{Kind: ChangeWrite, Off: page.Size,
				Len: int64(n * page.Size)}, func(int64, int64) error {
				assert.Fail(t, "home is changed, and its earlier bytes are not kept")
				return nil
			})
			require.ErrorIs(t, err, syscall.EIO)
		}
		src.home.failReads(nil)
		if again {
			src.write(t, page.Size, []byte("second"))
		}
		require.NoError(t, w.end())
		p.add(40)
		p.add(page.Size + 40)
		require.EqualValues(t, 2, p.release())
		require.NoError(t, src.attached.Sync(context.Background(), nil))
		require.Equal(t, "first", string(src.home.bytes(0, 5)))
		require.Equal(t, again, string(src.home.bytes(page.Size, 6)) == "second")
		require.Equal(t, p.load(40, 41), src.home.bytes(40, 1))
		require.Equal(t, p.load(page.Size+40, page.Size+41), src.home.bytes(page.Size+40, 1))
	}
}

// TestWriteThatFailsBesideAnother: home takes half of a write. The page's earlier bytes are kept. So the device does
// not take the new half for its own, and does not undo it.
func TestWriteThatFailsBesideAnother(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(2 * page.Size)
	p := m.run(src, 0, 0, 2*page.Size, true)
	held := [2]*heldWrite{
		src.hold(t, 0, []byte("first"), nil).begun(),
		src.hold(t, page.Size, []byte("halfgone"), syscall.ENOSPC).begun(),
	}
	require.ErrorIs(t, held[1].end(), syscall.ENOSPC)
	require.NoError(t, held[0].end())
	changed, err := src.attached.CheckHome(context.Background())
	require.NoError(t, err)
	require.False(t, changed)
	p.add(40)
	p.add(page.Size + 40)
	require.EqualValues(t, 2, p.release())
	require.NoError(t, src.attached.Sync(context.Background(), nil))
	require.Equal(t, "first", string(src.home.bytes(0, 5)))
	require.Equal(t, "half", string(src.home.bytes(page.Size, 4)))
	require.Equal(t, p.load(page.Size+40, page.Size+41), src.home.bytes(page.Size+40, 1))
	require.EqualValues(t, 2, p.acquire())
	require.Equal(t, "half", string(p.load(page.Size, page.Size+4)))
}

// TestWriteOfAFileCutInSource writes past the end of a file that was cut directly in SOURCE. The devices' bytes between
// that end and the write become zeros, as home's do.
func TestWriteOfAFileCutInSource(t *testing.T) {
	for _, cut := range []int{page.Size, page.Size + 10} {
		for _, writable := range []bool{false, true} { // without and with a base to keep
			m := newMachine(t, 1)
			src := m.noisyFile(2 * page.Size)
			p := m.run(src, 0, 0, 2*page.Size, writable)
			src.home.resize(cut)
			src.write(t, page.Size+100, []byte("x"))
			require.Equal(t, make([]byte, page.Size+100-cut), p.load(cut, page.Size+100))
			require.Equal(t, make([]byte, page.Size+100-cut), src.home.bytes(cut, page.Size+100-cut))
			p.acquire()
			require.Equal(t, "x", string(p.load(page.Size+100, page.Size+101)))
		}
	}
}

// TestWritersBesideDevices: programs on the CPU and on two devices write at once. Byte i of a page belongs to writer i
// mod 8, and nothing that was written is lost.
func TestWritersBesideDevices(t *testing.T) {
	const pages, cpus, devices, rounds = 64, 6, 2, 200
	const size = pages * page.Size
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	m := newMachine(t, devices)
	src := m.file(size)
	var programs [devices]*program
	for d := range programs {
		programs[d] = m.run(src, d, 0, size, true)
	}
	var want [cpus + devices]map[int]byte
	var group sync.WaitGroup
	for who := range want {
		want[who] = map[int]byte{}
		rnd := rand.New(rand.NewPCG(seed, uint64(who)))
		group.Go(func() {
			for range rounds {
				at := rnd.IntN(size/8)*8 + who
				b := byte(1 + rnd.IntN(255))
				want[who][at] = b
				if who < cpus {
					err := src.tryWrite(Change{Kind: ChangeWrite, Off: int64(at), Len: 1}, []byte{b})
					assert.NoError(t, err)
					continue
				}
				p := programs[who-cpus]
				p.store(at, b)
				switch rnd.IntN(10) {
				case 0:
					_, err := p.Release(t.Context(), 0, size)
					assert.NoError(t, err)
				case 1:
					_, err := p.Acquire(t.Context(), 0, size, false)
					assert.NoError(t, err)
				case 2:
					assert.NoError(t, src.attached.Sync(context.Background(), func() error { return nil }))
				}
			}
		})
	}
	group.Wait()
	for _, p := range programs {
		p.release()
	}
	require.NoError(t, src.attached.Sync(context.Background(), nil))
	for _, p := range programs {
		p.acquire()
	}
	for who := range want {
		for at, b := range want[who] {
			require.Equal(t, b, src.home.bytes(at, 1)[0], "byte %d of writer %d, seed %d", at, who, seed)
			for _, p := range programs {
				require.Equal(t, b, p.byteAt(at), "byte %d of writer %d, seed %d", at, who, seed)
			}
		}
	}
	changed, err := src.attached.CheckHome(context.Background())
	require.NoError(t, err)
	require.False(t, changed)
}
