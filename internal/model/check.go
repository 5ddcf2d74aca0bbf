package model

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"time"
)

// ErrRefused is what a System returns for a step that it cannot carry out, as a filesystem that lacks an operation.
// Nothing happened then.
var ErrRefused = errors.New("refused")

// System is what is compared with the Model.
type System interface {
	// Do carries out a step and returns what a read or a load sees.
	Do(s Step) ([]byte, error)
}

// Homer is a System whose home can be looked at.
type Homer interface {
	// Home returns the bytes of the file as home has them.
	Home() ([]byte, error)
}

// Inspector is a System that can be looked into.
type Inspector interface {
	System
	Homer
	// Kernel and Replica return a page's bytes up to end of file, nil where there is no copy.
	Kernel(p int) []byte
	Replica(device, p int) []byte
	// Overlaps returns how many bytes two owners changed differently.
	Overlaps() int64
}

// Run is a program under way.
type Run struct {
	Layout  Layout
	Model   *Model
	Oracle  *Oracle
	System  System
	Program []Step
	// Loose leaves the System free to collect and refresh when it likes: only the Oracle judges what is read.
	Loose bool
	// EarlyFlush leaves the kernel free to write dirty pages home when it likes. That changes nothing but home, and
	// what a client is shown of an extent that it maps another part of.
	EarlyFlush bool
	// Refusals counts the steps that the System refused.
	Refusals int
}

// NewRun starts a program on sys, whose file must be as the layout says.
func NewRun(l Layout, sys System) *Run {
	return &Run{Layout: l, Model: New(l), Oracle: NewOracle(l), System: sys}
}

// Interleaver is a System that can let something happen in the midst of a step.
type Interleaver interface {
	System
	// Between has fn called once while the next step copies a page of a device home, after it was read there and before
	// anybody knows. It may not be called at all. nil takes it back.
	Between(device, page int, fn func())
}

// Step carries out s everywhere and compares. It reports false, and does nothing, if s is not Legal now.
func (r *Run) Step(s Step) (done bool, err error) {
	if !r.Model.Legal(s) {
		return false, nil
	}
	return true, r.steps(s)
}

// StepDuring carries out s, and t in the midst of s where the System does something there that t could disturb. Nobody
// can tell that from t after s. It reports false, and does nothing, unless both are Legal and t is a Store into one
// page.
func (r *Run) StepDuring(s, t Step) (done bool, err error) {
	in, ok := r.System.(Interleaver)
	if !ok || !r.Model.Legal(s) || !r.Model.Legal(t) || t.Op != Store || !s.Op.disturbable() {
		return false, nil
	}
	p := t.Off / PageSize
	if p != (t.Off+t.Len-1)/PageSize || s.Op == Write && s.Off+s.Len > r.Model.size {
		return false, nil // what is stored past end of file is lost when the file grows
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

// disturbable reports whether a store by a device's program during a step cannot be told from one after it.
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

// carryOut does s, and compares what it returns.
func (r *Run) carryOut(s Step) error {
	r.Program = append(r.Program, s)
	event := s
	// The Oracle is told of the pages that are really meant.
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
		return fmt.Errorf("the model breaks its own rules: %w", err)
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

// homePatience is how long home may lack what a CPU read brought from a device.
const homePatience = 10 * time.Second

// Follower is a System whose home has what a CPU read brings a moment later.
type Follower interface{ HomeFollows() }

// compareHome compares home with the model's.
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
			// A page that is dirty may have been written back early, and written again since.
			r.Model.copyDirty(want, home)
		}
		if err = same("home", 0, home, want); err == nil || time.Since(began) >= patience {
			return err
		}
	}
}

// compare compares what can be seen besides.
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

// same compares bytes of the file that begin at off.
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

// Check runs a program on a fresh System. Steps that are not Legal when their turn comes are left out.
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

// Closing returns what ends every program: all releases return, all clients go, everything comes home, and the CPU
// reads the whole file through its page cache and past it. Some of it may not be Legal.
func (l Layout) Closing() (steps []Step) {
	for c := l.CPUs; c < l.Clients(); c++ {
		steps = append(steps, Step{Op: Finish, Client: Client(c)}, Step{Op: Unmap, Client: Client(c)},
			Step{Op: Unview, Client: Client(c)})
	}
	whole := int64(l.Pages) * PageSize
	return append(steps, Step{Op: Read, Len: whole}, Step{Op: Fsync}, Step{Op: Read, Len: whole},
		Step{Op: DirectRead, Len: whole})
}

// Shrink returns a part of program that still fails, from which no step can be left out and in which no step can be
// made simpler.
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

// simpler returns steps to try in the place of s, simplest first.
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

// FormatProgram returns a program, a line a step, as ParseProgram reads it.
func (l Layout) FormatProgram(program []Step) string {
	var b strings.Builder
	for _, s := range program {
		b.WriteString(l.Format(s))
		b.WriteByte('\n')
	}
	return b.String()
}
