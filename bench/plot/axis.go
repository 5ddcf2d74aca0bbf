package plot

import (
	"math"
	"strconv"
	"strings"
)

// axis maps values to pixels.
type axis struct {
	low, high   float64 // of the values; exponents if log
	from, until float64 // pixels of low and high
	log         bool
	ticks       []tick
}

// tick is a labelled place on an axis.
type tick struct {
	at   float64
	text string
}

// at returns the pixel of a value.
func (a *axis) at(v float64) float64 {
	low, high := a.low, a.high
	if a.log {
		v, low, high = math.Log(math.Max(v, a.low)), math.Log(low), math.Log(high)
	}
	return a.from + (v-low)/(high-low)*(a.until-a.from)
}

// logAxis makes an axis on which equal ratios are equally far apart. It includes all values, which must be positive.
func logAxis(from, until float64, values ...float64) *axis {
	low, high := bounds(values)
	low, high = low/1.15, high*1.15
	a := &axis{from: from, until: until, log: true, low: low, high: high}
	steps := []float64{1}
	if decades := math.Log10(high / low); decades < 1 {
		steps = []float64{1, 1.5, 2, 3, 5, 7}
	} else if decades < 2.5 {
		steps = []float64{1, 2, 5}
	}
	for power := math.Floor(math.Log10(low)); power <= math.Ceil(math.Log10(high)); power++ {
		for _, s := range steps {
			if v := s * math.Pow(10, power); v >= low && v <= high {
				a.ticks = append(a.ticks, tick{v, short(v)})
			}
		}
	}
	if len(a.ticks) == 0 { // the values are close together
		a.ticks = []tick{{low, short(low)}, {high, short(high)}}
	}
	return a
}

// zeroAxis makes an axis that begins with 0.
func zeroAxis(from, until float64, values ...float64) *axis {
	_, high := bounds(values)
	step := math.Pow(10, math.Floor(math.Log10(high)))
	for _, part := range []float64{0.1, 0.2, 0.25, 0.5, 1, 2} {
		if high/(step*part) <= 6 {
			step *= part
			break
		}
	}
	a := &axis{from: from, until: until, high: math.Ceil(high/step*1.02) * step}
	for v := 0.0; v <= a.high*1.001; v += step {
		a.ticks = append(a.ticks, tick{v, short(v)})
	}
	return a
}

// bounds returns the smallest and the largest positive value.
func bounds(values []float64) (low, high float64) {
	low, high = math.Inf(1), 0
	for _, v := range values {
		if v > 0 && !math.IsInf(v, 0) {
			low, high = min(low, v), max(high, v)
		}
	}
	if high == 0 {
		return 1, 1
	}
	return low, high
}

// short formats a number for an axis.
func short(v float64) string {
	unit := ""
	if v >= 10000 {
		v, unit = v/1000, "k"
	}
	text := strconv.FormatFloat(v, 'f', 3, 64)
	return strings.TrimSuffix(strings.TrimRight(text, "0"), ".") + unit
}
