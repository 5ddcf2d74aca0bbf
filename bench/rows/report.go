package rows

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Format is the version of the JSON file's form. It grows when a field is removed or changes its meaning.
const Format = 1

// Report is the result of one run, and the form of its JSON file. docs/bench.md describes it.
type Report struct {
	Format int `json:"format"`
	// Version is that of the measured program, or "" if it is unknown.
	Version string    `json:"gaiafs_version,omitempty"`
	Machine Machine   `json:"machine"`
	Started time.Time `json:"started"`
	Seconds float64   `json:"seconds"` // from the first row to the last
	Rounds  int       `json:"rounds"`
	// Ended says why rows are missing, or "" if none are.
	Ended string `json:"ended,omitempty"`
	// Mounts are the measured mounts of gaiafs, in the order in which they were made.
	Mounts []Mount  `json:"mounts,omitempty"`
	Rows   []Result `json:"rows"`
}

// Mount describes how a side was mounted.
type Mount struct {
	Side string `json:"side"`
	GPUs string `json:"gpus"`
	// Flags are the other flags that differ from the defaults.
	Flags []string `json:"flags,omitempty"`
	// Passthrough says that the kernel read and wrote the backing files itself.
	Passthrough bool `json:"passthrough"`
}

// Passing says on which mounts files pass through, or "" if on none.
func (r *Report) Passing() string {
	var sides []string
	for _, m := range r.Mounts {
		if m.Passthrough {
			sides = append(sides, m.Side)
		}
	}
	if len(sides) == 0 {
		return ""
	}
	return "files pass through, past the daemon, on: " + strings.Join(sides, ", ")
}

// WriteJSON writes the report, with every single value, in the way of WriteFile.
func (r *Report) WriteJSON(file string) error {
	doc := *r
	doc.Format = Format
	doc.Rows = slices.Clone(r.Rows)
	for i := range doc.Rows {
		if doc.Rows[i].Sides == nil {
			doc.Rows[i].Sides = []SideResult{} // an empty list instead of null, for programs that iterate
		}
	}
	text, err := json.MarshalIndent(&doc, "", "  ")
	if err != nil {
		return err
	}
	return WriteFile(file, func(w io.Writer) error {
		_, err := w.Write(append(text, '\n'))
		return err
	})
}

// Lines returns the table lines of a row: one per side.
func (r *Result) Lines() [][]string {
	for word, why := range map[string]string{"skipped": r.Skipped, "failed": r.Failed} {
		if why != "" {
			return [][]string{{r.Name, word, "", "", "", strings.ReplaceAll(why, "\n", "; ")}}
		}
	}
	var lines [][]string
	for i, s := range r.Sides {
		line := []string{"", s.Name, Number(s.Summary.Median) + " " + r.Unit, spread(s.Summary), "", ""}
		if i == 0 {
			line[0] = r.Name
			line[5] = r.ownVerdict()
		}
		if s.Ratio != nil {
			line[4] = fmt.Sprintf("%.2f (%.2f–%.2f)", s.Ratio.Median, s.Ratio.Q1, s.Ratio.Q3)
			line[5] = r.verdictAgainst(s.Name)
		}
		lines = append(lines, line)
	}
	return lines
}

func (r *Result) ownVerdict() string {
	for _, t := range r.Targets {
		if t.Against == "" {
			return t.Target + ": " + string(t.Verdict)
		}
	}
	return ""
}

func (r *Result) verdictAgainst(name string) string {
	for _, t := range r.Targets {
		if t.Against == name {
			return strings.TrimSuffix(t.Target, " "+name) + ": " + string(t.Verdict)
		}
	}
	return ""
}

// Head names the columns of Lines.
var Head = []string{"what", "side", "median", "quartiles", "gaiafs is × as fast", "target"}

// WriteTable writes the rows for a terminal, with remarks below those of each group.
func (r *Report) WriteTable(out io.Writer) error {
	for first := 0; first < len(r.Rows); {
		group := r.Rows[first].Group
		w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
		fmt.Fprintf(w, "\n[%s]\t\t\t\t\t\n%s\n", group, strings.Join(Head, "\t"))
		notes := ""
		for ; first < len(r.Rows) && r.Rows[first].Group == group; first++ {
			row := &r.Rows[first]
			for _, line := range row.Lines() {
				fmt.Fprintln(w, strings.Join(line, "\t"))
			}
			if row.Note != "" {
				notes += fmt.Sprintf("  (%s: %s)\n", row.Name, row.Note)
			}
		}
		if err := w.Flush(); err != nil {
			return err
		}
		if _, err := io.WriteString(out, notes); err != nil {
			return err
		}
	}
	return nil
}

// WriteMarkdown writes the machine and the rows in the form of the files in bench/results.
func (r *Report) WriteMarkdown(out io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", r.Machine.markdown())
	fmt.Fprintf(&b, "- %d rounds, each with all sides; median, then the quartiles\n", r.Rounds)
	if passing := r.Passing(); passing != "" {
		fmt.Fprintf(&b, "- %s\n", passing)
	}
	if r.Ended != "" {
		fmt.Fprintf(&b, "- not complete: %s\n", r.Ended)
	}
	group := ""
	for i := range r.Rows {
		row := &r.Rows[i]
		if row.Group != group {
			group = row.Group
			fmt.Fprintf(&b, "\n### %s\n\n| %s |\n|%s\n", group, strings.Join(Head, " | "),
				strings.Repeat(" --- |", len(Head)))
		}
		for k, line := range row.Lines() {
			if k == 0 && row.Note != "" {
				line[0] += " (" + row.Note + ")"
			}
			for i := range line {
				line[i] = strings.ReplaceAll(line[i], "|", `\|`)
			}
			fmt.Fprintf(&b, "| %s |\n", strings.Join(line, " | "))
		}
	}
	_, err := io.WriteString(out, b.String())
	return err
}

func spread(s Summary) string {
	if s.Min == s.Max {
		return ""
	}
	return Number(s.Q1) + "–" + Number(s.Q3)
}

// Number formats a number with three significant digits and no exponent.
func Number(v float64) string {
	switch a := math.Abs(v); {
	case a >= 100 || a == 0:
		return fmt.Sprintf("%.0f", v)
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	case a >= 1:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.3g", v)
}

// Failures counts the missed targets.
func (r *Report) Failures() (missedTargets, all int) {
	for _, row := range r.Rows {
		for _, t := range row.Targets {
			all++
			if t.Verdict == Missed {
				missedTargets++
			}
		}
	}
	return missedTargets, all
}

// Brief returns a result in one line, for the progress.
func (r *Result) Brief() string {
	switch {
	case r.Skipped != "":
		return "skipped: " + r.Skipped
	case r.Failed != "":
		return "failed: " + r.Failed
	}
	var parts []string
	for _, s := range r.Sides {
		text := fmt.Sprintf("%s %s %s", s.Name, Number(s.Summary.Median), r.Unit)
		if s.Ratio != nil {
			text += fmt.Sprintf(" (%.2f×)", s.Ratio.Median)
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, ", ")
}
