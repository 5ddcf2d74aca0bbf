package mounttest

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/model"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

// traceSteps is the number of steps of a program that writes a trace.
const traceSteps = 60

// TestTraces writes traces of what random programs saw on busy mounts, in both write modes.
func TestTraces(t *testing.T) {
	if *model.TraceFolder == "" {
		t.Skip("no -traces: spec/traces gives it")
	}
	for name, writeBack := range map[string]bool{"mount-write-through": false, "mount-write-back": true} {
		t.Run(name, func(t *testing.T) {
			testdevice.Emulated(t, "traces need no GPU")
			x := newSystem(t, layoutOf(writeBack), testmount.Options{WriteBackInterval: 20 * time.Millisecond})
			var traces []*model.Trace
			for seed := *firstFlag + 1; len(traces) < (*model.TracePrograms+1)/2; seed++ {
				run := x.run(true)
				trace := run.Oracle.Record(x.layout.Spots(seed)...)
				src := model.NewSource(seed)
				_, err := runProgram(x, run, func() (model.Step, bool) {
					return x.layout.Random(src, possible), len(run.Program) < traceSteps
				})
				require.NoError(t, err, "seed %d", seed)
				traces = append(traces, trace)
			}
			require.NoError(t, model.SaveTraces(filepath.Join(*model.TraceFolder, name), traces))
		})
	}
}
