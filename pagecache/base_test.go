package pagecache

import (
	"context"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/lrc"
)

// TestBasesAgainstMap makes the same calls on bases and on a plain map.
func TestBasesAgainstMap(t *testing.T) {
	type key struct {
		page page.Index
		base lrc.Base
	}
	rapid.Check(t, func(t *rapid.T) {
		var memory pageMemory
		s := bases{memory: &memory}
		twin := make(map[key]*pageBytes)
		held := func() (n int) {
			for _, content := range twin {
				n += copies(content)
			}
			return n
		}
		pages := rapid.OneOf(rapid.IntRange(0,
			3*basePages), rapid.SampledFrom([]int{0, basePages - 1, basePages, 1 << 40}))
		for range rapid.IntRange(1, 200).Draw(t, "calls") {
			k := key{page.Index(pages.Draw(t, "page")), lrc.Base(rapid.IntRange(1, 2).Draw(t, "base"))}
			require.True(t, twin[k] == s.at(k.page, k.base))
			switch rapid.IntRange(0, 3).Draw(t, "call") {
			case 0:
				s.put(k.page, k.base, zeroPage)
				twin[k] = zeroPage
			case 1:
				content := make([]*pageBytes, 1)
				memory.take(content)
				s.put(k.page, k.base, content[0])
				twin[k] = content[0]
			case 2:
				content := s.take(k.page, k.base)
				require.True(t, twin[k] == content)
				if copies(content) > 0 {
					memory.give(content)
				}
				delete(twin, k)
			default: // runs with some pages without a base, and one page twice
				before := held()
				for range rapid.IntRange(1, 4).Draw(t, "runs") {
					rg := page.Range{Start: k.page, End: k.page +
						page.Index(rapid.IntRange(1, 2*basePages).Draw(t, "pages"))}
					s.vacate([]lrc.PageBase{{Range: rg, Base: k.base}, {Range: rg, Base: k.base}})
					for p := rg.Start; p < rg.End; p++ {
						delete(twin, key{p, k.base})
					}
					for other, content := range twin {
						require.True(t, content == s.at(other.page, other.base))
					}
					k.page = page.Index(pages.Draw(t, "page"))
				}
				require.Equal(t, before-held(), s.sweep())
			}
			require.Equal(t, held(), s.n)
		}
		for k, content := range twin {
			require.True(t, content == s.at(k.page, k.base))
			require.True(t, content == s.take(k.page, k.base))
			if copies(content) > 0 {
				memory.give(content)
			}
		}
		require.Empty(t, s.blocks)
		require.LessOrEqual(t, len(memory.slabs), spareSlabs)
	})
}

// TestBaseThatCannotBeRead makes home fail when a page is to be kept, so the write fails. The next write keeps the
// page. Changes by both sides are merged, and an acquire brings them.
func TestBaseThatCannotBeRead(t *testing.T) {
	for _, acquires := range []bool{false, true} {
		m := newMachine(t, 1)
		src := m.noisyFile(100 * page.Size)
		p := m.run(src, 0, 0, 100*page.Size, true)
		src.home.failReads(syscall.EIO)
		require.ErrorIs(t, src.tryWrite(Change{Kind: ChangeWrite, Off: 100, Len: 90 * page.Size},
			make([]byte, 90*page.Size)), syscall.EIO)
		src.home.failReads(nil)
		src.write(t, 100, []byte("of the CPU"))
		if acquires {
			require.EqualValues(t, 1, p.acquire())
			require.Equal(t, "of the CPU", string(p.load(100, 110)))
		}
		p.add(0)
		require.EqualValues(t, 1, p.release())
		require.NoError(t, src.attached.Sync(context.Background(), nil))
		require.Equal(t, "of the CPU", string(src.home.bytes(100, 10)))
		require.Equal(t, p.load(0, 1), src.home.bytes(0, 1))
	}
}

// TestMergedPortions brings home more pages, with two writers each, than fit in one portion.
func TestMergedPortions(t *testing.T) {
	const n = 3 * collectPortion * page.Size
	m := newMachine(t, 1, memory(128<<20))
	src := m.noisyFile(n)
	p := m.run(src, 0, 0, n, true)
	for at := 0; at < n; at += page.Size {
		src.write(t, at+5, []byte{1})
		p.add(at + 9)
	}
	require.EqualValues(t, n/page.Size, p.release())
	require.NoError(t, src.attached.Sync(context.Background(), nil))
	for at := 0; at < n; at += page.Size {
		require.Equal(t, byte(1), src.home.bytes(at+5, 1)[0])
		require.Equal(t, p.load(at+9, at+10), src.home.bytes(at+9, 1))
	}
}

// TestBasesOfZerosTakeNoMemory: a new file is full of zero pages.
func TestBasesOfZerosTakeNoMemory(t *testing.T) {
	const pages = 64
	m := newMachine(t, 2)
	src := m.file(pages * page.Size)
	p, q := m.run(src, 0, 0, pages*page.Size, true), m.run(src, 1, 0, pages*page.Size, true)
	for at := 0; at < pages*page.Size; at += page.Size {
		src.write(t, at, []byte("cpu"))
		p.add(at + 100)
		q.add(at + 200)
	}
	require.NotEmpty(t, src.attached.bases.blocks)
	require.Zero(t, m.cache.Status().BaseBytes)
	p.release()
	require.NoError(t, src.attached.Sync(context.Background(), nil))
	src.truncate(t, 5*page.Size+150) // the base is zeroed with the replica
	src.truncate(t, pages*page.Size)
	q.add(6*page.Size + 300)
	q.release()
	require.NoError(t, src.attached.Sync(context.Background(), nil))
	require.Equal(t, make([]byte, page.Size), zeroPage[:])
	for at := 0; at < 5*page.Size; at += page.Size {
		require.Equal(t, "cpu", string(src.home.bytes(at, 3)))
		require.NotZero(t, src.home.bytes(at+100, 1)[0])
		require.NotZero(t, src.home.bytes(at+200, 1)[0])
	}
	require.Zero(t, src.home.bytes(7*page.Size, 1)[0])
	require.NotZero(t, src.home.bytes(6*page.Size+300, 1)[0])
}
