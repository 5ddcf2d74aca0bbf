package rows

import (
	"math"
	"slices"
)

// Summary summarises repeated measurements. Q1 and Q3 are the quartiles.
type Summary struct {
	Median float64 `json:"median"`
	Q1     float64 `json:"q1"`
	Q3     float64 `json:"q3"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// Summarise summarises values, of which there must be at least one.
func Summarise(values []float64) Summary {
	v := slices.Clone(values)
	slices.Sort(v)
	return Summary{Median: quantile(v, 0.5), Q1: quantile(v, 0.25), Q3: quantile(v, 0.75), Min: v[0], Max: v[len(v)-1]}
}

// quantile interpolates linearly between the values next to q of sorted, with 0 <= q <= 1.
func quantile(sorted []float64, q float64) float64 {
	at := q * float64(len(sorted)-1)
	low := int(math.Floor(at))
	if low+1 >= len(sorted) {
		return sorted[len(sorted)-1]
	}
	return sorted[low] + (at-float64(low))*(sorted[low+1]-sorted[low])
}

// ratios divides round by round, so that a slow round affects both sides of its ratio. The result is speed over speed;
// faster says whether larger values are better.
func ratios(subject, baseline []float64, faster bool) []float64 {
	out := make([]float64, 0, len(subject))
	for i := range min(len(subject), len(baseline)) {
		s, b := subject[i], baseline[i]
		if !faster {
			s, b = b, s
		}
		if b > 0 {
			out = append(out, s/b)
		}
	}
	return out
}
