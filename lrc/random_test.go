package lrc

import (
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gaiafs/gaiafs/internal/model"
)

var (
	seedFlag  = flag.Uint64("seed", 0, "run only the random program of this seed")
	stepsFlag = flag.Int("steps", 0, "number of steps of random programs in all; 0 for the usual number")
)

const (
	programSteps = 300
	usualSteps   = 210_000
)

// randomProgram makes and runs the program of a seed, and returns the steps that ran. ops limits it to some operations.
func randomProgram(l model.Layout, sys model.System, seed uint64, steps int,
	ops func(model.Op) bool) ([]model.Step, error) {
	src := model.NewSource(seed)
	run := model.NewRun(l, sys)
	for tries := 0; len(run.Program) < steps; tries++ {
		if tries > 100*steps {
			return run.Program, fmt.Errorf("only %d of %d tries were legal", len(run.Program), tries)
		}
		s := l.Random(src, ops)
		var err error
		if src.IntN(8) == 0 {
			store := l.Random(src, func(o model.Op) bool { return o == model.Store })
			_, err = run.StepDuring(s, store)
		} else {
			_, err = run.Step(s)
		}
		if err != nil {
			return run.Program, err
		}
	}
	for _, s := range l.Closing() {
		if _, err := run.Step(s); err != nil {
			return run.Program, err
		}
	}
	return run.Program, nil
}

// layoutOf chooses the participants by the seed.
func layoutOf(seed uint64) model.Layout {
	l := model.DefaultLayout(seed%2 == 1)
	switch seed / 2 % 4 {
	case 1:
		l.Pages, l.Size = 2, 2*model.PageSize
	case 2:
		l.Size = 0
	}
	return l
}

// report shrinks a failing program, and fails t with the result.
func report(t *testing.T, seed uint64, l model.Layout, program []model.Step, err error) {
	t.Helper()
	fails := func(p []model.Step) bool { return model.Check(l, newExecutor(l, none), p) != nil }
	text := "(it does not fail when it is run again)"
	if fails(program) {
		program = model.Shrink(program, fails)
		text = fmt.Sprintf("shrunk to %d steps: %v\n%s", len(program), model.Check(l, newExecutor(l, none), program),
			l.FormatProgram(program))
	}
	t.Fatalf("seed %d, write-back %v: %v\nrun it again: go test ./lrc -run '^TestRandomPrograms$' -seed=%d\n%s", seed,
		l.WriteBack, err, seed, text)
}

func TestRandomPrograms(t *testing.T) {
	steps := usualSteps
	if underRace {
		steps /= 20 // one goroutine, and slow
	}
	if *stepsFlag > 0 {
		steps = *stepsFlag
	}
	if *seedFlag != 0 {
		l := layoutOf(*seedFlag)
		if program, err := randomProgram(l, newExecutor(l, none), *seedFlag, programSteps, nil); err != nil {
			report(t, *seedFlag, l, program, err)
		}
		return
	}
	start := time.Now()
	done := 0
	seed := uint64(1)
	if *stepsFlag > 0 {
		seed = uint64(start.UnixNano())
	}
	for ; done < steps; seed++ {
		l := layoutOf(seed)
		program, err := randomProgram(l, newExecutor(l, none), seed, programSteps, nil)
		if err != nil {
			report(t, seed, l, program, err)
		}
		done += len(program)
	}
	t.Logf("%d steps in %v", done, time.Since(start).Round(time.Millisecond))
}

// rapidSource lets rapid make the choices, so that rapid can shrink.
type rapidSource struct{ t *rapid.T }

func (s rapidSource) IntN(n int) int { return rapid.IntRange(0, n-1).Draw(s.t, "n") }

func TestRapidPrograms(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := model.DefaultLayout(rapid.Bool().Draw(t, "write-back"))
		run := model.NewRun(l, newExecutor(l, none))
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			s := l.Random(rapidSource{t}, nil)
			_, err := run.Step(s)
			if err != nil {
				t.Log(l.FormatProgram(run.Program))
			}
			require.NoError(t, err)
		}
	})
}
