package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/bench/rows"
)

// Options are what a run is told.
type Options struct {
	// Dir is the directory on the backing filesystem to measure on, File a file of the user's for rows that read: ""
	// for files of the bench's own. File is never written to.
	Dir, File string
	// Model is a safetensors file of the user's: only the rows about it run. Python is the program that loads it.
	Model, Python string
	// Match says which rows run, by GROUP/NAME.
	Match *regexp.Regexp
	// Rounds is how often each side is measured; 0 stands for 5, or 3 with Quick.
	Rounds int
	// Quick takes smaller files and fewer rows, and ends within QuickTime.
	Quick bool
	// GPUs is --gpus of the mounts.
	GPUs string
	// JSON, HTML and Markdown are files to write the report to, "" for none.
	JSON, HTML, Markdown string

	// Command is the command line and Version that of gaiafs, for the report.
	Command, Version string
	// Mount starts a gaiafs that shows source at mountpoint, with these flags and no other settings, and returns once
	// the mount can be used. prepare is called before the start.
	Mount func(flags []string, source, mountpoint string, prepare func(*exec.Cmd)) (*exec.Cmd, error)
	// Process returns the command that has this program call Process with these arguments.
	Process func(ctx context.Context, args ...string) *exec.Cmd
	// Out gets the table, Progress what is going on.
	Out, Progress io.Writer
}

// ErrOverwrites says that a report would take the place of something that is wanted.
var ErrOverwrites = errors.New("would write over")

// ErrNoMatch says that Match names no row. Nothing was measured.
var ErrNoMatch = errors.New("no row matches")

// CheckReports finds out before anything is measured whether the reports can be written, and fails with ErrOverwrites
// where one would destroy File, another report, or the file that the table goes into. It leaves what is there as it is.
func (o *Options) CheckReports() error {
	type named struct{ name, path string }
	taken := []named{{"--file", o.File}, {"--model", o.Model}}
	if f, ok := o.Out.(*os.File); ok {
		if st, err := f.Stat(); err == nil && st.Mode().IsRegular() {
			taken = append(taken, named{"the table", fmt.Sprintf("/proc/self/fd/%d", f.Fd())})
		}
	}
	for _, report := range []named{{"--json", o.JSON}, {"--html", o.HTML}, {"--markdown", o.Markdown}} {
		if report.path == "" {
			continue
		}
		for _, other := range taken {
			if other.path != "" && rows.Touch(report.path, other.path) {
				return fmt.Errorf("%s %s %w %s", report.name, report.path, ErrOverwrites, other.name)
			}
		}
		if err := rows.CanBeWritten(report.path); err != nil {
			return err
		}
		taken = append(taken, report)
	}
	return nil
}

// QuickTime is how long a run with Quick takes at most, but for the last row.
const QuickTime = 105 * time.Second

// Run measures and writes the reports. If ctx ends, or a row fails, what was measured until then is written all the
// same, and the error says why that is not all. Nothing that was made is left, whatever happened.
func Run(ctx context.Context, o Options) (err error) {
	if o.Rounds == 0 {
		o.Rounds = 5
		if o.Quick {
			o.Rounds = 3
		}
	}
	if o.Match == nil {
		o.Match = regexp.MustCompile("")
	}
	if o.Model != "" {
		o.File = o.Model
	}
	wanted := o.wanted(ctx)
	if len(wanted) == 0 {
		which := ""
		switch {
		case o.Model != "":
			which = " of those about --model"
		case o.File != "":
			which = " of those that can read --file"
		}
		return fmt.Errorf("%w %q%s; 'gaiafs bench --list' names the groups, and a run of one its rows", ErrNoMatch,
			o.Match, which)
	}
	s, err := newSession(o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := s.prepare(wanted); err != nil {
		return err
	}
	begin := time.Now()
	r := &rows.Report{Rounds: o.Rounds, Started: begin.UTC().Truncate(time.Second), Version: o.Version,
		Ended:   "still running",
		Machine: rows.Describe(s.backingDir(), o.Command)}
	fmt.Fprintln(o.Progress, r.Machine.String())
	if r.Machine.Load > float64(r.Machine.Cores)/2 {
		fmt.Fprintln(o.Progress, "other programs are using the machine: figures will differ from run to run")
	}
	for _, remark := range s.remarks {
		fmt.Fprintln(o.Progress, remark)
	}
	err = s.runGroups(ctx, wanted, r)
	if ctx.Err() != nil {
		err = errors.New("interrupted")
	}
	switch r.Ended = ""; {
	case err != nil:
		r.Ended = err.Error()
	case len(r.Rows) == 0:
		err = fmt.Errorf("%w %q", ErrNoMatch, o.Match)
	case s.failed > 0:
		err = fmt.Errorf("rows that failed: %d; the table says why", s.failed)
	}
	s.describeMounts(r)
	r.Seconds = time.Since(begin).Seconds()
	return errors.Join(err, o.write(r))
}

// wanted returns the groups that have a row that matches. What a group cannot name without being made is its own to
// say.
func (o *Options) wanted(ctx context.Context) (wanted []*group) {
	s := newListing(*o)
	for _, g := range o.groups() {
		list, err := g.rows(ctx, s)
		if err != nil || slices.ContainsFunc(list,
			func(row rows.Row) bool { return o.Match.MatchString(row.Title()) }) {
			wanted = append(wanted, g)
		}
	}
	return wanted
}

// groups returns those of which rows may match.
func (o *Options) groups() (wanted []*group) {
	for i := range groups {
		g := &groups[i]
		if g.wanted(o.Match) && (o.File == "" || g.reads) && (o.Model != "") == (g.name == modelGroup) {
			wanted = append(wanted, g)
		}
	}
	return wanted
}

// wanted reports whether match may name a row of the group: each of its alternatives is taken to begin with the group's
// name, or to be about names only.
func (g *group) wanted(match *regexp.Regexp) bool {
	return slices.ContainsFunc(alternatives(match.String()), func(text string) bool {
		first, _, cut := strings.Cut(strings.TrimPrefix(text, "^"), "/")
		if !cut {
			return true
		}
		part, err := regexp.Compile(first)
		return err != nil || part.MatchString(g.name)
	})
}

// alternatives cuts a regular expression at those of its | that are in no parentheses or brackets.
func alternatives(expression string) (all []string) {
	depth, start := 0, 0
	for i := 0; i < len(expression); i++ {
		switch expression[i] {
		case '\\':
			i++
		case '(', '[':
			depth++
		case ')', ']':
			depth--
		case '|':
			if depth == 0 {
				all, start = append(all, expression[start:i]), i+1
			}
		}
	}
	return append(all, expression[start:])
}

// runGroups measures group after group. With Quick, each gets its share of the time that is left.
func (s *session) runGroups(ctx context.Context, wanted []*group, r *rows.Report) error {
	var end time.Time
	if s.Quick {
		end = time.Now().Add(QuickTime)
	}
	for i, g := range wanted {
		until := end
		if s.Quick {
			all := 0
			for _, later := range wanted[i:] {
				all += later.share
			}
			until = time.Now().Add(time.Until(end) * time.Duration(g.share) / time.Duration(all))
		}
		if err := s.runGroup(ctx, g, until, r); err != nil {
			return err
		}
	}
	return nil
}

// runGroup measures the rows of a group. until is when they should be done, the zero time for whenever they are. What
// fails is a line of the table, and the others are measured all the same; an error is one that they would meet, too.
func (s *session) runGroup(ctx context.Context, g *group, until time.Time, r *rows.Report) error {
	defer s.endGroup()
	all, at := rows.Row{Group: g.name, Name: "all"}, "["+g.name+"] "
	if !until.IsZero() && time.Now().After(until) {
		return s.noteLine(r, &all, at, rows.Result{Skipped: noTime}, nil)
	}
	list, err := g.rows(ctx, s)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var why rows.Impossible
	if errors.As(err, &why) {
		return s.noteLine(r, &all, at, rows.Result{Skipped: why.Reason}, nil)
	}
	if err != nil {
		return s.noteLine(r, &all, at, rows.Result{}, fmt.Errorf("%s: %w", g.name, err))
	}
	list = slices.DeleteFunc(list, func(row rows.Row) bool { return !s.Match.MatchString(row.Title()) })
	for i := range list {
		row := &list[i]
		if !until.IsZero() {
			if time.Now().After(until) && row.Skip == "" { // so that later groups have their share
				row.Skip = noTime
			}
			row.Until = time.Now().Add(time.Until(until) / time.Duration(len(list)-i))
		}
		at, start := fmt.Sprintf("[%s %d/%d] ", g.name, i+1, len(list)), time.Now()
		res, err := row.Run(ctx, s.Rounds, func(round, of int, side string) {
			if isTerminal(s.Progress) {
				fmt.Fprintf(s.Progress, "%s%s%s: round %d of %d: %s", clearLine, at, row.Name, round, of, side)
			}
		})
		if err != nil && ctx.Err() != nil {
			return ctx.Err() // whatever it says: programs that it ran were ended
		}
		if isTerminal(s.Progress) {
			at = clearLine + at
		}
		if err := s.note(r, row, at, res, err); err != nil {
			return err
		}
		fmt.Fprintf(s.Progress, " (%.1f s)\n", time.Since(start).Seconds())
	}
	return nil
}

// noTime is why a row is left out where the machine is slow, or busy.
const noTime = "the time of --quick was over"

// clearLine has the next words of the progress on a terminal replace the last.
const clearLine = "\r\033[K"

// noteLine is note for a line of its own.
func (s *session) noteLine(r *rows.Report, row *rows.Row, at string, res rows.Result, err error) error {
	defer fmt.Fprintln(s.Progress)
	return s.note(r, row, at, res, err)
}

// note puts a row into the report and says so after at. It returns err if that is no error of the row alone.
func (s *session) note(r *rows.Report, row *rows.Row, at string, res rows.Result, err error) error {
	if err != nil {
		if err = explain(err, s.Dir); isFatal(err) {
			return err
		}
		res = rows.Result{Failed: err.Error()}
		s.failed++
	}
	if res.Name == "" {
		res.Group, res.Name, res.Labels = row.Group, row.Name, row.Labels
		res.Unit, res.Faster = row.Unit.Name, row.Unit.Faster
	}
	fmt.Fprintf(s.Progress, "%s%s: %s", at, row.Name, res.Brief())
	r.Rows = append(r.Rows, res)
	if s.JSON == "" || !rows.IsReplaced(s.JSON) { // a pipe gets one document
		return nil
	}
	s.describeMounts(r)
	return r.WriteJSON(s.JSON) // whoever kills the bench finds what it had
}

// isFatal reports whether other rows would fail for the same reason.
func isFatal(err error) bool {
	return errors.Is(err, errChanged) || errors.Is(err, errNoRoom)
}

// errNoRoom says what to do about a full disk.
var errNoRoom = errors.New("choose another folder with --dir, or take less with --quick")

// explain adds to an error what can be done about it. What programs say of a full disk is known by its words.
func explain(err error, dir string) error {
	full := errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) ||
		strings.Contains(strings.ToLower(err.Error()), unix.ENOSPC.Error())
	if full && !errors.Is(err, errNoRoom) {
		return fmt.Errorf("%w: there is no room left in %s: %w", err, dir, errNoRoom)
	}
	return err
}

// write prints the table and writes the files.
func (o *Options) write(r *rows.Report) error {
	if len(r.Rows) == 0 {
		return nil
	}
	if err := r.WriteTable(o.Out); err != nil {
		return err
	}
	if passing := r.Passing(); passing != "" {
		fmt.Fprintf(o.Out, "\n(%s)\n", passing)
	}
	if o.Model != "" {
		fmt.Fprintf(o.Out, "\n%s\n", strings.Join(verdict(r), "\n"))
	}
	misses, all := r.Failures()
	fmt.Fprintf(o.Out, "\n%d of %d targets missed, %s, %.0f s.\nTo repeat: %s\n", misses, all, r.Machine.String(),
		r.Seconds, r.Machine.Command)
	var errs []error
	if o.JSON != "" {
		errs = append(errs, r.WriteJSON(o.JSON))
	}
	for _, f := range []struct {
		path  string
		write func(io.Writer) error
	}{{o.Markdown, r.WriteMarkdown}, {o.HTML, func(w io.Writer) error { return writePage(w, r) }}} {
		if f.path == "" {
			continue
		}
		errs = append(errs, rows.WriteFile(f.path, f.write))
	}
	return errors.Join(errs...)
}

// isTerminal reports whether a line on w can be written over.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
