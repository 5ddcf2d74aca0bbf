package bench

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/bench/rows"
)

func TestVerdict(t *testing.T) {
	row := func(name string, ratio float64) rows.Result {
		return rows.Result{Group: "small", Name: name, Sides: []rows.SideResult{{Name: "gaiafs"},
			{Name: "backing", Ratio: &rows.Summary{Median: ratio}}}}
	}
	r := &rows.Report{
		Mounts: []rows.Mount{{Side: "gaiafs", GPUs: "emulated:2"}},
		Rows: []rows.Result{row("read", 0.9), row("stat", 0.5), row("open", 1.25),
			{Group: "tree", Name: "git", Skipped: "git is not installed"}},
	}
	require.Equal(t, []string{
		"small: gaiafs reaches 0.90 of backing in the median of 3 rows, 0.50 in the worst and 1.25 in the best.",
		"Skipped: tree/git (git is not installed).",
		"Devices were emulated by host memory: figures of devices say nothing about a GPU.",
	}, verdict(r))
}

func TestModelVerdict(t *testing.T) {
	row := func(name string, mine, theirs float64) rows.Result {
		ratio := rows.Summary{Median: theirs / mine}
		return rows.Result{Group: modelGroup, Name: name, Sides: []rows.SideResult{
			{Name: "gaiafs", Summary: rows.Summary{Median: mine}},
			{Name: sideSafetensors, Summary: rows.Summary{Median: theirs}, Ratio: &ratio}}}
	}
	r := &rows.Report{Rows: []rows.Result{
		{Group: modelGroup, Name: modelCold + ", 8.0 GiB", Skipped: "it is on tmpfs"},
		row(modelWarm+", 8.0 GiB", 200, 1140), row(modelSecond+", 8.0 GiB", 3.5, 1140),
		row(modelRun+", a pass", 10, 9.8),
	}}
	require.Equal(t, []string{
		"From the host's page cache, it is loaded after 200 ms; with safetensors 1140 ms: 5.70 times as fast.",
		"A second process, while the first one has the model, loads it in 3.50 ms; with safetensors 1140 ms: 325.71 times as fast.",
		"A pass over all weights takes 10.0 ms; with safetensors 9.80 ms: the same, within 5 % (0.98).",
		"Processes share one copy of the model in the device's memory; with safetensors each has its own.",
		"Skipped: model/load, cold, 8.0 GiB (it is on tmpfs).",
	}, verdict(r))
	require.Equal(t, "slower, 0.50 of its speed", speed(0.5))
}
