package plot

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// elements parses a chart, which must be well-formed, and returns the attributes of its elements of one name.
func elements(t *testing.T, svg, name string) (all []map[string]string) {
	t.Helper()
	for d := xml.NewDecoder(strings.NewReader(svg)); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return all
		}
		require.NoError(t, err, svg)
		if start, ok := token.(xml.StartElement); ok && start.Name.Local == name {
			attributes := make(map[string]string)
			for _, a := range start.Attr {
				attributes[a.Name.Local] = a.Value
			}
			all = append(all, attributes)
		}
	}
}

func number(t *testing.T, text string) float64 {
	t.Helper()
	v, err := strconv.ParseFloat(text, 64)
	require.NoError(t, err)
	require.False(t, math.IsNaN(v) || math.IsInf(v, 0), text)
	return v
}

func TestLinesLieWhereTheirValuesAre(t *testing.T) {
	for _, log := range []bool{false, true} {
		l := Lines{Title: "a < b", X: "x", Y: "MB/s", Ticks: []string{"0", "50", "100"}, Log: log, Level: 1,
			Series: []Series{
				{"one & only", 0, []Point{{0, 1, 0.9, 1.1, "first"}, {2, 4, 3, 5, "last"}, {1, 2, 2, 2, "between"}}},
				{"other", 1, []Point{{0, 1, 1, 1, "same"}}},
			}}
		marks := elements(t, l.SVG(), "circle")
		require.Len(t, marks, 3+1+2, "points, and the legend")
		x := func(i int) float64 { return number(t, marks[i]["cx"]) }
		y := func(i int) float64 { return number(t, marks[i]["cy"]) }
		require.Less(t, x(0), x(1))
		require.Less(t, x(1), x(2), "points are in the order of the axis")
		require.Greater(t, y(0), y(1))
		if log {
			require.InDelta(t, y(0)-y(1), y(1)-y(2), 0.2, "doubling is the same everywhere")
		} else {
			require.InDelta(t, 2*(y(0)-y(1)), y(1)-y(2), 0.2)
		}
		require.Len(t, elements(t, l.SVG(), "polyline"), 1, "one point makes no line")
	}
}

func TestRatiosLieAroundOne(t *testing.T) {
	r := Ratios{Title: "t", Lines: []Ratio{
		{Name: "n", Against: "a", Median: 0.5, Low: 0.4, High: 0.6, Limit: 1, Class: "missed", Title: "half"},
		{Name: "n", Against: "b", Median: 2, Low: 2, High: 2, Class: "c0"},
		{Name: "m", Against: "b", Median: 1, Low: 1, High: 1, Class: "c0"},
	}}
	marks := elements(t, r.SVG(), "circle")
	require.Len(t, marks, 3)
	half, twice, one := number(t, marks[0]["cx"]), number(t, marks[1]["cx"]), number(t, marks[2]["cx"])
	require.InDelta(t, one-half, twice-one, 0.2)
	require.Equal(t, 1, strings.Count(r.SVG(), ">n</text>"), "a name stands once")
}

// Whatever the values, an axis has a few ticks within its bounds.
func TestAxesHaveTicks(t *testing.T) {
	for _, values := range [][]float64{{}, {0}, {1}, {0.001}, {999, 1001}, {3, 40000}, {1e-3, 1e6}, {math.Inf(1), 2}} {
		for _, a := range []*axis{logAxis(100, 0, values...), zeroAxis(100, 0, values...)} {
			require.NotEmpty(t, a.ticks, "%v", values)
			require.LessOrEqual(t, len(a.ticks), 12, "%v", values)
			for _, k := range a.ticks {
				require.GreaterOrEqual(t, a.at(k.at), -0.1, "%v", values)
				require.LessOrEqual(t, a.at(k.at), 100.1, "%v", values)
			}
		}
	}
}

func TestNumbersOfAxesAreShort(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 0.05: "0.05", 1.5: "1.5", 200: "200", 10000: "10k", 25000: "25k"} {
		require.Equal(t, want, short(v))
	}
}
