package prefetch

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gaiafs/gaiafs/internal/page"
)

// pages returns the n pages from start on.
func pages(start, n int64) page.Range {
	return page.Range{Start: page.Index(start), End: page.Index(start + n)}
}

// access makes one access of unknown pattern.
func access(p Predictor, rg page.Range) []page.Range { return p.Access(rg, Unknown, nil) }

func TestPredictorsAreMadeByName(t *testing.T) {
	require.Contains(t, Names(), "coverage")
	for _, name := range Names() {
		p, err := New(name)
		require.NoError(t, err)
		require.NotNil(t, p)
		require.NotEmpty(t, About(name))
	}
	_, err := New("oracle")
	require.ErrorContains(t, err, "none, kernel, tree")
	require.Empty(t, About("oracle"))
}

// TestPredictionsLieWithinTheFile drives every predictor with accesses, changes of size and drops, in any order.
func TestPredictionsLieWithinTheFile(t *testing.T) {
	for _, name := range Names() {
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				p, err := New(name)
				require.NoError(t, err)
				end := page.Index(rapid.Int64Range(0, 20000).Draw(t, "end"))
				p.Resize(end)
				at := int64(0)
				for range rapid.IntRange(1, 200).Draw(t, "steps") {
					n := rapid.SampledFrom([]int64{1, 1, 1, 3, 16, 32, 600}).Draw(t, "pages")
					switch rapid.IntRange(0, 9).Draw(t, "step") {
					case 0:
						end = page.Index(rapid.Int64Range(0, 20000).Draw(t, "end"))
						p.Resize(end)
						continue
					case 1:
						p.Unused(pages(at, n))
						continue
					case 2:
						at = rapid.Int64Range(0, 20000).Draw(t, "jump")
					case 3:
						at = max(at-2*n, 0)
					}
					pattern := rapid.SampledFrom([]Pattern{Unknown, Unknown, Unknown, Sequential, Random}).Draw(t,
						"pattern")
					rg := pages(at, n).Intersect(page.Range{End: end})
					before := []page.Range{{Start: 1, End: 2}}
					ahead := p.Access(rg, pattern, before[:1:1])
					require.Equal(t, before[0], ahead[0])
					if pattern == Random {
						require.Len(t, ahead, 1)
					}
					total := int64(0)
					for _, a := range ahead[1:] {
						require.False(t, a.Empty())
						require.GreaterOrEqual(t, a.Start, page.Index(0))
						require.LessOrEqual(t, a.End, end)
						total += a.Len()
					}
					require.LessOrEqual(t, total, int64(2*MaxWindow)+n+treeRegion*treeBlock)
					at += n
				}
			})
		})
	}
}

// TestWithoutASizeTheFileHasNoEnd: predictors work before they are told where the file ends.
func TestWithoutASizeTheFileHasNoEnd(t *testing.T) {
	for _, name := range Names() {
		p, err := New(name)
		require.NoError(t, err)
		last := int64(endless) - 8
		for i := range int64(8) {
			for _, a := range p.Access(pages(last+i, 1), Sequential, nil) {
				require.LessOrEqual(t, a.End, endless, name)
			}
		}
	}
}

func TestTreeFetchesTheRestOfWhatIsMostlyThere(t *testing.T) {
	tree := NewTree()
	block := func(k, n int64) page.Range { return pages(k*treeBlock, n*treeBlock) }
	require.Equal(t, []page.Range{block(0, 1)}, access(tree, pages(3, 1)), "the block of the page")
	require.Empty(t, access(tree, pages(4, 2)), "the block is on its way")
	require.Equal(t, []page.Range{block(2, 1)}, access(tree, pages(2*treeBlock, 1)), "2 of 4 is not more than half")
	require.Equal(t, []page.Range{block(1, 1), block(3, 1)}, access(tree, pages(treeBlock, 1)), "3 of 4 is")
}

func TestTreeCountsOnlyWithinARegion(t *testing.T) {
	tree := NewTree()
	fetched := int64(0)
	for k := int64(0); k < treeRegion; k += 2 {
		for _, a := range access(tree, pages(k*treeBlock, 1)) {
			require.LessOrEqual(t, a.End, page.Index(treeRegion*treeBlock))
			fetched += a.Len()
		}
	}
	require.EqualValues(t, treeRegion*treeBlock/2, fetched, "every other block is never more than half")
	require.EqualValues(t, treeRegion*treeBlock/2, total(access(tree, pages(treeBlock, 1))),
		"one more is, on every level")
	require.Empty(t, access(tree, pages((treeRegion-1)*treeBlock, 1)))
	tree.Unused(pages(0, treeRegion*treeBlock))
	require.NotEmpty(t, access(tree, pages(0, 1)), "what was dropped is fetched again")
	tree.Resize(0)
	require.Empty(t, tree.regions[0])
}

func TestKernelDoublesItsWindow(t *testing.T) {
	k := NewKernel(32)
	var windows []page.Range
	for i := range int64(92) {
		windows = append(windows, access(k, pages(i, 1))...)
	}
	require.Equal(t, []page.Range{pages(0, 4), pages(4, 8), pages(12, 16), pages(28, 32), pages(60, 32), pages(92, 32)},
		windows)
}

func TestKernelReadsWhatIsAskedForAtRandom(t *testing.T) {
	k := NewKernel(32)
	access(k, pages(1000, 1))
	for i := range int64(50) {
		require.Empty(t, access(k, pages((i*7919)%5000*3+7, 1)))
	}
}

func TestSetKnowsItsPages(t *testing.T) {
	s := make(set)
	s.add(pages(4090, 20))
	require.True(t, s.has(4090))
	require.True(t, s.has(4109))
	require.False(t, s.has(4110))
	s.drop(pages(4095, 2))
	require.False(t, s.has(4095))
	require.False(t, s.has(4096))
	require.True(t, s.has(4097))
	s.drop(pages(1<<30, 1<<14))
	s.resize(4100)
	require.True(t, s.has(4099))
	require.False(t, s.has(4100))
	s.resize(4096)
	require.Len(t, s, 1)
}
