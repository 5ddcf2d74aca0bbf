package mounttest

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/model"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

var (
	seedFlag  = flag.Uint64("seed", 0, "run only the random program of this seed")
	firstFlag = flag.Uint64("first", 0, "is added to the seeds of random programs, so that others run")
	stepsFlag = flag.Int("steps", 7_800, "number of steps of random programs in all")
)

const programSteps = 100

// possible reports whether a program on a mount can carry out the Op as a step of its own. A Collect only follows a
// Release.
func possible(o model.Op) bool {
	switch o {
	case model.Publish, model.Drop, model.Finish, model.Untrack, model.Collect, model.Use, model.Done:
		return false
	}
	return o < model.Append || o >= model.Map && o != model.Peek
}

// expand returns the steps that a random step becomes on a mount.
func expand(run *model.Run, s model.Step) []model.Step {
	l := run.Layout
	flush := model.Step{Op: model.Flush, Len: run.Model.Size()}
	switch s.Op {
	case model.Reclaim:
		// posix_fadvise writes back what it is told to drop.
		flush.Off, flush.Len = s.Off, s.Len
		return []model.Step{flush, s}
	case model.Truncate, model.Punch, model.Unmap, model.Kill, model.Unview:
		// ftruncate, fallocate and every close of a descriptor do that too.
		return []model.Step{flush, s}
	case model.Map:
		// A client gets whole extents, which show home's bytes. A release makes the kernel begin to write pages home
		// that the model still takes for dirty.
		if !run.Loose {
			return []model.Step{flush, s}
		}
	case model.Store, model.Group:
		if !run.Loose && s.Off+s.Len > run.Model.Size() {
			// A store past end of file makes the page count as modified, and its release may make a collect bring home
			// early what else the page has.
			return nil
		}
	case model.Release:
		if s.Val%4 == 0 {
			collect := s
			collect.Op = model.Collect
			return []model.Step{s, collect}
		}
	case model.View, model.Look:
		// A view may take released bytes directly from devices. The model needs them home.
		if !run.Loose {
			return append(run.Model.ReadsOf(s), s)
		}
	case model.Evict:
		// An extent is evicted as a whole, and only if no client maps a page of it.
		for c := range l.Clients() {
			c := model.Client(c)
			if _, viewed := run.Model.Viewed(c); !l.IsCPU(c) && l.Device(c) == l.Device(s.Client) &&
				(viewed || run.Model.Mapped(c) && !run.Model.Movable(c)) {
				return nil
			}
		}
		s.Off, s.Len = 0, int64(l.Pages)*model.PageSize
		if !run.Loose {
			// Everything pending in an extent comes home, even if this device holds nothing of those pages.
			return []model.Step{{Op: model.Fsync}, s}
		}
	}
	return []model.Step{s}
}

func (x *system) expand(run *model.Run, s model.Step) []model.Step {
	if x.wide {
		return x.expandWide(run, s)
	}
	if x.moving != nil && !run.Loose {
		if steps, known := x.expandMoving(run, s); known {
			return steps
		}
	}
	return expand(run, s)
}

// closing returns the steps that end a program. When clients close their descriptors, the kernel has nothing dirty.
func (x *system) closing() []model.Step {
	steps := append([]model.Step{{Op: model.Fsync}}, x.layout.Closing()...)
	if x.wide && !x.unlinked {
		steps = append([]model.Step{{Op: model.Reopen}}, steps...)
	}
	for c := x.layout.CPUs; x.moving != nil && c < x.layout.Clients(); c++ {
		steps = append([]model.Step{{Op: model.Done, Client: model.Client(c), Val: allBrackets}}, steps...)
	}
	return steps
}

// runProgram runs the steps that next makes on a fresh file, and then the closing steps. It returns the steps that next
// made.
func runProgram(x *system, run *model.Run, next func() (model.Step, bool)) (program []model.Step, err error) {
	if err := x.begin(); err != nil {
		return nil, err
	}
	for s, ok := next(); ok; s, ok = next() {
		program = append(program, s)
		for _, s := range x.expand(run, s) {
			refusals := run.Refusals
			if done, err := run.Step(s); err != nil {
				return program, err
			} else if !done && s.Op != model.Flush || run.Refusals > refusals && x.moving != nil {
				break
			}
		}
	}
	for _, s := range x.closing() {
		if _, err := run.Step(s); err != nil {
			return program, err
		}
	}
	return program, x.converged(run)
}

// replay makes runProgram run a program again.
func replay(program []model.Step) func() (model.Step, bool) {
	i := 0
	return func() (s model.Step, ok bool) {
		if i == len(program) {
			return s, false
		}
		i++
		return program[i-1], true
	}
}

// converged returns an error unless all see the same bytes, after everything was released and came home.
func (x *system) converged(run *model.Run) error {
	whole := model.Step{Op: model.Read, Len: int64(x.layout.Pages) * model.PageSize}
	home, err := x.Home()
	if err != nil {
		return err
	}
	read, err := x.Do(whole)
	if err != nil {
		return err
	}
	whole.Op = model.DirectRead
	direct, err := x.Do(whole)
	if err != nil {
		return err
	}
	if string(read) != string(home) || string(direct) != string(home) {
		return fmt.Errorf("in the end, the page cache, a direct read and the backing file do not have the same bytes")
	}
	for c := x.layout.CPUs; c < x.layout.Clients() && len(home) > 0; c++ {
		client := model.Client(c)
		for _, s := range []model.Step{
			{Op: model.Map, Client: client, Len: whole.Len, Movable: x.moving != nil},
			{Op: model.Load, Client: client, Len: int64(len(home))},
			{Op: model.Unmap, Client: client},
		} {
			got, err := x.Do(s)
			if err != nil {
				return err
			}
			if s.Op == model.Load && string(got) != string(home) {
				return fmt.Errorf("in the end, device %d does not have the bytes of the backing file: %s",
					x.layout.Device(client), firstDifference(got, home))
			}
		}
	}
	return nil
}

func firstDifference(got, want []byte) string {
	for i := range min(len(got), len(want)) {
		if got[i] != want[i] {
			return fmt.Sprintf("byte %d of page %d is 0x%02x, want 0x%02x", i%model.PageSize, i/model.PageSize, got[i],
				want[i])
		}
	}
	return fmt.Sprintf("%d bytes, want %d", len(got), len(want))
}

func layoutOf(writeBack bool) model.Layout {
	l := model.DefaultLayout(writeBack)
	l.ReadAhead = true
	l.Devices = testdevice.Count(l.Devices)
	for i, d := range l.GPUs {
		l.GPUs[i] = testdevice.Number(d)
	}
	return l
}

// mixedLayout is the layout of a mount whose last device is of another kind than the others.
func mixedLayout(writeBack bool) model.Layout {
	l := layoutOf(writeBack)
	last := testdevice.Count(l.Devices - 1)
	l.Devices, l.GPUs[len(l.GPUs)-1] = last+1, last
	return l
}

// kernelOpens begins the names of the modes in which the kernel opens files.
const kernelOpens = "kernel-opens"

// TestRandomPrograms runs random programs on mounts: in both write modes, on a quiet daemon and on a busy one, through
// libcuda, and with opens that the daemon does not see.
func TestRandomPrograms(t *testing.T) {
	modes := []struct {
		name        string
		writeBack   bool
		interval    time.Duration
		loose       bool
		disguised   bool
		deviceReads string
		// emulated is the number of emulated devices next to devices of another kind: disguised ones, or GPUs.
		emulated int
		moving   *moving
	}{
		{"write-through", false, time.Hour, false, false, "", 0, nil},
		{"write-back", true, time.Hour, false, false, "", 0, nil},
		{"write-through-busy", false, 20 * time.Millisecond, true, false, "", 0, nil},
		{"write-back-busy", true, 20 * time.Millisecond, true, false, "", 0, nil},
		{"libcuda", false, time.Hour, false, true, "", 0, nil},
		{"libcuda-busy", false, 20 * time.Millisecond, true, true, "", 0, nil},
		// Devices serve all reads that they can.
		{"devices-serve", false, time.Hour, false, false, "always", 0, nil},
		{"devices-serve-write-back-busy", true, 20 * time.Millisecond, true, false, "always", 0, nil},
		{"two-kinds", false, time.Hour, false, !testdevice.GPUs(), "", 1, nil},
		{"two-kinds-busy", true, 20 * time.Millisecond, true, !testdevice.GPUs(), "", 1, nil},
		// A device has two extents, and the file has one.
		{"moving", false, time.Hour, false, false, "", 0, roomy},
		{"moving-write-back", true, time.Hour, false, false, "", 0, roomy},
		{"moving-crammed-busy", false, 20 * time.Millisecond, true, false, "always", 0, crammed},
		{"moving-tenants-busy", true, 20 * time.Millisecond, true, false, "", 0, tenants},
		{kernelOpens, false, time.Hour, false, false, "", 0, nil},
		{kernelOpens + "-busy", false, 20 * time.Millisecond, true, false, "", 0, nil},
		{kernelOpens + "-write-back-busy", true, 20 * time.Millisecond, true, false, "", 0, nil},
	}
	for i, mode := range modes {
		t.Run(mode.name, func(t *testing.T) {
			if mode.disguised {
				testdevice.Emulated(t, "there is a libcuda that is not fake")
			}
			layout := layoutOf(mode.writeBack)
			if mode.emulated > 0 {
				layout = mixedLayout(mode.writeBack)
			}
			first := uint64(1000*(i+1)+1) + *firstFlag
			if mode.moving != nil {
				testdevice.Emulated(t, "programs use the memory as their own")
			}
			options := testmount.Options{
				WriteBackInterval: mode.interval, Disguised: mode.disguised, DeviceReads: mode.deviceReads,
				Emulated: mode.emulated, KernelOpens: strings.HasPrefix(mode.name, kernelOpens),
			}
			if options.KernelOpens && os.Geteuid() != 0 {
				t.Skip("needs root")
			}
			if mode.moving != nil {
				options.Memory = movingMemory
			}
			x := newMovingSystem(t, layout, mode.moving.options(options, first), mode.moving)
			start, done, steps := time.Now(), 0, *stepsFlag/len(modes)
			for seed := first; done < steps || *seedFlag != 0 ||
				done < 10*steps && x.needsMoves(); seed++ {
				if *seedFlag != 0 {
					seed = *seedFlag
				}
				run := x.run(mode.loose)
				before := x.overlaps()
				src := model.NewSource(seed)
				program, err := runProgram(x, run, func() (model.Step, bool) {
					return x.layout.Random(src, x.possible), len(run.Program) < programSteps
				})
				done += len(run.Program)
				if err != nil {
					fail(t, x, run, program, seed, "-run '^TestRandomPrograms$/^"+mode.name+"$'"+x.flags(), err)
				}
				if !mode.loose {
					require.Equal(t, run.Model.Overlaps, x.overlaps()-before, "overlapping bytes of seed %d", seed)
				}
				if *seedFlag != 0 {
					break
				}
			}
			if mode.moving != nil {
				x.requireMoves(done)
			}
			if mode.deviceReads != "" {
				s, err := x.status()
				require.NoError(t, err)
				require.Positive(t, s.Counters["device_reads"])
			}
			t.Logf("%d steps in %v; slowest: %s", done, time.Since(start).Round(time.Millisecond), x.slowest())
		})
	}
}

func (x *system) run(loose bool) *model.Run {
	run := model.NewRun(x.layout, x)
	run.Loose, run.EarlyFlush = loose, true
	if x.wide {
		run.Oracle.WatchTimes(time.Now)
	}
	return run
}

// fail shrinks a program that failed, and fails t with the shrunk program.
func fail(t *testing.T, x *system, run *model.Run, program []model.Step, seed uint64, flags string, err error) {
	t.Helper()
	tries := 0
	last, lastErr := run, err
	fails := func(p []model.Step) bool {
		if tries++; tries > 400 || x.recover() != nil {
			return false
		}
		again := x.run(run.Loose)
		_, err := runProgram(x, again, replay(p))
		if err != nil {
			last, lastErr = again, err
		}
		return err != nil
	}
	text := "it did not fail when it was run again"
	if fails(program) {
		text = fmt.Sprintf("shrunk to %d steps", len(model.Shrink(program, fails)))
	}
	t.Fatalf("seed %d, step %d: %v\nrun it again: go test ./internal/mounttest %s -seed=%d\n%s: %v\n%s",
		seed, len(run.Program), err, flags, seed, text, lastErr, x.layout.FormatProgram(last.Program))
}

// recover replaces programs that a failed step may have ended.
func (x *system) recover() error {
	for c, p := range x.processes {
		_ = p.kill()
		q, err := x.start(c)
		if err != nil {
			return err
		}
		x.processes[c] = q
	}
	clear(x.mapped)
	clear(x.viewed)
	return x.settled()
}
