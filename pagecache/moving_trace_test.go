package pagecache

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/model"
	"github.com/gaiafs/gaiafs/internal/page"
	"github.com/gaiafs/gaiafs/internal/testdevice"
)

// traceSteps is the number of steps of a program that writes a trace.
const traceSteps = 300

// watch makes a trace record some bytes.
func (f *movingFile) watch(bytes []int) {
	f.watched = bytes
	offsets := make([]int64, len(bytes))
	for i, at := range bytes {
		offsets[i] = int64(at)
	}
	f.trace = model.NewTrace(worldDevices, offsets...)
}

// agent returns the number of a writer in traces.
func (f *movingFile) agent(writer int) int { return (writer + 1) % (worldDevices + 1) }

// TestMoveTraces writes traces of what programs saw of memory that moves, one for each file of a world. It also writes
// the trace of a client that disobeys; TLC must refuse that one.
func TestMoveTraces(t *testing.T) {
	testdevice.Emulated(t, "clients map memory in this process")
	if *model.TraceFolder == "" {
		t.Skip("no -traces: spec/traces gives it")
	}
	var traces []*model.Trace
	for seed := uint64(1); len(traces) < *model.TracePrograms && !t.Failed(); seed++ {
		w := traceMoves(t, seed, false)
		for _, f := range w.files {
			traces = append(traces, f.trace)
		}
	}
	require.NoError(t, model.SaveTraces(filepath.Join(*model.TraceFolder, "moves"), traces))
	for seed := uint64(1); seed < 100; seed++ {
		if w := traceMoves(t, seed, true); w.wrong {
			seen := []*model.Trace{w.files[0].trace, w.files[1].trace}
			require.NoError(t, model.SaveTraces(filepath.Join(*model.TraceFolder, "refused-clinging-client"), seen))
			return
		}
	}
	t.Error("no check noticed a client that kept its memory")
}

// traceMoves runs the world of a seed. With clings, clients keep their first memory.
func traceMoves(t *testing.T, seed uint64, clings bool) (w *movingWorld) {
	t.Run(fmt.Sprint(seed, clings), func(t *testing.T) {
		// Adjacent bytes of the three writers, and some of another extent's last page.
		at := int(seed%worldBricks)*brick + int(seed%7)*page.Size
		w = newMovingWorld(t, seed, at/3*3, at/3*3+1, at/3*3+2, 2*brick-6)
		w.loose = clings
		for range traceSteps {
			for _, c := range w.clients {
				c.clings.Store(clings)
			}
			w.step()
		}
		w.finish()
	})
	return w
}
