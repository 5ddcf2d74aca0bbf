package pagecache

import (
	"context"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/pagecache/home"
)

// eachWay runs a test with writes by one core and by several.
func eachWay(t *testing.T, do func(t *testing.T, m *machine)) {
	for name, least := range map[string]int64{"one core": 1 << 40, "several cores": 2 * page.Size} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, 2)
			m.cache.homes.LeastParallel = least
			do(t, m)
		})
	}
}

// TestOneLookIsForFewBytes: a look at home is relied on for no more bytes than docs/source-changes.md says.
func TestOneLookIsForFewBytes(t *testing.T) {
	for _, parallel := range []bool{false, true} {
		m := newMachine(t, 1)
		limit := int64(home.WriteSize)
		if m.cache.homes.LeastParallel = 1 << 40; parallel {
			m.cache.homes.LeastParallel, limit = home.LeastParallel, home.ParallelSize+home.WriteSize
		}
		const size = 24 << 20
		src := m.file(size)
		p := m.run(src, 0, 0, size, true)
		for off := 0; off < size; off += page.Size {
			p.store(off, 'x')
		}
		p.release()
		require.NoError(t, m.cache.Flush(context.Background()))
		require.LessOrEqual(t, src.home.most, limit)
		require.Positive(t, src.home.most)
		p.unmap()
	}
}

// TestALookIsForAMoment: if writes take long, each has a look of its own.
func TestALookIsForAMoment(t *testing.T) {
	m := newMachine(t, 1)
	const size = 20 * page.Size
	src := m.file(size)
	p := m.run(src, 0, 0, size, true)
	for off := 0; off < size; off += 2 * page.Size {
		p.store(off, 'x')
	}
	p.release()
	src.home.slow = 2 * home.LookAgain
	require.NoError(t, m.cache.Flush(context.Background()))
	require.EqualValues(t, page.Size, src.home.most)
	p.unmap()
}

// TestWritesStayInsideTheFile: bytes that a device stored past the end of the last page's part of the file stay out.
func TestWritesStayInsideTheFile(t *testing.T) {
	eachWay(t, func(t *testing.T, m *machine) {
		const size = 5*page.Size - 7
		src := m.noisyFile(size)
		want := src.home.bytes(0, size)
		p := m.run(src, 0, 0, 5*page.Size, true)
		for off := 0; off < size; off += page.Size {
			p.store(off, 'x')
			want[off] = 'x'
		}
		p.store(size+1, 'x')
		p.release()
		require.NoError(t, m.cache.Flush(context.Background()))
		requireSame(t, want, src.home.bytes(0, len(src.home.data)))
		p.unmap()
	})
}

// TestChangeRightBeforeTheWrites: a byte that is stored in SOURCE after a collect has merged the page, but before the
// page's write looks at home, survives.
func TestChangeRightBeforeTheWrites(t *testing.T) {
	eachWay(t, func(t *testing.T, m *machine) {
		const pages = 8
		src := m.noisyFile(pages * page.Size)
		want := src.home.bytes(0, pages*page.Size)
		p := m.run(src, 0, 0, pages*page.Size, true)
		for i := range pages {
			p.store(i*page.Size+1, want[i*page.Size+1]+1)
			want[i*page.Size+1]++
		}
		p.release()
		const at = 3*page.Size + 50
		want[at]++
		src.home.mu.Lock()
		src.home.beforeWrites = func() {
			src.home.beforeWrites = nil
			src.home.editUnseen(at, want[at], false)
		}
		src.home.mu.Unlock()
		require.NoError(t, m.cache.Flush(context.Background()))
		require.Nil(t, src.home.beforeWrites)
		requireSame(t, want, src.home.bytes(0, len(want)))
		p.unmap()
	})
}

func (h *memoryHome) setRoom(room int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.room = room
}

// TestHomeTakesOnlyAPart: home has taken more pages than the write reported when it failed. Nobody's stores get lost:
// neither those of the device, which go on, nor those of another one into the same pages.
func TestHomeTakesOnlyAPart(t *testing.T) {
	eachWay(t, func(t *testing.T, m *machine) {
		const pages = 8
		src := m.noisyFile(pages * page.Size)
		want := src.home.bytes(0, pages*page.Size)
		p, q := m.run(src, 0, 0, pages*page.Size, true), m.run(src, 1, 0, pages*page.Size, true)
		store := func(x *program, at int) {
			x.add(at)
			want[at]++
		}
		for i := range pages {
			for k := range 40 { // too many places to put a base together from
				store(p, i*page.Size+64*k+1)
			}
			store(q, i*page.Size+2)
		}
		p.release()
		src.home.setRoom(5 * page.Size)
		require.ErrorIs(t, m.cache.Flush(context.Background()), syscall.ENOSPC)
		for i := range pages {
			store(p, i*page.Size+3)
		}
		q.release()
		_ = m.cache.Flush(context.Background())
		src.home.setRoom(0)
		p.release()
		require.NoError(t, m.cache.Flush(context.Background()))
		requireSame(t, want, src.home.bytes(0, len(want)))
		for _, x := range []*program{p, q} {
			x.acquire()
			requireSame(t, want, x.all())
			x.unmap()
		}
		require.Zero(t, m.baseless())
	})
}
