package bench

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gaiafs/gaiafs/bench/plot"
	"github.com/gaiafs/gaiafs/bench/rows"
)

//go:embed page.html
var pageText string

var pageTemplate = template.Must(template.New("page").Parse(pageText))

// document is the data of the template.
type document struct {
	Started, Duration, Version, Machine, Command, Ended, Targets string
	Rounds                                                       int
	Devices, Head                                                []string
	// Verdict says in sentences what the results mean, and what they do not show.
	Verdict  []string
	Sections []section
}

// section shows a group.
type section struct {
	Name, About string
	Charts      []charts
	Ratios      template.HTML
	Rows        [][]string
}

// charts are pictures that belong together.
type charts struct {
	Title, Words string
	Pictures     []template.HTML
}

// drawn marks a chart as safe HTML: it is our own SVG, in which every text is escaped.
func drawn(svg string) template.HTML { return template.HTML(svg) }

// writePage writes the report as a self-contained page.
func writePage(w io.Writer, r *rows.Report) error {
	misses, all := r.Failures()
	p := document{
		Started: r.Started.Format("2006-01-02 15:04 MST"), Duration: (time.Duration(r.Seconds) * time.Second).String(),
		Version: r.Version, Machine: r.Machine.String(), Command: r.Machine.Command, Ended: r.Ended,
		Targets: fmt.Sprintf("%d of %d targets are missed.", misses, all),
		Rounds:  r.Rounds, Devices: r.Machine.Devices, Head: rows.Head, Verdict: verdict(r),
	}
	if passing := r.Passing(); passing != "" {
		p.Devices = append(slices.Clone(p.Devices), passing)
	}
	for first := 0; first < len(r.Rows); {
		until := first
		for until < len(r.Rows) && r.Rows[until].Group == r.Rows[first].Group {
			until++
		}
		p.Sections = append(p.Sections, sectionOf(r.Rows[first:until]))
		first = until
	}
	return pageTemplate.Execute(w, &p)
}

// sectionOf shows the rows of one group.
func sectionOf(list []rows.Result) section {
	s := section{Name: list[0].Group}
	if i := slices.IndexFunc(groups, func(g group) bool { return g.name == s.Name }); i >= 0 {
		s.About = groups[i].about
	}
	switch s.Name {
	case "fio":
		s.Charts = fioCharts(list)
	case "cached":
		s.Charts = cachedCharts(list)
	case "versions":
		s.Charts = versionCharts(list)
	}
	s.Ratios = ratioChart(list)
	for i := range list {
		lines := list[i].Lines()
		if list[i].Note != "" {
			lines[0][0] += " (" + list[i].Note + ")"
		}
		s.Rows = append(s.Rows, lines...)
	}
	return s
}

// ratioChart shows the ratio of each first side to the other sides.
func ratioChart(list []rows.Result) template.HTML {
	c := plot.Ratios{Title: list[0].Group + ": ratios"}
	for _, row := range list {
		for _, side := range row.Sides {
			if side.Ratio == nil {
				continue
			}
			line := plot.Ratio{Name: row.Name, Against: "against " + side.Name, Class: "even",
				Median: side.Ratio.Median, Low: side.Ratio.Q1, High: side.Ratio.Q3}
			line.Title = fmt.Sprintf("%s against %s: %.2f (%.2f–%.2f)", row.Sides[0].Name, side.Name, line.Median,
				line.Low, line.High)
			for _, t := range row.Targets {
				if t.Against == side.Name {
					line.Limit, line.Class = t.Limit, classes[t.Verdict]
					line.Title += ", target " + t.Target + ": " + string(t.Verdict)
				}
			}
			c.Lines = append(c.Lines, line)
		}
	}
	if len(c.Lines) == 0 {
		return ""
	}
	return drawn(c.SVG())
}

// classes are the style classes of verdicts.
var classes = map[rows.Verdict]string{rows.Met: "met", rows.Even: "even", rows.Missed: "missed", rows.NoTarget: "even"}

// sideColour returns the colour of a side, which is the same in all charts.
func sideColour(name string) int {
	for i, n := range []string{placeGaiafs, placeLoopback, placeLoopback1M, placeBacking} {
		if name == n {
			return i
		}
	}
	return 4
}

// valued makes a point of a side's values; related makes one of a ratio.
func valued(x int, row *rows.Result, side *rows.SideResult) plot.Point {
	s := side.Summary
	return plot.Point{X: x, Y: s.Median, Low: s.Q1, High: s.Q3, Title: fmt.Sprintf("%s, %s: %s %s (%s–%s)", row.Name,
		side.Name,
		rows.Number(s.Median), row.Unit, rows.Number(s.Q1), rows.Number(s.Q3))}
}

func related(x int, row *rows.Result, r *rows.Summary) plot.Point {
	return plot.Point{X: x, Y: r.Median, Low: r.Q1, High: r.Q3,
		Title: fmt.Sprintf("%s: %.2f (%.2f–%.2f)", row.Name, r.Median, r.Q1, r.Q3)}
}

// index returns the index of a word in list, and appends the word if it is new.
func index(list *[]string, word string) int {
	i := slices.Index(*list, word)
	if i < 0 {
		i = len(*list)
		*list = append(*list, word)
	}
	return i
}

// add adds a point to the series of that name, and makes the series if it is new.
func add(c *plot.Lines, name string, colour int, p plot.Point) {
	i := slices.IndexFunc(c.Series, func(s plot.Series) bool { return s.Name == name })
	if i < 0 {
		i = len(c.Series)
		c.Series = append(c.Series, plot.Series{Name: name, Colour: colour})
	}
	c.Series[i].Points = append(c.Series[i].Points, p)
}

// fioCharts have one picture for each pattern and number of jobs, over the size of a request.
func fioCharts(list []rows.Result) (all []charts) {
	var blocks []string // the block sizes that occur
	for _, b := range fioBlocks {
		label := strconv.FormatInt(b, 10)
		if slices.ContainsFunc(list, func(r rows.Result) bool {
			return r.Labels["block"] == label &&
				len(r.Sides) > 0
		}) {
			blocks = append(blocks, blockText(b))
		}
	}
	for _, st := range fioStates {
		var titles []string
		var pictures []*plot.Lines
		for k := range list {
			row := &list[k]
			if row.Labels["state"] != string(st) || row.Labels["mount"] != "" || row.Labels["mapped"] != "" ||
				len(row.Sides) == 0 {
				continue
			}
			jobs := row.Labels["jobs"] + " jobs"
			if row.Labels["jobs"] == "1" {
				jobs = "1 job"
			}
			i := index(&titles, row.Labels["pattern"]+", "+jobs)
			if i == len(pictures) {
				pictures = append(pictures, &plot.Lines{Title: titles[i], X: "size of a request", Y: "MB/s",
					Ticks: blocks, Log: true})
			}
			block, err := strconv.ParseInt(row.Labels["block"], 10, 64)
			if x := slices.Index(blocks, blockText(block)); err == nil && x >= 0 {
				for s := range row.Sides {
					side := &row.Sides[s]
					add(pictures[i], side.Name, sideColour(side.Name), valued(x, row, side))
				}
			}
		}
		c := charts{Title: string(st), Words: stateWords[st]}
		for _, p := range pictures {
			c.Pictures = append(c.Pictures, drawn(p.SVG()))
		}
		if len(pictures) > 0 {
			all = append(all, c)
		}
	}
	return all
}

var stateWords = map[state]string{
	cold:         "The bytes are only on the disk.",
	hostWarm:     "The bytes are in the host's memory.",
	deviceCached: "For gaiafs the bytes are on a device and on the disk, for the others only on the disk.",
}

// cachedCharts are figure 6.1 of the thesis.
func cachedCharts(list []rows.Result) []charts {
	var ticks []string
	for i := range list {
		if p := list[i].Labels["percent"]; p != "" && len(list[i].Sides) > 0 {
			index(&ticks, p)
		}
	}
	slices.SortFunc(ticks, func(a, b string) int { return len(a)*1000 - len(b)*1000 + strings.Compare(a, b) })
	c := charts{Words: "The speed as a multiple of the disk's, by the share of the file that is on a device."}
	for _, pattern := range cachedPatterns {
		picture := plot.Lines{Title: pattern.name + ", " + blockText(pattern.block), X: "% of the file on a device",
			Y: "× disk alone", Ticks: ticks, Level: 1}
		for k := range list {
			row := &list[k]
			if row.Labels["pattern"] != pattern.name || len(row.Sides) < 2 || row.Sides[1].Ratio == nil {
				continue
			}
			name, colour := row.Labels["jobs"]+" jobs", 4
			if row.Labels["jobs"] == "1" {
				name, colour = "1 job", 0
			}
			add(&picture, name, colour, related(slices.Index(ticks, row.Labels["percent"]), row, row.Sides[1].Ratio))
		}
		if len(picture.Series) > 0 {
			c.Pictures = append(c.Pictures, drawn(picture.SVG()))
		}
	}
	return []charts{c}
}

// versionCharts show the cost of a request by the number of devices.
func versionCharts(list []rows.Result) []charts {
	ticks := []string{"0"}
	for _, n := range versionCounts {
		label := strconv.Itoa(n)
		if slices.ContainsFunc(list, func(r rows.Result) bool {
			return r.Labels["devices"] == label &&
				len(r.Sides) > 0
		}) {
			ticks = append(ticks, label)
		}
	}
	c := charts{Words: "The time of a request of 4 KiB that reaches the daemon, by the number of devices of the mount, for a file on none of them and for a file on all of them."}
	var titles []string
	var pictures []*plot.Lines
	for k := range list {
		row := &list[k]
		what, colour := "on no device", 0
		if row.Labels["mapped"] == "true" {
			what, colour = "on all devices", 4
		}
		if len(row.Sides) == 0 {
			continue
		}
		i := index(&titles, row.Labels["operation"])
		if i == len(pictures) {
			pictures = append(pictures, &plot.Lines{Title: titles[i], X: "devices", Y: "µs", Ticks: ticks})
		}
		add(pictures[i], what, colour, valued(slices.Index(ticks, row.Labels["devices"]), row, &row.Sides[0]))
		for s := range row.Sides[1:] { // several rows measure the mount without devices; show it once
			if side := &row.Sides[1+s]; side.Name == sideName(0) && row.Labels["devices"] == "32" {
				add(pictures[i], what, colour, valued(0, row, side))
			}
		}
	}
	for _, p := range pictures {
		c.Pictures = append(c.Pictures, drawn(p.SVG()))
	}
	return []charts{c}
}
