package lrc

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/model"
)

// TestPlantedFaults checks the checker: random programs find each of these mistakes, soon.
func TestPlantedFaults(t *testing.T) {
	for _, c := range []struct {
		name   string
		fault  fault
		within int // steps
	}{
		{"a version increment is skipped", skippedVersion, 20_000},
		{"a base is not kept", forgottenBase, 20_000},
		{"a draining page is collected", collectedDraining, 20_000},
		{"the base of an own tail stays behind", oldTail, 20_000},
		{"words are merged", mergedWords, 20_000},
		{"a replica is copied over", copiedOver, 20_000},
		{"agreement is read twice", tornAgreement, 60_000},
		{"the kernel holds a page again", heldAgain, 60_000},
		{"stores into pages that were not brought are not found", unwatched, 20_000},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			steps := 0
			for seed := uint64(1); steps < c.within; seed++ {
				l := layoutOf(seed)
				program, err := randomProgram(l, newExecutor(l, c.fault), seed, programSteps)
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
