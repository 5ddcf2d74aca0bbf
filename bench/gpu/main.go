package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/bench/rows"
)

func main() {
	workIfAsked()
	if err := run(os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "gpu bench:", err)
		os.Exit(1)
	}
}

// group is a set of rows that share files and mounts. rows is called when the group's turn comes.
type group struct {
	name string
	rows func(ctx context.Context, s *session) ([]rows.Row, error)
}

// groups are in the order in which they run: the most informative ones first.
var groups = []group{
	{"warm", warmRows},
	{"views", viewRows},
	{"shards", shardRows},
	{"update", updateRows},
	{"out", outRows},
	{"links", linkRows},
	{"pinned", pinnedRows},
	{"release", releaseRows},
	{"acquire", acquireRows},
	{"sharing", sharingRows},
	{"stitch", stitchRows},
	{"peer", peerRows},
	{"second", secondRows},
	{"cold", coldRows},
	{"reads", readRows},
}

func groupNames() (names []string) {
	for _, g := range groups {
		names = append(names, g.name)
	}
	return names
}

// sizeFlag is a flag with a number of bytes.
type sizeFlag int64

func (f *sizeFlag) String() string { return sizeText(int64(*f)) }

func (f *sizeFlag) Set(text string) error {
	n, err := parseSize(text)
	*f = sizeFlag(n)
	return err
}

// parseSize reads "10GiB", "512M" or "4096": units are powers of 1024.
func parseSize(text string) (int64, error) {
	number := strings.TrimRight(strings.ToUpper(text), "KMGTIB")
	unit := strings.TrimSuffix(strings.TrimSuffix(strings.ToUpper(text[len(number):]), "B"), "I")
	shift, ok := map[string]int{"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[unit]
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || !ok || n <= 0 || n > 1<<50>>shift {
		return 0, fmt.Errorf("%q is not a size; write one such as 512MiB or 10GiB", text)
	}
	return n << shift, nil
}

// parse reads the command line. Messages about flags go to said.
func parse(args []string, said io.Writer) (o options, list bool, err error) {
	flags := flag.NewFlagSet("gpu", flag.ContinueOnError)
	flags.SetOutput(said)
	size, large := sizeFlag(10<<30), sizeFlag(100<<30)
	flags.StringVar(&o.gpus, "gpus", "cuda:0", "devices, as for gaiafs mount: cuda:0,1 or emulated:2")
	flags.StringVar(&o.program, "gaiafs", besideThis("gaiafs"), "the gaiafs `BINARY`")
	flags.StringVar(&o.dir, "dir", os.TempDir(),
		"directory on the backing filesystem; needs free space for --size and 3 GiB more")
	flags.StringVar(&o.python, "python", "python3", "Python with PyTorch and safetensors")
	flags.Var(&size, "size", "`SIZE` of the file to load")
	flags.Var(&large, "large", "largest `SIZE` that a second process maps")
	flags.IntVar(&o.runs, "runs", 5, "how often each side is measured")
	seconds := flags.Int("time", 360, "`SECONDS` after which no row begins, and the present row is cut off")
	flags.StringVar(&o.rows, "rows", "", "only these groups, separated by commas: "+strings.Join(groupNames(), ","))
	match := flags.String("run", "", "only rows whose GROUP/NAME matches this regular `EXPRESSION`")
	flags.StringVar(&o.json, "json", "", "write all measurements to this file, again after each row")
	flags.StringVar(&o.markdown, "markdown", "", "write the tables in Markdown to this file")
	listing := flags.Bool("list", false, "list the groups and exit")
	if err := flags.Parse(args); err != nil {
		return o, false, err
	}
	if flags.NArg() > 0 {
		return o, false, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if o.match, err = regexp.Compile(*match); err != nil {
		return o, false, fmt.Errorf("--run: %w", err)
	}
	o.size, o.large, o.time = int64(size), int64(large), time.Duration(*seconds)*time.Second
	for name := range strings.SplitSeq(o.rows, ",") {
		if o.rows != "" && !slices.Contains(groupNames(), name) {
			return o, false, fmt.Errorf("--rows: there is no group %q; the groups are %s", name,
				strings.Join(groupNames(), ", "))
		}
	}
	switch {
	case o.size < 2*headerSize:
		return o, false, fmt.Errorf("--size %s: at least %s are needed", sizeText(o.size), sizeText(2*headerSize))
	case o.runs < 1 || *seconds < 1:
		return o, false, fmt.Errorf("--runs and --time must be positive")
	}
	return o, *listing, nil
}

// besideThis returns the path of a program in this program's folder, or in PATH if it is not there.
func besideThis(name string) string {
	if exe, err := os.Executable(); err == nil {
		path := filepath.Join(filepath.Dir(exe), name)
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	return name
}

// run executes the command line.
func run(args []string, out, progress io.Writer) (err error) {
	o, list, err := parse(args, progress)
	if errors.Is(err, flag.ErrHelp) {
		return nil
	}
	if err != nil {
		return err
	}
	if list {
		fmt.Fprintln(out, strings.Join(groupNames(), "\n"))
		return nil
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	signal.Ignore(syscall.SIGPIPE) // it cleans up even if the reader of the table has gone
	ctx, cancel := context.WithTimeout(ctx, o.time)
	defer cancel()
	s, err := newSession(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()

	r := rows.Report{Rounds: o.runs, Machine: rows.Describe(s.dir, strings.Join(append([]string{"gpu"}, args...), " "))}
	for _, g := range s.gpus {
		r.Machine.Devices = append(r.Machine.Devices, g.String())
		fmt.Fprintln(progress, g)
	}
	fmt.Fprintln(progress, r.Machine.String())
	if s.size < o.size {
		fmt.Fprintf(progress, "files of %s are loaded: %s do not fit on the GPU together with the other sides\n",
			sizeText(s.size), sizeText(o.size))
	}
	begin := time.Now()
	var failed []error
	for _, g := range groups {
		if o.rows == "" || slices.Contains(strings.Split(o.rows, ","), g.name) {
			failed = append(failed, s.runGroup(ctx, &g, &r, out))
		}
	}
	if err := r.WriteTable(out); err != nil {
		return err
	}
	misses, all := r.Failures()
	fmt.Fprintf(out, "\n%d of %d targets missed, %.0f s. To repeat: %s\n", misses, all, time.Since(begin).Seconds(),
		r.Machine.Command)
	if s.json != "" && !rows.IsReplaced(s.json) {
		failed = append(failed, r.WriteJSON(s.json))
	}
	if o.markdown != "" {
		failed = append(failed, rows.WriteFile(o.markdown, r.WriteMarkdown))
	}
	return errors.Join(failed...)
}

// runGroup runs a group's rows. An error ends the group, not the run, and is also a line of the table.
func (s *session) runGroup(ctx context.Context, g *group, r *rows.Report, out io.Writer) error {
	note := func(res rows.Result, took time.Duration) error {
		r.Rows = append(r.Rows, res)
		fmt.Fprintf(out, "%s/%s: %s (%.1f s)\n", res.Group, res.Name, res.Brief(), took.Seconds())
		if s.json == "" || !rows.IsReplaced(s.json) { // a pipe gets one document
			return nil
		}
		return r.WriteJSON(s.json)
	}
	if ctx.Err() != nil {
		return note(rows.Result{Group: g.name, Name: "all", Skipped: "the time was over"}, 0)
	}
	defer s.endGroup()
	start := time.Now()
	list, err := g.rows(ctx, s)
	if err != nil {
		return errors.Join(fmt.Errorf("%s: %w", g.name,
			err), note(rows.Result{Group: g.name, Name: "all", Skipped: "failed: " + err.Error()}, 0))
	}
	fmt.Fprintf(out, "%s: prepared (%.1f s)\n", g.name, time.Since(start).Seconds())
	for i := range list {
		row, start := &list[i], time.Now()
		if !s.match.MatchString(row.Title()) {
			continue
		}
		res, err := row.Run(ctx, s.runs, func(int, int, string) {})
		switch {
		case err != nil && ctx.Err() != nil:
			res, err = rows.Result{Group: row.Group, Name: row.Name, Skipped: "the time was over"}, nil
		case err != nil:
			res = rows.Result{Group: row.Group, Name: row.Name, Skipped: "failed: " + err.Error()}
		}
		if err = errors.Join(err, note(res, time.Since(start))); err != nil {
			return err
		}
	}
	return nil
}
