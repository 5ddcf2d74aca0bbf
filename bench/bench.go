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
	// Dir is the directory on the backing filesystem to measure on, File a file of the user's for rows that read: "" for files
	// of the bench's own. File is never written to.
	Dir, File string
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
	// Mount starts a gaiafs that shows source at mountpoint, with these flags and no other settings, and returns once the
	// mount can be used. prepare is called before the start.
	Mount func(flags []string, source, mountpoint string, prepare func(*exec.Cmd)) (*exec.Cmd, error)
	// Process returns the command that has this program call Process with these arguments.
	Process func(ctx context.Context, args ...string) *exec.Cmd
	// Out gets the table, Progress what is going on.
	Out, Progress io.Writer
}

// QuickTime is how long a run with Quick takes at most, but for the last row.
const QuickTime = 105 * time.Second

// Run measures and writes the reports. If ctx ends, or a row fails, what was measured until then is written all the same,
// and the error says why that is not all. Nothing that was made is left, whatever happened.
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
	wanted := o.groups()
	if len(wanted) == 0 {
		return fmt.Errorf("no group of rows matches; 'gaiafs bench --list' names them")
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
	r := &rows.Report{Rounds: o.Rounds, Started: begin.UTC().Truncate(time.Second), Version: o.Version, Ended: "still running",
		Machine: rows.Describe(s.backingDir(), o.Command)}
	fmt.Fprintln(o.Progress, r.Machine.String())
	for _, remark := range s.remarks {
		fmt.Fprintln(o.Progress, remark)
	}
	err = s.runGroups(ctx, wanted, r)
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("interrupted")
	}
	if r.Ended = ""; err != nil {
		r.Ended = err.Error()
	}
	r.Machine.Devices = s.describeDevices()
	r.Seconds = time.Since(begin).Seconds()
	return errors.Join(err, o.write(r))
}

// groups returns those of which rows may match.
func (o *Options) groups() (wanted []*group) {
	for i := range groups {
		g := &groups[i]
		if g.wanted(o.Match) && (o.File == "" || g.reads) {
			wanted = append(wanted, g)
		}
	}
	return wanted
}

// wanted reports whether match may name a row of the group: each of its alternatives is taken to begin with the group's name, or
// to be about names only.
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

// runGroup measures the rows of a group. until is when they should be done, the zero time for whenever they are.
func (s *session) runGroup(ctx context.Context, g *group, until time.Time, r *rows.Report) error {
	defer s.endGroup()
	skip := func(reason string) {
		fmt.Fprintf(s.Progress, "%s: skipped: %s\n", g.name, reason)
		r.Rows = append(r.Rows, rows.Result{Group: g.name, Name: "all", Skipped: reason})
	}
	if !until.IsZero() && time.Now().After(until) {
		skip("the time of --quick was over")
		return nil
	}
	list, err := g.rows(ctx, s)
	var why rows.Impossible
	if errors.As(err, &why) {
		skip(why.Reason)
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", g.name, err)
	}
	list = slices.DeleteFunc(list, func(row rows.Row) bool { return !s.Match.MatchString(row.Title()) })
	for i := range list {
		row := &list[i]
		if !until.IsZero() {
			row.Until = time.Now().Add(time.Until(until) / time.Duration(len(list)-i))
		}
		res, err := s.runRow(ctx, row, fmt.Sprintf("%s %d/%d", g.name, i+1, len(list)))
		if err != nil {
			return err
		}
		r.Rows = append(r.Rows, res)
		if s.JSON != "" { // whoever kills the bench finds what it had
			if err := r.WriteJSON(s.JSON); err != nil {
				return err
			}
		}
	}
	return nil
}

// runRow measures a row and says so. at is how far the bench is.
func (s *session) runRow(ctx context.Context, row *rows.Row, at string) (rows.Result, error) {
	terminal := isTerminal(s.Progress)
	start := time.Now()
	res, err := row.Run(ctx, s.Rounds, func(round, of int, side string) {
		if terminal {
			fmt.Fprintf(s.Progress, "\r\033[K[%s] %s: round %d of %d: %s", at, row.Name, round, of, side)
		}
	})
	if terminal {
		fmt.Fprint(s.Progress, "\r\033[K")
	}
	if err != nil {
		return res, explain(err, s.Dir)
	}
	fmt.Fprintf(s.Progress, "[%s] %s: %s (%.1f s)\n", at, row.Name, res.Brief(), time.Since(start).Seconds())
	return res, nil
}

// explain adds to an error what can be done about it.
func explain(err error, dir string) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || strings.Contains(err.Error(), unix.ENOSPC.Error()) {
		return fmt.Errorf("%w: there is no room left in %s; choose another folder with --dir, or take less with --quick", err, dir)
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
	misses, all := r.Failures()
	fmt.Fprintf(o.Out, "\n%d of %d targets missed, %s, %.0f s.\nTo repeat: %s\n", misses, all, r.Machine.String(), r.Seconds, r.Machine.Command)
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
		out, err := os.Create(f.path)
		if err == nil {
			err = errors.Join(f.write(out), out.Close())
		}
		errs = append(errs, err)
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
