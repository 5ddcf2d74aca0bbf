package bench

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gaiafs/gaiafs/bench/rows"
)

// verdict describes the results in sentences: for each group the ratio of the mount to the other sides, then the
// targets, and what failed, was skipped or only emulated.
func verdict(r *rows.Report) (words []string) {
	for first := 0; first < len(r.Rows); {
		until := first
		for until < len(r.Rows) && r.Rows[until].Group == r.Rows[first].Group {
			until++
		}
		if r.Rows[first].Group == modelGroup {
			words = append(words, modelVerdict(r.Rows[first:until])...)
		} else {
			words = append(words, standing(r.Rows[first:until])...)
		}
		first = until
	}
	if misses, all := r.Failures(); all > 0 {
		words = append(words, fmt.Sprintf("%d of %d targets are met.", all-misses, all))
	}
	var skipped, failed []string
	for _, row := range r.Rows {
		switch name := row.Group + "/" + row.Name; {
		case row.Failed != "":
			failed = append(failed, name)
		case row.Skipped != "":
			skipped = append(skipped, name+" ("+row.Skipped+")")
		}
	}
	if len(failed) > 0 {
		words = append(words, "Failed: "+strings.Join(failed, ", ")+". The table says why.")
	}
	if len(skipped) > 0 {
		words = append(words, "Skipped: "+strings.Join(skipped, ", ")+".")
	}
	if slices.ContainsFunc(r.Mounts, func(m rows.Mount) bool { return strings.HasPrefix(m.GPUs, "emulated") }) {
		words = append(words, "Devices were emulated by host memory: figures of devices say nothing about a GPU.")
	}
	return words
}

// standing gives the median ratio of the first sides of a group's rows to each of the others.
func standing(list []rows.Result) (words []string) {
	var names []string
	ratios := map[string][]float64{}
	for _, row := range list {
		for _, side := range row.Sides {
			if side.Ratio == nil {
				continue
			}
			pair := row.Sides[0].Name + " reaches %s of " + side.Name
			if ratios[pair] == nil {
				names = append(names, pair)
			}
			ratios[pair] = append(ratios[pair], side.Ratio.Median)
		}
	}
	for _, pair := range names {
		of := ratios[pair]
		slices.Sort(of)
		text := list[0].Group + ": " + fmt.Sprintf(pair, fmt.Sprintf("%.2f", of[len(of)/2]))
		if len(of) > 1 {
			text += fmt.Sprintf(" in the median of %d rows, %.2f in the worst and %.2f in the best", len(of), of[0],
				of[len(of)-1])
		}
		words = append(words, text+".")
	}
	return words
}
