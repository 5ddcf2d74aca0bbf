package model

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"time"
)

// ErrRefused is returned by a System that cannot carry out a step, for example because its filesystem lacks the
// operation. The step has no effect then.
var ErrRefused = errors.New("refused")

// System is compared with the Model.
type System interface {
	// Do carries out a step and returns the bytes that a read or a load sees.
	Do(s Step) ([]byte, error)
}

// Homer is a System whose home can be read.
type Homer interface {
	// Home returns the bytes of the file at home.
	Home() ([]byte, error)
}

// Inspector is a System whose state can be read.
type Inspector interface {
	System
	Homer
	// Kernel and Replica return a page's bytes up to end of file, or nil if there is no copy.
	Kernel(p int) []byte
	Replica(device, p int) []byte
	// Overlaps returns how many bytes got different values from two owners.
	Overlaps() int64
}

// Run is a running program.
type Run struct {
	Layout  Layout
	Model   *Model
	Oracle  *Oracle
	System  System
	Program []Step
	// Loose lets the System collect and refresh at any time: only the Oracle judges reads.
	Loose bool
	// EarlyFlush lets the kernel write dirty pages home at any time. That changes only home, and what a client sees of
	// an extent outside of its mapping.
	EarlyFlush bool
	// Refusals counts the steps that the System refused.
	Refusals int
}

// NewRun starts a program on sys, whose file must match the layout.
func NewRun(l Layout, sys System) *Run {
	return &Run{Layout: l, Model: New(l), Oracle: NewOracle(l), System: sys}
}

// Interleaver is a System that can run a function during a step.
type Interleaver interface {
	System
	// Between arranges for one call of fn while the next step copies a page of a device home: after the page was read,
	// and before the step takes effect. The call may not happen. A nil fn cancels it.
	Between(device, page int, fn func())
}

// Step carries out s on Model, Oracle and System, and compares them. If s is not Legal now, it returns false and does
// nothing.
func (r *Run) Step(s Step) (done bool, err error) {
	if !r.Model.Legal(s) {
		return false, nil
	}
	return true, r.steps(s)
}

// StepDuring carries out s, and carries out t during s at a point where t could disturb s. The result must be that of t
// after s. It returns false, and does nothing, unless both are Legal and t is a Store into one page.
func (r *Run) StepDuring(s, t Step) (done bool, err error) {
	in, ok := r.System.(Interleaver)
	if !ok || !r.Model.Legal(s) || !r.Model.Legal(t) || t.Op != Store || !s.Op.disturbable() {
		return false, nil
	}
	p := t.Off / PageSize
	if p != (t.Off+t.Len-1)/PageSize || s.Op == Write && s.Off+s.Len > r.Model.size {
		return false, nil // a store past end of file is lost when the file grows
	}
	var terr error
	early := false
	in.Between(r.Layout.Device(t.Client), int(p), func() {
		early = true
		_, terr = r.System.Do(t)
	})
	err = r.carryOut(s)
	in.Between(0, 0, nil)
	if err == nil {
		err = terr
	}
	if err == nil && !early {
		if err = r.compare(); err == nil {
			err = r.steps(t)
		}
		return true, err
	}
	if err == nil {
		r.Program = append(r.Program, t)
		r.Program[len(r.Program)-1].During = true
		r.Model.Do(t)
		if err = r.Oracle.Event(t, nil); err == nil {
			err = r.compare()
		}
	}
	return true, err
}

// disturbable reports whether a store during the Op by a device's program must have the same effect as one after it.
func (o Op) disturbable() bool {
	switch o {
	case Write, Read, DirectRead, Fsync, Flush, Collect:
		return true
	}
	return false
}

func (r *Run) steps(s Step) error {
	if err := r.carryOut(s); err != nil {
		return err
	}
	return r.compare()
}

// carryOut carries out s and compares the bytes that it returns.
func (r *Run) carryOut(s Step) error {
	r.Program = append(r.Program, s)
	event := s
	// The Oracle gets only the pages that the client maps.
	if mp := r.Model.mappings[s.Client]; mp != nil && (s.Op == Unmap || s.Op == Kill) {
		event.Off, event.Len = int64(mp.start)*PageSize, int64(mp.end-mp.start)*PageSize
		if !mp.writable {
			event.Len = 0
		}
	}
	switch s.Op {
	case Acquire, Release, Publish, DontNeed, Use:
		start, end := r.Model.within(s)
		event.Off, event.Len = int64(start)*PageSize, int64(end-start)*PageSize
		if s.Op == DontNeed && !r.Model.mappings[s.Client].writable {
			event.Len = 0
		}
	}
	got, err := r.System.Do(s)
	if errors.Is(err, ErrRefused) {
		r.Refusals++
		r.Oracle.Refused(s)
		return nil
	}
	if err != nil {
		return err
	}
	want := r.Model.Do(s)
	if err := r.Model.Verify(); err != nil {
		return fmt.Errorf("the model violates its own rules: %w", err)
	}
	if s.Op == Load && !r.Loose {
		got = got[:min(int64(len(got)), r.Model.size-s.Off)]
	}
	if !r.Loose {
		if err := same("the bytes read", s.Off, got, want); err != nil {
			return err
		}
	}
	return r.Oracle.Event(event, got)
}

// homePatience is how long home may lack bytes that a CPU read fetched from a device.
const homePatience = 10 * time.Second

// Follower is a System whose home gets the bytes that a CPU read fetched a moment later.
type Follower interface{ HomeFollows() }

// compareHome compares home with the model's home.
func (r *Run) compareHome(h Homer) error {
	patience := time.Duration(0)
	if _, ok := r.System.(Follower); ok {
		patience = homePatience
	}
	for began := time.Now(); ; time.Sleep(time.Millisecond) {
		home, err := h.Home()
		if err != nil {
			return err
		}
		want := r.Model.Home()
		if len(home) == len(want) && r.EarlyFlush {
			// A dirty page may have been written back early and changed again since.
			r.Model.copyDirty(want, home)
		}
		if err = same("home", 0, home, want); err == nil || time.Since(began) >= patience {
			return err
		}
	}
}

// compare compares everything else that is visible.
func (r *Run) compare() error {
	if r.Loose {
		return nil
	}
	if h, ok := r.System.(Homer); ok {
		if err := r.compareHome(h); err != nil {
			return err
		}
	}
	in, ok := r.System.(Inspector)
	if !ok {
		return nil
	}
	for p := range r.Layout.Pages {
		at := int64(p) * PageSize
		if err := same("the kernel's page", at, in.Kernel(p), r.Model.Kernel(p)); err != nil {
			return err
		}
		for d := range r.Layout.Devices {
			if err := same(fmt.Sprintf("device %d's page", d), at, in.Replica(d, p),
				r.Model.Replica(d, p)); err != nil {
				return err
			}
		}
	}
	if got, want := in.Overlaps(), r.Model.Overlaps; got != want {
		return fmt.Errorf("%d overlapping bytes, want %d", got, want)
	}
	return nil
}

// same compares bytes of the file from off on.
func same(what string, off int64, got, want []byte) error {
	if bytes.Equal(got, want) && (got == nil) == (want == nil) {
		return nil
	}
	if len(got) != len(want) || (got == nil) != (want == nil) {
		return fmt.Errorf("%s: %d bytes, want %d", what, len(got), len(want))
	}
	var b strings.Builder
	n := 0
	for i := range got {
		if got[i] != want[i] {
			if n++; n <= 8 {
				at := off + int64(i)
				fmt.Fprintf(&b, "; byte %d of page %d is 0x%02x, want 0x%02x", at%PageSize, at/PageSize, got[i],
					want[i])
			}
		}
	}
	return fmt.Errorf("%s: %d bytes differ%s", what, n, b.String())
}

// Check runs a program on a fresh System. It leaves out steps that are not Legal when their turn comes.
func Check(l Layout, sys System, program []Step) error {
	r := NewRun(l, sys)
	for i := 0; i < len(program); i++ {
		s := program[i]
		if i+1 < len(program) && program[i+1].During {
			done, err := r.StepDuring(s, program[i+1])
			if err != nil {
				return fmt.Errorf("step %d, %s: %w", i, l.Format(s), err)
			}
			if done {
				i++
				continue
			}
		}
		if _, err := r.Step(s); err != nil {
			return fmt.Errorf("step %d, %s: %w", i, l.Format(s), err)
		}
	}
	return nil
}

// Closing returns the steps that end every program: all releases return, all clients unmap, everything comes home, and
// the CPU reads the whole file through its page cache and past it. Some of the steps may not be Legal.
func (l Layout) Closing() (steps []Step) {
	for c := l.CPUs; c < l.Clients(); c++ {
		steps = append(steps, Step{Op: Finish, Client: Client(c)}, Step{Op: Unmap, Client: Client(c)},
			Step{Op: Unview, Client: Client(c)})
	}
	whole := int64(l.Pages) * PageSize
	return append(steps, Step{Op: Read, Len: whole}, Step{Op: Fsync}, Step{Op: Read, Len: whole},
		Step{Op: DirectRead, Len: whole})
}

// Shrink returns a shorter program that still fails: no step of it can be left out or made simpler.
func Shrink(program []Step, fails func([]Step) bool) []Step {
	for n := max(len(program)/2, 1); ; {
		shrunk := false
		for i := 0; i+n <= len(program); {
			without := append(append([]Step{}, program[:i]...), program[i+n:]...)
			if fails(without) {
				program, shrunk = without, true
			} else {
				i += n
			}
		}
		if n > 1 {
			n /= 2
		} else if !shrunk {
			break
		}
	}
	for i := range program {
		for _, simpler := range program[i].simpler() {
			try := append([]Step{}, program...)
			try[i] = simpler
			if fails(try) {
				program = try
				break
			}
		}
	}
	return program
}

// simpler returns simpler replacements for s, the simplest first.
func (s Step) simpler() (list []Step) {
	try := func(change func(*Step)) {
		t := s
		if change(&t); t != s {
			list = append(list, t)
		}
	}
	if s.Op.stores() {
		try(func(t *Step) { t.Len, t.Same, t.Val = 1, true, 7 })
		try(func(t *Step) { t.Len = 1 })
	}
	if s.Op.wholePages() {
		try(func(t *Step) { t.Len = PageSize })
	}
	if s.During {
		try(func(t *Step) { t.During = false })
	}
	if s.Op == View {
		try(func(t *Step) { t.Val = 0 })
	}
	if s.Op == Look {
		try(func(t *Step) { t.Off, t.Len, t.Val = 0, 1, 0 })
	}
	if s.Op == Map || s.Op == View {
		try(func(t *Step) { t.Lazy = false })
	}
	return list
}

// FormatProgram returns a program, one step per line, in the form that ParseProgram reads.
func (l Layout) FormatProgram(program []Step) string {
	var b strings.Builder
	for _, s := range program {
		b.WriteString(l.Format(s))
		b.WriteByte('\n')
	}
	return b.String()
}
