package bench

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/gaiafs/gaiafs/bench/rows"
	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// modelGroup is the group of --model. It runs only if that flag is given, and then alone.
const modelGroup = "model"

// sideSafetensors is the other side in the model's rows.
const sideSafetensors = "safetensors"

// Beginnings of the names of the model's rows.
const (
	modelCold   = "load, cold"
	modelWarm   = "load, host-warm"
	modelSecond = "load by a second process"
	modelRun    = "run"
)

// modelProgram is the program that loads weights and computes with them.
//
//go:embed model.py
var modelProgram string

// loader is a Python process that carries out orders.
type loader struct {
	cmd  *exec.Cmd
	said bytes.Buffer // its standard error; read it only after the process has ended
	in   *json.Encoder
	out  *json.Decoder
	// how and path say what it loads, and by which library.
	how, path string
}

type loaderOrder struct {
	Do              string
	How, Path, UUID string `json:",omitempty"`
}

type loaderAnswer struct {
	Took    time.Duration
	Sum     uint32
	Err     string
	Full    bool   // Err says that a device has no memory
	Missing string // a package that is not installed
}

// startLoader starts a Python process for the first device of a mount. uuid identifies it; "" means an emulated device.
func (s *session) startLoader(ctx context.Context, how, path, uuid string) (*loader, error) {
	l := &loader{cmd: exec.CommandContext(ctx, s.Python, "-c", modelProgram), how: how, path: path}
	l.cmd.Stderr = &l.said
	// It ends if bench is killed, but not by the Ctrl-C that ends bench.
	l.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	in, err := l.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := l.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := l.cmd.Start(); err != nil {
		return nil, fmt.Errorf("%w: choose another Python by --python", err)
	}
	s.later(func() {
		_ = in.Close() // ends it, unless it hangs
		kill := time.AfterFunc(10*time.Second, func() { _ = l.cmd.Process.Kill() })
		_ = l.cmd.Wait()
		kill.Stop()
	})
	l.in, l.out = json.NewEncoder(in), json.NewDecoder(out)
	_, err = l.ask(loaderOrder{Do: "begin", UUID: uuid})
	return l, err
}

// ask makes the process carry out an order.
func (l *loader) ask(o loaderOrder) (a loaderAnswer, err error) {
	o.How, o.Path = l.how, l.path
	if err = l.in.Encode(o); err == nil {
		err = l.out.Decode(&a)
	}
	switch {
	case err != nil:
		_ = l.cmd.Process.Kill()
		_ = l.cmd.Wait() // so that said is complete
		lines := strings.Split(strings.TrimSpace(l.said.String()), "\n")
		return a, fmt.Errorf("the Python process ended: %s", lines[len(lines)-1])
	case a.Missing != "":
		return a, errors.New(a.Missing)
	case a.Full:
		return a, rows.Impossible{Reason: a.Err}
	case a.Err != "":
		return a, errors.New(a.Err)
	}
	return a, nil
}

// model is the file of --model, and the processes that load it.
type model struct {
	s              *session
	mount, backing *place
	// first and second load with gaiafs, other with safetensors.
	first, second, other *loader
	sum                  *uint32 // of the weights, from the first loader that was asked
}

// modelRows compare with safetensors how long a model takes to load and to compute with.
func modelRows(ctx context.Context, s *session) ([]rows.Row, error) {
	m := &model{s: s}
	var err error
	if m.mount, err = s.place(placeGaiafs); err == nil {
		m.backing, err = s.place(placeBacking)
	}
	if err == nil {
		err = s.needDevices(m.mount, 1)
	}
	if err == nil && !s.listing {
		err = m.start(ctx)
	}
	if err != nil {
		return nil, err
	}
	size := ", " + humanize.IBytes(uint64(s.given.whole))
	load := func(name string, st state, l, against *loader, before ...*loader) rows.Row {
		mine := rows.Side{Name: placeGaiafs, Measure: m.load(l), Check: m.check(l),
			Prepare: func(ctx context.Context) error { return m.prepare(ctx, st, m.mount, before...) }}
		theirs := rows.Side{Name: sideSafetensors, Measure: m.load(against), Check: m.check(against),
			Prepare: func(ctx context.Context) error { return m.prepare(ctx, st, m.backing) }}
		return rows.Row{Group: modelGroup, Name: name + size, Unit: rows.Milliseconds, Sides: []rows.Side{mine, theirs},
			Targets: []rows.Target{{Against: sideSafetensors, Limit: 1}}}
	}
	compute := func(l *loader) rows.Side {
		return rows.Side{Name: l.side(), Measure: m.measure(l, "run"), Check: m.check(l),
			Prepare: func(ctx context.Context) error { return m.prepare(ctx, hostWarm, m.backing, l) }}
	}
	return []rows.Row{
		load(modelCold, cold, m.first, m.other),
		load(modelWarm, hostWarm, m.first, m.other),
		load(modelSecond, hostWarm, m.second, m.other, m.first),
		{Group: modelGroup, Name: modelRun + ", a pass over all weights", Unit: rows.Milliseconds,
			Sides:   []rows.Side{compute(m.first), compute(m.other)},
			Targets: []rows.Target{{Against: sideSafetensors, Limit: 0.95}}},
	}, nil
}

// side returns the name of the loader's side. nil stands for any loader while rows are listed.
func (l *loader) side() string {
	if l == nil || l.how != sideSafetensors {
		return placeGaiafs
	}
	return sideSafetensors
}

// start starts the processes.
func (m *model) start(ctx context.Context) (err error) {
	st, err := m.mount.status()
	if err != nil {
		return err
	}
	uuid, name := st.Devices[0].UUID, m.s.given.name
	for _, w := range []struct {
		loader *(*loader)
		how    string
		path   string
	}{{&m.first, placeGaiafs, m.mount.path(name)}, {&m.second, placeGaiafs, m.mount.path(name)},
		{&m.other, sideSafetensors, m.backing.path(name)}} {
		if *w.loader, err = m.s.startLoader(ctx, w.how, w.path, uuid); err != nil {
			return err
		}
	}
	return nil
}

// prepare makes all processes drop the weights, evicts the file from devices, and puts it into the host's memory or
// removes it from there. Then the loaders in before load it.
func (m *model) prepare(ctx context.Context, st state, p *place, before ...*loader) error {
	for _, l := range []*loader{m.first, m.second, m.other} {
		if _, err := l.ask(loaderOrder{Do: "drop"}); err != nil {
			return err
		}
	}
	f, err := os.Open(m.mount.path(m.s.given.name))
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := gaiafs.Evict(ctx, f, -1); err != nil {
		return err
	}
	if err := m.s.enter(ctx, st, p, m.s.given); err != nil {
		return err
	}
	for _, l := range before {
		if _, err := l.ask(loaderOrder{Do: "load"}); err != nil {
			return err
		}
	}
	return nil
}

func (m *model) load(l *loader) func(context.Context) (float64, error) { return m.measure(l, "load") }

// measure makes a loader carry out an order, and returns how many milliseconds that took.
func (m *model) measure(l *loader, do string) func(context.Context) (float64, error) {
	return func(context.Context) (float64, error) {
		a, err := l.ask(loaderOrder{Do: do})
		if changed := m.s.given.unchanged(); changed != nil {
			err = changed
		}
		return ms(a.Took), err
	}
}

// check fails if a loader has other weights than the first one that was asked.
func (m *model) check(l *loader) func(context.Context) error {
	return func(context.Context) error {
		a, err := l.ask(loaderOrder{Do: "checksum"})
		if err != nil {
			return err
		}
		if m.sum == nil {
			m.sum = &a.Sum
		}
		if a.Sum != *m.sum {
			return fmt.Errorf("%s loaded other bytes than the loader before it", l.how)
		}
		return nil
	}
}

// modelVerdict describes the results of a model's rows in sentences.
func modelVerdict(list []rows.Result) (words []string) {
	row := func(name string) *rows.Result {
		i := slices.IndexFunc(list, func(r rows.Result) bool {
			return strings.HasPrefix(r.Name, name) && len(r.Sides) == 2 && r.Sides[1].Ratio != nil
		})
		if i < 0 {
			return nil
		}
		return &list[i]
	}
	for _, of := range []struct{ name, begins string }{
		{modelCold, "From the disk, the model is loaded after "},
		{modelWarm, "From the host's page cache, it is loaded after "},
		{modelSecond, "A second process, while the first one has the model, loads it in "},
		{modelRun, "A pass over all weights takes "},
	} {
		if r := row(of.name); r != nil {
			words = append(words, fmt.Sprintf("%s%s ms; with safetensors %s ms: %s.", of.begins,
				rows.Number(r.Sides[0].Summary.Median), rows.Number(r.Sides[1].Summary.Median),
				speed(r.Sides[1].Ratio.Median)))
		}
	}
	if row(modelSecond) != nil {
		words = append(words, "Processes share one copy of the model in the device's memory; with safetensors each has its "+
			"own.")
	}
	return words
}

// speed describes a ratio of speeds.
func speed(ratio float64) string {
	switch {
	case ratio >= 1.05:
		return fmt.Sprintf("%.2f times as fast", ratio)
	case ratio > 0.95:
		return fmt.Sprintf("the same, within 5 %% (%.2f)", ratio)
	}
	return fmt.Sprintf("slower, %.2f of its speed", ratio)
}
