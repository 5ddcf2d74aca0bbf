package rows

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Unit is the unit of a row's values.
type Unit struct {
	Name string
	// Faster says that larger values are better.
	Faster bool
}

// Units of rows.
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

// Side is one of the things that a row compares.
type Side struct {
	// Name is the side's name in the table.
	Name string
	// Prepare sets up the state from which Measure starts. It is not measured. nil if there is nothing to prepare.
	Prepare func(ctx context.Context) error
	// Measure does the work once and returns a value in the row's unit.
	Measure func(ctx context.Context) (float64, error)
	// Check is called once, after the first measurement of the side. It fails if the work was not done correctly. It is
	// not measured. nil if there is nothing to check.
	Check func(ctx context.Context) error
}

// Target is what a row should reach.
type Target struct {
	// Against is the side whose ratio to the first side counts; "" means the first side's own value.
	Against string
	// Limit is the smallest ratio that meets the target. If Against is "", it is the worst value: the largest, or the
	// smallest if larger is better.
	Limit float64
}

// text formats the target for a row of that unit.
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
	// Labels describe the row for programs. They are kept in the result.
	Labels map[string]string
	// Rounds is how often each side is measured; 0 leaves it to Run's caller.
	Rounds int
	// Until is when the row should end. A round that would end later, if it took as long as the last one, does not
	// begin. The first round always does. The zero time means no limit.
	Until time.Time
	// Note is called after the last round and returns a remark on the row. nil if there is none.
	Note func() string
	// Skip says why the row cannot run here, or "" if it can.
	Skip string
}

// Title is the unique name of the row.
func (r *Row) Title() string { return r.Group + "/" + r.Name }

// Verdict says whether a value or a ratio meets its target.
type Verdict string

// Verdicts.
const (
	Met      Verdict = "met"
	Even     Verdict = "within spread" // the median misses the target, but the better quartile meets it
	Missed   Verdict = "missed"
	NoTarget Verdict = ""
)

// SideResult has the measurements of a side.
type SideResult struct {
	Name    string    `json:"name"`
	Values  []float64 `json:"values"`
	Summary Summary   `json:"summary"`
	// Ratio is the first side's speed over this side's; nil for the first side itself.
	Ratio *Summary `json:"ratio,omitempty"`
}

// Result is the result of a row.
type Result struct {
	Group string `json:"group"`
	Name  string `json:"name"`
	// Labels are those of the row.
	Labels map[string]string `json:"labels,omitempty"`
	Unit   string            `json:"unit"`
	// Faster says that larger values are better.
	Faster  bool           `json:"larger_is_better"`
	Sides   []SideResult   `json:"sides"`
	Targets []TargetResult `json:"targets,omitempty"`
	Note    string         `json:"note,omitempty"`
	// Skipped says why there are no sides; Failed says so for a row that should have worked.
	Skipped string `json:"skipped,omitempty"`
	Failed  string `json:"failed,omitempty"`
}

// TargetResult is the result for a target.
type TargetResult struct {
	Target  string  `json:"target"`
	Verdict Verdict `json:"verdict"`
	// Against and Limit are those of the target.
	Against string  `json:"against,omitempty"`
	Limit   float64 `json:"limit"`
}

// ErrSkip, wrapped in a side's error, says that the row cannot be measured here. That is not a failure.
var ErrSkip = errors.New("not possible here")

// Impossible is an ErrSkip whose text is the whole reason.
type Impossible struct{ Reason string }

func (e Impossible) Error() string { return e.Reason }

// Is makes an Impossible an ErrSkip.
func (e Impossible) Is(target error) bool { return target == ErrSkip }

// reason returns the text of an ErrSkip for the table.
func reason(err error) string {
	var i Impossible
	if errors.As(err, &i) {
		return i.Reason
	}
	return err.Error()
}

// Run measures the row. It calls progress before each measurement. If ctx ends after a complete round, the result
// covers the complete rounds, and its note says so.
func (r *Row) Run(ctx context.Context, rounds int, progress func(round, of int, side string)) (Result, error) {
	if r.Skip != "" {
		return r.skipped(r.Skip), nil
	}
	if r.Rounds > 0 {
		rounds = r.Rounds
	}
	values := make([][]float64, len(r.Sides))
	var last time.Duration
	for round := range rounds {
		begin := time.Now()
		if round > 0 && !r.Until.IsZero() && begin.Add(last).After(r.Until) {
			return r.cutOff(values, round, rounds), nil
		}
		var checks time.Duration // time of checks, which later rounds do not spend
		for i := range r.Sides {
			k := (i + round) % len(r.Sides)
			progress(round+1, rounds, r.Sides[k].Name)
			v, err := r.once(ctx, &r.Sides[k])
			if err != nil && ctx.Err() != nil && round > 0 {
				return r.cutOff(values, round, rounds), nil
			}
			if err == nil && round == 0 {
				start := time.Now()
				err = r.check(ctx, &r.Sides[k])
				checks += time.Since(start)
			}
			if errors.Is(err, ErrSkip) {
				return r.skipped(reason(err)), nil
			}
			if err != nil {
				return Result{}, err
			}
			values[k] = append(values[k], v)
		}
		last = time.Since(begin) - checks
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

// check runs a side's check.
func (r *Row) check(ctx context.Context, s *Side) error {
	if s.Check == nil {
		return nil
	}
	if err := s.Check(ctx); err != nil {
		return fmt.Errorf("%s: checking %s: %w", r.Title(), s.Name, err)
	}
	return nil
}

// skipped makes the result of a row that cannot be measured.
func (r *Row) skipped(reason string) Result {
	return Result{Group: r.Group, Name: r.Name, Labels: r.Labels, Unit: r.Unit.Name, Faster: r.Unit.Faster,
		Skipped: reason}
}

// cutOff makes the result of the rounds that were complete when the time was over.
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

// conclude makes the result from the measurements of each side.
func (r *Row) conclude(values [][]float64) Result {
	res := Result{Group: r.Group, Name: r.Name, Labels: r.Labels, Unit: r.Unit.Name, Faster: r.Unit.Faster}
	for i, s := range r.Sides {
		sr := SideResult{Name: s.Name, Values: values[i], Summary: Summarise(values[i])}
		if x := ratios(values[0], values[i], r.Unit.Faster); i > 0 && len(x) > 0 {
			sum := Summarise(x)
			sr.Ratio = &sum
		}
		res.Sides = append(res.Sides, sr)
	}
	for _, t := range r.Targets {
		res.Targets = append(res.Targets, TargetResult{t.text(r.Unit), t.judge(&res, r.Unit), t.Against, t.Limit})
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
