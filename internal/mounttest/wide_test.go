package mounttest

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/model"
	"github.com/gaiafs/gaiafs/internal/testdevice"
	"github.com/gaiafs/gaiafs/internal/testmount"
)

// kind is something that only wider programs can do: the name of an operation, or kernelsize. With kernelsize, only the
// kernel knows the size of a file that a program made longer.
type kind string

// offByDefault are the kinds that run only if -kinds names them, each with the reason.
var offByDefault = map[kind]string{}

var (
	kindsFlag = flag.String("kinds", "default",
		"what wider programs do besides reading, writing and mapping: names by commas, all, none or default; -name leaves out")
	machineFlag = flag.Int("machine", -1, "run wider programs only on the machine of this number")
	programFlag = flag.String("program", "",
		"a file with the steps to run instead, as a failure prints them; with -machine")
)

// machine describes a mount of wider programs. Programs run on several.
type machine struct {
	gpus        []int // the device of each program
	memory      int64 // of a device; at least two extents, which hold the file
	hostMemory  int64 // 0: plenty
	interval    time.Duration
	deviceReads string
	edge        bool // the file crosses the edge of an extent
	moving      *moving
}

const (
	plenty     = 64 << 20
	eightPages = 8 * model.PageSize
	busy       = 20 * time.Millisecond
)

var machines = []machine{
	{gpus: []int{0, 0, 1, 2}, memory: deviceMemory, hostMemory: eightPages, interval: busy, edge: true},
	{gpus: []int{0, 0}, memory: plenty, interval: time.Hour},
	{gpus: []int{0, 0, 1}, memory: deviceMemory, interval: busy, deviceReads: "always", edge: true},
	{interval: busy},
	{gpus: []int{0, 0, 1, 2}, memory: plenty, interval: busy},
	{gpus: []int{0, 0, 1}, memory: plenty, hostMemory: eightPages, interval: time.Hour, deviceReads: "always"},
	{gpus: []int{0}, memory: deviceMemory, hostMemory: eightPages, interval: time.Hour, edge: true},
	{gpus: []int{0, 0, 1}, memory: movingMemory, interval: busy, edge: true, moving: tenants},
	{gpus: []int{0, 0, 1, 1}, memory: movingMemory, interval: busy, edge: true, moving: crammed},
}

// extent is the unit of device memory.
const extent = 2 << 20

// wideSteps is how many steps run on a mount before the next machine's turn.
const wideSteps = 2_000

// wideMode is a way of writing. opens says that the kernel opens files.
type wideMode struct {
	name             string
	writeBack, opens bool
}

var wideModes = []wideMode{{"write-through", false, false}, {"write-back", true, false}, {kernelOpens, false, true},
	{kernelOpens + "-write-back", true, true}}

// TestWidePrograms runs programs with everything that can happen to a file, on every kind of backing filesystem, and
// also directly in SOURCE. Only the Oracle judges, because it is unknown when the daemon does its work.
func TestWidePrograms(t *testing.T) {
	kinds := chosenKinds(t)
	subtest := 0
	for _, b := range backings {
		t.Run(b.name, func(t *testing.T) {
			for _, mode := range wideModes {
				subtest++
				first := subtest
				t.Run(mode.name, func(t *testing.T) {
					if mode.opens && (os.Geteuid() != 0 || b.name == "overlay") {
						t.Skip("needs root, and a filesystem that reports changes")
					}
					widePrograms(t, b.make, mode, kinds, first)
				})
			}
		})
	}
}

func widePrograms(t *testing.T, backing func(testing.TB) (string, string), mode wideMode, kinds map[kind]bool,
	first int) {
	if *machineFlag >= 0 {
		source, missing := backing(t)
		if missing != "" {
			skip(t, missing)
		}
		wideMachine(t, source, *machineFlag, mode, kinds, uint64(first)*1_000_000+1, *stepsFlag/8)
		return
	}
	for round, done := 0, 0; done < *stepsFlag/8; round++ {
		n := min(wideSteps, *stepsFlag/8-done)
		if round == 0 {
			n = min(n, (*stepsFlag/8+1)/2) // at least two machines each
		}
		m := (first + round) % len(machines)
		t.Run(fmt.Sprintf("round%d-machine%d", round, m), func(t *testing.T) {
			source, missing := backing(t)
			if missing != "" {
				skip(t, missing)
			}
			wideMachine(t, source, m, mode, kinds, uint64(first)*1_000_000+uint64(round)*1_000+1, n)
		})
		if t.Failed() {
			return
		}
		done += n
	}
}

// wideMachine runs programs with seed and the seeds after it on one mount.
func wideMachine(t *testing.T, source string, number int, mode wideMode, kinds map[kind]bool, seed uint64, steps int) {
	m := machines[number]
	l := model.DefaultLayout(mode.writeBack)
	l.GPUs, l.Devices = nil, 0
	for _, d := range m.gpus {
		l.GPUs = append(l.GPUs, testdevice.Number(d))
		l.Devices = max(l.Devices, testdevice.Number(d)+1)
	}
	if m.moving != nil {
		testdevice.Emulated(t, "programs use the memory as their own")
	}
	x := newMovingSystem(t, l, m.moving.options(testmount.Options{
		Source: source, Memory: m.memory, HostMemory: m.hostMemory, WriteBackInterval: m.interval,
		DeviceReads: m.deviceReads, KernelOpens: mode.opens,
	}, seed+*firstFlag), m.moving)
	x.wide, x.kinds = true, kinds
	if m.edge {
		x.base = extent - 3*model.PageSize
	}
	seed += *firstFlag
	if *seedFlag != 0 {
		seed = *seedFlag
	}
	if *programFlag != "" {
		runText(t, x)
		return
	}
	start := time.Now()
	for done := 0; done < steps; seed++ {
		run := x.run(true)
		src := model.NewSource(seed)
		program, err := runProgram(x, run, func() (model.Step, bool) {
			return x.layout.Random(src, x.possible), len(run.Program) < programSteps
		})
		done += len(run.Program)
		if err != nil {
			names := slices.Sorted(maps.Keys(kinds))
			flags := fmt.Sprintf("-run '^%s$' -machine=%d -kinds=%s",
				strings.Join(strings.Split(t.Name(), "/")[:3], "$/^"), number, join(names)) + x.flags()
			fail(t, x, run, program, seed, flags, err)
		}
		if *seedFlag != 0 {
			break
		}
	}
	if m.moving != nil {
		x.requireMoves(steps)
	}
	t.Logf("%d steps in %v; slowest: %s", steps, time.Since(start).Round(time.Millisecond), x.slowest())
}

// runText runs the steps of -program unchanged.
func runText(t *testing.T, x *system) {
	text, err := os.ReadFile(*programFlag)
	require.NoError(t, err)
	steps, err := x.layout.ParseProgram(string(text))
	require.NoError(t, err)
	require.NoError(t, x.begin())
	run := x.run(true)
	for _, s := range append(steps, x.closing()...) {
		done, err := run.Step(s)
		require.NoError(t, err, "%s", x.layout.FormatProgram(run.Program))
		if !done {
			t.Log("left out: ", x.layout.Format(s))
		}
	}
}

func join(names []kind) string {
	var b []string
	for _, n := range names {
		b = append(b, string(n))
	}
	if len(b) == 0 {
		return "none"
	}
	return strings.Join(b, ",")
}

// chosenKinds parses -kinds.
func chosenKinds(t *testing.T) map[kind]bool {
	all := map[kind]bool{"kernelsize": true}
	for _, o := range model.Ops() {
		if wideOnly(o) {
			all[kind(o.String())] = true
		}
	}
	chosen := make(map[kind]bool)
	set := func(which map[kind]bool, but map[kind]string) {
		for k := range which {
			if but[k] == "" {
				chosen[k] = true
			}
		}
	}
	for name := range strings.SplitSeq(*kindsFlag, ",") {
		switch k := kind(strings.TrimPrefix(name, "-")); {
		case k == "all":
			set(all, nil)
		case k == "default":
			set(all, offByDefault)
		case k == "none":
		case !all[k]:
			t.Fatalf("there is no kind %q; there are %s", k, join(slices.Sorted(maps.Keys(all))))
		default:
			chosen[k] = true
			if strings.HasPrefix(name, "-") {
				delete(chosen, k)
			}
		}
	}
	return chosen
}

// wideOnly reports whether only wider programs have an operation.
func wideOnly(o model.Op) bool { return o >= model.Append && o < model.Map || o == model.Peek }

// possible reports whether the programs of x can carry out an operation.
func (x *system) possible(o model.Op) bool {
	if x.layout.Devices == 0 && o >= model.Map {
		return false
	}
	if o == model.Use || o == model.Done {
		return x.moving != nil
	}
	if x.moving != nil && x.moving.pinned > 0 && o.OfViews() {
		return false // views cannot move, and leave no room
	}
	return possible(o) || wideOnly(o) && o != model.Peek && x.kinds[kind(o.String())]
}

// expandWide returns the steps that a random step becomes. Unlike in other programs, nothing is written home in
// between, unless the result of the step would be unpredictable without that.
func (x *system) expandWide(run *model.Run, s model.Step) []model.Step {
	size := run.Model.Size()
	flush := model.Step{Op: model.Flush, Len: size}
	sync, reopen := model.Step{Op: model.Fsync}, model.Step{Op: model.Reopen, Client: s.Client}
	if x.unlinked && (s.Op.InSource() || s.Op == model.Reopen || s.Op == model.Kill || s.Op == model.OpenTrunc ||
		s.Op == model.Unlink) {
		return nil // the file has no name
	}
	// The kernel goes by the size that it was told last.
	least := run.Oracle.LeastSize()
	if s.Op == model.MapStore && s.Off+s.Len > least || s.Op == model.Copy && s.From+s.Len > least {
		return nil
	}
	switch s.Op {
	case model.SeekRead:
		if !x.layout.WriteBack {
			return []model.Step{flush, s} // the kernel asks without sending stores through mmap
		}
	case model.Store:
		longer := x.kinds["sourceappend"] && !x.layout.WriteBack
		if longer && s.Off+s.Len > run.Oracle.LeastSize() {
			return nil // a change in SOURCE makes the file longer, and the device may not know
		}
	case model.Release:
		if s.Val%4 == 0 {
			collect := s
			collect.Op = model.Collect
			return []model.Step{s, collect}
		}
	case model.Evict:
		for c := range x.layout.Clients() {
			c := model.Client(c)
			_, viewed := run.Model.Viewed(c)
			if !x.layout.IsCPU(c) && x.layout.Device(c) == x.layout.Device(s.Client) &&
				(viewed || run.Model.Mapped(c) && !run.Model.Movable(c)) {
				return nil
			}
		}
		s.Off, s.Len = 0, int64(x.layout.Pages)*model.PageSize
	case model.Map:
		if x.kinds["peek"] {
			// Current are the bytes that are home when the mapping is made.
			return []model.Step{flush, s, {Op: model.Peek, Client: s.Client,
				Len: int64(x.layout.Pages) * model.PageSize}}
		}
	case model.SourceAppend, model.SourceTruncate, model.SourceCollapse, model.SourceInsert:
		if x.layout.WriteBack {
			return nil // the kernel goes by its own size
		}
		if s.Op != model.SourceAppend {
			return []model.Step{sync, s, reopen}
		}
	case model.SourceClone:
		return []model.Step{sync, s}
	case model.Unlink:
		return []model.Step{reopen, s}
	}
	return []model.Step{s}
}

// skip skips a test that lacks something. The test fails instead if GAIAFS_REQUIRE_TOOLS is set and a tool is missing.
func skip(t *testing.T, missing string) {
	t.Helper()
	if os.Getenv("GAIAFS_REQUIRE_TOOLS") != "" && strings.HasPrefix(missing, "there is no") {
		t.Fatal(missing)
	}
	t.Skip(missing)
}
