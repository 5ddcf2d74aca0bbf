package pagecache

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// TestAppendedHomeIsKept appends to home directly in SOURCE while a device has the last page, with and without bytes
// stored past the end, and with little memory for bases. The appended bytes must reach the device, and stay.
func TestAppendedHomeIsKept(t *testing.T) {
	const end, added = page.Size + 1000, 2 * page.Size
	for _, full := range []bool{false, true} {
		for _, past := range []bool{false, true} {
			m := newMachine(t, 2)
			src := m.file(end)
			src.home.editAt(0, bytes.Repeat([]byte{5}, end))
			p, q := m.run(src, 0, 0, 4*page.Size, true), m.run(src, 1, 0, 4*page.Size, false)
			if past {
				p.store(end+1, 9)
			}
			p.store(end-1, 6)
			src.home.resize(end + added)
			src.home.editAt(end, bytes.Repeat([]byte{7}, added))
			want := src.home.bytes(0, end+added)
			want[end-1] = 6
			var others int64
			if full {
				others = m.cache.memory.left() + 1
			}
			m.cache.memory.charge(memoryViews, others)
			_, err := src.attached.CheckHome(context.Background())
			m.cache.memory.charge(memoryViews, -others)
			require.NoError(t, err)
			p.release()
			p.acquire()
			q.acquire()
			requireSame(t, want, p.load(0, len(want)))
			requireSame(t, want, q.load(0, len(want)))
			require.NoError(t, src.attached.Sync(context.Background(), nil))
			requireSame(t, want, src.home.bytes(0, len(want)))
		}
	}
}

// TestAppendedHomeThatWasFilledIsKept fills a device after home became longer, and before the next look.
func TestAppendedHomeThatWasFilledIsKept(t *testing.T) {
	const end = 1000
	m := newMachine(t, 1)
	src := m.file(end)
	mp, err := m.cache.Map(context.Background(), src, MapRequest{Len: page.Size, Writable: true, Lazy: true})
	require.NoError(t, err)
	p := m.attach(mp, 0, page.Size, true)
	src.home.resize(end + 10)
	src.home.editAt(end, bytes.Repeat([]byte{7}, 10))
	f := src.attached
	f.mu.Lock()
	noticed := f.home.LookedAt()
	_, _ = f.home.Look()
	f.home.HasLookedAt(f.home.Noticed()) // as if the change came right after the look
	require.NoError(t, f.acquireAllLocked(context.Background(), p.Mapping.h, page.Range{End: 1}))
	f.home.HasLookedAt(noticed)
	f.mu.Unlock()
	_, err = f.CheckHome(context.Background())
	require.NoError(t, err)
	p.store(0, 3)
	p.release()
	require.NoError(t, f.Sync(context.Background(), nil))
	want := append(make([]byte, end), bytes.Repeat([]byte{7}, 10)...)
	want[0] = 3
	requireSame(t, want, src.home.bytes(0, end+10))
	p.acquire()
	requireSame(t, want, p.load(0, end+10))
}

// TestAppendedBetweenLookAndCollect appends directly in SOURCE during a change, when nobody looks.
func TestAppendedBetweenLookAndCollect(t *testing.T) {
	const end = 1000
	m := newMachine(t, 1)
	src := m.file(end)
	p := m.run(src, 0, 0, 2*page.Size, true)
	p.store(0, 3)
	p.release()
	added := bytes.Repeat([]byte{7}, page.Size)
	f := src.attached
	f.mu.Lock()
	src.home.resize(end + len(added))
	src.home.editAt(end, added)
	_, _ = f.home.Look()
	noticed := f.home.LookedAt()
	f.home.HasLookedAt(f.home.Noticed())
	require.NoError(t, f.collectLocked(context.Background(), page.Range{End: 2}, false))
	f.home.HasLookedAt(noticed)
	f.mu.Unlock()
	want := append(make([]byte, end), added...)
	want[0] = 3
	requireSame(t, want, src.home.bytes(0, len(want)))
	p.acquire()
	requireSame(t, want, p.load(0, len(want)))
}

// TestMemoryIsSettledBeforeItIsGiven changes a page in SOURCE that a program uses. Then another program is given the
// memory around that page.
func TestMemoryIsSettledBeforeItIsGiven(t *testing.T) {
	m := newMachine(t, 1)
	src := m.noisyFile(8 * page.Size)
	p := m.run(src, 0, page.Size, 3*page.Size, true)
	src.home.editAt(3*page.Size, make([]byte, page.Size))
	m.run(src, 0, 5*page.Size, page.Size, true)
	requireSame(t, make([]byte, page.Size), p.load(2*page.Size, 3*page.Size))
}
