package pagecache

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

// storeAndEdit stores one byte on a device in so many places of a page, and changes the byte next to each in SOURCE. It
// returns the merged page.
func storeAndEdit(p *program, src *source, at page.Index, places int) (merged []byte) {
	off := int(at.Offset())
	merged = src.home.bytes(off, page.Size)
	for i := range places {
		k := i * page.Size / places
		p.add(off + k)
		merged[k]++
		merged[k+40]++
		src.home.editAt(off+k+40, []byte{merged[k+40]})
	}
	return merged
}

// TestSearchForBasesIsBounded counts the tried mixtures when very many pages changed on both sides in so many places
// that no base is found. It is no more than a few for each compared page; unused tries go to later pages. A page that
// changed in few places is settled even behind all of these.
func TestSearchForBasesIsBounded(t *testing.T) {
	const pages = 300
	m := newMachine(t, 1)
	src := m.noisyFile(pages * page.Size)
	p := m.run(src, 0, 0, pages*page.Size, true)
	for at := page.Index(0); at < pages-1; at++ {
		storeAndEdit(p, src, at, 20)
	}
	want := storeAndEdit(p, src, pages-1, 3)
	f := src.attached
	f.mu.Lock()
	require.NoError(t, f.lookLocked(t.Context()))
	tries := 0
	require.NoError(t, f.settlePartLocked(t.Context(), page.Range{End: pages}, &tries))
	f.doubt = nil
	f.mu.Unlock()
	require.GreaterOrEqual(t, tries, 0, "more than %d a page were tried", pageTries)
	require.Less(t, tries, pageTries*pages/2, "none were tried")
	require.EqualValues(t, pages-1, m.baseless())
	p.acquire()
	requireSame(t, want, bytes.Clone(p.load((pages-1)*page.Size, pages*page.Size)))
}

// TestSharesOfTries: other pages get the tries that a page does not take, and no page takes more than mostTries.
func TestSharesOfTries(t *testing.T) {
	require.Equal(t, 25, triesFor(100, 4))
	require.Equal(t, 33, triesFor(99, 3))
	require.Equal(t, mostTries, triesFor(10*mostTries, 2))
	require.Zero(t, triesFor(0, 7))
}

// TestHomeThatIsChangedBackAndForth: a page in SOURCE differs whenever a base is to be kept, and is as before when it
// is compared. The waiting call fails after a while, and loses nothing.
func TestHomeThatIsChangedBackAndForth(t *testing.T) {
	for name, call := range map[string]func(src *source) error{
		"collect": func(src *source) error { return src.attached.Sync(t.Context(), nil) },
		"write": func(src *source) error {
			return src.attached.ChangeHome(t.Context(), Change{Kind: ChangeWrite, Off: 50, Len: 10},
				func(int64, int64) error { panic("it changes home") })
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, 2)
			src := m.noisyFile(2 * page.Size)
			m.run(src, 0, 0, 2*page.Size, true)
			p := m.run(src, 1, 0, 2*page.Size, true)
			p.add(0)
			if name == "collect" {
				p.release()
			}
			want := src.home.bytes(0, 2*page.Size)
			reads := 0
			src.home.beforeRead = func(page.Bytes) {
				src.home.data[100] = want[100]
				// A bug would loop forever without this bound.
				if reads++; !src.attached.doubtfulLocked(page.Range{End: 1}) && reads < 10_000 {
					src.home.data[100]++
				}
			}
			require.ErrorContains(t, call(src), "keeps being changed directly")
			require.Less(t, reads, 1000)
			src.home.beforeRead = nil
			src.home.data[100] = want[100]
			src.attached.home.ChangedBeside()
			p.release()
			require.NoError(t, src.attached.Sync(t.Context(), nil))
			want[0]++
			requireSame(t, want, src.home.bytes(0, 2*page.Size))
		})
	}
}
