package view

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/page"
)

func TestLayoutRefuses(t *testing.T) {
	one := Segment{Offset: 0, Length: 1, Count: 1}
	for name, c := range map[string]struct {
		files, alignment int
		segments         []Segment
		want             string
	}{
		"no segments":     {1, 256, nil, "a view of 0 segments"},
		"too many":        {1, 256, slices.Repeat([]Segment{one}, MaxSegments+1), "segments; it has 1 to"},
		"no files":        {0, 256, []Segment{one}, "a view of 0 files"},
		"too many files":  {MaxFiles + 1, 256, []Segment{one}, "files; it has 1 to"},
		"alignment 0":     {1, 0, []Segment{one}, "the alignment 0"},
		"alignment 3":     {1, 3, []Segment{one}, "the alignment 3"},
		"alignment 4 MiB": {1, 4 << 20, []Segment{one}, "the alignment 4194304"},
		"no such file":    {1, 1, []Segment{{File: 1, Length: 1, Count: 1}}, "segment 0: there is no file 1"},
		"negative offset": {1, 1, []Segment{one, {Offset: -1, Length: 1, Count: 1}},
			"segment 1: its offset is 18446744073709551615"},
		"no length":    {1, 1, []Segment{{Count: 1}}, "the length 0"},
		"no count":     {1, 1, []Segment{{Length: 1}}, "the count 0"},
		"rows overlap": {1, 1, []Segment{{Length: 2, Stride: 1, Count: 2}}, "the stride 1 is less"},
		"past the end": {1, 1, []Segment{{Offset: math.MaxInt64, Length: 1, Count: 1}},
			"ends past the largest file"},
		"stride x count": {1, 1, []Segment{{Length: 1, Stride: math.MaxInt64 / 2, Count: 4}},
			"ends past the largest file"},
		"many rows": {1, 1, []Segment{{Length: 1, Stride: 1, Count: MaxRows + 1}}, "rows"},
		"rows in all": {1, 1, []Segment{{Length: 1, Stride: 1, Count: MaxRows}, one},
			"segment 1: the view has more than"},
		"too large": {1, 1, slices.Repeat([]Segment{{Length: 1 << 61, Count: 1}}, 4), "larger than 2^62"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := New(c.files, c.segments, int64(c.alignment))
			require.ErrorContains(t, err, c.want)
		})
	}
	l, err := New(1, []Segment{{Offset: math.MaxInt64 - 1, Length: 1, Count: 1}}, 256)
	require.NoError(t, err)
	assert.Equal(t, page.Bytes{Off: math.MaxInt64 - 1, End: math.MaxInt64}, l.File(0).Span())
}

func TestLayoutPacks(t *testing.T) {
	l, err := New(2, []Segment{
		{Offset: 100, Length: 10, Count: 1},
		{File: 1, Offset: 0, Length: 3, Stride: 7, Count: 4},
		{Offset: 90, Length: 300, Count: 1},
	}, 256)
	require.NoError(t, err)
	assert.Equal(t, []int64{0, 256, 512}, l.starts)
	assert.EqualValues(t, 812, l.Size())
	assert.Equal(t, []Run{{90, 512, 12}, {100, 0, 2}}, slices.Collect(l.File(0).Runs(page.Span(0, 102))))
	assert.Equal(t, []Run{{9, 261, 1}, {14, 262, 3}, {21, 265, 1}}, slices.Collect(l.File(1).Runs(page.Span(9, 13))))
}

// anyLayout returns a layout of random segments of files of some pages.
func anyLayout(t *testing.T, rng *rand.Rand, size int64) *Layout {
	files := 1 + rng.IntN(3)
	var segments []Segment
	for range 1 + rng.IntN(40) {
		s := Segment{File: rng.IntN(files), Offset: rng.Int64N(size), Count: 1}
		s.Length = 1 + rng.Int64N(min(size-s.Offset, 1<<(1+rng.IntN(17))))
		if rng.IntN(2) == 0 {
			s.Length = min(s.Length, 1+rng.Int64N(6000))
			s.Stride = s.Length + rng.Int64N(3)*rng.Int64N(9000)
			s.Count = 1 + rng.Int64N(max(1, (size-s.Offset-s.Length)/s.Stride))
		}
		segments = append(segments, s)
	}
	l, err := New(files, segments, 1<<rng.IntN(10))
	require.NoError(t, err)
	return l
}

// byHand returns, for each byte of the view, its file and its offset there; -1 is padding.
func byHand(l *Layout) (file []int, at []int64) {
	file, at = slices.Repeat([]int{-1}, int(l.Size())), make([]int64, l.Size())
	for i, s := range l.Segments() {
		for k := range s.Count {
			for b := range s.Length {
				v := l.starts[i] + k*s.Length + b
				file[v], at[v] = s.File, s.Offset+k*s.Stride+b
			}
		}
	}
	return file, at
}

func TestRandomLayouts(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	const size = 100 * page.Size
	for range 60 {
		l := anyLayout(t, rng, size)
		file, at := byHand(l)
		for range 20 {
			checkRuns(t, rng, l, file, at, size)
			checkSources(t, rng, l, file, at)
		}
		checkState(t, rng, l, file, at)
	}
}

func anyBytes(rng *rand.Rand, size int64) page.Bytes {
	off := rng.Int64N(size)
	return page.Span(off, 1+rng.Int64N(min(size-off, 1<<(1+rng.IntN(18)))))
}

// checkRuns compares the runs of some bytes of a file with a byte-by-byte search.
func checkRuns(t *testing.T, rng *rand.Rand, l *Layout, file []int, at []int64, size int64) {
	i := rng.IntN(len(l.files))
	b := anyBytes(rng, size)
	var want, got []int64 // places in the view
	for v := range file {
		if file[v] == i && at[v] >= b.Off && at[v] < b.End {
			want = append(want, int64(v))
		}
	}
	for r := range l.File(i).Runs(b) {
		for k := range r.Len {
			if r.Off+k != at[r.View+k] {
				require.Equal(t, r.Off+k, at[r.View+k])
			}
			got = append(got, r.View+k)
		}
	}
	slices.Sort(got)
	require.Equal(t, want, got, "bytes %v of file %d", b, i)
	checkRows(t, l.File(i), b)
	require.Equal(t, len(want) > 0, l.File(i).Has(b))
}

// checkRows checks that Rows yields the same runs as a walk over all rows of all segments, in few groups.
func checkRows(t *testing.T, f *File, b page.Bytes) {
	places := make(map[Run]int) // runs of one byte
	for _, i := range f.order {
		s := f.l.segments[i]
		for k := range s.Count {
			row := page.Span(s.Offset+k*s.Stride, s.Length)
			for at := max(row.Off, b.Off); at < min(row.End, b.End); at++ {
				places[Run{at, f.l.starts[i] + k*s.Length + at - row.Off, 1}]++
			}
		}
	}
	groups := 0
	for r := range f.Rows(b) {
		groups++
		require.Positive(t, r.Count)
		require.Equal(t, r.Span(), r.Span().Intersect(b))
		for k := range r.Count {
			for at := range r.Len {
				x := Run{r.Off + k*r.Stride + at, r.View + k*r.Len + at, 1}
				if places[x]--; places[x] == 0 {
					delete(places, x)
				}
			}
		}
	}
	require.Empty(t, places)
	require.LessOrEqual(t, groups, 3*len(f.order))
}

// checkSources checks that the sources of some bytes of the view include all of them, and no more than their rows.
func checkSources(t *testing.T, rng *rand.Rand, l *Layout, file []int, at []int64) {
	view := anyBytes(rng, l.Size())
	var sources []Segment
	for i, b := range l.Sources(view) {
		sources = append(sources, Segment{File: i, Offset: b.Off, Length: b.Len()})
	}
	for v := view.Off; v < view.End; v++ {
		if file[v] >= 0 && !slices.ContainsFunc(sources, func(s Segment) bool {
			return s.File == file[v] && s.Offset <= at[v] && at[v] < s.Offset+s.Length
		}) {
			require.Fail(t, "no source", "byte %d of the view", v)
		}
	}
}

// checkState compares a State with a set of pages.
func checkState(t *testing.T, rng *rand.Rand, l *Layout, file []int, at []int64) {
	i := rng.IntN(len(l.files))
	has := make(map[page.Index]bool)
	for v := range file {
		if file[v] == i {
			has[page.Index(at[v]>>page.Shift)] = true
		}
	}
	s, want := NewState(l.File(i)), make(map[page.Index]bool)
	for p := range has {
		want[p] = true
	}
	for range 30 {
		rg := anyBytes(rng, 120*page.Size).Pages()
		if rng.IntN(2) == 0 {
			s.Mark(rg)
			for p := rg.Start; p < rg.End; p++ {
				if has[p] {
					want[p] = true
				}
			}
			continue
		}
		got := make(map[page.Index]bool)
		gap := rng.Int64N(5)
		stale, pages, next := s.Take(rg, math.MaxInt64, math.MaxInt64, gap, 1)
		s.Arrived(rg)
		require.Equal(t, rg.End, next)
		for k, r := range stale {
			require.False(t, k > 0 && r.Start <= stale[k-1].End)
			for p, missing := r.Start, int64(0); p < r.End; p++ {
				if missing++; has[p] {
					got[p], missing = true, 0
				}
				require.LessOrEqual(t, missing, gap, "page %d of %v", p, r)
			}
		}
		require.Len(t, got, int(pages))
		for p := range want {
			require.Equal(t, rg.Contains(p), got[p], "page %d of %v", p, rg)
			if rg.Contains(p) {
				delete(want, p)
				delete(got, p)
			}
		}
		require.Empty(t, got)
	}
	_, _, _ = s.Take(page.From(0).Pages(), math.MaxInt64, math.MaxInt64, 0, 1)
	s.Arrived(page.From(0).Pages())
	require.True(t, s.Fresh())
}

// TestSplit: pages are stale, coming or there, and a caller need not wait for pages taken after its own.
func TestSplit(t *testing.T) {
	l, err := New(1, []Segment{{Length: 100 * page.Size, Count: 1}}, 256)
	require.NoError(t, err)
	s := NewState(l.File(0))
	rg := func(start, end page.Index) []page.Range { return []page.Range{{Start: start, End: end}} }
	all := rg(0, 100)
	s.Take(page.Range{End: 60}, math.MaxInt64, math.MaxInt64, 0, 5)
	s.Arrived(page.Range{End: 20})
	s.Mark(page.Range{Start: 10, End: 12})
	s.Mark(page.Range{Start: 30, End: 32})

	there, coming, lack, moved := s.Split(rg(0, 200), 6)
	assert.Equal(t, []page.Range{{Start: 0, End: 10}, {Start: 12, End: 20}}, there)
	assert.Equal(t, []page.Range{{Start: 20, End: 30}, {Start: 32, End: 60}}, coming)
	assert.Equal(t, []page.Range{{Start: 10, End: 12}, {Start: 30, End: 32}, {Start: 60, End: 100}},
		page.Subtract(lack, page.Range{Start: 100, End: 200}))
	_, coming, lack, _ = s.Split(all, 5)
	assert.Empty(t, coming)
	assert.Equal(t, []page.Range{{Start: 10, End: 12}, {Start: 20, End: 100}}, lack)

	s.Arrived(page.Range{Start: 20, End: 40})
	<-moved
	there, _, _, moved = s.Split(all, 6)
	assert.Equal(t, []page.Range{{Start: 0, End: 10}, {Start: 12, End: 30}, {Start: 32, End: 40}}, there)
	s.GaveUp()
	<-moved
	_, coming, lack, _ = s.Split(all, 6)
	assert.Empty(t, coming)
	assert.Equal(t, []page.Range{{Start: 10, End: 12}, {Start: 30, End: 32}, {Start: 40, End: 100}}, lack)
}

// TestClaims: coming pages can be claimed once, until they are returned. Pages that changed after Take cannot be
// claimed, whether they have arrived or not.
func TestClaims(t *testing.T) {
	l, err := New(1, []Segment{{Length: page.Size, Stride: 4 * page.Size, Count: 25},
		{Offset: 96 * page.Size, Length: 4 * page.Size, Count: 1}}, 256)
	require.NoError(t, err)
	s := NewState(l.File(0))
	all := page.Range{End: 200}
	rg := func(start, end page.Index) []page.Range { return []page.Range{{Start: start, End: end}} }
	assert.Empty(t, s.Claim(all, 8), "nothing is coming")
	s.Take(page.Range{End: 40}, math.MaxInt64, math.MaxInt64, 0, 1)
	assert.Equal(t, rg(8, 13), s.Claim(page.Range{Start: 5, End: 16}, 3),
		"gaps without bytes of the view are covered")
	assert.Equal(t, []page.Range{{Start: 4, End: 5}, {Start: 16, End: 17}}, s.Claim(page.Range{Start: 3, End: 18}, 3),
		"gaps with claimed pages are not")
	s.Mark(page.Range{Start: 8, End: 9})
	assert.Empty(t, s.Claim(page.Range{Start: 4, End: 16}, 0), "it is claimed")
	s.Arrived(page.Range{Start: 8, End: 9})
	assert.Empty(t, s.Claim(page.Range{Start: 4, End: 16}, 0), "it is stale, and not coming")
	s.Return(page.Range{Start: 12, End: 13})
	assert.Equal(t, rg(12, 13), s.Claim(page.Range{Start: 4, End: 16}, 0))
	assert.Equal(t, rg(36, 37), s.Claim(page.Range{Start: 34, End: 200}, 3), "the other pages were not taken")
	s.Arrived(page.Range{Start: 4, End: 200})
	assert.Equal(t, rg(0, 1), s.Coming())
	s.Mark(page.Range{Start: 0, End: 1})
	assert.Equal(t, rg(0, 1), s.Claim(all, 0), "it is stale, but also coming")
	s.Return(page.Range{Start: 0, End: 1})
	s.GaveUp()
	taken, _, _ := s.Take(page.Range{End: 40}, math.MaxInt64, math.MaxInt64, 0, 2)
	assert.Equal(t, []page.Range{{Start: 0, End: 1}, {Start: 8, End: 9}}, taken)
}

// TestStateOfLargeFiles: only sections with bytes of the view are taken, one part at a time.
func TestStateOfLargeFiles(t *testing.T) {
	const tera = 1 << 40
	l, err := New(1, []Segment{
		{Offset: 5, Length: 10, Stride: tera, Count: 1000},
		{Offset: 1 << 30, Length: 1 << 30, Count: 1},
	}, 256)
	require.NoError(t, err)
	s := NewState(l.File(0))
	assert.Len(t, s.sections, 1000+8)
	assert.GreaterOrEqual(t, l.Memory(), int64(1008*stateSection))
	assert.Less(t, l.Memory(), int64(3*1008*stateSection))
	var all []page.Range
	for next := page.Index(0); ; {
		stale, _, to := s.Take(page.Range{Start: next, End: page.From(0).Pages().End}, sectionPages, sectionPages, 0, 1)
		if all = append(all, stale...); len(stale) == 0 {
			break
		}
		next = to
		s.Arrived(page.From(0).Pages())
	}
	assert.Len(t, all, 1000+8)
	assert.True(t, s.Fresh())
	s.Mark(page.Range{Start: 1 << 28, End: 1<<28 + 1})
	stale, _, _ := s.Take(page.From(0).Pages(), 1, 1, 0, 1)
	assert.Equal(t, []page.Range{{Start: 1 << 28, End: 1<<28 + 1}}, stale)
}

// TestGivenUpSections: what a fill of whole sections did not bring is stale again, and nothing else.
func TestGivenUpSections(t *testing.T) {
	const size = 3 * sectionPages
	l, err := New(1, []Segment{{Length: size * page.Size, Count: 1}}, 256)
	require.NoError(t, err)
	s, all := NewState(l.File(0)), page.From(0).Pages()
	_, pages, _ := s.Take(all, math.MaxInt64, math.MaxInt64, 0, 1)
	require.EqualValues(t, size, pages)
	s.Claim(page.Range{Start: size - 5, End: size}, 0)
	s.Arrived(page.Range{End: sectionPages + 7})
	s.GaveUp()
	require.Empty(t, s.Coming())
	taken, _, _ := s.Take(all, math.MaxInt64, math.MaxInt64, 0, 2)
	require.Equal(t, []page.Range{{Start: sectionPages + 7, End: size}}, taken)
	require.Equal(t, taken, s.Claim(all, 0), "nothing is claimed still")
}
