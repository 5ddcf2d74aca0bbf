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

// Options are the parameters of a run.
type Options struct {
	// Dir is the directory on the backing filesystem to measure on. File is a file of the user's for rows that read; ""
	// means files of bench itself. File is never written to.
	Dir, File string
	// Model is a safetensors file of the user's. If it is set, only the rows about it run. Python is the program that
	// loads it.
	Model, Python string
	// Match says which rows run, by GROUP/NAME.
	Match *regexp.Regexp
	// Rounds is how often each side is measured; 0 means 5, or 3 with Quick.
	Rounds int
	// Quick uses smaller files and fewer rows, and ends within QuickTime.
	Quick bool
	// GPUs is the value of --gpus for the mounts.
	GPUs string
	// JSON, HTML and Markdown are files for the report; "" means none.
	JSON, HTML, Markdown string

	// Command is the command line and Version the version of gaiafs, for the report.
	Command, Version string
	// Mount starts a gaiafs that shows source at mountpoint, with these flags and no other settings. It returns when
	// the mount is usable. It calls prepare before the start.
	Mount func(flags []string, source, mountpoint string, prepare func(*exec.Cmd)) (*exec.Cmd, error)
	// Process returns the command that makes this program call Process with these arguments.
	Process func(ctx context.Context, args ...string) *exec.Cmd
	// Out gets the table, Progress the progress.
	Out, Progress io.Writer
}

// ErrOverwrites says that a report would overwrite something else.
var ErrOverwrites = errors.New("would write over")

// ErrNoMatch says that Match names no row. Nothing was measured.
var ErrNoMatch = errors.New("no row matches")

// CheckReports checks before anything is measured whether the reports can be written. It fails with ErrOverwrites if
// one would destroy File, another report, or the file that the table goes to. It changes no file.
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

// QuickTime is how long a run with Quick takes at most, except for its last row.
const QuickTime = 105 * time.Second

// quickMatch matches the rows of a run with Quick that names none. They answer what a user asks first: how long a file
// takes to a device, what a second process pays, what writing together costs, and what the mount costs CPU programs.
var quickMatch = regexp.MustCompile(`^device/(gaia_mmap|second gaia_mmap|mrelease, 1 %|macquire by another)|` +
	`^sharing/(8192 KiB, strides of (8|4096) B|lost updates)|` +
	`^fio/(read 1 MiB (host-warm|cold|device-cached) 1 job|randread 4 KiB (host-warm|cold) 1 job|` +
	`write (4 KiB|1 MiB) host-warm 1 job)$|` +
	`^tree/git (clone|status)`)

// Run measures and writes the reports. If ctx ends or a row fails, it still writes what was measured before, and the
// error says what is missing. In all cases it removes everything that it made.
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
	if o.Quick && o.Match.String() == "" && o.File == "" && o.Model == "" {
		o.Match = quickMatch
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

// wanted returns the groups with a row that matches. For a group that cannot list its rows in advance, the group itself
// decides.
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

// groups returns the groups that may have matching rows.
func (o *Options) groups() (wanted []*group) {
	for i := range groups {
		g := &groups[i]
		if g.wanted(o.Match) && (o.File == "" || g.reads) && (o.Model != "") == (g.name == modelGroup) {
			wanted = append(wanted, g)
		}
	}
	return wanted
}

// wanted reports whether match may match a row of the group. It takes each alternative of match to begin with the
// group's name, or to be only about names.
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

// alternatives splits a regular expression at each | outside parentheses and brackets.
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

// runGroups measures group after group. With Quick, each gets its share of the remaining time.
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

// runGroup measures the rows of a group. until is when they should end; the zero time means no limit. A failed row is a
// line of the table, and the other rows are still measured. An error is one that the other rows would also have.
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
			if time.Now().After(until) && row.Skip == "" { // leave their share to later groups
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
			return ctx.Err() // whatever err says: ctx ended the programs
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

// noTime is why a row is left out on a slow or busy machine.
const noTime = "the time of --quick was over"

// clearLine makes the next progress text replace the last one on a terminal.
const clearLine = "\r\033[K"

// noteLine is note on a separate line.
func (s *session) noteLine(r *rows.Report, row *rows.Row, at string, res rows.Result, err error) error {
	defer fmt.Fprintln(s.Progress)
	return s.note(r, row, at, res, err)
}

// note adds a row to the report and prints it after at. It returns err if other rows would fail for the same reason.
func (s *session) note(r *rows.Report, row *rows.Row, at string, res rows.Result, err error) error {
	if err != nil {
		if err = explain(err, s.Dir); isFatal(err) {
			return err
		}
		res = rows.Result{Failed: strings.TrimPrefix(err.Error(), row.Group+"/"+row.Name+": ")}
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
	return r.WriteJSON(s.JSON) // if bench is killed, these results are kept
}

// isFatal reports whether other rows would fail for the same reason.
func isFatal(err error) bool {
	return errors.Is(err, errChanged) || errors.Is(err, errNoRoom)
}

// errNoRoom says what to do if a disk is full.
var errNoRoom = errors.New("choose another folder with --dir, or use less with --quick")

// explain adds advice to an error. It recognises by their texts what programs say about a full disk.
func explain(err error, dir string) error {
	full := errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) ||
		strings.Contains(strings.ToLower(err.Error()), unix.ENOSPC.Error())
	if full && !errors.Is(err, errNoRoom) {
		return fmt.Errorf("%w: there is no space left in %s: %w", err, dir, errNoRoom)
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
	targets := "no target was measured"
	if misses, all := r.Failures(); all > 0 {
		targets = fmt.Sprintf("%d of %d targets missed", misses, all)
	}
	fmt.Fprintf(o.Out, "\n%s, %s, %.0f s.\nTo repeat: %s\n", targets, r.Machine.String(), r.Seconds, r.Machine.Command)
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

// isTerminal reports whether a line on w can be overwritten.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil && os.Getenv("TERM") != "dumb"
}
