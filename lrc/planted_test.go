package lrc

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/model"
)

// TestPlantedFaults checks the checker: random programs find each of these mistakes, soon.
func TestPlantedFaults(t *testing.T) {
	race := []model.Op{
		model.Map, model.Store, model.Acquire, model.Publish, model.Drop, model.Finish, model.Write, model.Read,
		model.DirectRead,
		model.Collect, model.Load,
	}
	for _, c := range []struct {
		name   string
		fault  fault
		within int // steps
		// only limits programs to these operations, if the mistake is too rare among all operations.
		only []model.Op
	}{
		{"a version increment is skipped", skippedVersion, 20_000, nil},
		{"a base is not kept", forgottenBase, 20_000, nil},
		{"a draining page is collected", collectedDraining, 20_000, nil},
		{"the base of an own tail stays behind", oldTail, 20_000, nil},
		{"words are merged", mergedWords, 20_000, nil},
		{"a replica is copied over", copiedOver, 20_000, nil},
		{"agreement is read twice", tornAgreement, 60_000, race},
		{"the kernel holds a page again", heldAgain, 60_000, race},
		{"stores into pages that were not brought are not found", unwatched, 20_000, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			ops := model.Op.Exact
			if c.only != nil {
				ops = func(o model.Op) bool { return slices.Contains(c.only, o) }
			}
			steps := 0
			for seed := uint64(1); steps < c.within; seed++ {
				l := layoutOf(seed)
				program, err := randomProgram(l, newExecutor(l, c.fault), seed, programSteps, ops)
				steps += len(program)
				if err == nil {
					continue
				}
				fails := func(p []model.Step) bool { return model.Check(l, newExecutor(l, c.fault), p) != nil }
				require.True(t, fails(program), "a program that failed runs well the second time")
				small := model.Shrink(program, fails)
				t.Logf("found after %d steps, shrunk to %d: %v\n%s", steps, len(small),
					model.Check(l, newExecutor(l, c.fault), small), l.FormatProgram(small))
				return
			}
			t.Fatalf("not found in %d steps", steps)
		})
	}
}
