package plot

// Ratio is a line of Ratios: a median with its quartiles.
type Ratio struct {
	// Name is what was compared, Against with what.
	Name, Against string
	// Median, Low and High are positive.
	Median, Low, High float64
	// Limit is the target, or 0 if there is none.
	Limit float64
	// Class is the style class of the colour.
	Class string
	// Title describes the ratio in words.
	Title string
}

// Ratios is a chart of many ratios, one below the other, on an axis on which one half and two are equally far from 1.
type Ratios struct {
	Title string
	Lines []Ratio
}

// Sizes of a Ratios chart in pixels.
const (
	ratiosWidth  = 860.0
	ratiosNames  = 520.0
	ratiosRight  = 16.0
	ratiosHeight = 17.0 // of a line
	ratiosTop    = 24.0
)

// SVG draws the chart.
func (r *Ratios) SVG() string {
	bottom := ratiosTop + ratiosHeight*float64(len(r.Lines))
	d := begin(ratiosWidth, bottom+8, r.Title)
	values := []float64{0.8, 1.25}
	for _, l := range r.Lines {
		values = append(values, l.Low, l.Median, l.High, l.Limit)
	}
	x := logAxis(ratiosNames, ratiosWidth-ratiosRight, values...)
	for _, t := range x.ticks {
		d.line("grid", x.at(t.at), ratiosTop-6, x.at(t.at), bottom)
		d.text("tick", "middle", x.at(t.at), ratiosTop-11, t.text)
	}
	d.line("level", x.at(1), ratiosTop-6, x.at(1), bottom)
	last := ""
	for i, l := range r.Lines {
		y := ratiosTop + ratiosHeight*(float64(i)+0.5)
		if l.Name != last {
			d.text("name", "start", 4, y+4, l.Name)
			last = l.Name
		}
		d.text("tick", "end", ratiosNames-10, y+4, l.Against)
		if l.High > l.Low {
			d.line("spread "+l.Class, x.at(l.Low), y, x.at(l.High), y)
		}
		if l.Limit > 0 {
			d.line("limit", x.at(l.Limit), y-6, x.at(l.Limit), y+6)
		}
		d.dot("mark "+l.Class, x.at(l.Median), y, l.Title)
	}
	return d.end()
}
