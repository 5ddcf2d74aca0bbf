package rows

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSummarise(t *testing.T) {
	s := Summarise([]float64{5, 1, 3, 2, 4})
	require.Equal(t, Summary{Median: 3, Q1: 2, Q3: 4, Min: 1, Max: 5}, s)
	require.Equal(t, Summary{Median: 7, Q1: 7, Q3: 7, Min: 7, Max: 7}, Summarise([]float64{7}))
	require.InDelta(t, 1.75, Summarise([]float64{1, 2, 3, 4}).Q1, 1e-9)
}

func TestRatiosAreSpeedOverSpeed(t *testing.T) {
	require.Equal(t, []float64{2, 0.5}, ratios([]float64{20, 5}, []float64{10, 10}, true))
	require.Equal(t, []float64{0.5, 2}, ratios([]float64{20, 5}, []float64{10, 10}, false))
	require.Empty(t, ratios([]float64{1}, []float64{0}, true), "nothing is divided by zero")
}

// fixed is a side that returns these values in turn.
func fixed(name string, values ...float64) Side {
	i := 0
	return Side{Name: name, Measure: func(context.Context) (float64, error) {
		i++
		return values[i-1], nil
	}}
}

func TestRowsAreInterleavedAndJudged(t *testing.T) {
	r := Row{
		Group: "g", Name: "n", Unit: MBPerSecond,
		Sides: []Side{fixed("gaiafs", 10, 30, 20), fixed("slow", 5, 10, 10), fixed("same", 11, 30.1, 19),
			fixed("fast", 20, 60, 41)},
		Targets: []Target{
			{Against: "slow", Limit: 1}, {Against: "same", Limit: 1}, {Against: "fast", Limit: 1}, {Limit: 19},
			{Limit: 25},
		},
	}
	var order []string
	res, err := r.Run(context.Background(), 3, func(_, _ int, side string) { order = append(order, side) })
	require.NoError(t, err)
	require.Equal(t, []string{"gaiafs", "slow", "same", "fast", "slow", "same", "fast", "gaiafs", "same", "fast",
		"gaiafs", "slow"}, order)
	require.Nil(t, res.Sides[0].Ratio)
	require.Equal(t, 2.0, res.Sides[1].Ratio.Median)
	var verdicts []Verdict
	for _, v := range res.Targets {
		verdicts = append(verdicts, v.Verdict)
	}
	require.Equal(t, []Verdict{Met, Even, Missed, Met, Even}, verdicts)
}

func TestAFailingSideEndsTheRow(t *testing.T) {
	r := Row{Group: "g", Name: "n", Sides: []Side{{Name: "gaiafs", Measure: func(context.Context) (float64, error) {
		return 0, os.ErrInvalid
	}}}}
	_, err := r.Run(context.Background(), 3, func(int, int, string) {})
	require.ErrorIs(t, err, os.ErrInvalid)
	require.ErrorContains(t, err, "g/n: gaiafs")
}

func TestASideMayNotBePossible(t *testing.T) {
	r := Row{Group: "g", Name: "n", Sides: []Side{fixed("gaiafs", 1),
		{Name: "other", Prepare: func(context.Context) error {
			return fmt.Errorf("no room: %w", ErrSkip)
		}}}}
	res, err := r.Run(context.Background(), 1, func(int, int, string) {})
	require.NoError(t, err)
	require.Empty(t, res.Sides)
	require.Contains(t, res.Skipped, "no room: not possible here")
}

func TestWhatWasDoneIsCheckedOnce(t *testing.T) {
	checks := 0
	side := fixed("gaiafs", 1, 2, 3)
	side.Check = func(context.Context) error { checks++; return nil }
	r := Row{Group: "g", Name: "n", Labels: map[string]string{"jobs": "1"}, Sides: []Side{side}}
	res, err := r.Run(context.Background(), 3, func(int, int, string) {})
	require.NoError(t, err)
	require.Equal(t, 1, checks)
	require.Equal(t, "1", res.Labels["jobs"])

	r.Sides[0] = fixed("gaiafs", 1, 2, 3)
	r.Sides[0].Check = func(context.Context) error { return os.ErrInvalid }
	_, err = r.Run(context.Background(), 3, func(int, int, string) {})
	require.ErrorContains(t, err, "g/n: checking gaiafs")
}

func TestARoundThatWouldBeLateIsNotBegun(t *testing.T) {
	slow := Side{Name: "gaiafs", Measure: func(context.Context) (float64, error) {
		time.Sleep(20 * time.Millisecond)
		return 1, nil
	}}
	r := Row{Sides: []Side{slow}, Until: time.Now().Add(30 * time.Millisecond)}
	res, err := r.Run(context.Background(), 3, func(int, int, string) {})
	require.NoError(t, err)
	require.Len(t, res.Sides[0].Values, 1)
	require.Equal(t, "cut off after 1 of 3 rounds", res.Note)
}

func TestWhyARowIsImpossibleIsSaidInItsOwnWords(t *testing.T) {
	r := Row{Group: "g", Name: "n", Sides: []Side{{Name: "gaiafs", Measure: func(context.Context) (float64, error) {
		return 0, Impossible{"no disk"}
	}}}}
	res, err := r.Run(context.Background(), 1, func(int, int, string) {})
	require.NoError(t, err)
	require.Equal(t, "no disk", res.Skipped)
}

func TestTheJSONFileIsAlwaysWhole(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "r.json")
	for rounds := range 2 {
		require.NoError(t, (&Report{Rounds: rounds}).WriteJSON(file))
	}
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Contains(t, string(text), `"rounds": 1`)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 1)
	require.Error(t, (&Report{}).WriteJSON(filepath.Join(dir, "none", "r.json")))
}

// A row without sides has an empty list, and its unit.
func TestRowsWithoutSidesInTheJSON(t *testing.T) {
	row := Row{Group: "g", Name: "n", Unit: MBPerSecond, Skip: "why"}
	res, err := row.Run(context.Background(), 1, nil)
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "r.json")
	require.NoError(t, (&Report{Rows: []Result{res, {Failed: "why"}}}).WriteJSON(file))
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.NotContains(t, string(text), "null")
	require.Equal(t, 2, strings.Count(string(text), `"sides": []`))
	require.Contains(t, string(text), `"unit": "MB/s",`+"\n"+`      "larger_is_better": true`)
}

func TestAnOwnTargetIsTheWorstValue(t *testing.T) {
	for _, c := range []struct {
		unit  Unit
		limit float64
		want  Verdict
		text  string
	}{
		{Milliseconds, 20, Met, "≤ 20"}, {Milliseconds, 16, Even, "≤ 16"}, {Milliseconds, 9, Missed, "≤ 9"},
		{GBPerSecond, 20, Met, "≥ 20"}, {GBPerSecond, 24, Even, "≥ 24"}, {GBPerSecond, 31, Missed, "≥ 31"},
	} {
		r := Row{Unit: c.unit, Sides: []Side{fixed("gaiafs", 10, 30, 20)}, Targets: []Target{{Limit: c.limit}}}
		res, err := r.Run(context.Background(), 3, func(int, int, string) {})
		require.NoError(t, err)
		require.Equal(t, []TargetResult{{Target: c.text, Verdict: c.want, Limit: c.limit}}, res.Targets)
	}
}

func TestWhenTimeIsOverWholeRoundsCount(t *testing.T) {
	ctx, end := context.WithCancel(context.Background())
	r := Row{Sides: []Side{fixed("gaiafs", 1, 2, 3), fixed("other", 4, 5, 6)}, Note: func() string { return "noted" }}
	res, err := r.Run(ctx, 3, func(round, _ int, side string) {
		if round == 3 && side == "other" {
			end()
		}
	})
	require.NoError(t, err)
	require.Equal(t, []float64{1, 2}, res.Sides[0].Values)
	require.Equal(t, []float64{4, 5}, res.Sides[1].Values)
	require.Equal(t, "noted; cut off after 2 of 3 rounds", res.Note)
	_, err = r.Run(ctx, 3, func(int, int, string) {})
	require.ErrorIs(t, err, context.Canceled, "not one round was whole")
}

func TestTablesNameEachVerdictOnce(t *testing.T) {
	r := Report{Machine: Machine{Devices: []string{"a GPU"}}, Rounds: 1,
		Rows: []Result{{Group: "g", Name: "n", Unit: "ms",
			Sides: []SideResult{{Name: "gaiafs", Summary: Summarise([]float64{1})}, {Name: "a", Ratio: &Summary{}},
				{Name: "x a", Ratio: &Summary{}}},
			Targets: []TargetResult{{"≥ 2", Met, "", 2}, {"≥ 1× a", Missed, "a", 1}, {"≥ 3× x a", Even, "x a", 3}},
		}}}
	var out bytes.Buffer
	require.NoError(t, r.WriteMarkdown(&out))
	for _, want := range []string{"| ≥ 2: met |", "| ≥ 1×: missed |", "| ≥ 3×: within spread |", "- a GPU\n"} {
		require.Equal(t, 1, strings.Count(out.String(), want), "%s\n%s", want, out.String())
	}
	r.Mounts = []Mount{{Side: "gaiafs", Passthrough: true}, {Side: "b"}}
	require.NoError(t, r.WriteMarkdown(&out))
	require.Contains(t, out.String(), "- files pass through, past the daemon, on: gaiafs\n")
	misses, all := r.Failures()
	require.Equal(t, []int{1, 3}, []int{misses, all})
}

func TestWordsDoNotBreakTables(t *testing.T) {
	r := Report{Rows: []Result{{Group: "g", Name: "n", Skipped: "one\nor | the other"}}}
	var out bytes.Buffer
	require.NoError(t, r.WriteMarkdown(&out))
	require.Contains(t, out.String(), `| n | skipped |  |  |  | one; or \| the other |`)
	r.Rows[0] = Result{Group: "g", Name: "n", Failed: "a reason"}
	out.Reset()
	require.NoError(t, r.WriteMarkdown(&out))
	require.Contains(t, out.String(), "| n | failed |  |  |  | a reason |")
	require.Equal(t, "failed: a reason", r.Rows[0].Brief())
}
