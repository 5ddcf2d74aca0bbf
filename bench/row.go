package main

import (
	"context"
	"fmt"
	"slices"
)

// unit is what a row's values count.
type unit struct {
	Name string
	// Faster says that larger values are better.
	Faster bool
}

var (
	mbPerSecond  = unit{"MB/s", true}
	perSecond    = unit{"/s", true}
	milliseconds = unit{"ms", false}
	microseconds = unit{"µs", false}
	seconds      = unit{"s", false}
	bytesPerPage = unit{"B/page", false}
	count        = unit{"", false}
)

// side is one of those that a row compares.
type side struct {
	name string
	// prepare brings about the state that measure starts from; it is not measured. nil for nothing to prepare.
	prepare func(ctx context.Context) error
	// measure does the work once and returns a value in the row's unit.
	measure func(ctx context.Context) (float64, error)
}

// target is what a row should come to.
type target struct {
	// against names the side whose ratio to the first side counts; "" stands for the first side's own value.
	against string
	// limit is the least ratio, or the largest value where against is "".
	limit float64
}

func (t target) String() string {
	if t.against == "" {
		return fmt.Sprintf("≤ %g", t.limit)
	}
	return fmt.Sprintf("≥ %.4g× %s", t.limit, t.against)
}

// row is one question. The first side is the one that the question is about.
type row struct {
	group, name string
	unit        unit
	sides       []side
	targets     []target
	// rounds is how often each side is measured; 0 stands for the session's.
	rounds int
	// note is asked after the last round for something to say about the row. nil for nothing.
	note func() string
	// skip says why the row cannot run here; "" where it can.
	skip string
}

func (r *row) title() string { return r.group + "/" + r.name }

// verdict is how a value or a ratio stands to its target.
type verdict string

const (
	met      verdict = "met"
	even     verdict = "within spread" // the median misses the target, the better quartile does not
	missed   verdict = "missed"
	noTarget verdict = ""
)

// sideResult is what was measured of a side.
type sideResult struct {
	Name    string    `json:"name"`
	Values  []float64 `json:"values"`
	Summary summary   `json:"summary"`
	// Ratio is the first side's speed over this one's; nil for the first side itself.
	Ratio *summary `json:"ratio,omitempty"`
}

// rowResult is what came of a row.
type rowResult struct {
	Group   string         `json:"group"`
	Name    string         `json:"name"`
	Unit    string         `json:"unit"`
	Sides   []sideResult   `json:"sides"`
	Targets []targetResult `json:"targets,omitempty"`
	Note    string         `json:"note,omitempty"`
	// Skipped says why there are no sides.
	Skipped string `json:"skipped,omitempty"`
}

type targetResult struct {
	Target  string  `json:"target"`
	Verdict verdict `json:"verdict"`
}

// run measures the row. progress is told what comes next.
func (r *row) run(ctx context.Context, rounds int, progress func(round, of int, side string)) (rowResult, error) {
	if r.skip != "" {
		return rowResult{Group: r.group, Name: r.name, Skipped: r.skip}, nil
	}
	if r.rounds > 0 {
		rounds = r.rounds
	}
	values := make([][]float64, len(r.sides))
	for round := range rounds {
		for i := range r.sides {
			k := (i + round) % len(r.sides)
			s := &r.sides[k]
			progress(round+1, rounds, s.name)
			if err := ctx.Err(); err != nil {
				return rowResult{}, err
			}
			if s.prepare != nil {
				if err := s.prepare(ctx); err != nil {
					return rowResult{}, fmt.Errorf("%s: preparing %s: %w", r.title(), s.name, err)
				}
			}
			v, err := s.measure(ctx)
			if err != nil {
				return rowResult{}, fmt.Errorf("%s: %s: %w", r.title(), s.name, err)
			}
			values[k] = append(values[k], v)
		}
	}
	return r.conclude(values), nil
}

// conclude makes the result of what was measured of each side.
func (r *row) conclude(values [][]float64) rowResult {
	res := rowResult{Group: r.group, Name: r.name, Unit: r.unit.Name}
	for i, s := range r.sides {
		sr := sideResult{Name: s.name, Values: values[i], Summary: summarise(values[i])}
		if x := ratios(values[0], values[i], r.unit.Faster); i > 0 && len(x) > 0 {
			sum := summarise(x)
			sr.Ratio = &sum
		}
		res.Sides = append(res.Sides, sr)
	}
	for _, t := range r.targets {
		res.Targets = append(res.Targets, targetResult{t.String(), t.judge(&res)})
	}
	if r.note != nil {
		res.Note = r.note()
	}
	return res
}

// judge compares a result with the target.
func (t target) judge(res *rowResult) verdict {
	if t.against == "" {
		s := res.Sides[0].Summary
		switch {
		case s.Median <= t.limit:
			return met
		case s.Q1 <= t.limit:
			return even
		}
		return missed
	}
	i := slices.IndexFunc(res.Sides, func(s sideResult) bool { return s.Name == t.against })
	if i < 0 || res.Sides[i].Ratio == nil {
		return noTarget
	}
	switch x := res.Sides[i].Ratio; {
	case x.Median >= t.limit:
		return met
	case x.Q3 >= t.limit:
		return even
	}
	return missed
}
