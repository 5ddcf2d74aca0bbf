package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gaiafs/gaiafs/prefetch"
	"github.com/gaiafs/gaiafs/prefetch/replay"
	"github.com/gaiafs/gaiafs/prefetch/trace"
)

// replayDocument is the output of replay --json. docs/trace.md documents it.
type replayDocument struct {
	Version    int             `json:"version"`
	Trace      string          `json:"trace"`
	Accesses   int             `json:"accesses"`
	Lost       uint64          `json:"lost"`
	Model      modelDocument   `json:"model"`
	Predictors []scoreDocument `json:"predictors"`
}

type modelDocument struct {
	Piece         int64   `json:"piece_bytes"`
	DaemonUS      float64 `json:"daemon_us"`
	DiskLatencyUS float64 `json:"disk_latency_us"`
	Disk          int64   `json:"disk_bytes_per_s"`
	DiskDepth     int     `json:"disk_depth"`
	Link          int64   `json:"link_bytes_per_s"`
}

type scoreDocument struct {
	Name      string  `json:"name"`
	Accesses  int64   `json:"accesses"`
	Hits      int64   `json:"hits"`
	Late      int64   `json:"late"`
	Requests  int64   `json:"requests"`
	Read      int64   `json:"distinct_bytes"`
	Fetched   int64   `json:"fetched_bytes"`
	Ahead     int64   `json:"ahead_bytes"`
	Wasted    int64   `json:"wasted_bytes"`
	Seconds   float64 `json:"seconds"`
	Waited    float64 `json:"waited_seconds"`
	Bandwidth int64   `json:"bytes_per_s"`
}

func newTraceReplay() *cobra.Command {
	var s scoring
	var latency time.Duration
	var disk, link size
	var depth int
	cmd := &cobra.Command{
		Use:   "replay FILE",
		Short: "Score predictors of read-ahead on a trace",
		Args:  arguments("FILE"),
		Example: `  gaiafs trace replay reads.trace
  gaiafs trace replay reads.trace --predictor streams,kernel --disk 500M --disk-latency 5ms`,
		RunE: func(cmd *cobra.Command, args []string) error {
			m := replay.DefaultModel()
			m.Stages[1].Latency, m.Stages[1].Bandwidth, m.Stages[1].Depth = latency, float64(disk), depth
			m.Stages[2].Bandwidth = float64(link)
			if err := m.Check(); err != nil {
				return usageError{err}
			}
			t, err := s.read(cmd, args[0], func(name string) error { _, err := prefetch.New(name); return err })
			if err != nil {
				return err
			}
			d := replayDocument{
				Version: 1, Trace: args[0], Accesses: t.Accesses(), Lost: t.Lost,
				Model: modelDocument{m.Piece, us(m.Stages[0].Setup), us(latency), int64(disk), depth, int64(link)},
			}
			for _, name := range s.names {
				s, err := replay.Run(t, m, func() prefetch.Predictor { p, _ := prefetch.New(name); return p })
				if err != nil {
					return fmt.Errorf("%s cannot be replayed: %w", args[0], err)
				}
				d.Predictors = append(d.Predictors, scoreDocument{name, s.Accesses, s.Hits, s.Late, s.Requests,
					s.Distinct, s.Fetched, s.Ahead,
					s.Wasted, s.Time.Seconds(), s.Waited.Seconds(), int64(s.Bandwidth())})
			}
			return s.print(cmd, &d)
		},
	}
	cmd.Long = `replay repeats the reads of a trace against a model of disk and link. Each program reads again when its last read has been
answered and the time that it worked in the recording has passed. replay scores these predictors of read-ahead:

` + nameList(prefetch.Names(), prefetch.About) + `

docs/trace.md describes the model. The FILE - is standard input.`
	m := replay.DefaultModel()
	disk, link = size(m.Stages[1].Bandwidth), size(m.Stages[2].Bandwidth)
	s.flags(cmd, "predictor", "predictors", prefetch.Names())
	cmd.Flags().DurationVar(&latency, "disk-latency", m.Stages[1].Latency, "`DURATION` until the disk begins to answer")
	cmd.Flags().IntVar(&depth, "disk-depth", m.Stages[1].Depth, "number `N` of requests that the disk serves concurrently")
	cmd.Flags().Var(&disk, "disk", "bytes per second of the disk")
	cmd.Flags().Var(&link, "link", "bytes per second of the link to the device")
	return cmd
}

func us(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

func (d *replayDocument) print(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %d accesses\n", d.Trace, d.Accesses)
	table(&b, func(t io.Writer) {
		fmt.Fprintf(t, "  predictor\ttime\tbandwidth\thits\tlate\tfetched\twasted\trequests\t\n")
		for _, p := range d.Predictors {
			fmt.Fprintf(t, "  %s\t%s\t%s/s\t%s\t%s\t%s\t%s\t%d\t\n", p.Name,
				time.Duration(p.Seconds*float64(time.Second)).Round(10*time.Microsecond),
				bytesText(p.Bandwidth), percent(p.Hits, p.Accesses), percent(p.Late, p.Accesses), bytesText(p.Fetched),
				percent(p.Wasted, p.Fetched), p.Requests)
		}
	})
	_, err := io.WriteString(w, b.String())
	return err
}

func percent(part, all int64) string {
	if all == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f %%", 100*float64(part)/float64(all))
}

func newTraceShow() *cobra.Command {
	var all, partial bool
	cmd := &cobra.Command{
		Use:     "show FILE",
		Short:   "Show the contents of a trace",
		Args:    arguments("FILE"),
		Example: "  gaiafs trace show reads.trace\n  gaiafs trace show --all reads.trace | less",
		RunE: func(cmd *cobra.Command, args []string) error {
			t, err := readTrace(cmd, args[0], partial)
			if err != nil {
				return err
			}
			if all {
				return showEvents(cmd.OutOrStdout(), t)
			}
			return showTrace(cmd.OutOrStdout(), t)
		},
	}
	cmd.Long = `show prints the files and the programs of a trace. With --all it prints every access, one per line: microseconds since the
start, microseconds it took, program, first byte, bytes, and file. The FILE - is standard input.`
	cmd.Flags().BoolVar(&all, "all", false, "print every access")
	partialFlag(cmd, &partial)
	return cmd
}

func showEvents(w io.Writer, t *trace.Trace) error {
	for _, x := range t.Events {
		line := fmt.Sprintf("%d\t%d\t%s\t%d\t%d\t%q\n", x.Time.Microseconds(), x.Took.Microseconds(),
			t.Sources[x.Source], x.Off, x.Len, t.Files[x.File].Name)
		switch {
		case x.Resize:
			line = fmt.Sprintf("%d\t-\tresize\t-\t%d\t%q\n", x.Time.Microseconds(), x.Len, t.Files[x.File].Name)
		case x.Write:
			line = fmt.Sprintf("%d\twrite\t%s\t%d\t%d\t%q\n", x.Time.Microseconds(), t.Sources[x.Source], x.Off, x.Len,
				t.Files[x.File].Name)
		}
		if _, err := io.WriteString(w, line); err != nil {
			return err
		}
	}
	return nil
}

func showTrace(w io.Writer, t *trace.Trace) error {
	type sum struct {
		accesses, bytes int64
		sources         map[uint32]struct{}
	}
	files := make([]sum, len(t.Files))
	var last, took time.Duration
	accesses, bytes, written := int64(0), int64(0), int64(0)
	for _, x := range t.Events {
		last = max(last, x.Time+x.Took)
		if x.Write {
			written += x.Len
		}
		if !x.Access() {
			continue
		}
		f := &files[x.File]
		if f.sources == nil {
			f.sources = make(map[uint32]struct{})
		}
		f.accesses++
		f.bytes += x.Len
		f.sources[x.Source] = struct{}{}
		accesses, bytes, took = accesses+1, bytes+x.Len, took+x.Took
	}
	var b strings.Builder
	fmt.Fprintf(&b, "from %s, %s: %d accesses of %s in all, by %s\n", t.Start.Local().Format(time.DateTime),
		last.Round(time.Millisecond), accesses, bytesText(bytes), count(len(t.Sources), "program"))
	if written > 0 {
		fmt.Fprintf(&b, "programs changed %s on devices\n", bytesText(written))
	}
	if t.Lost > 0 {
		fmt.Fprintf(&b, "%d accesses are missing: they came faster than they could be recorded\n", t.Lost)
	}
	if accesses == 0 {
		fmt.Fprintln(&b, "no read reached the daemon: the kernel's page cache answers reads itself, and so do files that "+
			"pass through (docs/trace.md)")
	} else {
		fmt.Fprintf(&b, "mean access: %s, %s\n", bytesText(bytes/accesses),
			(took / time.Duration(accesses)).Round(time.Microsecond))
	}
	order := make([]int, len(files))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, c int) int { return int(min(max(files[c].bytes-files[a].bytes, -1), 1)) })
	table(&b, func(w io.Writer) {
		fmt.Fprintf(w, "  file\tsize\taccesses\tread\tprograms\n")
		for _, i := range order {
			fmt.Fprintf(w, "  %q\t%s\t%d\t%s\t%d\n", t.Files[i].Name, bytesText(t.Files[i].Size), files[i].accesses,
				bytesText(files[i].bytes), len(files[i].sources))
		}
	})
	_, err := io.WriteString(w, b.String())
	return err
}
