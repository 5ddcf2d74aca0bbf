package lrc

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/model"
	"github.com/gaiafs/gaiafs/internal/page"
)

// rehearse lets fn begin a plan, carry out a part of it and abort it, now and then. Afterwards nothing may have
// changed.
func (x *executor) rehearse(what string, fn func()) {
	if x.aborts == nil || x.aborts.IntN(2) == 0 {
		return
	}
	x.aborted++
	before, bases := x.f.Dump(), len(x.bases)
	fn()
	if after := x.f.Dump(); after != before {
		x.failf("%s that was aborted changed the state:\n%swas\n%s", what, after, before)
	}
	if len(x.bases) != bases {
		x.failf("%s that was aborted left %d bases, not %d", what, len(x.bases), bases)
	}
}

// keepSome keeps the first bases that a plan asks for, and throws them away.
func (x *executor) keepSome(keep []PageBase) {
	if keep = keep[:x.aborts.IntN(len(keep)+1)]; len(keep) > 0 {
		x.keep(keep)
		x.dropBases(keep)
	}
}

func (x *executor) abortWrite(rg page.Range) {
	x.rehearse("a write", func() {
		p := x.f.BeginWrite(rg)
		x.keepSome(p.Keep)
		p.Abort()
	})
}

func (x *executor) abortCollect(runs []Pending) {
	x.rehearse("a collect", func() {
		p := x.f.BeginCollect(runs)
		x.keepSome(p.Keep)
		p.Abort()
	})
}

// TestAbortedPlans aborts half of the plans of random programs and begins them again. The model checks that the aborts
// have no effect.
func TestAbortedPlans(t *testing.T) {
	steps := usualSteps / 10
	if underRace {
		steps /= 10
	}
	aborted := 0
	for seed, done := uint64(1), 0; done < steps; seed++ {
		l := layoutOf(seed)
		aborting := func() *executor {
			x := newExecutor(l, none)
			x.aborts = rand.New(rand.NewPCG(seed, 0))
			return x
		}
		x := aborting()
		program, err := randomProgram(l, x, seed, programSteps, nil)
		if err != nil {
			fails := func(p []model.Step) bool { return model.Check(l, aborting(), p) != nil }
			if fails(program) {
				program = model.Shrink(program, fails)
			}
			t.Fatalf("seed %d: %v\n%s", seed, err, l.FormatProgram(program))
		}
		done, aborted = done+len(program), aborted+x.aborted
	}
	require.Greater(t, aborted, steps/10)
	t.Logf("%d plans were aborted in %d steps", aborted, steps)
}
