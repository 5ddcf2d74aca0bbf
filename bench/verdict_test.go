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
