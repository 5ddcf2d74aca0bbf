package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/gaiafs/gaiafs/bench/rows"
	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

// shardSlack is how much longer shards may take than a whole load over as many links. mostRead is how often they may
// read the file.
const (
	shardSlack = 1.1
	mostRead   = 1.05
)

// shardRows load the parts of all ranks at the same time, each on its GPU. If there are fewer GPUs than ranks, a GPU
// has several parts.
func shardRows(ctx context.Context, s *session) ([]rows.Row, error) {
	d, err := s.dataFile()
	if err != nil {
		return nil, err
	}
	own, err := s.ownLinks(ctx, "shards", d)
	if err != nil {
		return nil, err
	}
	n := min(d.size, s.size)
	v, alone := &viewer{s: s, d: d, n: n}, &viewer{s: own, d: d, n: n}
	var read shardReads
	shards := v.shards(fmt.Sprintf("gaiafs, %d shards at once", rankCount), &read)
	whole := alone.one("gaiafs, the whole file on one GPU, over its own link")
	links := min(len(s.gpus), rankCount)
	name := fmt.Sprintf("%s in %d shards of rows of %s, on %d GPUs", sizeText(v.n), rankCount, sizeText(rowSize), links)
	return []rows.Row{{
		Group: "shards", Name: name, Unit: rows.GBPerSecond, Sides: []rows.Side{shards, whole},
		Targets: []rows.Target{{Against: whole.Name, Limit: float64(links) / shardSlack}},
		Note: func() string {
			return fmt.Sprintf("a shard is rows of a matrix; the speed is that of all of them together. This part of what "+
				"was read came from pages that were locked because the file is hot, by rounds: %.2g", read.locked)
		},
	}, {
		Group: "shards", Name: "how often they read the file", Unit: rows.Count, Rounds: 1,
		Targets: []rows.Target{{Limit: mostRead}},
		Sides: []rows.Side{{Name: "gaiafs", Measure: func(context.Context) (float64, error) {
			if len(read.times) == 0 {
				return 0, rows.Impossible{Reason: "the row before did not run"}
			}
			return rows.Summarise(read.times).Median, nil
		}}},
		Note: func() string { return fmt.Sprintf("in the rounds of the row before: %.3g", read.times) },
	}}, nil
}

// shardReads is, for each round, how often ranks read the file, and the part of that which came from locked pages.
type shardReads struct{ times, locked []float64 }

// shards makes the side in which all ranks load their parts at the same time, and notes in reads what they read.
func (v *viewer) shards(name string, reads *shardReads) rows.Side {
	gpus := make([]gpu, rankCount)
	for r := range gpus {
		gpus[r] = v.s.gpus[r%len(v.s.gpus)]
	}
	return rows.Side{
		Name:    name,
		Prepare: func(context.Context) error { return v.ready() },
		Measure: func(context.Context) (speed float64, err error) {
			v.round++
			var n int64
			segments := make([][]gaiafs.Segment, rankCount)
			for r := range segments {
				x := rank(r, v.n-8*v.round)
				x.Offset += 8 * v.round
				n += x.Length * x.Count
				segments[r] = []gaiafs.Segment{x}
			}
			counters, err := v.s.mount.counted(func() error {
				took, err := v.atOnce(gpus, func(r int) []gaiafs.Segment { return segments[r] })
				speed = gigabytes(n, took)
				return err
			})
			read := counters["locked_pages"] + counters["cached_pages"] + counters["direct_pages"] +
				counters["buffered_pages"]
			reads.times = append(reads.times, float64(read*pageSize)/float64(n))
			reads.locked = append(reads.locked, float64(counters["locked_pages"])/float64(max(read, 1)))
			return speed, err
		},
	}
}

// one makes the side that has the whole file as one segment of a view on the first GPU.
func (v *viewer) one(name string) rows.Side {
	return rows.Side{
		Name:    name,
		Prepare: func(context.Context) error { return v.ready() },
		Measure: func(context.Context) (float64, error) {
			v.round++
			x := gaiafs.Segment{Offset: tensorAt + 8*v.round, Length: v.n - tensorAt - 8*v.round}
			took, err := v.atOnce(v.s.gpus[:1], func(int) []gaiafs.Segment { return []gaiafs.Segment{x} })
			return gigabytes(x.Length, took), err
		},
	}
}

// linkRows fill a view on one GPU over the links of all GPUs, and over its own link only.
func linkRows(ctx context.Context, s *session) ([]rows.Row, error) {
	if len(s.gpus) < 2 {
		return []rows.Row{{Group: "links", Name: "a view over the links of all GPUs", Skip: "there is one"}}, nil
	}
	d, err := s.dataFile()
	if err != nil {
		return nil, err
	}
	own, err := s.ownLinks(ctx, "links", d)
	if err != nil {
		return nil, err
	}
	status, err := s.mount.status()
	if err != nil {
		return nil, err
	}
	n := min(d.size, s.size, status.Devices[0].Memory/20*19)
	alone, all := &viewer{s: own, d: d, n: n}, &viewer{s: s, d: d, n: n}
	const sideOwn = "gaiafs, --neighbour-links off"
	return []rows.Row{{
		Group: "links", Name: fmt.Sprintf("%s in a view on one of %d GPUs", sizeText(n), len(s.gpus)),
		Unit:    rows.GBPerSecond,
		Sides:   []rows.Side{all.one("gaiafs"), alone.one(sideOwn)},
		Targets: []rows.Target{{Against: sideOwn, Limit: 1}},
		Note: func() string {
			status, err := s.mount.status()
			if err != nil {
				return err.Error()
			}
			var through []string
			for _, x := range status.Devices {
				n := int64(0)
				for _, m := range x.Moved {
					if m.Way == "through" {
						n += m.Bytes
					}
				}
				through = append(through, sizeText(n))
			}
			return "went through each GPU to another so far: " + strings.Join(through, ", ")
		},
	}}, nil
}

// ownLinks returns the session with another mount for a group of rows. Its GPUs are filled over their own links only. A
// single GPU needs no other mount for that.
func (s *session) ownLinks(ctx context.Context, group string, d *dataFile) (*session, error) {
	if len(s.gpus) == 1 {
		return s, nil
	}
	return s.another(ctx, group, d, "--neighbour-links", "off")
}

// another returns the session with another mount, made with more arguments. It has the same file.
func (s *session) another(ctx context.Context, name string, d *dataFile, more ...string) (*session, error) {
	dir := filepath.Join(s.dir, name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, err
	}
	other := *s
	var err error
	if other.mount, err = startMount(ctx, s.program, dir, s.options.gpus, s.memory, more...); err != nil {
		return nil, err
	}
	s.later(other.mount.close)
	return &other, os.Link(s.mount.home(d.name), other.mount.home(d.name))
}

// pinnedRows fill views from a file that is pinned on the host: on one GPU, over the links of all GPUs, and shards on
// all GPUs at once.
func pinnedRows(ctx context.Context, s *session) ([]rows.Row, error) {
	d, err := s.dataFile()
	if err != nil {
		return nil, err
	}
	other, err := s.another(ctx, "pinned", d, "--pinned-memory", fmt.Sprintf("%dB", d.size+1<<30))
	if err != nil {
		return nil, err
	}
	copied, err := s.another(ctx, "copied", d, "--pinned-memory", "0")
	if err != nil {
		return nil, err
	}
	const group = "pinned"
	path := filepath.Join(other.mount.dir, d.name)
	began := time.Now()
	if out, err := exec.CommandContext(ctx, s.program, "pin", "--device", "host", path).CombinedOutput(); err != nil {
		return []rows.Row{{Group: group, Name: "a file that is pinned on the host",
			Skip: "it cannot be pinned: " + strings.TrimSpace(string(out))}}, nil
	}
	took := time.Since(began)
	status, err := s.mount.status()
	if err != nil {
		return nil, err
	}
	n := min(d.size, s.size, status.Devices[0].Memory/20*19)
	pinned, plain := &viewer{s: other, d: d, n: n}, &viewer{s: copied, d: d, n: n}
	const ours, notPinned = "gaiafs, pinned on the host", "gaiafs, --pinned-memory 0"
	list := []rows.Row{{
		Group: group, Name: sizeText(n) + " in a view on one GPU", Unit: rows.GBPerSecond,
		Sides:   []rows.Side{pinned.one(ours), plain.one(notPinned)},
		Targets: []rows.Target{{Against: notPinned, Limit: 1}},
		Note: func() string {
			return fmt.Sprintf("over the links of %d GPUs; pinning took %.2f s", len(s.gpus), took.Seconds())
		},
	}}
	whole := pinned.one("gaiafs, pinned, the whole file on one GPU")
	links := min(len(s.gpus), rankCount)
	return append(list, rows.Row{
		Group: group, Name: fmt.Sprintf("%s in %d shards, on %d GPUs", sizeText(n), rankCount, links),
		Unit:    rows.GBPerSecond,
		Sides:   []rows.Side{pinned.shards("gaiafs, pinned, all shards at once", new(shardReads)), whole},
		Targets: []rows.Target{{Against: whole.Name, Limit: 1 / shardSlack}},
	}), nil
}
