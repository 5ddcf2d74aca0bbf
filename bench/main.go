package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/bench/rows"
)

func main() {
	serveIfAsked()
	mapIfAsked()
	if err := run(os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// group is a set of rows that share what they run on. rows is called when the group's turn comes; a skipped error leaves
// it out, with the reason in the table.
type group struct {
	name string
	rows func(ctx context.Context, s *session) ([]rows.Row, error)
}

var groups = []group{
	{"merge", mergeRows},
	{"modified", modifiedRows},
	{"state", stateRows},
	{"device", deviceRows},
	{"sharing", sharingRows},
	{"fio", fioRows},
	{"tree", treeRows},
}

// skipped says that a group cannot run here, and what to do about it.
type skipped struct{ reason string }

func (e skipped) Error() string { return e.reason }

// run carries out the command line.
func run(args []string, out, progress io.Writer) (err error) {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(progress)
	quick := flags.Bool("quick", false, "smaller files and fewer repetitions: under two minutes")
	pattern := flags.String("run", "", "run only the rows whose GROUP/NAME matches this regular expression")
	jsonFile := flags.String("json", "", "write everything measured to this file")
	markdown := flags.String("markdown", "", "write the tables in Markdown to this file")
	parent := flags.String("dir", os.TempDir(), "directory on the backing filesystem to measure on; needs 8 GiB of room")
	rounds := flags.Int("rounds", 0, "measure each side that often instead of 5 times, or 3 with -quick")
	list := flags.Bool("list", false, "list the groups and end")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if *list {
		for _, g := range groups {
			fmt.Fprintln(out, g.name)
		}
		return nil
	}
	match, err := regexp.Compile(*pattern)
	if err != nil {
		return fmt.Errorf("-run: %w", err)
	}
	if *rounds == 0 {
		*rounds = 5
		if *quick {
			*rounds = 3
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	signal.Ignore(syscall.SIGPIPE) // whoever stopped reading the table does not keep it from cleaning up
	s, err := newSession(*parent, *quick)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()

	r := rows.Report{Rounds: *rounds, Machine: rows.Describe(s.dir, strings.Join(append([]string{"go run ./bench"}, args...), " "))}
	fmt.Fprintln(progress, r.Machine.String())
	begin := time.Now()
	for _, g := range groups {
		if err = runGroup(ctx, s, &g, match, *rounds, &r, progress); err != nil {
			break // what was measured until then is not lost
		}
	}
	if len(r.Rows) == 0 {
		return err
	}
	if err := r.WriteTable(out); err != nil {
		return err
	}
	misses, all := r.Failures()
	fmt.Fprintf(out, "\n%d of %d targets missed, %s, %.0f s.\nTo repeat: %s\n", misses, all, r.Machine.String(),
		time.Since(begin).Seconds(), r.Machine.Command)
	return errors.Join(err, writeFiles(&r, *jsonFile, *markdown))
}

// writeFiles writes the report to those of the files that have a name.
func writeFiles(r *rows.Report, jsonFile, markdown string) error {
	if jsonFile != "" {
		if err := r.WriteJSON(jsonFile); err != nil {
			return err
		}
	}
	if markdown == "" {
		return nil
	}
	f, err := os.Create(markdown)
	if err != nil {
		return err
	}
	return errors.Join(r.WriteMarkdown(f), f.Close())
}

// wanted reports whether match may name a row of the group: a pattern is taken to begin with the group's name, or to
// be about names only.
func (g *group) wanted(match *regexp.Regexp) bool {
	first, _, cut := strings.Cut(strings.TrimPrefix(match.String(), "^"), "/")
	if !cut {
		return true
	}
	part, err := regexp.Compile(first)
	return err != nil || part.MatchString(g.name)
}

func runGroup(ctx context.Context, s *session, g *group, match *regexp.Regexp, rounds int, r *rows.Report, progress io.Writer) error {
	if !g.wanted(match) {
		return nil
	}
	defer s.endGroup()
	terminal := isTerminal(progress)
	list, err := g.rows(ctx, s)
	var why skipped
	if errors.As(err, &why) {
		fmt.Fprintf(progress, "%s: skipped: %s\n", g.name, why.reason)
		r.Rows = append(r.Rows, rows.Result{Group: g.name, Name: "all", Skipped: why.reason})
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", g.name, err)
	}
	for i := range list {
		row := &list[i]
		if !match.MatchString(row.Title()) {
			continue
		}
		start := time.Now()
		res, err := row.Run(ctx, rounds, func(round, of int, side string) {
			if terminal {
				fmt.Fprintf(progress, "\r\033[K%s: round %d of %d: %s", row.Title(), round, of, side)
			}
		})
		if terminal {
			fmt.Fprint(progress, "\r\033[K")
		}
		if err != nil {
			return err
		}
		fmt.Fprintf(progress, "%s: %s (%.1f s)\n", row.Title(), res.Brief(), time.Since(start).Seconds())
		r.Rows = append(r.Rows, res)
	}
	return nil
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
