package lrc

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/model"
)

// traced reports whether an operation can be part of a trace.
func traced(o model.Op) bool { return o.Exact() && o != model.Copy }

// traceOf runs the program of a seed, judged only by the Oracle, and returns its trace.
func traceOf(seed uint64, plant fault, bytes []int64) (*model.Trace, error) {
	l := layoutOf(seed)
	run := model.NewRun(l, newExecutor(l, plant))
	run.Loose = true
	if bytes == nil {
		bytes = l.Spots(seed)
	}
	trace := run.Oracle.Record(bytes...)
	src := model.NewSource(seed)
	for tries := 0; len(run.Program) < programSteps && tries < 100*programSteps; tries++ {
		var err error
		s := l.Random(src, traced)
		if src.IntN(8) == 0 {
			_, err = run.StepDuring(s, l.Random(src, func(o model.Op) bool { return o == model.Store }))
		} else {
			_, err = run.Step(s)
		}
		if err != nil {
			return trace, err
		}
	}
	return trace, nil
}

// TestTraces writes traces of correct programs, and one for each planted fault that clients can see. TLC must refuse
// the latter.
func TestTraces(t *testing.T) {
	if *model.TraceFolder == "" {
		t.Skip("no -traces: spec/traces gives it")
	}
	var right []*model.Trace
	for seed := range uint64(*model.TracePrograms) {
		trace, err := traceOf(seed+1, none, nil)
		require.NoError(t, err)
		right = append(right, trace)
	}
	require.NoError(t, model.SaveTraces(filepath.Join(*model.TraceFolder, "lrc"), right))
	// tornAgreement and heldAgain are left out: clients never or hardly ever see them. The model finds them.
	for _, c := range []struct {
		name  string
		fault fault
	}{
		{"skipped-version", skippedVersion},
		{"forgotten-base", forgottenBase},
		{"collected-draining", collectedDraining},
		{"old-tail", oldTail},
		{"merged-words", mergedWords},
		{"copied-over", copiedOver},
		{"unwatched", unwatched},
	} {
		refused := refusedTrace(c.fault)
		require.NotNil(t, refused, "no client saw %s", c.name)
		require.NoError(t, model.SaveTraces(filepath.Join(*model.TraceFolder, "refused-"+c.name), []*model.Trace{refused}))
	}
}

// refusedTrace returns a trace of a program in which a client sees a planted fault, or nil if there is none among some
// hundreds.
func refusedTrace(plant fault) *model.Trace {
	for seed := range uint64(200) {
		_, err := traceOf(seed+1, plant, nil)
		var at, p int64
		if err == nil {
			continue
		}
		// The Oracle names a byte. A second run watches it.
		if _, bad := fmt.Sscanf(err.Error(), "byte %d of page %d reads", &at, &p); bad != nil {
			continue
		}
		trace, _ := traceOf(seed+1, plant, []int64{p*model.PageSize + at})
		return trace
	}
	return nil
}
