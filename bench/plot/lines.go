package plot

import (
	"fmt"
	"slices"
)

// Point is a measured value: the median and its quartiles.
type Point struct {
	// X is an index into the chart's Ticks.
	X            int
	Y, Low, High float64
	// Title describes the point in words.
	Title string
}

// Series are points that belong together. Colour is the number of a class in the style sheet.
type Series struct {
	Name   string
	Colour int
	Points []Point
}

// Lines is a chart of several series over the same few places.
type Lines struct {
	Title, X, Y string
	Ticks       []string
	Series      []Series
	// Log makes equal ratios equally far apart in Y. Level, if positive, draws a line at that value of Y.
	Log   bool
	Level float64
}

// Sizes of a Lines chart in pixels.
const (
	linesWidth, linesHeight = 340.0, 230.0
	linesLeft, linesRight   = 46.0, 12.0
	linesTop, linesBottom   = 26.0, 62.0
)

// SVG draws the chart.
func (l *Lines) SVG() string {
	rows := (len(l.Series) + 1) / 2 // of the legend
	height := linesHeight + 15*float64(max(rows-1, 0))
	d := begin(linesWidth, height, l.Title+": "+l.Y)
	d.text("title", "start", 4, 14, l.Title)
	floor := linesHeight - linesBottom
	y := l.axis(floor)
	for _, t := range y.ticks {
		at := y.at(t.at)
		d.line("grid", linesLeft, at, linesWidth-linesRight, at)
		d.text("tick", "end", linesLeft-5, at+3.5, t.text)
	}
	d.text("tick", "end", linesWidth-linesRight, linesTop-4, l.Y)
	for i, text := range l.Ticks {
		d.text("tick", "middle", l.place(i), floor+14, text)
	}
	d.text("tick", "middle", (linesLeft+linesWidth-linesRight)/2, floor+28, l.X)
	if l.Level > 0 {
		d.line("level", linesLeft, y.at(l.Level), linesWidth-linesRight, y.at(l.Level))
	}
	for i, s := range l.Series {
		l.draw(d, y, i, s)
		x, at := linesLeft+float64(i%2)*145, linesHeight-14+15*float64(i/2)
		d.dot(fmt.Sprintf("mark c%d", s.Colour), x, at-4, s.Name)
		d.text("tick", "start", x+8, at, s.Name)
	}
	return d.end()
}

// axis makes the axis of values above the floor.
func (l *Lines) axis(floor float64) *axis {
	var values []float64
	for _, s := range l.Series {
		for _, p := range s.Points {
			values = append(values, p.Y, p.Low, p.High)
		}
	}
	if l.Level > 0 {
		values = append(values, l.Level)
	}
	if l.Log {
		return logAxis(floor, linesTop, values...)
	}
	return zeroAxis(floor, linesTop, values...)
}

// place returns where a tick is.
func (l *Lines) place(i int) float64 {
	width := (linesWidth - linesLeft - linesRight) / float64(len(l.Ticks))
	return linesLeft + (float64(i)+0.5)*width
}

// draw draws the i-th series, slightly shifted so that no mark hides another.
func (l *Lines) draw(d *drawing, y *axis, i int, s Series) {
	beside := (float64(i) - float64(len(l.Series)-1)/2) * 5
	class := fmt.Sprintf("c%d", s.Colour)
	points := slices.Clone(s.Points)
	slices.SortStableFunc(points, func(a, b Point) int { return a.X - b.X })
	var path []float64
	for _, p := range points {
		path = append(path, l.place(p.X)+beside, y.at(p.Y))
	}
	if len(points) > 1 {
		d.path("curve "+class, path...)
	}
	for k, p := range points {
		x := path[2*k]
		if p.High > p.Low {
			d.line("spread "+class, x, y.at(p.Low), x, y.at(p.High))
		}
		d.dot("mark "+class, x, path[2*k+1], p.Title)
	}
}
