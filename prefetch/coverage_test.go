package prefetch

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gaiafs/gaiafs/internal/page"
)

func total(ahead []page.Range) (n int64) {
	for _, a := range ahead {
		n += a.Len()
	}
	return n
}

func TestCoverageFetchesNothingAtRandom(t *testing.T) {
	c := NewCoverage(DefaultCoverage)
	r := rand.New(rand.NewPCG(1, 2))
	n := int64(0)
	for range 20000 {
		n += total(access(c, pages(r.Int64N(1<<20), 1)))
	}
	require.Less(t, n, int64(1000), "of 20,000 pages that were read")
}

// TestCoverageLearnsTheSizeOfRecords reads a quarter of the file's records of 16 pages, in random order.
func TestCoverageLearnsTheSizeOfRecords(t *testing.T) {
	c := NewCoverage(DefaultCoverage)
	const records = 1 << 14
	order := rand.New(rand.NewPCG(3, 4)).Perm(records)[:records/4]
	var fetched, outside int64
	for k, record := range order {
		for i := range int64(16) {
			ahead := access(c, pages(int64(record)*16+i, 1))
			if k < 100 {
				continue
			}
			for _, a := range ahead {
				in := a.Intersect(pages(int64(record)*16, 16)).Len()
				fetched += a.Len()
				outside += a.Len() - in
			}
		}
	}
	reads := int64(records/4-100) * 16
	require.Greater(t, fetched-outside, reads*8/10, "pages of the record")
	require.Less(t, outside, reads/10)
}

func TestCoverageFollowsAFrontier(t *testing.T) {
	c := NewCoverage(DefaultCoverage)
	there := make(map[page.Index]bool)
	hits := 0
	r := rand.New(rand.NewPCG(5, 6))
	// Steps arrive in random order, within 1056 of their place.
	const steps = 64 << 10
	window := make([]int64, 0, 1056)
	next := int64(0)
	for range int64(steps) {
		for len(window) < cap(window) && next < steps {
			window = append(window, next)
			next++
		}
		k := r.IntN(len(window))
		step := window[k]
		window[k] = window[len(window)-1]
		window = window[:len(window)-1]
		if there[page.Index(step)] {
			hits++
		}
		for _, a := range access(c, pages(step, 1)) {
			for i := a.Start; i < a.End; i++ {
				there[i] = true
			}
		}
	}
	require.Greater(t, hits, steps*9/10)
}

func TestCoverageIsToldThatAccessesAreSequential(t *testing.T) {
	c := NewCoverage(DefaultCoverage)
	ahead := c.Access(pages(0, 1), Sequential, nil)
	require.EqualValues(t, 2*MinWindow-1, total(ahead), "the first 512 KiB, and the next")
	require.Empty(t, c.Access(pages(0, 1), Sequential, nil), "nothing is new")
}

func TestWhatIsAheadIsBounded(t *testing.T) {
	c := NewCoverage(CoverageOptions{Most: 1000})
	for k := range int64(1000) {
		c.Access(pages(k*5000, 1), Sequential, nil)
		require.LessOrEqual(t, c.ahead, int64(1000))
	}
	c.Unused(pages(0, 5000000))
	require.Zero(t, c.ahead)
	require.NotEmpty(t, c.Access(pages(1, 1), Sequential, nil))
}

func TestUseEarnsCreditAndDisuseCostsIt(t *testing.T) {
	c := NewCoverage(DefaultCoverage)
	for k := range int64(4096) {
		access(c, pages(k, 1))
	}
	used := c.used
	require.Greater(t, used, int64(3500))
	ahead := c.ahead
	require.Positive(t, ahead)
	c.Unused(pages(4096, 1<<14))
	require.Zero(t, c.ahead)
	require.Equal(t, max(used-4*ahead, 0), c.used)
}

// TestCoverageKeepsItsBooks reads, truncates and drops pages at random, in a file too large to be remembered whole.
func TestCoverageKeepsItsBooks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := NewCoverage(CoverageOptions{Most: 5000, Sections: 3})
		at := int64(0)
		for range rapid.IntRange(1, 300).Draw(t, "steps") {
			switch rapid.IntRange(0, 12).Draw(t, "step") {
			case 0:
				c.Resize(page.Index(rapid.Int64Range(1, 5*sectionPages).Draw(t, "end")))
			case 1:
				c.Unused(pages(at, 2000))
			case 2, 3, 4:
				at = rapid.Int64Range(0, 5*sectionPages).Draw(t, "jump")
			}
			n := rapid.Int64Range(1, 40).Draw(t, "pages")
			c.Access(pages(at, n), Pattern(rapid.IntRange(0, 2).Draw(t, "pattern")), nil)
			at += n
		}
		asked := int64(0)
		for _, k := range c.sections {
			asked += int64(k.asked.count())
			for i := range k.asked {
				require.Zero(t, k.asked[i]&k.read[i], "a page that was read is not ahead")
			}
		}
		require.Equal(t, asked, c.ahead)
		for l := range c.level {
			x := &c.level[l]
			begun, since := 0, uint64(0)
			for _, o := range x.open {
				if !o.late {
					begun++
					since += o.since
				}
			}
			require.Equal(t, begun, x.begun, "level %d", l)
			require.Equal(t, since, x.since)
		}
	})
}

func TestCoverageForgetsWhatItHasNoRoomFor(t *testing.T) {
	c := NewCoverage(CoverageOptions{Sections: 4})
	for k := range int64(100) {
		c.Access(pages(k*sectionPages, 2), Sequential, nil)
		require.LessOrEqual(t, len(c.sections), 4)
		require.Len(t, c.order, len(c.sections))
		asked := int64(0)
		for _, x := range c.sections {
			asked += int64(x.asked.count())
		}
		require.Equal(t, asked, c.ahead)
	}
	c.Resize(98*sectionPages + 10)
	require.Len(t, c.sections, 3, "of 96 to 99 all but the last")
	for l := range c.level {
		require.LessOrEqual(t, len(c.level[l].open), 2*queue+1)
	}
}
