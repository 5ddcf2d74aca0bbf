package plot

import (
	"fmt"
	"html"
	"strings"
)

// drawing collects the marks of a chart.
type drawing struct{ strings.Builder }

// begin opens a chart of that size in pixels. name is for screen readers.
func begin(width, height float64, name string) *drawing {
	d := new(drawing)
	fmt.Fprintf(d, `<svg class="chart" role="img" aria-label="%s" viewBox="0 0 %g %g" width="%g" height="%g">`,
		html.EscapeString(name), width, height, width, height)
	return d
}

func (d *drawing) end() string {
	d.WriteString("</svg>\n")
	return d.String()
}

func (d *drawing) line(class string, x1, y1, x2, y2 float64) {
	fmt.Fprintf(d, `<line class="%s" x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f"/>`, class, x1, y1, x2, y2)
}

// text writes words that begin, end or are centred at x, as anchor says.
func (d *drawing) text(class, anchor string, x, y float64, words string) {
	fmt.Fprintf(d, `<text class="%s" text-anchor="%s" x="%.1f" y="%.1f">%s</text>`, class, anchor, x, y,
		html.EscapeString(words))
}

// dot draws a mark that shows title under the pointer.
func (d *drawing) dot(class string, x, y float64, title string) {
	fmt.Fprintf(d, `<circle class="%s" cx="%.1f" cy="%.1f" r="3.5"><title>%s</title></circle>`, class, x, y,
		html.EscapeString(title))
}

// path draws a line through points, given as x and y in turn.
func (d *drawing) path(class string, points ...float64) {
	fmt.Fprintf(d, `<polyline class="%s" points="`, class)
	for i := 0; i+1 < len(points); i += 2 {
		fmt.Fprintf(d, "%.1f,%.1f ", points[i], points[i+1])
	}
	d.WriteString(`"/>`)
}
