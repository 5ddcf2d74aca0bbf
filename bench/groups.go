package bench

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/gaiafs/gaiafs/bench/rows"
)

// group is a set of rows that share files and mounts.
type group struct {
	name string
	// about describes the group in one line.
	about string
	// rows makes the rows when the group's turn comes. If it fails with rows.Impossible, the table has the reason
	// instead of the group.
	rows func(ctx context.Context, s *session) ([]rows.Row, error)
	// reads says that some of the rows can read a user's file.
	reads bool
	// share is the group's part of the time with Quick: its seconds if all groups run.
	share int
	// room and quickRoom are how much space the files need, in MiB.
	room, quickRoom int64
}

// groups lists all groups in the order in which they run.
var groups = []group{
	{
		name: "merge", about: "merging a page with several writers",
		rows: mergeRows, share: 1,
	},
	{
		name: "modified", about: "finding the modified pages on a device",
		rows: modifiedRows, share: 3,
	},
	{
		name: "state", about: "host memory for versions and page states",
		rows: stateRows, share: 2,
	},
	{
		name: "device", about: "mapping, acquire and release",
		rows: deviceRows, share: 25, room: 2100, quickRoom: 520,
	},
	{
		name: "evict", about: "memory of one device while another one evicts to a slow disk",
		rows: evictRows, share: 2, room: 100, quickRoom: 100,
	},
	{
		name: "sharing", about: "a CPU and a device program writing the same pages",
		rows: sharingRows, share: 5, room: 600, quickRoom: 70,
	},
	{
		name: "fio", about: "fio through each mount and without one",
		rows: fioRows, share: 34, reads: true, room: 1700, quickRoom: 900,
	},
	{
		name: "cached", about: "CPU reads of a file that is partly on a device (thesis, figure 6.1)",
		rows: cachedRows, share: 15, reads: true, room: 1100, quickRoom: 160,
	},
	{
		name: "versions", about: "the cost of many devices for CPU programs",
		rows: versionRows, share: 7, room: 60, quickRoom: 20,
	},
	{
		name: "metadata", about: "names and attributes",
		rows: metadataRows, share: 5, room: 50, quickRoom: 20,
	},
	{
		name: "tree", about: "trees of small files, git, a Go build",
		rows: treeRows, share: 9, room: 2500, quickRoom: 400,
	},
	{
		name: "small", about: "a data set of small files, on read-only mounts",
		rows: smallRows, share: 3, room: 700, quickRoom: 100,
	},
	{
		name: modelGroup, about: "loading a model, and computing with it, against safetensors",
		rows: modelRows, share: 90, reads: true,
	},
}

// List prints the names of the groups and what they are about.
func List(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, g := range groups {
		note := ""
		switch {
		case g.name == modelGroup:
			note = " (with --model only)"
		case g.reads:
			note = " (can read --file)"
		}
		fmt.Fprintf(w, "%s\t%s%s\n", g.name, g.about, note)
	}
	return w.Flush()
}
