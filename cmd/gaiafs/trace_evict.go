package main

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
	"github.com/gaiafs/gaiafs/pagecache/residency/score"
)

// evictDocument is the output of evict --json. docs/eviction.md documents it.
type evictDocument struct {
	Version  int             `json:"version"`
	Trace    string          `json:"trace"`
	Accesses int             `json:"accesses"`
	Lost     uint64          `json:"lost"`
	Extent   int64           `json:"extent_bytes"`
	Distinct int64           `json:"distinct_bytes"`
	Link     int64           `json:"link_bytes_per_s"`
	Plays    []evictMemories `json:"memories"`
}

// evictMemories has the scores for one size of memory.
type evictMemories struct {
	Percent int          `json:"percent"`
	Memory  int64        `json:"memory_bytes"`
	Rules   []evictScore `json:"rules"`
	Bounds  []evictScore `json:"bounds"`
}

type evictScore struct {
	Name      string  `json:"name"`
	Placement string  `json:"placement"`
	Accesses  int64   `json:"accesses"`
	Hits      int64   `json:"hits"`
	Moves     int64   `json:"moves"`
	Trips     int64   `json:"round_trips"`
	Moved     int64   `json:"moved_bytes"`
	Home      int64   `json:"home_bytes"`
	Remote    int64   `json:"remote_bytes"`
	Seconds   float64 `json:"seconds"`
}

func scoreOf(name, placement string, s score.Score) evictScore {
	return evictScore{name, placement, s.Accesses, s.Hits, s.Moves, s.Trips, s.Moved, s.Home, s.Remote,
		s.Time.Seconds()}
}

func newTraceEvict() *cobra.Command {
	var s scoring
	var placements []string
	var memories []int
	var readOnlyFirst bool
	var runs int
	setup := score.Setup{Static: policy.DefaultStatic, Penalty: policy.DefaultPenalty, Model: score.DefaultModel()}
	extent, link := size(2<<20), size(setup.Model.Link)
	cmd := &cobra.Command{
		Use:   "evict FILE",
		Short: "Score eviction rules on a trace",
		Args:  arguments("FILE"),
		Example: `  gaiafs trace evict reads.trace
  gaiafs trace make skewed -o - | gaiafs trace evict - --memory 25,50 --placement always,threshold`,
		RunE: func(cmd *cobra.Command, args []string) error {
			setup.Model.Link = float64(link)
			for _, setup.Placement = range placements {
				if err := setup.Check(); err != nil {
					return usageError{err}
				}
			}
			for _, percent := range memories {
				if percent < 0 || percent > 100 {
					return usagef("--memory %d is not a percentage", percent)
				}
			}
			if runs < 1 || runs > 1e6 {
				return usagef("--chances %d is not between 1 and a million", runs)
			}
			options := policy.Options{ReadOnlyFirst: readOnlyFirst}
			t, err := s.read(cmd, args[0], func(name string) error {
				_, err := score.NewRule(name, options)
				return err
			})
			if err != nil {
				return err
			}
			plays := len(memories) * (len(s.names)*len(placements) + 1 + runs)
			steps, err := score.New(t, int64(extent), plays)
			if err != nil {
				return fmt.Errorf("%s cannot be scored: %w", args[0], err)
			}
			d := evictDocument{
				Version: 1, Trace: args[0], Accesses: t.Accesses(), Lost: t.Lost,
				Extent: int64(extent), Distinct: steps.Distinct(), Link: int64(link),
			}
			for _, percent := range memories {
				setup.Memory = max(d.Distinct*int64(percent)/100, d.Extent)
				of := evictMemories{Percent: percent, Memory: setup.Memory}
				for _, name := range s.names {
					for _, setup.Placement = range placements {
						of.Rules = append(of.Rules, scoreOf(name, setup.Placement,
							steps.Score(setup, func() policy.Rule {
								rule, _ := score.NewRule(name, options)
								return rule
							})))
					}
				}
				setup.Placement = "always"
				of.Bounds = []evictScore{
					scoreOf("belady", setup.Placement, steps.Belady(setup)),
					scoreOf(fmt.Sprintf("best-of-%d", runs), setup.Placement, steps.BestOfChance(setup, runs)),
				}
				d.Plays = append(d.Plays, of)
			}
			return s.print(cmd, &d)
		},
	}
	cmd.Long = `evict plays the accesses of a trace against device memory that is too small for them. These rules choose what to evict:

` + nameList(score.Names(), score.About) + `

The last two rows are bounds: Belady's rule, which knows the future, and the best of many random runs. docs/eviction.md
describes the simulation, and has scores. The FILE - is standard input.`
	s.flags(cmd, "rule", "rules", score.Names())
	cmd.Flags().IntSliceVar(&memories, "memory", []int{25, 50, 75},
		"memory of a device: `PERCENTS` of what its programs access; 0: one extent")
	cmd.Flags().StringSliceVar(&placements, "placement", []string{"always"},
		"`WORDS` that say when an accessed extent moves in: always, never, or threshold")
	cmd.Flags().Uint64Var(&setup.Static, "threshold", setup.Static, "number `N` of accesses that move an extent in when memory is just full")
	cmd.Flags().Uint64Var(&setup.Penalty, "penalty", setup.Penalty, "factor `N` on the threshold if something must be evicted")
	cmd.Flags().BoolVar(&readOnlyFirst, "read-only-first", false, "evict extents first that were not written to")
	cmd.Flags().IntVar(&runs, "chances", 100, "number `N` of random runs; the best one is a bound")
	cmd.Flags().Var(&extent, "extent", "size of extents, a power of two")
	cmd.Flags().Var(&link, "link", "bytes per second of the link to the device")
	return cmd
}

func (d *evictDocument) print(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %d accesses to %s\n", d.Trace, d.Accesses, bytesText(d.Distinct))
	table(&b, func(t io.Writer) {
		fmt.Fprintf(t, "  memory\trule\tplacement\ttime\thits\tmoved in\tround trips\tcopied home\tremote\t\n")
		for _, p := range d.Plays {
			for _, r := range append(p.Rules, p.Bounds...) {
				fmt.Fprintf(t, "  %d %%\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t\n", p.Percent, r.Name, r.Placement,
					time.Duration(r.Seconds*float64(time.Second)).Round(10*time.Microsecond),
					percent(r.Hits, r.Accesses),
					bytesText(r.Moved), r.Trips, bytesText(r.Home), bytesText(r.Remote))
			}
		}
	})
	_, err := io.WriteString(w, b.String())
	return err
}
