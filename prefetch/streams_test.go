package prefetch

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

func TestAStreamIsFoundAtItsSecondAccess(t *testing.T) {
	s := NewStreams(DeviceStreams)
	require.Empty(t, access(s, pages(100, 4)))
	require.Equal(t, []page.Range{pages(108, 32)}, access(s, pages(104, 4)), "a quarter of the first window")
}

func TestASequentialStreamBeginsWithTheFirstWindow(t *testing.T) {
	s := NewStreams(DeviceStreams)
	require.Equal(t, []page.Range{pages(4, MinWindow)}, s.Access(pages(0, 4), Sequential, nil))
	for at := int64(4); at < MinWindow/2; at += 4 {
		require.Empty(t, s.Access(pages(at, 4), Sequential, nil), "more than half of the window is unread")
	}
	require.Equal(t, []page.Range{pages(4+MinWindow, MinWindow+MinWindow/2)},
		s.Access(pages(MinWindow/2, 4), Sequential, nil), "it doubles")
}

// TestStreamsThatEndEarlyMakeTheNextOnesCareful reads records of 16 pages in random order.
func TestStreamsThatEndEarlyMakeTheNextOnesCareful(t *testing.T) {
	s := NewStreams(DeviceStreams)
	var early, late int64
	for k := range int64(2000) {
		for i := range int64(16) {
			n := total(access(s, pages(k*7919%4001*5000+i, 1)))
			if k < 100 {
				early += n
			} else {
				late += n
			}
		}
	}
	require.Greater(t, early/100, int64(16))
	require.Less(t, late/1900, int64(28))
	for i := range int64(20000) {
		access(s, pages(1<<40+i, 1))
	}
	require.EqualValues(t, DeviceStreams.First/4, s.first, "a long stream restores the trust")
}

// scan reads with n pages per access. It returns how much was fetched before it was asked for, the most that was ahead
// at a time, and how much was fetched and not read.
func scan(t *testing.T, s *Streams, at func(k int64) page.Range, accesses int64) (hits, most, left int64) {
	t.Helper()
	there := make(map[page.Index]bool)
	for k := range accesses {
		rg := at(k)
		hit := true
		for i := rg.Start; i < rg.End; i++ {
			hit = hit && there[i]
			delete(there, i)
		}
		if hit {
			hits++
		}
		for _, a := range access(s, rg) {
			for i := a.Start; i < a.End; i++ {
				require.False(t, there[i], "page %d is asked for twice", i)
				there[i] = true
			}
		}
		most = max(most, int64(len(there)))
	}
	return hits, most, int64(len(there))
}

func TestWindowsGrowUpToTheirBound(t *testing.T) {
	hits, most, _ := scan(t, NewStreams(DeviceStreams), func(k int64) page.Range { return pages(16*k, 16) }, 4000)
	require.EqualValues(t, 3998, hits)
	require.EqualValues(t, MaxWindow, most)
}

func TestSeveralStreamsOfEveryKindAreToldApart(t *testing.T) {
	const far = 1 << 20
	kinds := map[string]func(k int64) page.Range{
		"forward":  func(k int64) page.Range { return pages(far*(k%8)+k/8*4, 4) },
		"backward": func(k int64) page.Range { return pages(far*(k%8+1)-(k/8+1)*4, 4) },
		"strided":  func(k int64) page.Range { return pages(far*(k%8)+k/8*100, 4) },
		"strided backward": func(k int64) page.Range {
			return pages(far*(k%8+1)-(k/8+1)*100, 4)
		},
		"mixed": func(k int64) page.Range {
			switch n := k / 4; k % 4 {
			case 0:
				return pages(n*4, 4)
			case 1:
				return pages(2*far-(n+1)*4, 4)
			case 2:
				return pages(3*far+n*64, 4)
			default:
				return pages(4*far+n*8, 8)
			}
		},
	}
	for name, at := range kinds {
		t.Run(name, func(t *testing.T) {
			hits, _, left := scan(t, NewStreams(StreamsOptions{Most: 256}), at, 1600)
			require.GreaterOrEqual(t, hits, int64(1600-3*8))
			require.LessOrEqual(t, left, int64(8*256))
		})
	}
}

func TestAccessesOfPartsOfPagesAreOneStream(t *testing.T) {
	// 10,000 bytes at a time: neighbours share a page.
	s := NewStreams(CPUStreams)
	there := page.Index(0)
	for k := range int64(500) {
		rg := page.Covering(k*10000, 10000)
		if k > 2 {
			require.GreaterOrEqual(t, there, rg.End)
		}
		for _, a := range access(s, rg) {
			there = max(there, a.End)
		}
	}
	require.Len(t, s.all, 1)
}

// TestAccessesComeInAnyOrder: several accesses in progress at once, each begun after some later ones, are one stream.
func TestAccessesComeInAnyOrder(t *testing.T) {
	for _, together := range []int64{2, 4, 8} {
		rnd := rand.New(rand.NewPCG(1, uint64(together)))
		s := NewStreams(CPUStreams)
		fetched, late := make(map[page.Index]bool), 0
		for k := int64(0); k < 1600; k += together {
			for _, i := range rnd.Perm(int(together)) {
				rg := pages((k+int64(i))*32, 32)
				if !fetched[rg.Start] && k >= 200 {
					late++
				}
				for _, a := range access(s, rg) {
					for p := a.Start; p < a.End; p++ {
						fetched[p] = true
					}
				}
			}
		}
		require.LessOrEqual(t, late, 16, "%d at once", together)
	}
}

func TestReadingAPageAgainChangesNothing(t *testing.T) {
	s := NewStreams(DeviceStreams)
	access(s, pages(0, 16))
	access(s, pages(16, 16))
	before := s.all[0]
	require.Empty(t, access(s, pages(20, 4)))
	before.used++
	require.Equal(t, []stream{before}, s.all)
	require.NotEmpty(t, access(s, pages(32, 16)), "the stream goes on")
}

func TestAJumpIsNotAStream(t *testing.T) {
	s := NewStreams(DeviceStreams)
	for k := range int64(200) {
		require.Empty(t, access(s, pages(k*7919%4001*5000, 1)))
	}
	require.Len(t, s.all, DeviceStreams.Table)
}

func TestWindowsShrinkWithWhatIsUnused(t *testing.T) {
	s := NewStreams(DeviceStreams)
	for k := range int64(10) {
		access(s, pages(k*16, 16))
	}
	window := s.all[0].window
	require.Greater(t, window, int64(MinWindow))
	s.Unused(pages(200, 16))
	require.Equal(t, window/2, s.all[0].window)
	s.Unused(pages(1<<30, 16))
	require.Equal(t, window/2, s.all[0].window, "the stream did not fetch that")
	for range 20 {
		s.Unused(pages(200, 16))
	}
	require.Zero(t, s.all[0].window)
	require.Empty(t, access(s, pages(1<<20, 1)))
	require.NotEmpty(t, access(s, pages(160, 16)), "and is found again when it goes on")
}

func TestATruncatedFileEndsItsStreams(t *testing.T) {
	s := NewStreams(DeviceStreams)
	access(s, pages(1000, 16))
	access(s, pages(1016, 16))
	s.Resize(500)
	require.Empty(t, s.all)
	s.Resize(600)
	access(s, pages(550, 16))
	require.Equal(t, []page.Range{pages(582, 18)}, access(s, pages(566, 16)), "nothing past end of file")
	access(s, pages(582, 16))
	require.Empty(t, access(s, pages(598, 2)))
}
