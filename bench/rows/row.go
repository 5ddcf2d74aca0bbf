package rows

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// Unit is what a row's values count.
type Unit struct {
	Name string
	// Faster says that larger values are better.
	Faster bool
}

// The units of rows.
var (
	MBPerSecond  = Unit{"MB/s", true}
	GBPerSecond  = Unit{"GB/s", true}
	PerSecond    = Unit{"/s", true}
	Milliseconds = Unit{"ms", false}
	Microseconds = Unit{"µs", false}
	Seconds      = Unit{"s", false}
	BytesPerPage = Unit{"B/page", false}
	Mebibytes    = Unit{"MiB", false}
	Count        = Unit{"", false}
)

// Side is one of those that a row compares.
type Side struct {
	// Name is the side's in the table.
	Name string
	// Prepare brings about the state that Measure starts from; it is not measured. nil for nothing to prepare.
	Prepare func(ctx context.Context) error
	// Measure does the work once and returns a value in the row's unit.
	Measure func(ctx context.Context) (float64, error)
}

// Target is what a row should come to.
type Target struct {
	// Against names the side whose ratio to the first side counts; "" stands for the first side's own value.
	Against string
	// Limit is the least ratio; where Against is "", the worst value: the largest, or the least where larger is faster.
	Limit float64
}

// text names the target in a row of that unit.
func (t Target) text(u Unit) string {
	switch {
	case t.Against != "":
		return fmt.Sprintf("≥ %.4g× %s", t.Limit, t.Against)
	case u.Faster:
		return fmt.Sprintf("≥ %g", t.Limit)
	}
	return fmt.Sprintf("≤ %g", t.Limit)
}

// Row is one question. The first side is the one that the question is about.
type Row struct {
	Group, Name string
	Unit        Unit
	Sides       []Side
	Targets     []Target
	// Rounds is how often each side is measured; 0 leaves it to Run's caller.
	Rounds int
	// Note is asked after the last round for something to say about the row. nil for nothing.
	Note func() string
	// Skip says why the row cannot run here; "" where it can.
	Skip string
}

// Title names the row among all.
func (r *Row) Title() string { return r.Group + "/" + r.Name }

// Verdict is how a value or a ratio stands to its target.
type Verdict string

// The verdicts.
const (
	Met      Verdict = "met"
	Even     Verdict = "within spread" // the median misses the target, the better quartile does not
	Missed   Verdict = "missed"
	NoTarget Verdict = ""
)

// SideResult is what was measured of a side.
type SideResult struct {
	Name    string    `json:"name"`
	Values  []float64 `json:"values"`
	Summary Summary   `json:"summary"`
	// Ratio is the first side's speed over this one's; nil for the first side itself.
	Ratio *Summary `json:"ratio,omitempty"`
}

// Result is what came of a row.
type Result struct {
	Group   string         `json:"group"`
	Name    string         `json:"name"`
	Unit    string         `json:"unit"`
	Sides   []SideResult   `json:"sides"`
	Targets []TargetResult `json:"targets,omitempty"`
	Note    string         `json:"note,omitempty"`
	// Skipped says why there are no sides.
	Skipped string `json:"skipped,omitempty"`
}

// TargetResult is what came of a target.
type TargetResult struct {
	Target  string  `json:"target"`
	Verdict Verdict `json:"verdict"`
	// Against is the target's.
	Against string `json:"against,omitempty"`
}

// ErrSkip, wrapped in what a side fails with, says that the row cannot be measured here, which is no failure.
var ErrSkip = errors.New("not possible here")

// Run measures the row. progress is told what comes next. If ctx ends after a whole round, the result is of the rounds
// until then, and its note says so.
func (r *Row) Run(ctx context.Context, rounds int, progress func(round, of int, side string)) (Result, error) {
	if r.Skip != "" {
		return Result{Group: r.Group, Name: r.Name, Skipped: r.Skip}, nil
	}
	if r.Rounds > 0 {
		rounds = r.Rounds
	}
	values := make([][]float64, len(r.Sides))
	for round := range rounds {
		for i := range r.Sides {
			k := (i + round) % len(r.Sides)
			progress(round+1, rounds, r.Sides[k].Name)
			v, err := r.once(ctx, &r.Sides[k])
			if err != nil && ctx.Err() != nil && round > 0 {
				return r.cutOff(values, round, rounds), nil
			}
			if errors.Is(err, ErrSkip) {
				return Result{Group: r.Group, Name: r.Name, Skipped: err.Error()}, nil
			}
			if err != nil {
				return Result{}, err
			}
			values[k] = append(values[k], v)
		}
	}
	return r.conclude(values), nil
}

// once prepares and measures a side.
func (r *Row) once(ctx context.Context, s *Side) (float64, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if s.Prepare != nil {
		if err := s.Prepare(ctx); err != nil {
			return 0, fmt.Errorf("%s: preparing %s: %w", r.Title(), s.Name, err)
		}
	}
	v, err := s.Measure(ctx)
	if err != nil {
		return 0, fmt.Errorf("%s: %s: %w", r.Title(), s.Name, err)
	}
	return v, nil
}

// cutOff makes the result of the rounds that were whole when the time was over.
func (r *Row) cutOff(values [][]float64, whole, rounds int) Result {
	for i := range values {
		values[i] = values[i][:whole]
	}
	res := r.conclude(values)
	if res.Note != "" {
		res.Note += "; "
	}
	res.Note += fmt.Sprintf("cut off after %d of %d rounds", whole, rounds)
	return res
}

// conclude makes the result of what was measured of each side.
func (r *Row) conclude(values [][]float64) Result {
	res := Result{Group: r.Group, Name: r.Name, Unit: r.Unit.Name}
	for i, s := range r.Sides {
		sr := SideResult{Name: s.Name, Values: values[i], Summary: Summarise(values[i])}
		if x := ratios(values[0], values[i], r.Unit.Faster); i > 0 && len(x) > 0 {
			sum := Summarise(x)
			sr.Ratio = &sum
		}
		res.Sides = append(res.Sides, sr)
	}
	for _, t := range r.Targets {
		res.Targets = append(res.Targets, TargetResult{t.text(r.Unit), t.judge(&res, r.Unit), t.Against})
	}
	if r.Note != nil {
		res.Note = r.Note()
	}
	return res
}

// judge compares a result with the target.
func (t Target) judge(res *Result, u Unit) Verdict {
	if t.Against == "" {
		s := res.Sides[0].Summary
		if u.Faster {
			return atLeast(t.Limit, s.Median, s.Q3)
		}
		return atLeast(-t.Limit, -s.Median, -s.Q1)
	}
	i := slices.IndexFunc(res.Sides, func(s SideResult) bool { return s.Name == t.Against })
	if i < 0 || res.Sides[i].Ratio == nil {
		return NoTarget
	}
	return atLeast(t.Limit, res.Sides[i].Ratio.Median, res.Sides[i].Ratio.Q3)
}

func atLeast(limit, median, better float64) Verdict {
	switch {
	case median >= limit:
		return Met
	case better >= limit:
		return Even
	}
	return Missed
}
